"""Runs handed on from layout to layout, through the front door: each loads in every bit what the last one saved, and
goes on as if it had always run on one rank.

A relay of n layouts proves n - 1 pairs, and run backwards their other direction, with one start of ranks for each.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megazero.flags import parse
from megazero.parallel.groups import World, open_mesh
from tests.harness import on_ranks
from tests.training import LLAMA, SMALL, Recorder, assemble, pieces_of, train

Layout = tuple[int, int, int]
State = dict[tuple[str, str], Tensor]
STEPS = 3                       # of each leg


@dataclass
class Leg:
    """What one layout of a relay loaded, the losses of its steps, and what it saved."""

    loaded: State
    losses: list[float]
    saved: State


def leg_rank(argv: list[str], world: int) -> tuple[list, list[float], list]:
    """One rank of a leg."""
    plan = pretrain_gpt.prepare(parse(argv)[0], World(0, world, 0))
    mesh, record = open_mesh(plan.topology), Recorder()
    trainer, progress = pretrain_gpt.build(plan, mesh, record)
    loaded = pieces_of(trainer)
    trainer.train(progress, plan.iterations, plan.config.checkpoint.save_interval)
    return loaded, [step["lm_loss"] for step in record.steps], pieces_of(trainer)


def leg(flags: str, layout: Layout, root: Path, number: int) -> Leg:
    """Take over from leg number - 1, run STEPS steps, save."""
    tensor, pipeline, _ = layout
    sizes = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
    save = f"--save {root} --auto-resume --save-interval {STEPS} --train-iters {STEPS * number}"
    ranks = math.prod(layout)
    told = on_ranks(ranks, leg_rank, f"{SMALL} {flags} {sizes} {save}".split(), ranks)
    return Leg(assemble([loaded for loaded, _, _ in told]), told[0][1], assemble([saved for _, _, saved in told]))


def run_relay(root: Path, legs: list[tuple[Layout, str]], shared: str, limit: float) -> None:
    """Each leg loads what the one before saved, and its losses are those of one rank in `shared`'s precision."""
    want = one_rank(f"{shared} --train-iters {STEPS * len(legs)}")
    before = None
    for number, (layout, flags) in enumerate(legs, start=1):
        now = leg(f"{shared} {flags}", layout, root, number)
        if before is not None:
            assert_same(now.loaded, before.saved)
        assert now.losses == pytest.approx(want[STEPS * (number - 1) : STEPS * number], rel=limit), f"{layout} {flags}"
        before = now


def assert_same(got: State, want: State) -> None:
    """Weights and both moments, by name, in every bit."""
    assert got.keys() == want.keys() and {kind for _, kind in want} == {"weight", "exp_avg", "exp_avg_sq"}
    wrong = [key for key in want if not torch.equal(got[key], want[key])]
    assert not wrong
    assert all(want[name, "exp_avg_sq"].any() for name, _ in want), "moments that are all zero prove nothing"


@functools.cache
def one_rank(flags: str) -> list[float]:
    return train(flags).losses


# (tensor, pipeline, data) and what else is particular. Together every size of each axis, stage of ZeRO and placement.
INTERLEAVED = "--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 1"
EXACT = [
    ((4, 1, 1), "--zero-stage 1"),
    ((1, 3, 1), "--pipeline-model-parallel-layout Etttt||L"),          # a rank without a layer
    ((1, 1, 3), "--zero-stage 2 --overlap-grad-reduce --bucket-size 4000"),
    ((1, 2, 1), f"--zero-stage 0 {INTERLEAVED}"),
    ((2, 1, 2), "--zero-stage 0"),
    ((1, 2, 3), "--zero-stage 2 --pipeline-schedule zb-v"),
    ((2, 2, 1), "--zero-stage 1 --pipeline-schedule zb-v --micro-batch-size 1"),
    ((1, 1, 1), ""),
]
CLOSE = [
    ((2, 1, 1), ""), ((1, 2, 1), "--pipeline-schedule zb-v"), ((1, 1, 3), "--zero-stage 2"), ((1, 2, 1), INTERLEAVED),
]


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_any_layout_goes_on_from_any_other_in_fp64(back: bool, tmp_path: Path) -> None:
    """C037, C039, C051: tied embedding; the next three losses of each layout to 1e-10."""
    run_relay(tmp_path, EXACT[::-1] if back else EXACT, "--fp64 --global-batch-size 12", 1e-10)


def test_any_layout_goes_on_from_any_other_in_fp32(tmp_path: Path) -> None:
    """C037, C039: untied, Llama's shape; the next three losses of each layout to 1e-5."""
    run_relay(tmp_path, CLOSE, f"{LLAMA} --global-batch-size 12", 1e-5)


def test_a_run_goes_on_in_another_precision_from_the_very_masters_and_moments(tmp_path: Path) -> None:
    """C037: they are fp32 in all three; losses as close as 16 bits are."""
    scale = "--initial-loss-scale 1024"
    legs = [
        ((2, 1, 1), "--bf16"), ((1, 1, 1), ""), ((1, 1, 2), "--bf16 --zero-stage 2"), ((1, 2, 1), f"--fp16 {scale}"),
        ((1, 1, 1), ""),
    ]
    run_relay(tmp_path, legs, "", 1e-2)


@pytest.mark.parametrize(("groups", "tensors"), [(4, (1, 2, 4, 1)), (2, (2, 1, 2))])
def test_key_value_heads_and_gates_stay_in_order_over_a_change_of_the_tensor_size(
    groups: int, tensors: tuple[int, ...], tmp_path: Path
) -> None:
    """C143, C144: queries are stored with the key and value of their group, up and gate apart."""
    run_relay(tmp_path, [((size, 1, 1), "") for size in tensors], f"--fp64 {LLAMA} --num-query-groups {groups}", 1e-10)


def test_a_single_key_value_head_is_not_cut() -> None:
    """C143: it would have to be on both ranks, which is refused by name, not guessed."""
    with pytest.raises(ValueError, match="--num-query-groups 1 is not divisible by --tensor-model-parallel-size 2"):
        parse(f"{SMALL} {LLAMA} --num-query-groups 1 --tensor-model-parallel-size 2".split())
