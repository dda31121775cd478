"""Every schedule trains the same GPT as one rank, through the front door: cut unevenly, tied or not, recomputed or not,
with any number of micro-batches; and equal masks make schedules equal in every bit."""

from __future__ import annotations

import functools
import gc
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import megazero.machine
import pretrain_gpt
from megazero.data.batch import MicroBatch
from megazero.data.indexed import IndexedWriter
from megazero.flags import parse
from megazero.gpt import WORD_TABLE
from megazero.parallel.groups import World, open_mesh
from megazero.pipe.instructions import Forward, Orders, Program
from megazero.pipe.lower import add_communication
from megazero.pipe.schedule import interleaved
from megazero.trainer import Progress, Trainer
from tests.harness import on_ranks
from tests.test_parity import LIMITS, UNTIED
from tests.training import SMALL, Outcome, Recorder, assemble, distance, train, train_rank

SCHEDULES = {
    "gpipe": "--pipeline-schedule gpipe",
    "1f1b": "--pipeline-schedule 1f1b",
    "interleaved": "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
    "zb-h1": "--pipeline-schedule zb-h1",
    "zb-v": "--pipeline-schedule zb-v",
}
RECOMPUTATIONS = (
    "",
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
)
MICRO_BATCHES = (1, 2, 3, 5, 8)
LAYERS = {2: 5, 3: 7, 4: 9}         # no number of stages divides them (C057)


def words(flags: str, layout: tuple[int, int, int], base: str = SMALL) -> list[str]:
    tensor, pipeline, _ = layout
    return f"{base} {flags} --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}".split()


def train_all(
    runs: Sequence[str], layout: tuple[int, int, int], base: str = SMALL,
    before: Callable[[Trainer], None] | None = None,
) -> list[Outcome]:
    """`train` of several runs, one after another in the same processes."""
    world = math.prod(layout)
    ranks = on_ranks(world, train_all_on_rank, [words(run, layout, base) for run in runs], world, before)
    return [
        Outcome(results[0][0].steps, assemble([pieces for _, pieces, _ in results]))
        for results in zip(*ranks, strict=True)
    ]


def train_all_on_rank(
    runs: Sequence[Sequence[str]], world: int, before: Callable[[Trainer], None] | None
) -> list[tuple[Recorder, list, Any]]:
    return [train_rank(argv, world, None, None, before) for argv in runs]


@functools.cache
def one_rank(flags: str) -> Outcome:
    return train(flags)


def check_equal(got: Outcome, want: Outcome, what: str) -> None:
    for name, value in distance(got, want).items():
        assert value <= LIMITS[name], f"{what}: {name} differ by {value:.1e}"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_trains_the_same_model_as_one_rank(ranks: int) -> None:
    """C057 C062: losses, norms, weights and moments; tied and untied, all recomputations and 1 to 8 micro-batches take
    turns."""
    cases = []
    for number, (name, schedule) in enumerate(SCHEDULES.items()):
        turn = number + len(SCHEDULES) * (ranks - 2)
        micros = MICRO_BATCHES[(number + 2 * ranks) % len(MICRO_BATCHES)]
        model = f"--fp64 --train-iters 2 --num-layers {LAYERS[ranks]} --global-batch-size {2 * micros}"
        cases.append((name, f"{model} {'' if turn % 2 else UNTIED}", schedule, RECOMPUTATIONS[turn % 4]))
    outcomes = train_all([" ".join(case[1:]) for case in cases], (1, ranks, 1))
    for got, (name, model, _, recomputation) in zip(outcomes, cases, strict=True):
        check_equal(got, one_rank(model), f"{name} {model} {recomputation}")


def test_an_interleaved_run_goes_in_the_groups_that_are_asked_for() -> None:
    """Another order of computation, and the model of one rank."""
    flags = "--fp64 --train-iters 2 --global-batch-size 16"
    asked = f"{flags} {SCHEDULES['interleaved']} --microbatch-group-size-per-virtual-pipeline-stage 3"
    order = pretrain_gpt.pipelining_of(parse(words(asked, (1, 2, 1)))[0]).order
    assert order(2, 8, 2) == interleaved(2, 8, 2, 3) != interleaved(2, 8, 2)
    (got,) = train_all([asked], (1, 2, 1))
    check_equal(got, one_rank(flags), "groups of 3")
    with pytest.raises(ValueError, match="-stage 1: must be at least --pipeline-model-parallel-size 2"):
        parse(words("--microbatch-group-size-per-virtual-pipeline-stage 1", (1, 2, 1)))


def test_a_rank_may_hold_an_end_of_the_model_and_no_block() -> None:
    """Fewer blocks than ranks, where embedding and head count in the split."""
    model = "--fp64 --train-iters 2 --num-layers 1"
    runs = [
        "--pipeline-model-parallel-layout E|t|L --pipeline-schedule zb-h1",
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        "--pipeline-model-parallel-layout E|||||tL --pipeline-schedule zb-v",
    ]
    for run, got in zip(runs, train_all([f"{model} {run}" for run in runs], (1, 3, 1)), strict=True):
        check_equal(got, one_rank(model), run)


def test_every_schedule_trains_the_same_model_beside_tensor_and_data_ranks() -> None:
    """C057 C062: two of each, on eight ranks; tied and untied."""
    model = "--fp64 --train-iters 2 --num-layers 5"
    cases = [(f"{model} {tie}", schedule) for tie in ("", UNTIED) for schedule in SCHEDULES.values()]
    for got, (flags, schedule) in zip(train_all([" ".join(case) for case in cases], (2, 2, 2)), cases, strict=True):
        check_equal(got, one_rank(flags), f"{flags} {schedule}")


@pytest.mark.parametrize("flags", ["", UNTIED])
def test_no_schedule_changes_the_logged_number_of_parameters(flags: str) -> None:
    """C057 C062: on 1 to 4 stages, or on 2 to 8, of a model that few of these numbers divide; a tied table is one."""
    said = set()
    for ranks in (1, 2, 3, 4):
        for schedule in SCHEDULES.values():
            config, _ = parse(words(f"--num-layers 9 {flags} {schedule}", (1, ranks, 1)))
            said.add(pretrain_gpt.describe(pretrain_gpt.prepare(config, World(0, ranks, 0))).split(", ")[1])
    width, vocab = 32, 97
    count = 9 * (12 * width**2 + 13 * width) + (vocab * (1 + bool(flags)) + 16 + 2) * width
    assert said == {f"{count:,} parameters"}


@pytest.mark.parametrize(
    ("ranks", "ties", "zero"),
    [(1, (True,), 1), (2, (True, False), 1), (2, (True,), 2), (3, (True,), 1), (4, (False,), 1)],
)
def test_schedules_are_equal_in_every_bit(ranks: int, ties: tuple[bool, ...], zero: int) -> None:
    """With dropout, clipping active, in fp32: losses of all steps, final weights and moments. Tied too, also where one
    rank holds both ends of the model, as in the V shape, and where gradients are reduced after each backward; where one
    stage holds both, the order of their sum is its own."""
    dropout = f"--attention-dropout 0.1 --hidden-dropout 0.1 --num-layers {2 * ranks} --train-iters 3"
    dropout += f" --zero-stage {zero}"
    names = SCHEDULES if ranks > 1 else ("gpipe", "1f1b", "zb-h1")
    cases = [(name, tied) for tied in ties for name in names]
    runs = [f"{dropout} {'' if tied else UNTIED} {SCHEDULES[name]}" for name, tied in cases]
    outcomes = train_all(runs, (1, ranks, 1))
    for (name, tied), got in zip(cases, outcomes, strict=True):
        first = outcomes[cases.index(("gpipe", tied))]
        assert min(got.norms) > 0.5 and got.losses[0] == first.losses[0], name
        assert got.losses == first.losses, name
        # Each stage has buckets of its own, so an fp64 norm is summed in another order, and its last digit moves.
        assert got.norms == pytest.approx(first.norms, rel=1e-14), name
        assert [key for key in first.state if not torch.equal(got.state[key], first.state[key])] == [], name


def tables_after_each_step(runs: Sequence[Sequence[str]], world: int, steps: int) -> list[list[list[str]]]:
    """For each run and step, a digest of each copy of the token table that this rank holds."""
    return [_tables(*begin(argv, world), steps) for argv in runs]


def begin(argv: Sequence[str], world: int) -> tuple[Trainer, Progress]:
    """The trainer of this rank."""
    plan = pretrain_gpt.prepare(parse(argv)[0], World(0, world, 0))
    return pretrain_gpt.build(plan, open_mesh(plan.topology), Recorder())


def _tables(trainer: Trainer, progress: Progress, steps: int) -> list[list[str]]:
    infos = [info for bucket in trainer.machine.optimizer.buckets for info in bucket.infos]
    stages = trainer.machine.engine.stages.values()
    heads = [layer.weight for stage in stages for name, layer in stage.named_layers() if name == "head"]
    found = []
    for step in range(1, steps + 1):
        progress = trainer.train(progress, step, None)
        copies = [info.tensor for info in infos if info.name == WORD_TABLE]
        assert all(head is copy for head in heads for copy in copies)
        found.append([hashlib.sha256(c.detach().view(torch.int16).numpy().tobytes()).hexdigest() for c in copies])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_both_holders_of_a_tied_table_stay_equal(ranks: int) -> None:
    """C061: in bf16, after every one of ten steps, in all modes, with and without ZeRO; and the table does change."""
    steps = 10
    flags = f"--bf16 --train-iters {steps} --micro-batch-size 1 --global-batch-size 4"
    runs = [
        words(f"{flags} --num-layers {2 * ranks} --zero-stage {(number + ranks) % 2} {schedule}", (1, ranks, 1))
        for number, schedule in enumerate(SCHEDULES.values())
    ]
    places = on_ranks(ranks, tables_after_each_step, runs, ranks, steps)
    for name, *of_ranks in zip(SCHEDULES, *places, strict=True):
        holders = [rank for rank, found in enumerate(of_ranks) if found[0]]
        assert holders == ([0] if name == "zb-v" or ranks == 1 else [0, ranks - 1]), name
        copies = [of_ranks[rank] for rank in holders]
        assert all(copy == copies[0] for copy in copies), name
        assert len({digest for (digest,) in copies[0]}) == steps, name


def repeated_tokens(runs: Sequence[Sequence[str]], world: int) -> list[dict[str, list[float]]]:
    """The losses that this rank sees for each run: of micro-batches that are one repeated token each, in training; of
    other sizes and lengths, in evaluation; of a shorter sequence, in training; and of the first again."""
    found = []
    for argv in runs:
        machine = begin(argv, world)[0].machine

        def losses(train: bool, seq: int, batch: int, micros: int, machine: Any = machine) -> list[float]:
            batches = [
                MicroBatch(torch.full((seq, batch), token), torch.full((seq, batch), token), scale=1 / (seq * batch))
                for token in range(3, 3 + micros)
            ]
            program = (machine.train_program if train else machine.evaluate_program)(micros)
            return [loss.item() for loss in machine.engine.run(program, batches, seq)]

        found.append({
            "training": losses(True, 16, 2, 6), "evaluation": losses(False, 11, 3, 5),
            "shorter": losses(True, 8, 2, 2), "again": losses(True, 16, 2, 6),
        })
    return found


def test_losses_belong_to_their_micro_batches_whatever_their_shape() -> None:
    """C064 C070: six micro-batches of one repeated token each; evaluation has another size and length, and a step of a
    curriculum is shorter."""
    model = "--fp64 --num-layers 6"
    (want,) = repeated_tokens([words(model, (1, 1, 1))], 1)
    assert len({f"{loss:.6f}" for loss in want["training"]}) == 6
    runs = [words(f"{model} {schedule}", (1, 3, 1)) for schedule in SCHEDULES.values()]
    for name, *of_ranks in zip(SCHEDULES, *on_ranks(3, repeated_tokens, runs, 3), strict=True):
        last = 0 if name == "zb-v" else 2
        for rank, got in enumerate(of_ranks):
            for what, losses in got.items():
                assert losses == pytest.approx(want[what] if rank == last else [], rel=1e-12), f"{name} {what}"


def programs_built(runs: Sequence[Sequence[str]], world: int) -> list[tuple[list[int], list[str]]]:
    """For each run the micro-batches of each program that was made for it, in order, and of those that it keeps the
    forwards of other ranks."""
    found = []
    for argv in runs:
        made: list[int] = []

        def counted(orders: Orders, stages: int, made: list[int] = made) -> list[Program]:
            made.append(1 + max(op.micro for order in orders for op in order))
            return add_communication(orders, stages)

        with mock.patch.object(megazero.machine, "add_communication", counted):
            _, _, foreign = train_rank(argv, world, forwards_of_others, None)
        found.append((made, foreign))
    return found


def forwards_of_others(trainer: Trainer) -> list[str]:
    gc.collect()
    own = trainer.machine.engine.stages
    return [str(op) for op in gc.get_objects() if isinstance(op, Forward) and op.stage not in own]


def test_a_program_is_built_once_and_not_in_every_step() -> None:
    """One for the wires, and one for each number of micro-batches, in training and in evaluation; a rank keeps its
    own."""
    flags = "--train-iters 6 --rampup-batch-size 4 4 12 --eval-interval 2 --eval-iters 2 --eval-micro-batch-size 1"
    runs = [words(f"{flags} {schedule}", (1, 2, 1)) for schedule in SCHEDULES.values()]
    assert on_ranks(2, programs_built, runs, 2) == [[([1, 2, 8, 4], [])] * len(runs)] * 2


def machine_losses(runs: Sequence[Sequence[str]], world: int) -> list[tuple[float, float]]:
    """The summed loss as every rank learns it, of an evaluation with a shape of its own and of a training step."""
    found = []
    for argv in runs:
        machine = begin(argv, world)[0].machine
        other = [MicroBatch(torch.full((11, 3), 7), torch.full((11, 3), 8)) for _ in range(4)]
        usual = [MicroBatch(torch.full((16, 2), 7), torch.full((16, 2), 8)) for _ in range(4)]
        evaluated = machine.loss(other, machine.evaluate_program(4)).item()
        found.append((evaluated, machine.loss(usual, machine.train_program(4)).item()))
    return found


def test_every_rank_learns_the_loss_of_a_step_with_its_own_shape() -> None:
    model = "--fp64 --num-layers 4"
    (want,) = machine_losses([words(model, (1, 1, 1))], 1)
    runs = [words(f"{model} {schedule}", (1, 2, 1)) for schedule in SCHEDULES.values()]
    for found in on_ranks(2, machine_losses, runs, 2):
        for name, got in zip(SCHEDULES, found, strict=True):
            assert got == pytest.approx(want, rel=1e-12), name


def read_at_the_ends_alone(trainer: Trainer) -> None:
    """A rank without the first and the last stage must not ask its loader for anything."""
    engine = trainer.machine.engine
    if engine.stages.keys().isdisjoint({0, engine.last_stage}):
        trainer.feeds["train"].loader.global_batch = None


@pytest.mark.parametrize("samples", [12, 14])
def test_a_set_that_wraps_round_stops_no_stage(samples: int, tmp_path: Path) -> None:
    """C065 C070: data for three steps, or for three and a tail that fills no batch; eight steps, three stages, of which
    the middle ones read nothing."""
    with IndexedWriter(tmp_path / "few", vocab_size=97) as writer:
        writer.add_document([np.random.default_rng(1).integers(0, 97, samples * 16 + 1)])
    base = SMALL.replace("--mock-data", f"--data-path {tmp_path / 'few'} --split 1")
    flags = "--fp64 --num-layers 6 --micro-batch-size 1 --global-batch-size 4 --train-iters 8"
    (want,) = train_all([flags], (1, 1, 1), base)
    assert len(set(want.losses)) == 8
    runs = [f"{flags} {schedule}" for schedule in SCHEDULES.values()]
    for name, got in zip(SCHEDULES, train_all(runs, (1, 3, 1), base, read_at_the_ends_alone), strict=True):
        check_equal(got, want, name)


def test_the_reported_loss_is_that_of_the_whole_global_batch() -> None:
    """C068: with micro-batches of 1 and of 4 on two data ranks; the one rank has micro-batches of 2."""
    flags = "--fp64 --train-iters 2"
    want = one_rank(flags).losses
    runs = [f"{flags} --micro-batch-size {size} {schedule}" for schedule in SCHEDULES.values() for size in (1, 4)]
    for run, got in zip(runs, train_all(runs, (1, 2, 2)), strict=True):
        assert got.losses == pytest.approx(want, rel=1e-11), run
