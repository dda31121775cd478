"""Where a number first went bad: the step is run once more, with a look at every layer.

Nothing was updated, and what a step computes follows from its number alone, so it is the same step. What is not there
when it is run again was not computed wrongly but stored or sent wrongly: that points to the hardware.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .machine import Machine
from .parallel.collectives import gather_objects
from .pipe.instructions import Program
from .pipe.output import WithLoss, flat, hidden_of
from .pipe.stage import Stage

PARAMETER, FORWARD, BACKWARD, GRADIENT = range(4)


@dataclass(frozen=True, order=True)
class Fault:
    """A value that is not finite, in the order in which it comes about."""

    phase: int
    micro: int
    place: tuple[int, int]      # in the model, from where the phase begins
    what: str
    rank: int

    def __str__(self) -> str:
        micro = f", micro-batch {self.micro}" if self.phase in (FORWARD, BACKWARD) else ""
        return f"{self.what} on rank {self.rank}{micro}"


def find(machine: Machine, batches: Sequence[Any], program: Program, key: Hashable = None) -> Fault | None:
    """The first value that is not finite when the step is run again on these micro-batches, the same on all ranks,
    which call it together; None: there is none. Gradients are forgotten."""
    found: list[Fault] = []
    engine, optimizer, rank = machine.engine, machine.optimizer, machine.mesh.rank
    optimizer.reducer.abandon()
    for info in (info for bucket in optimizer.buckets for info in bucket.infos):
        if not _is_sound(info.tensor):
            found.append(Fault(PARAMETER, 0, optimizer.place(info.name), f"the parameter {info.name}", rank))
    reduction, engine.reduction = engine.reduction, None        # each rank is to see its own gradients
    with _looking(machine, found):
        machine.loss(batches, program, key=key)
    engine.reduction = reduction
    for bucket in optimizer.trained:
        for info in bucket.infos:
            stages = bucket.homes or (0,)
            if any(not _is_sound(optimizer.reducer.gradient(info.tensor, stage)) for stage in stages):
                place = optimizer.place(info.name)
                found.append(Fault(GRADIENT, 0, place, f"the gradient of {info.name}", rank))
    optimizer.reducer.abandon()
    told = [fault for fault in gather_objects(min(found, default=None), machine.mesh.world) if fault is not None]
    return min(told, default=None)


def _is_sound(x: Tensor) -> bool:
    return bool(x.isfinite().all())


@contextmanager
def _looking(machine: Machine, found: list[Fault]) -> Iterator[None]:
    """Every layer's output is looked at, and the gradient that comes back to it."""
    hooks = []
    for number, stage in machine.engine.stages.items():
        for at, (name, layer) in enumerate(stage.named_layers() if isinstance(stage, Stage) else ()):
            look = partial(_look, machine, found, place=(number, at), name=name)
            hooks.append(layer.register_forward_hook(look))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _look(
    machine: Machine, found: list[Fault], layer: nn.Module, inputs: Any, output: Any, *, place: tuple[int, int],
    name: str,
) -> None:
    micro, rank = machine.mesh.activity.instruction[0].micro, machine.mesh.rank
    tensors = list(flat(hidden_of(output)))
    if isinstance(output, WithLoss):
        tensors.append(output.loss)
    for x in (x for x in tensors if x is not None and x.is_floating_point()):
        if not _is_sound(x):
            found.append(Fault(FORWARD, micro, place, f"the output of {name}", rank))
        if x.requires_grad:
            back = Fault(BACKWARD, micro, (-place[0], -place[1]), f"the gradient of the output of {name}", rank)
            x.register_hook(partial(_look_back, found, back))


def _look_back(found: list[Fault], fault: Fault, grad: Tensor) -> None:
    if not _is_sound(grad):
        found.append(fault)
