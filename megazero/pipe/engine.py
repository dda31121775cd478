"""The interpreter: runs one rank's program over its stages. All it knows of a schedule is its words.

A receive is posted where it stands in the program and waited for where its tensor is used; a send is waited
for only when too many are under way. So the program's order rules the wires, never the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .instructions import (
    Backward,
    Forward,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from .lower import Program
from .p2p import Wires

SENDS_UNDER_WAY = 4


@dataclass
class _Live:
    """What one (stage, micro-batch) holds between its first and its last instruction."""

    entry: Tensor | None = None       # input of the stage; None on the first stage
    exit: Tensor | None = None        # output of the stage
    grad: Tensor | None = None        # gradient of exit; None on the last stage, whose exit is the loss
    entry_grad: Tensor | None = None  # gradient of entry, until it is sent
    arriving: Any = None              # the receive that fills entry or grad


class PipeEngine:
    """Runs programs over stages: number -> callable(input or None, micro-batch) -> output.

    The output of `last_stage` is a loss where the program has backwards; it is their root. `reduce_grads` is told
    of each stage whose gradients are complete.
    """

    def __init__(
        self, stages: dict[int, Callable[[Tensor | None, Any], Tensor]], last_stage: int, wires: Wires, *,
        dtype: torch.dtype, device: torch.device, reduce_grads: Callable[[int], None] = lambda stage: None,
    ) -> None:
        self.stages, self.last_stage, self.wires = stages, last_stage, wires
        self.dtype, self.device, self.reduce_grads = dtype, device, reduce_grads
        self._live: dict[tuple[int, int], _Live] = {}
        self._sends: deque[tuple[Any, Tensor]] = deque()
        self._outputs: dict[int, Tensor] = {}
        self._wire_shape: tuple[int, ...] = ()
        self._training = True

    def run(self, program: Program, batches: Sequence[Any], wire_shape: tuple[int, ...]) -> list[Tensor]:
        """One step. `wire_shape` is that of the hidden states between stages, in this step.

        Returns the outputs of the last stage, one per micro-batch in order, where this rank holds it, else [].
        """
        self._wire_shape = wire_shape
        self._training = any(isinstance(op, Backward) for op in program)
        self._outputs = {}
        with nullcontext() if self._training else torch.no_grad():
            for op in program:
                _RUN[type(op)](self, op, batches)
        self._settle(0)
        assert not self._live, f"the program left {sorted(self._live)} unfinished"
        return [self._outputs[micro] for micro in sorted(self._outputs)]

    def _of(self, op: Any) -> _Live:
        return self._live.setdefault((op.stage, op.micro), _Live())

    def _forward(self, op: Forward, batches: Sequence[Any]) -> None:
        live = self._of(op)
        if live.arriving is not None:
            live.arriving.wait()
            live.arriving = None
        elif op.stage:                                    # the stage below lives on this very rank
            below = self._live[op.stage - 1, op.micro]
            live.entry = below.exit.detach()
            if not self._training:
                del self._live[op.stage - 1, op.micro]
        if live.entry is not None and self._training:
            live.entry.requires_grad_()
        live.exit = self.stages[op.stage](live.entry, batches[op.micro])
        if op.stage == self.last_stage:
            self._outputs[op.micro] = live.exit.detach()
            if not self._training:
                del self._live[op.stage, op.micro]

    def _backward(self, op: Backward, batches: Sequence[Any]) -> None:
        live = self._of(op)
        if live.arriving is not None:
            live.arriving.wait()
        torch.autograd.backward([live.exit], [live.grad])
        live.exit = live.grad = live.arriving = None
        below = self._live.get((op.stage - 1, op.micro))
        if below is not None and below.exit is not None:
            below.grad = live.entry.grad
        if op.stage == 0 or below is not None:
            del self._live[op.stage, op.micro]
        else:
            live.entry_grad, live.entry = live.entry.grad, None

    def _settle(self, limit: int) -> None:
        """Wait for the oldest sends until at most `limit` are under way."""
        while len(self._sends) > limit:
            self._sends.popleft()[0].wait()

    def _send(self, x: Tensor, peer: int) -> None:
        x = x.contiguous()
        self._sends.append((self.wires.send(x, peer), x))
        self._settle(SENDS_UNDER_WAY)

    def _empty(self) -> Tensor:
        return torch.empty(self._wire_shape, dtype=self.dtype, device=self.device)

    def _send_activation(self, op: SendActivation, batches: Sequence[Any]) -> None:
        self._send(self._of(op).exit.detach(), op.peer)
        if not self._training:
            del self._live[op.stage, op.micro]

    def _recv_activation(self, op: RecvActivation, batches: Sequence[Any]) -> None:
        live = self._of(op)
        live.entry = self._empty()
        live.arriving = self.wires.receive(live.entry, op.peer)

    def _send_grad(self, op: SendGrad, batches: Sequence[Any]) -> None:
        self._send(self._live.pop((op.stage, op.micro)).entry_grad, op.peer)

    def _recv_grad(self, op: RecvGrad, batches: Sequence[Any]) -> None:
        live = self._of(op)
        live.grad = self._empty()
        live.arriving = self.wires.receive(live.grad, op.peer)

    def _reduce(self, op: ReduceGrads, batches: Sequence[Any]) -> None:
        self.reduce_grads(op.stage)


_RUN: dict[type, Callable[..., None]] = {
    Forward: PipeEngine._forward,
    Backward: PipeEngine._backward,
    SendActivation: PipeEngine._send_activation,
    RecvActivation: PipeEngine._recv_activation,
    SendGrad: PipeEngine._send_grad,
    RecvGrad: PipeEngine._recv_grad,
    ReduceGrads: PipeEngine._reduce,
}
