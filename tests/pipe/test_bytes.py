"""The bytes that a rank holds, measured before every instruction on gloo ranks: those that the paper says are alive, of
a graph until its input gradient, of what weight gradients need until they are added."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.parallel.activity import Activity
from megazero.parallel.groups import Group, open_mesh
from megazero.parallel.layers import gather_linear
from megazero.parallel.topology import Topology
from megazero.parallel.weights import WeightQueue
from megazero.pipe.engine import PipeEngine
from megazero.pipe.instructions import Backward, BackwardInput, BackwardWeight, Forward, Program
from megazero.pipe.lower import add_communication
from megazero.pipe.p2p import Wires, edges_of
from megazero.pipe.schedule import SCHEDULES
from megazero.pipe.simulate import simulate
from tests.harness import on_ranks
from tests.pipe.test_engine import RUNS

ROWS, NARROW, WIDE = 32, 2, 2048        # what travels is narrow, so that messages under way hardly count
UNIT = ROWS * WIDE * 4                  # bytes of one wide tensor
LIVE = 3        # a stage's graph: the results of tanh, exp and sin, of which the second layer reads the last
PUT_OFF = 2     # what the second layer read, and the gradient of what the first one made


class Storages(TorchDispatchMode):
    """Knows all memory that operations make meanwhile, as long as it is there; also what autograd alone holds."""

    def __init__(self) -> None:
        super().__init__()
        self.made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = storages_of((args, kwargs))
        out = func(*args, **(kwargs or {}))
        for storage in storages_of(out) - given:            # and no views
            self.made.add(storage)
        return out

    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.made)


def storages_of(tensors: Any) -> set[torch.UntypedStorage]:
    return {x.untyped_storage() for x in tree_leaves(tensors) if isinstance(x, Tensor)}


class Measuring(Activity):
    """Told of every instruction before it runs: notes what is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages, self.bytes = Storages(), []

    def run(self, instruction: Any, at: int, count: int) -> None:
        self.bytes.append(self.storages.bytes())


class Part(nn.Module):
    """Two linear layers, narrow to wide and back, with operations between them whose results only their backward
    needs."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.is_last, self.queue = is_last, WeightQueue()
        self.up, self.down = nn.Parameter(torch.ones(WIDE, NARROW)), nn.Parameter(torch.ones(NARROW, WIDE) / WIDE)

    def forward(self, x: Tensor | None, batch: None) -> Tensor:
        x = torch.ones(ROWS, NARROW) if x is None else x
        wide = torch.sin(torch.exp(torch.tanh(gather_linear(x, self.up, None, Group("tensor"), self.queue))))
        y = gather_linear(wide, self.down, None, Group("tensor"), self.queue)
        return y.sum() if self.is_last else y


def measure(ranks: int, micros: int) -> list[list[float]]:
    """Of each of RUNS: wide tensors that are alive on this rank after each instruction of a step that is not the
    first."""
    mesh, found = open_mesh(Topology(pipeline=ranks)), []
    for name, chunks in RUNS:
        schedule, stages = SCHEDULES[name], ranks * chunks
        programs, measuring = add_communication(schedule(ranks, micros, chunks), stages), Measuring()
        mine = [s for s, home in enumerate(schedule.homes(ranks, chunks)) if home == mesh.stage]
        parts = {s: Part(s == stages - 1) for s in mine}
        engine = PipeEngine(
            parts, stages - 1, Wires(replace(mesh.pipeline, activity=measuring), edges_of(programs)),
            device=torch.device("cpu"), queues={s: part.queue for s, part in parts.items()},
        )
        engine.run(programs[mesh.stage], [None] * micros)
        measuring.bytes.clear()
        with measuring.storages:
            engine.run(programs[mesh.stage], [None] * micros)
        found.append([number / UNIT for number in [*measuring.bytes[1:], measuring.storages.bytes()]])
    return found


def on_paper(program: Program) -> list[tuple[int, int]]:
    """After each instruction: forwards whose input gradient is still to come, and others whose weight gradient is."""
    live = put_off = 0
    found = []
    for op in program:
        live += isinstance(op, Forward) - isinstance(op, Backward | BackwardInput)
        put_off += isinstance(op, BackwardInput) - isinstance(op, BackwardWeight)
        found.append((live, put_off))
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_bytes_are_alive_as_long_as_on_paper(ranks: int) -> None:
    micros = 6
    for rank, found in enumerate(on_ranks(ranks, measure, ranks, micros)):
        for (name, chunks), measured in zip(RUNS, found, strict=True):
            programs = add_communication(SCHEDULES[name](ranks, micros, chunks), ranks * chunks)
            counts, paper = on_paper(programs[rank]), simulate(programs)
            peaks = max(live for live, _ in counts), max(live + put_off for live, put_off in counts)
            assert peaks == (paper.peak_live[rank], paper.peak_held[rank])
            for op, units, (live, put_off) in zip(programs[rank], measured, counts, strict=True):
                expected = LIVE * live + PUT_OFF * put_off
                assert 0 <= units - expected < 0.5, f"{name} x {chunks} on {rank}: {units} after {op}, not {expected}"
