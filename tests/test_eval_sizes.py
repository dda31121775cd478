"""Evaluation in runs: sizes of its own change neither its loss nor the training, and --skip-train only evaluates."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megazero.config import check_world
from megazero.flags import UsageError, parse
from tests.training import SMALL, Outcome, train

DROPS = "--attention-dropout 0.1 --hidden-dropout 0.1"
EVALUATES = "--eval-interval 2 --eval-iters 2 --eval-global-batch-size 12"


@functools.cache
def one_rank(flags: str) -> Outcome:
    return train(f"--fp64 {flags}")


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ((1, 1, 1), "--eval-micro-batch-size 12"),
        ((1, 1, 2), "--eval-micro-batch-size 3 --overlap-param-gather"),
        ((1, 3, 1), "--eval-micro-batch-size 4"),
        ((2, 2, 1), "--eval-micro-batch-size 1 --pipeline-schedule zb-v"),
        ((1, 2, 2), "--eval-micro-batch-size 6 --num-virtual-stages-per-pipeline-rank 2"),
    ],
)
def test_neither_micro_batch_nor_layout_changes_the_loss_of_an_evaluation(layout, flags):
    """C070: batches of 12 beside training's of 8, in micro-batches of another size on every schedule's wire."""
    want, got = one_rank(EVALUATES), train(f"--fp64 {EVALUATES} {flags}", layout)
    assert [e[:2] for e in got.evaluations] == [e[:2] for e in want.evaluations]
    assert [e[:2] for e in want.evaluations] == [("valid", 2), ("valid", 4), ("valid", 5), ("test", 5)]
    assert [e[2] for e in got.evaluations] == pytest.approx([e[2] for e in want.evaluations], rel=1e-11)
    assert got.losses == pytest.approx(want.losses, rel=1e-11)


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 2)])
def test_evaluation_disturbs_no_bit_of_training(layout):
    """With dropout, which evaluation leaves out and must not consume."""
    without = train(DROPS, layout)
    beside = train(f"{DROPS} {EVALUATES} --eval-micro-batch-size 3 --overlap-param-gather", layout)
    assert beside.losses == without.losses and beside.norms == without.norms and len(beside.evaluations) == 4
    assert all(torch.equal(beside.state[key], tensor) for key, tensor in without.state.items())


def test_the_loss_is_of_as_many_samples_as_were_asked_for():
    """Three batches of 4 hold the samples of one of 12."""
    whole, parts = (
        one_rank(f"--train-iters 1 --eval-interval 1 --eval-iters {n} --eval-global-batch-size {size}").evaluations
        for n, size in ((1, 12), (3, 4))
    )
    assert [e[2] for e in parts] == pytest.approx([e[2] for e in whole], rel=1e-12)


@pytest.mark.parametrize(
    ("flags", "equation"),
    [
        (
            "--eval-global-batch-size 12 --eval-micro-batch-size 4",
            "--eval-global-batch-size 12 must be --eval-micro-batch-size 4 x micro-batches x data size 2, but "
            "12 / (4 x 2) = 1.5",
        ),
        (
            "--eval-global-batch-size 6",
            "--eval-global-batch-size 6 must be --micro-batch-size 2 x micro-batches x data size 2, but "
            "6 / (2 x 2) = 1.5",
        ),
        (
            "--eval-micro-batch-size 3",
            "evaluation by --global-batch-size 8 must be --eval-micro-batch-size 3 x micro-batches x data size 2, but "
            "8 / (3 x 2) = 1.33333",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_equation(flags, equation):
    config, _ = parse(f"{SMALL} {flags}".split())
    with pytest.raises(ValueError) as refused:
        check_world(config, 2)
    assert str(refused.value) == equation
    with pytest.raises(UsageError, match="--eval-micro-batch-size 0: must be at least 1"):
        parse(f"{SMALL} --eval-micro-batch-size 0".split())


def test_skip_train_evaluates_what_was_saved_and_leaves(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The losses are those that the run itself found at its end; nothing is trained and nothing saved, and no matter
    what a schedule would be."""
    run = f"{SMALL} {EVALUATES} --save {tmp_path}/run --save-interval 5 --overlap-grad-reduce"
    assert pretrain_gpt.main(f"{run} --metrics-jsonl {tmp_path}/a.jsonl".split()) == 0
    again = f"{run} --load {tmp_path}/run --skip-train --train-iters 9 --metrics-jsonl {tmp_path}/b.jsonl"
    again += " --weight-decay 0.5"
    capsys.readouterr()
    assert pretrain_gpt.main(again.split()) == 0
    first, second = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in "ab"
    )
    assert second == first[-3:-1] and [line["split"] for line in second] == ["valid", "test"]
    assert "saved" not in capsys.readouterr().out
    assert [folder.name for folder in (tmp_path / "run").iterdir() if folder.is_dir()] == ["iter_0000005"]
