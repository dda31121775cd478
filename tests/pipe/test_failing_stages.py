"""A stage that raises, anywhere in a step, ends the job on all ranks, and its error is shown first: under every
schedule, through the front door and in a model of one's own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from examples.own_model import WIDTH, example, loss
from megazero.machine import Pipelining, Setup
from megazero.own import OwnModel, open_ranks, plain
from megazero.parallel.groups import Group, Mesh
from megazero.parallel.layers import gather_linear
from megazero.parallel.params import adopt
from megazero.parallel.topology import Topology
from megazero.parallel.weights import WeightQueue
from megazero.pipe.output import flat, hidden_of
from megazero.pipe.stage import LayerSpec, Stage
from tests.harness import Job
from tests.training import SMALL

RANKS, SECONDS = 3, 30
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
Where = tuple[str, int, int]            # the part of a step, the step, the rank

# The first step and a later one, and each rank: the first one also holds the store through which ranks hear of it.
FAULTS = [("forward", 1, 1), ("forward", 3, 0), ("backward", 1, 2), ("backward", 3, 1)]
PUT_OFF = [("weight", 1, 0), ("weight", 3, 1)]


def faults(schedule: str) -> list[Where]:
    """Where a stage raises: what zero-bubble schedules put off is a part of a step too."""
    return FAULTS + PUT_OFF * schedule.startswith("zb")


def fail(*_: Any) -> None:
    raise RuntimeError("planted fault")


def raise_in(place: str, at: int, failing: int, rank: int) -> None:
    """Let the stages of one rank raise in the second micro-batch of step `at`: in the forward, in a node of the
    backward, or in what the weight queue has put off."""
    if rank != failing:
        return
    forward, put, seen = Stage.forward, WeightQueue.put, [(0, 0)]

    def changed(stage: Stage, x: Any, batch: Any) -> Any:
        out = forward(stage, x, batch)
        seen[0] = batch.draw[1:]
        if seen[0] == (at, 1):
            if place == "forward":
                fail()
            if place == "backward":
                flat(hidden_of(out))[0].register_hook(fail)
        return out

    def put_off(queue: WeightQueue, work: Callable[[], None]) -> None:
        put(queue, fail if place == "weight" and queue.is_deferring and seen[0][0] == at else work)

    Stage.forward, WeightQueue.put = changed, put_off


class Linear(nn.Module):
    """x + Ax, whose weight gradient is put off."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.queue, self.inner = mesh.weights, nn.Linear(WIDTH, WIDTH)
        adopt(self, std=0.1)

    def forward(self, x: Tensor, _: Any) -> Tensor:
        return x + gather_linear(x, self.inner.weight, self.inner.bias, Group("tensor"), self.queue)


OWN = [
    plain("enter", lambda: nn.Linear(2, WIDTH), std=0.5, cost=0.0),
    *(LayerSpec(f"linear.{i}", Linear) for i in range(6)),
    plain("leave", lambda: nn.Linear(WIDTH, 1), std=0.2, cost=0.0),
]


def train_own(argv: list[str]) -> None:
    """As examples/own_model.py does."""
    (name,) = argv
    with open_ranks(Topology(pipeline=RANKS)) as mesh:
        model = OwnModel(OWN, loss, mesh, Setup(pipelining=Pipelining(name, CHUNKS[name])))
        model.train(example, steps=5, micro_batches=4, learning_rate=1e-3)


def errors_of(jobs: dict[Where, Job]) -> dict[Where, str]:
    """What each of the jobs wrote to stderr, but for torch's warnings; all of their ranks have ended in time, and not
    well."""
    start, told = time.monotonic(), {}
    for where, job in jobs.items():
        assert job.wait(start + SECONDS - time.monotonic()) == [1] * RANKS, f"{where}\n{job.erred()}"
        told[where] = re.sub(r"^(\[rank\d\]:)?\[W.*\n", "", job.erred(), flags=re.MULTILINE)
    return told


@pytest.mark.parametrize("schedule", CHUNKS)
def test_a_stage_that_raises_ends_a_run_of_the_front_door(schedule: str, tmp_path: Path) -> None:
    flags = (
        f"{SMALL} --num-layers 6 --pipeline-model-parallel-size {RANKS} --pipeline-schedule {schedule} "
        f"--num-virtual-stages-per-pipeline-rank {CHUNKS[schedule]}"
    )
    with ExitStack() as stack:
        jobs = {
            where: stack.enter_context(
                Job(flags.split(), RANKS, tmp_path / str(where), plant=partial(raise_in, *where))
            )
            for where in faults(schedule)
        }
        for (place, at, failing), err in errors_of(jobs).items():
            first = f"pretrain_gpt.py: error: rank {failing} of {RANKS} failed:\nTraceback"
            assert err.startswith(first) and "RuntimeError: planted fault\n" in err, (place, at, err)
            assert err.count("Traceback") == 1, (place, at, err)


@pytest.mark.parametrize("schedule", CHUNKS)
def test_a_stage_that_raises_ends_a_run_of_a_model_of_ones_own(schedule: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        jobs = {
            where: stack.enter_context(
                Job([schedule], RANKS, tmp_path / str(where), plant=partial(raise_in, *where), main=train_own)
            )
            for where in faults(schedule)
        }
        for where, err in errors_of(jobs).items():
            errors = [line for line in err.splitlines() if line.startswith(("RuntimeError: ", "ConnectionError: "))]
            assert errors[0] == "RuntimeError: planted fault" and len(errors) == RANKS, (where, err)
