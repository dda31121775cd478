"""The interpreter: runs one rank's program over its stages. All it knows of a schedule is its words.

A receive is posted where it stands in the program and waited for where its tensor is used; a send is waited
for only when too many are under way. So the program's order rules the wires, never the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from ..parallel.weights import WeightQueue, Work
from .instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from .lower import Program
from .p2p import Wires

SENDS_UNDER_WAY = 4

Timed = tuple[Instruction, float, float]        # an instruction, when it began and when it ended


class Reduction(Protocol):
    """Sums gradients over the data ranks. `every`: after each backward of a stage, and not after the last alone."""

    every: bool

    def arm(self, stage: int) -> None:
        """The backward that completes the gradients of `stage` begins."""

    def reduce(self, stage: int) -> None:
        """That backward has ended."""

    def finish(self, stage: int) -> None:
        """The gradients of `stage` are complete."""


@dataclass
class _Live:
    """What one (stage, micro-batch) holds between its first and its last instruction."""

    entry: Tensor | None = None       # input of the stage; None on the first stage
    exit: Tensor | None = None        # output of the stage; its storage may be freed once it is sent
    grad: Tensor | None = None        # gradient of exit; None on the last stage, whose exit is the loss
    entry_grad: Tensor | None = None  # gradient of entry, until it is sent
    arriving: Any = None              # the receive that fills entry or grad


@dataclass
class _Step:
    """What lives as long as one call of `run`."""

    batches: Sequence[Any]
    wire_shape: tuple[int, ...]
    training: bool
    live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    deferred: dict[tuple[int, int], list[Work]] = field(default_factory=dict)
    sends: deque[tuple[Any, Tensor, torch.UntypedStorage | None]] = field(default_factory=deque)  # work, x, to be freed
    outputs: dict[int, Tensor] = field(default_factory=dict)
    times: list[Timed] = field(default_factory=list)
    began: float = 0.0                # when the current instruction began its work, after waiting for its tensor

    def of(self, op: Any) -> _Live:
        return self.live.setdefault((op.stage, op.micro), _Live())

    def arrive(self, live: _Live) -> None:
        """Wait for the tensor that is on its way."""
        live.arriving.wait()
        live.arriving = None
        self.began = perf_counter()

    def settle(self, limit: int) -> None:
        """Wait for the oldest sends until at most `limit` are under way."""
        while len(self.sends) > limit:
            work, _, spent = self.sends.popleft()
            work.wait()
            if spent is not None:
                spent.resize_(0)


class PipeEngine:
    """Runs programs over stages: number -> callable(input or None, micro-batch) -> output.

    The output of `last_stage` is a loss where the program has backwards; it is their root. `queues` holds the weight
    queue of each stage whose layers can put weight gradients off. `reduction` is told when a stage's last backward
    begins and when its gradients are complete. `trace`, where it is given, gets each training step's instructions with
    their times in seconds.
    """

    def __init__(
        self, stages: Mapping[int, Callable[[Tensor | None, Any], Tensor]], last_stage: int, wires: Wires, *,
        dtype: torch.dtype, device: torch.device, queues: Mapping[int, WeightQueue] | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        self.stages, self.last_stage, self.wires = stages, last_stage, wires
        self.dtype, self.device, self.reduction = dtype, device, reduction
        self.queues = queues or {}
        self.trace: deque[list[Timed]] | None = None
        self._keeps_exit: dict[int, bool] = {}        # stage -> whether a node of its graph saved its output

    def run(self, program: Program, batches: Sequence[Any], wire_shape: tuple[int, ...]) -> list[Tensor]:
        """One step. `wire_shape` is that of the hidden states between stages, in this step.

        Returns the outputs of the last stage, one per micro-batch in order, where this rank holds it, else [].
        """
        training = any(isinstance(op, Backward | BackwardInput) for op in program)
        step = _Step(batches, wire_shape, training)
        with nullcontext() if training else torch.no_grad():
            completing = self._completing(program)
            for at, op in enumerate(program):
                step.began = perf_counter()
                if at in completing:
                    self.reduction.arm(op.stage)
                _RUN[type(op)](self, op, step)
                if at in completing and self.reduction.every:
                    self.reduction.reduce(op.stage)
                step.times.append((op, step.began, perf_counter()))
        step.settle(0)
        if training and self.trace is not None:
            self.trace.append(step.times)
        left = sorted(step.live.keys() | step.deferred.keys())
        assert not left, f"the program left {left} unfinished"
        return [step.outputs[micro] for micro in sorted(step.outputs)]

    def _completing(self, program: Program) -> set[int]:
        """Where in the program stand the backwards that complete a stage's gradients: the last one, or every one."""
        if self.reduction is None:
            return set()
        backwards = [(at, op.stage) for at, op in enumerate(program) if isinstance(op, Backward | BackwardWeight)]
        if self.reduction.every:
            return {at for at, _ in backwards}
        return set({stage: at for at, stage in backwards}.values())

    def _forward(self, op: Forward, step: _Step) -> None:
        live = step.of(op)
        if live.arriving is not None:
            step.arrive(live)
        elif op.stage:                                    # the stage below lives on this very rank
            below = step.live[op.stage - 1, op.micro]
            live.entry = below.exit.detach()
            if not step.training:
                del step.live[op.stage - 1, op.micro]
        if live.entry is not None and step.training:
            live.entry.requires_grad_()
        live.exit = self._run_stage(op, live.entry, step)
        if op.stage == self.last_stage:
            step.outputs[op.micro] = live.exit.detach()
            if not step.training:
                del step.live[op.stage, op.micro]

    def _run_stage(self, op: Forward, entry: Tensor | None, step: _Step) -> Tensor:
        """The stage's forward. The first time it is watched whether the output is anything else as well: what a node
        saved, the input, or (a view of) a parameter."""
        stage, batch = self.stages[op.stage], step.batches[op.micro]
        if not step.training or op.stage in self._keeps_exit:
            return stage(entry, batch)
        saved: set[int] = set()

        def note(x: Tensor) -> Tensor:
            saved.add(x.untyped_storage().data_ptr())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = stage(entry, batch)
        storage = out.untyped_storage().data_ptr()
        is_entry = entry is not None and storage == entry.untyped_storage().data_ptr()
        is_parameter = out.is_leaf or out._base is not None and out._base.is_leaf
        self._keeps_exit[op.stage] = is_entry or is_parameter or storage in saved
        return out

    def _backward(self, op: Backward | BackwardInput, step: _Step) -> None:
        """Gradients of the stage's input and of all weights that the stage's queue does not put off."""
        live = step.of(op)
        if live.arriving is not None:
            step.arrive(live)
        torch.autograd.backward([live.exit], [live.grad])
        live.exit = live.grad = None
        below = step.live.get((op.stage - 1, op.micro))
        if below is not None and below.exit is not None:
            below.grad = live.entry.grad
        if op.stage == 0 or below is not None:
            del step.live[op.stage, op.micro]
        else:
            live.entry_grad, live.entry = live.entry.grad, None

    def _backward_input(self, op: BackwardInput, step: _Step) -> None:
        queue = self.queues.get(op.stage, WeightQueue())
        with queue.deferring() as work:
            self._backward(op, step)
        step.deferred[op.stage, op.micro] = work

    @torch.no_grad()
    def _backward_weight(self, op: BackwardWeight, step: _Step) -> None:
        work = step.deferred.pop((op.stage, op.micro))
        work.reverse()
        while work:
            work.pop()()                                  # in the order of the backward; what it held is freed at once

    def _send(self, x: Tensor, peer: int, step: _Step, spent: torch.UntypedStorage | None = None) -> None:
        x = x.contiguous()
        step.sends.append((self.wires.send(x, peer), x, spent))
        step.settle(SENDS_UNDER_WAY)

    def _empty(self, step: _Step) -> Tensor:
        return torch.empty(step.wire_shape, dtype=self.dtype, device=self.device)

    def _send_activation(self, op: SendActivation, step: _Step) -> None:
        out = step.of(op).exit
        if not step.training:
            del step.live[op.stage, op.micro]
        # Its backward needs the node of the output, but not the values, unless some node saved them.
        is_spent = step.training and not self._keeps_exit[op.stage]
        self._send(out.detach(), op.peer, step, out.untyped_storage() if is_spent else None)

    def _recv_activation(self, op: RecvActivation, step: _Step) -> None:
        live = step.of(op)
        live.entry = self._empty(step)
        live.arriving = self.wires.receive(live.entry, op.peer)

    def _send_grad(self, op: SendGrad, step: _Step) -> None:
        self._send(step.live.pop((op.stage, op.micro)).entry_grad, op.peer, step)

    def _recv_grad(self, op: RecvGrad, step: _Step) -> None:
        live = step.of(op)
        live.grad = self._empty(step)
        live.arriving = self.wires.receive(live.grad, op.peer)

    def _reduce(self, op: ReduceGrads, step: _Step) -> None:
        if self.reduction is not None:
            self.reduction.finish(op.stage)


_RUN: dict[type, Callable[..., None]] = {
    Forward: PipeEngine._forward,
    Backward: PipeEngine._backward,
    BackwardInput: PipeEngine._backward_input,
    BackwardWeight: PipeEngine._backward_weight,
    SendActivation: PipeEngine._send_activation,
    RecvActivation: PipeEngine._recv_activation,
    SendGrad: PipeEngine._send_grad,
    RecvGrad: PipeEngine._recv_grad,
    ReduceGrads: PipeEngine._reduce,
}
