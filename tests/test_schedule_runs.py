"""Schedules in real runs: what a step is logged to have updated with, and how a resumed run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

import pretrain_gpt
from megazero.parallel.rules import Adam
from tests.training import SMALL, Outcome, distance, train

WITHOUT_SHAPE = SMALL.replace("--lr 1e-3 --lr-decay-style constant ", "")


def run(capsys: pytest.CaptureFixture, flags: str, code: int = 0) -> tuple[str, str]:
    """Standard output and error of one process with these flags, over a model without a learning rate."""
    assert pretrain_gpt.main(f"{WITHOUT_SHAPE} {flags}".split()) == code
    return capsys.readouterr()


def rates(file: Path) -> list[float]:
    return [json.loads(line)["learning_rate"] for line in file.read_text().splitlines()]


def test_c121_a_resumed_run_takes_the_schedule_that_it_is_told_to(tmp_path, capsys):
    """Saved at 3e-4 and resumed at 1e-5: the new formula, the old one, or a refusal that names both."""
    folder, told = tmp_path / "run", tmp_path / "metrics.jsonl"
    run(capsys, f"--lr 3e-4 --train-iters 3 --save {folder} --save-interval 3 --lr-decay-iters 10")
    resumed = f"--lr 1e-5 --train-iters 4 --load {folder} --lr-decay-iters 10 --metrics-jsonl {told}"
    run(capsys, f"{resumed} --override-opt_param-scheduler")
    run(capsys, f"{resumed} --use-checkpoint-opt_param-scheduler")
    assert rates(told) == pytest.approx([1e-5 * 0.7, 3e-4 * 0.7], rel=1e-12)
    _, err = run(capsys, resumed, code=2)
    assert err.count("\n") == 1 and "--lr: 0.0003 in the checkpoint, 1e-05 now" in err
    assert "--override-opt_param-scheduler" in err and "--use-checkpoint-opt_param-scheduler" in err
    run(capsys, f"{resumed} --finetune --train-iters 1")
    assert rates(told)[2:] == [1e-5]  # from the start: nothing of the old schedule is left


def test_c124_the_logged_rate_is_the_same_for_any_accumulation(tmp_path, capsys):
    schedule = "--lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-5 --train-iters 5"
    for micro in (8, 4, 1):
        run(capsys, f"{schedule} --micro-batch-size {micro} --metrics-jsonl {tmp_path}/{micro}.jsonl")
    assert rates(tmp_path / "8.jsonl") == rates(tmp_path / "4.jsonl") == rates(tmp_path / "1.jsonl")
    assert len(set(rates(tmp_path / "8.jsonl"))) == 5


def test_c126_two_families_of_lengths_are_refused_by_name(capsys):
    _, err = run(capsys, "--lr 1e-3 --lr-warmup-samples 8", code=2)
    assert err == (
        "pretrain_gpt.py: error: --train-iters 5 and --lr-warmup-samples 8: count all in iterations or all in samples\n"
    )


def test_a_range_test_logs_deepspeeds_rates_and_goes_on_exactly(tmp_path, capsys):
    """C040 for a schedule that counts updates."""
    schedule = "--lr-scheduler LRRangeTest --lr-range-test-min-lr 1e-4 --lr-range-test-step-size 2"
    run(capsys, f"{schedule} --train-iters 6 --metrics-jsonl {tmp_path}/straight.jsonl")
    assert rates(tmp_path / "straight.jsonl") == pytest.approx([1e-4 * (1 + k / 2) for k in range(6)])
    parts = f"{schedule} --save {tmp_path}/run --save-interval 3 --metrics-jsonl {tmp_path}/parts.jsonl"
    run(capsys, f"{parts} --train-iters 6 --exit-interval 3")
    run(capsys, f"{parts} --train-iters 6 --auto-resume")
    assert rates(tmp_path / "parts.jsonl") == rates(tmp_path / "straight.jsonl")


def test_a_run_in_tokens_ends_at_them_and_decays_over_them(tmp_path, capsys):
    """Four steps of 8 x 16 tokens, though twenty were allowed."""
    flags = "--lr 1.0 --lr-decay-tokens 512 --lr-warmup-tokens 128 --train-tokens 500 --train-iters 20"
    out, _ = run(capsys, f"{flags} --log-interval 1 --metrics-jsonl {tmp_path}/m.jsonl")
    assert "iteration 4/4 | consumed samples 32 | consumed tokens 512" in out
    assert rates(tmp_path / "m.jsonl") == pytest.approx([0.0, 1.0, 2 / 3, 1 / 3])


def changed(outcome: Outcome, start: Outcome) -> dict[str, float]:
    """How far each weight is from where it began."""
    return {
        name: (tensor - start.state[name, kind]).abs().max().item()
        for (name, kind), tensor in outcome.state.items() if kind == "weight"
    }


def test_embedding_and_head_learn_at_their_own_rate_in_any_layout():
    """Adam's first step moves each element by its learning rate, and these are 100 times apart. Token table, positions
    and head have the one, and the rest the other; a decoupled rate that is --lr changes no bit."""
    base = "--fp64 --weight-decay 0 --untie-embeddings-and-output-weights"
    start = train(f"{base} --lr 0 --min-lr 0", iterations=1)
    want = train(f"{base} --decoupled-lr 1e-5", iterations=1)
    for layout in ((1, 1, 1), (2, 2, 1), (1, 1, 3)):
        whole = "--global-batch-size 12 " if layout[2] == 3 else ""
        got = train(f"{base} {whole}--decoupled-lr 1e-5", layout, iterations=1)
        for name, far in changed(got, start).items():
            if "qkv.bias" not in name:          # of keys: a gradient of rounding
                table = name in ("embedding.word.weight", "embedding.position", "head.weight")
                assert far == pytest.approx(1e-5 if table else 1e-3, rel=1e-3), name
        assert whole or max(distance(got, want).values()) < 1e-10
    same, plain = train("--decoupled-lr 1e-3"), train("")
    assert same.losses == plain.losses and all(same.state[key].equal(plain.state[key]) for key in plain.state)


def test_each_step_of_one_cycle_updates_with_its_own_momentum(capsys):
    """What --print-lr shows is what the rule is called with: a momentum that falls while the rate rises, but for the
    first step, which DeepSpeed makes before its schedule has begun."""
    cycle = (
        "--lr-scheduler OneCycle --cycle-min-lr 1e-4 --cycle-max-lr 1e-3 --cycle-first-step-size 2 "
        "--cycle-min-mom 0.8 --cycle-max-mom 0.95 --decay-mom-rate 0 --train-iters 6"
    )
    shown = [json.loads(line) for line in run(capsys, f"{cycle} --print-lr 6")[0].splitlines()]
    assert [line["momentum"] for line in shown[:5]] == pytest.approx([0.8, 0.875, 0.8, 0.875, 0.95])
    used, update = [], Adam.update

    def recording(self, buckets, grads, learning_rate, *more):
        used.append((self.betas[0], learning_rate))
        update(self, buckets, grads, learning_rate, *more)

    with mock.patch.object(Adam, "update", recording):
        run(capsys, cycle)
    assert used == [(line["momentum"], line["learning_rate"]) for line in shown]
