"""The sequence-length curriculum: DeepSpeed's rule as a pure function of the step, what runs count by it, and runs."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pretrain_gpt
from megazero import batch_sizes
from megazero.batch_sizes import BatchSizes, SeqLengths, constant, lengths_of, ramp, samples_of, staircase, tokens_of
from megazero.config import BatchConfig, ScheduleConfig
from megazero.config_curriculum import CurriculumConfig
from megazero.flags import UsageError, parse
from megazero.lr_curves import Done
from megazero.lr_schedule import make_schedule
from tests.training import SMALL, Outcome, distance, train

# ------------------------------------------------------------------------------------------------------- the lengths


def of_deepspeed(schedule: str, least: int, most: int, steps: int, **how) -> list[int]:
    """What DeepSpeed's scheduler is at in steps 1, 2, ...: it is asked before each step until it is at the end."""
    now, found = least, []
    for step in range(1, steps + 1):
        if now < most:
            if schedule == "fixed_discrete":
                later = [length for length, end in zip(how["lengths"], how["ends"]) if step <= end]
                now = later[0] if later else how["lengths"][-1]
            else:
                share = (float(step) / how["total"]) ** (1.0 / how["root"])
                now = math.floor(share * (most - least) + least)
                now -= now % how["unit"]
                now = min(now, most)
        found.append(now)
    return found


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 40), st.integers(0, 60), st.integers(1, 200), st.integers(1, 12), st.sampled_from([1, 2, 3, 0.5])
)
def test_lengths_are_those_of_deepspeeds_scheduler(least, more, total, unit, root):
    kind = "fixed_linear" if root == 1 else "fixed_root"
    least, most = max(least, unit), max(least, unit) + more
    config = CurriculumConfig(
        curriculum_schedule_type=kind, curriculum_min_difficulty=least, curriculum_max_difficulty=most,
        curriculum_total_step=total, curriculum_difficulty_step=unit,
        curriculum_root_degree=None if root == 1 else root,
    )  # fmt: skip
    want = of_deepspeed(kind, least, most, 3 * total, total=total, root=root, unit=unit)
    for seq_length in (most, most + 3, least):      # samples are never longer than they are read
        lengths = config.lengths(seq_length)
        assert [lengths.at(step) for step in range(1, 3 * total + 1)] == [min(n, seq_length) for n in want]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=5), st.integers(1, 30))
def test_discrete_lengths_are_those_of_deepspeeds_scheduler(stairs, most):
    lengths = [sum(gap for gap, _ in stairs[: i + 1]) for i in range(len(stairs))]
    ends = [sum(width for _, width in stairs[: i + 1]) for i in range(len(stairs) - 1)]
    config = CurriculumConfig(
        curriculum_schedule_type="fixed_discrete", curriculum_difficulty=tuple(lengths),
        curriculum_max_step=tuple(ends), curriculum_max_difficulty=most,
    )  # fmt: skip
    want = of_deepspeed("fixed_discrete", 0, most, 40, lengths=lengths, ends=ends)
    found = config.lengths(lengths[-1])
    assert [found.at(step) for step in range(1, 41)] == want


def test_the_curriculum_of_a_published_script():
    """80 to 2048 tokens in 27,638 steps, as in the scripts of GPT 1.3B."""
    lengths = CurriculumConfig(
        curriculum_schedule_type="fixed_linear", curriculum_min_difficulty=80, curriculum_max_difficulty=2048,
        curriculum_total_step=27_638,
    ).lengths(2048)  # fmt: skip
    assert [lengths.at(step) for step in (1, 112, 113, 13_819, 27_637, 27_638, 10**6)] == (
        [80, 80, 88, 1064, 2040, 2048, 2048]
    )
    assert len(lengths.lengths) == (2048 - 80) // 8 + 1


# --------------------------------------------------------------------------------------------------- what runs consume

growing = st.builds(
    lambda gaps, lengths: SeqLengths((1, *(1 + sum(gaps[: i + 1]) for i in range(len(gaps)))), tuple(lengths)),
    st.lists(st.integers(1, 9), min_size=4, max_size=4), st.lists(st.integers(1, 20), min_size=5, max_size=5),
)  # fmt: skip
batches = st.one_of(st.integers(1, 9).map(constant), st.integers(0, 90).map(lambda samples: ramp(2, 3, samples, 14)))


@settings(deadline=None)
@given(batches, growing, st.integers(1, 5000), st.integers(0, 60))
def test_tokens_samples_and_steps_are_those_of_a_run(sizes, lengths, wanted, resumed):
    samples, tokens, steps, at = 0, 0, 0, [(0, 0)]
    while tokens < wanted or steps <= resumed:
        assert tokens_of(samples, sizes, lengths) == tokens and samples_of(tokens, sizes, lengths) == samples
        size, length = sizes.at(samples), lengths.at(steps + 1)
        assert tokens_of(samples + 1, sizes, lengths) == tokens + length
        assert samples_of(tokens + length - 1, sizes, lengths) == samples
        steps, samples, tokens = steps + 1, samples + size, tokens + size * length
        at.append((samples, tokens))
    needed = next(step for step, (_, total) in enumerate(at) if total >= wanted)
    assert batch_sizes.steps_to(wanted, sizes, lengths) == needed
    done = min(resumed, needed)
    samples, tokens = at[done]
    assert batch_sizes.steps_to(wanted, sizes, lengths, done=done, samples=samples, consumed=tokens) == needed - done


def test_a_staircase_by_tokens_counts_what_short_samples_hold():
    """Steps of 4 samples with 2, 4, 8, 8, ... tokens: 24 tokens are over after two of them, 16 tokens on the way."""
    lengths = SeqLengths((1, 2, 3), (2, 4, 8))
    assert staircase(["0:4 24:8"], lengths) == BatchSizes((0, 8), (4, 8))
    assert staircase(["0:4 16:8 88:16"], lengths) == BatchSizes((0, 6, 16), (4, 8, 16))
    assert staircase(["0:4 24:8"], lengths_of(8)) == BatchSizes((0, 3), (4, 8))


def test_a_rate_by_tokens_decays_from_the_tokens_at_the_end_of_a_warm_up_by_samples():
    """Megatron-DeepSpeed's rule: 8 samples of warm-up, in steps of 4 with 2 and 4 tokens, are 24 of the decay."""
    lengths = SeqLengths((1, 2, 3), (2, 4, 8))
    config = ScheduleConfig(lr=1.0, lr_warmup_samples=8, lr_decay_tokens=88)
    schedule = make_schedule(config, BatchConfig(micro_batch_size=4, train_tokens=88), 4, seq_length=lengths)
    done = [Done(0, 0, 0), Done(1, 4, 8), Done(2, 8, 24), Done(3, 12, 56), Done(4, 16, 88)]
    assert [schedule.at(d).learning_rate for d in done] == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


# ------------------------------------------------------------------------------------------------------------- runs

# 5, 7, 9, 10 and 12 tokens of 16: most of them do not divide by a tensor size of 2.
LINEAR = (
    "--curriculum-schedule-type fixed_linear --curriculum-min-difficulty 4 --curriculum-total-step 7 "
    "--curriculum-difficulty-step 1"
)
STAIRS = "--curriculum-schedule-type fixed_discrete --curriculum-difficulty 3 7 16 --curriculum-max-step 2 3"
EXPERTS = "--num-experts 4 --topk 1 --moe-loss-coeff 0.01 --expert-interval 1 --moe-min-capacity 1"
LIMITS = {"loss": 1e-11, "norm": 1e-11, "weights": 1e-10, "moments": 1e-10}


@functools.cache
def one_rank(flags: str) -> Outcome:
    return train(f"--fp64 {flags}")


@pytest.mark.parametrize(
    ("layout", "flags", "how"),
    [
        ((2, 2, 1), LINEAR, "--pipeline-schedule zb-v"),
        ((1, 2, 2), f"{STAIRS} --rampup-batch-size 4 4 8", "--micro-batch-size 1 --overlap-grad-reduce"),
        ((2, 3, 1), f"{LINEAR} {EXPERTS}", ""),         # a stage in the middle reads no tokens, and yet knows padding
    ],
)
def test_any_layout_trains_the_same_with_samples_that_grow(layout, flags, how):
    evaluated = f"{flags} --eval-interval 2 --eval-iters 1"
    got, want = train(f"--fp64 {evaluated} {how}", layout), one_rank(evaluated)
    for name, value in distance(got, want).items():
        assert value <= LIMITS[name], f"{name} differ by {value:.1e}"
    assert [e[2] for e in got.evaluations] == pytest.approx([e[2] for e in want.evaluations], rel=1e-11)
    for key in ("seq_length", "consumed_samples", "consumed_tokens"):
        assert [step[key] for step in got.steps] == [step[key] for step in want.steps]


def test_a_step_reads_the_beginnings_of_its_samples_and_evaluation_all():
    def look(trainer):
        feed = trainer.feeds["train"]
        return [feed.global_batch(8, step)[0] for step in (1, 3, None)], feed.global_batch(8, 3)[1]

    (first, third, whole), counted = train(f"{LINEAR} --train-iters 1", look=look).seen[0]
    assert [batch.tokens.shape[0] for batch in (first[0], third[0], whole[0])] == [5, 9, 16] and counted == 8 * 9
    for short, long in zip(third, whole, strict=True):
        assert torch.equal(short.tokens, long.tokens[:9]) and torch.equal(short.labels, long.labels[:9])


def test_samples_that_grow_and_a_batch_that_grows_go_on_exactly(tmp_path: Path):
    """C040: a run in tokens whose rate counts tokens, stopped in the middle of both."""
    flags = (
        f"{LINEAR} --rampup-batch-size 4 4 16 --train-iters 20 --train-tokens 300 --lr-decay-tokens 400 "
        "--lr-warmup-tokens 50 --lr-decay-style cosine --attention-dropout 0.1"
    )
    straight = train(f"{flags} --save {tmp_path} --save-interval 2", (1, 2, 1))
    resumed = train(f"{flags} --load {tmp_path} --ckpt-step 2", (1, 2, 1))
    keys = ("iteration", "consumed_samples", "consumed_tokens", "seq_length", "lm_loss", "grad_norm", "learning_rate")
    told = [[tuple(step[key] for key in keys) for step in run.steps] for run in (straight, resumed)]
    assert [line[:4] for line in told[0]] == [
        (1, 4, 20, 5), (2, 8, 48, 7), (3, 12, 84, 9), (4, 16, 124, 10), (5, 24, 220, 12), (6, 32, 332, 14),
    ]  # fmt: skip
    assert told[1] == told[0][2:]
    assert all(torch.equal(resumed.state[key], straight.state[key]) for key in straight.state)


def test_a_student_and_its_teacher_see_the_same_short_samples(tmp_path: Path):
    train(f"--fp64 --save {tmp_path} --save-interval 1 --train-iters 1 --seed 7")
    flags = f"{LINEAR} --kd --load-teacher {tmp_path} --train-iters 3"
    got, want = train(f"--fp64 {flags}", (2, 2, 1)), one_rank(flags)
    assert got.losses == pytest.approx(want.losses, rel=1e-11) and all(step["kd_loss"] > 0 for step in got.steps)


def test_the_front_door_says_what_grows_and_prints_rates_by_tokens(tmp_path, capsys):
    flags = f"{SMALL} {LINEAR} --train-iters 2 --log-interval 1 --metrics-jsonl {tmp_path}/m.jsonl".split()
    assert pretrain_gpt.main(flags) == 0
    out = capsys.readouterr().out
    assert "curriculum (fixed_linear): samples have 5 tokens in step 1 and 16 from step 7 on\n" in out
    assert "consumed tokens 96 | seq length 7 |" in out
    assert [json.loads(line)["seq_length"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [5, 7]
    decays = "--lr 1.0 --lr-decay-style linear --lr-decay-tokens 168 --print-lr 3".split()
    assert pretrain_gpt.main(flags + decays) == 0
    shown = [json.loads(line)["learning_rate"] for line in capsys.readouterr().out.splitlines()]
    assert shown == pytest.approx([1.0, 1 - 40 / 168, 1 - 96 / 168])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--curriculum-min-difficulty 4", "goes only with --curriculum-schedule-type fixed_linear or fixed_root or"),
        ("--curriculum-schedule-type fixed_linear --curriculum-total-step 5", "needs --curriculum-min-difficulty"),
        (LINEAR.replace("linear", "root"), "fixed_root needs --curriculum-root-degree"),
        (f"{LINEAR} --curriculum-difficulty-step 8", "4 is below --curriculum-difficulty-step 8"),
        (f"{LINEAR} --curriculum-max-difficulty 3", "4 is above --curriculum-max-difficulty 3"),
        (f"{LINEAR} --curriculum-min-difficulty 17", "--curriculum-min-difficulty 17 is above --seq-length 16"),
        (f"{STAIRS} --curriculum-max-step 2", "has 3 numbers and --curriculum-max-step 1: the last difficulty"),
        (f"{STAIRS} --curriculum-max-step 3 2", "--curriculum-max-step 3 2: must grow from number to number"),
        ("--curriculum-schedule-type custom", "must be one of fixed_linear, fixed_root, fixed_discrete"),
    ],
)
def test_a_curriculum_that_cannot_be_is_refused(flags, told):
    with pytest.raises(UsageError, match=told):
        parse(f"{SMALL} {flags}".split())
