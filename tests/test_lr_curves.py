"""DeepSpeed's schedules against its own values: what the first, second, ... optimizer step updates with."""

from __future__ import annotations

import json
from itertools import islice

import pytest

import pretrain_gpt
from megazero.config import BatchConfig, DeepSpeedScheduleConfig, ScheduleConfig
from megazero.lr_curves import MOST_MOMENTUM, Done
from megazero.lr_schedule import Rates, Schedule, make_schedule

CYCLE = {
    "cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "decay_step_size": 2, "decay_lr_rate": 0.5,
    "decay_mom_rate": 0.1,
}  # fmt: skip
LINEAR = {"warmup_num_steps": 4, "warmup_type": "linear", "total_num_steps": 10}


def schedule_of(name: str, *, lr: float | None = None, train_iters: int = 20, **parameters) -> Schedule:
    named = DeepSpeedScheduleConfig(lr_scheduler=name, **parameters)
    return make_schedule(
        ScheduleConfig(lr=lr), BatchConfig(micro_batch_size=1, train_iters=train_iters), 8, named=named
    )


def steps(schedule: Schedule, count: int) -> list[Rates]:
    """What the first steps update with, each of eight samples of 16 tokens."""
    return [schedule.at(Done(k, 8 * k, 128 * k)) for k in range(count)]


def rates(schedule: Schedule, count: int) -> list[float]:
    return [step.learning_rate for step in steps(schedule, count)]


def momenta(schedule: Schedule, count: int) -> list[float | None]:
    return [step.momentum for step in steps(schedule, count)]


# name, parameters, learning rate of each step
VECTORS = [
    ("LRRangeTest", {"lr_range_test_step_size": 4}, (0.001, 0.00125, 0.0015, 0.00175, 0.002, 0.00225)),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 4, "lr_range_test_staircase": True},
        (0.001, 0.001, 0.001, 0.001, 0.002, 0.002, 0.002, 0.002, 0.003),
    ),
    ("OneCycle", CYCLE, (0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0)),
    ("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 5}, (0, 0, 0.430677, 0.682606, 0.861353, 1, 1)),
    (
        "WarmupLR",
        {"warmup_max_lr": 1.0, "warmup_num_steps": 5, "warmup_type": "linear"},
        (0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1),
    ),
    (
        "WarmupDecayLR",
        {"warmup_max_lr": 1.0, **LINEAR},
        (0, 0, 0.25, 0.5, 0.75, 1, 0.833333, 0.666667, 0.5, 0.333333, 0.166667, 0, 0),
    ),
    (
        "WarmupCosineLR",
        {"lr": 1.0, **LINEAR},
        (0, 0, 0.25, 0.5, 0.75, 0.933019, 0.750025, 0.50005, 0.250075, 0.0670806, 0.0001, 0.0001),
    ),
]


@pytest.mark.parametrize(("name", "parameters", "expected"), VECTORS)
def test_each_schedule_gives_deepspeeds_rates(name, parameters, expected):
    assert rates(schedule_of(name, **parameters), len(expected)) == pytest.approx(expected, rel=1e-6, abs=5e-7)


def test_the_momentum_of_one_cycle_is_deepspeeds_below_one():
    expected = (0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.945, 0.99)
    got = momenta(schedule_of("OneCycle", **CYCLE), 15)
    assert got[:11] == pytest.approx(expected, abs=1e-12)
    assert got[11:] == [MOST_MOMENTUM] * 4  # DeepSpeed goes on with 1.035, 1.08, 1.125, 1.17


def test_a_momentum_that_is_clamped_is_told_once_with_its_step():
    schedule = schedule_of("OneCycle", **CYCLE)
    assert momenta(schedule, 12)[10] < MOST_MOMENTUM == momenta(schedule, 12)[11]
    assert schedule.warnings(11) == []
    for count in (12, 1000):
        (told,) = schedule.warnings(count)
        assert told == "the momentum of OneCycle would grow past 0.999 at step 12: it stays there from then on"
    assert schedule_of("OneCycle", **CYCLE | {"decay_mom_rate": 0.0}).warnings(10**6) == []
    assert schedule_of("OneCycle", **CYCLE | {"decay_step_size": 0}).warnings(10**6) == []
    assert schedule_of("OneCycle", cycle_momentum=False, **CYCLE).warnings(10**6) == []
    assert schedule_of("LRRangeTest").warnings(10**6) == []


def test_golden_range_test_reaches_its_rates_when_published():
    """Minimum 1e-4, step size 200, rate 5: 0.002 after 760 steps, 0.005 after 1960."""
    schedule = schedule_of(
        "LRRangeTest", lr_range_test_min_lr=1e-4, lr_range_test_step_size=200, lr_range_test_step_rate=5.0
    )
    assert schedule.at(Done(760)).learning_rate == pytest.approx(0.002, rel=1e-12)
    assert schedule.at(Done(1960)).learning_rate == pytest.approx(0.005, rel=1e-12)


def test_a_cycle_rises_to_its_top_and_ends_at_its_bottom_whatever_its_sizes():
    for first in (1, 2, 3, 7, 30):
        for second in (1, 2, 3, 7, 30):
            schedule = schedule_of(
                "OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=first,
                cycle_second_step_size=second,
            )  # fmt: skip
            got = rates(schedule, first + second + 5)
            assert got[0] == 0.1 and got[first] == 1.0 and got[first + second :] == [0.1] * 5
            assert got[: first + 1] == sorted(got[: first + 1]) and got[first:] == sorted(got[first:], reverse=True)
            moved = momenta(schedule, first + second + 5)
            assert moved[first] == pytest.approx(0.8) and moved[first + second :] == [0.9] * 5


def test_stairs_hold_the_rate_between_two_steps_of_a_cycle():
    schedule = schedule_of(
        "OneCycle", cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=8, cycle_first_stair_count=2,
        cycle_second_step_size=4, cycle_second_stair_count=4,
    )  # fmt: skip
    assert rates(schedule, 13) == [0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5, 1, 0.75, 0.5, 0.25, 0]
    same = schedule_of("OneCycle", cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=4,
                       cycle_first_stair_count=2)  # fmt: skip
    assert rates(same, 9) == [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0]  # as many downwards


def test_after_the_cycle_the_rate_falls_from_the_minimum():
    schedule = schedule_of("OneCycle", **CYCLE | {"cycle_min_lr": 0.1})
    assert rates(schedule, 13)[8:] == pytest.approx([0.1, 0.1 / 1.25, 0.1 / 1.5, 0.1 / 1.75, 0.1 / 2])


def test_only_one_cycle_with_momentum_has_a_momentum():
    assert momenta(schedule_of("OneCycle", cycle_momentum=False, **CYCLE), 12) == [None] * 12
    for name in ("LRRangeTest", "WarmupDecayLR"):
        assert momenta(schedule_of(name), 12) == [None] * 12


def test_rates_that_are_not_given_follow_from_lr():
    assert rates(schedule_of("WarmupLR", lr=0.25, warmup_num_steps=2), 5)[-1] == 0.25
    assert rates(schedule_of("WarmupDecayLR", lr=0.25, warmup_num_steps=2), 4)[-1] == 0.25
    assert rates(schedule_of("WarmupDecayLR", warmup_num_steps=2), 4)[-1] == 0.001
    for name in ("WarmupLR", "WarmupCosineLR"):
        with pytest.raises(ValueError, match="give --lr"):
            schedule_of(name)


def test_the_last_step_is_the_runs_where_it_is_not_given():
    for name in ("WarmupDecayLR", "WarmupCosineLR"):
        given = {"lr": 1.0, "warmup_num_steps": 3}
        assert schedule_of(name, train_iters=30, **given).curve == schedule_of(name, total_num_steps=30, **given).curve


def test_a_warmup_of_one_step_is_one_of_two():
    for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        assert schedule_of(name, lr=1.0, warmup_num_steps=1) == schedule_of(name, lr=1.0, warmup_num_steps=2)


def test_a_skipped_step_moves_no_schedule_of_deepspeed():
    """They count finished updates, whatever was consumed."""
    for name, parameters, _ in VECTORS:
        schedule = schedule_of(name, **parameters)
        for done in range(12):
            assert schedule.at(Done(done, 0, 0)) == schedule.at(Done(done, 10**6, 10**9))


def test_weight_decay_goes_on_beside_a_schedule_of_deepspeed():
    named = DeepSpeedScheduleConfig(lr_scheduler="LRRangeTest")
    config = ScheduleConfig(weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=1.0)
    schedule = make_schedule(config, BatchConfig(micro_batch_size=1, train_iters=10), 8, named=named)
    assert [step.weight_decay for step in steps(schedule, 11)] == pytest.approx([k / 10 for k in range(11)])


SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --vocab-size 97 --micro-batch-size 2 "
    "--train-iters 20"
)


def printed(capsys, flags: str) -> tuple[list[dict], str]:
    assert pretrain_gpt.main(f"{SMALL} {flags}".split()) == 0
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_the_printed_lines_show_a_momentum_where_there_is_one(capsys):
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in CYCLE.items())
    lines, err = printed(capsys, f"--lr-scheduler onecycle {flags} --print-lr 15")
    assert [list(line) for line in lines] == [["step", "learning_rate", "weight_decay", "momentum"]] * 15
    assert [line["momentum"] for line in lines] == momenta(schedule_of("OneCycle", **CYCLE), 15)
    assert err == "warning: the momentum of OneCycle would grow past 0.999 at step 12: it stays there from then on\n"
    lines, err = printed(capsys, "--lr_schedule WarmupLR --warmup_max_lr 1 --warmup_num_steps 5 --print-lr 7")
    assert [list(line) for line in lines] == [["step", "learning_rate", "weight_decay"]] * 7 and err == ""
    assert [line["learning_rate"] for line in lines] == rates(schedule_of(*VECTORS[3][:1], **VECTORS[3][1]), 7)


def test_printed_tokens_are_those_of_the_samples(capsys):
    lines, _ = printed(
        capsys, "--train-tokens 320 --lr 1 --lr-warmup-tokens 64 --lr-decay-tokens 320 --print-lr 12"
    )
    got = [line["learning_rate"] for line in islice(lines, 12)]
    assert got == pytest.approx([0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0])
