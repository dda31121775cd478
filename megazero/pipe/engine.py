"""The interpreter: runs one rank's program over its stages. All it knows of a schedule is its words.

A receive is posted where it stands in the program and waited for where its tensors are used; a send is waited
for only when too many are under way. So the program's order rules the wires, never the clock. What the first message
of a kind is made of a header says, which is waited for where the receive stands: that cannot hang, for programs do
not even where every send and receive blocks there (`simulate.check_blocking`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from ..parallel.groups import Exchange
from ..parallel.weights import WeightQueue, Work
from ..stopping import Stop, Stopped
from .instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Program,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from .line import nbytes_of
from .message import HEADER, Format
from .output import Hidden, Output, WithLoss, add_reports_, flat, hidden_of, shaped
from .p2p import Wires

SENDS_UNDER_WAY = 4

Grads = Sequence[Tensor | None]                 # None: there is no gradient
Place = tuple[Hashable, bool, int]              # the key of a step, whether it trains, a stage
Timed = tuple[Instruction, float, float]        # an instruction, when it began and when it ended: time.perf_counter()


class Reduction(Protocol):
    """Sums gradients over the data ranks. `every`: after each backward of a stage, and not after the last alone."""

    every: bool

    def arm(self, stage: int) -> None:
        """The backward that completes the gradients of `stage` begins."""

    def reduce(self, stage: int) -> None:
        """That backward has ended."""

    def finish(self, stage: int) -> None:
        """The gradients of `stage` are complete."""

    def abandon(self) -> None:
        """The step is given up: forget its gradients."""


@dataclass
class _Live:
    """What one (stage, micro-batch) holds between its first and its last instruction."""

    entry: Hidden | None = None       # input of the stage; None on the first stage
    exit: Hidden | None = None        # output of the stage; its storages may be freed once it is sent
    loss: Tensor | None = None        # of the stage's own layers
    grads: Grads = ()                 # gradient of each tensor of exit; none on the last stage, whose exit is the loss
    entry_grads: Grads = ()           # gradients of entry, until they are sent
    arriving: Exchange | None = None  # the receive that fills entry or grads


@dataclass
class _Sending:
    """A message under way, its tensors, and the storages that are free once it has gone."""

    message: Exchange
    tensors: Sequence[Tensor]
    spent: Sequence[torch.UntypedStorage]


@dataclass
class _Step:
    """What lives as long as one call of `run`."""

    batches: Sequence[Any]
    key: Hashable
    training: bool
    now: Callable[[], Any] = perf_counter
    live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    deferred: dict[tuple[int, int], list[Work]] = field(default_factory=dict)
    sends: deque[_Sending] = field(default_factory=deque)
    outputs: dict[int, Hidden] = field(default_factory=dict)
    reports: dict[str, Tensor] = field(default_factory=dict)
    times: list[tuple[Instruction, Any, Any]] = field(default_factory=list)
    began: Any = 0.0                  # when the current instruction began its work, after waiting for its tensors

    def of(self, op: Any) -> _Live:
        return self.live.setdefault((op.stage, op.micro), _Live())

    def place(self, stage: int) -> Place:
        """What the format of a stage's input and output depends on."""
        return self.key, self.training, stage

    def arrive(self, live: _Live) -> None:
        """Wait for the tensors that are on their way."""
        if live.arriving is not None:
            live.arriving.wait()
            live.arriving = None
        self.began = self.now()

    def settle(self, limit: int) -> None:
        """Wait for the oldest sends until at most `limit` are under way."""
        while len(self.sends) > limit:
            sending = self.sends.popleft()
            sending.message.wait()
            for storage in sending.spent:
                storage.resize_(0)


class PipeEngine:
    """Runs programs over stages: number -> callable(hidden states or None, micro-batch) -> Output.

    The output of `last_stage` is a loss where the program has backwards; it is a root of them, and so is the loss that
    any stage gives beside its hidden states (`WithLoss`). `queues` holds the weight queue of each stage whose layers
    can put weight gradients off. `reduction` is told when a stage's last backward begins and when its gradients are
    complete. `trace`, where it is given, gets each training step's instructions with their times in seconds: on a GPU
    those at which it did them, for which the step waits at its end.
    `reports` are those of the last run, of this rank's stages, summed over its micro-batches. `stop` says which
    micro-batches of a training step are run.
    """

    def __init__(
        self, stages: Mapping[int, Callable[[Hidden | None, Any], Output]], last_stage: int, wires: Wires, *,
        device: torch.device, queues: Mapping[int, WeightQueue] | None = None, reduction: Reduction | None = None,
    ) -> None:
        self.stages, self.last_stage, self.wires = stages, last_stage, wires
        self.device, self.reduction, self.watch = device, reduction, wires.pipeline.watch
        self.queues = queues or {}
        self.trace: deque[list[Timed]] | None = None
        self.stop = Stop()
        self.reports: dict[str, Tensor] = {}
        self._sent: dict[Place, Format] = {}                # what the next stage was told of this one's output
        self._received: dict[Place, Format] = {}            # what was told of a stage's input
        self._spent: dict[Place, tuple[bool, ...]] = {}     # which tensors of an output are nothing else as well

    def run(self, program: Program, batches: Sequence[Any], key: Hashable = None) -> list[Hidden]:
        """One step. Its hidden states have the shapes of earlier steps with the same `key`, which is equal on all
        ranks; training and evaluation are told apart without it.

        Returns the outputs of the last stage, one per micro-batch in order, where this rank holds it, else [].
        Raises Stopped, on all ranks, where training is to stop before the last micro-batch; ValueError where a stage's
        output has another shape than before under the same key, or cannot be sent.
        """
        training = any(isinstance(op, Backward | BackwardInput) for op in program)
        traced, clock = training and self.trace is not None, self.watch.clock
        step = _Step(batches, key, training, clock.now if traced else perf_counter)
        abandoned, activity = False, self.wires.pipeline.activity
        with nullcontext() if training else torch.no_grad():
            completing = self._completing(program)
            for at, op in enumerate(program):
                if training and (abandoned if isinstance(op, ReduceGrads) else not self.stop.admits(op.micro)):
                    abandoned = True
                    continue
                self.watch.enter(_PHASES.get(type(op), self.watch.phase))
                step.began = step.now()
                activity.run(op, at, len(program))
                if at in completing:
                    self.reduction.arm(op.stage)
                _RUN[type(op)](self, op, step)
                if at in completing and self.reduction.every:
                    self.reduction.reduce(op.stage)
                if traced:
                    step.times.append((op, step.began, step.now()))
        step.settle(0)
        activity.instruction = None
        if abandoned:
            if self.reduction is not None:
                self.reduction.abandon()
            raise Stopped
        if traced:
            moments = iter(clock.on_host([moment for _, *both in step.times for moment in both]))
            self.trace.append([(op, next(moments), next(moments)) for op, _, _ in step.times])
        left = sorted(step.live.keys() | step.deferred.keys())
        assert not left, f"the program left {left} unfinished"
        self.reports = step.reports
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
        if live.entry is not None:
            step.arrive(live)
        elif op.stage:                                    # the stage below lives on this very rank
            below = step.live[op.stage - 1, op.micro]
            live.entry = _detached(below.exit, step.training)
            below.exit = _with_gradients(below.exit)
            if not step.training:
                del step.live[op.stage - 1, op.micro]
        out = self._run_stage(op, live.entry, step)
        live.entry, live.exit = _with_gradients(live.entry), hidden_of(out)
        if isinstance(out, WithLoss):
            live.loss = out.loss
            add_reports_(step.reports, out.reports)
        if op.stage == self.last_stage:
            step.outputs[op.micro] = _detached(live.exit, False)
            if not step.training:
                del step.live[op.stage, op.micro]

    def _run_stage(self, op: Forward, entry: Hidden | None, step: _Step) -> Output:
        """The stage's forward. The first time it is watched which storages nodes save, and so which parts of the output
        are free once they are sent."""
        stage, batch, place = self.stages[op.stage], step.batches[op.micro], step.place(op.stage)
        if not step.training or place in self._spent:
            return stage(entry, batch)
        saved: set[int] = set()

        def note(x: Tensor) -> Tensor:
            saved.add(_storage(x))
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = stage(entry, batch)
        if not all(isinstance(x, Tensor) for x in flat(hidden_of(out))):
            raise ValueError(f"stage {op.stage}: a layer returns a tensor or a tuple of them, or WithLoss of these")
        Format.of(hidden_of(out))                         # refuses what cannot go on
        self._spent[place] = _spent(out, entry, saved)
        return out

    def _backward(self, op: Backward | BackwardInput, step: _Step) -> None:
        """Gradients of the stage's input and of all weights that the stage's queue does not put off."""
        live = step.of(op)
        if live.arriving is not None:
            step.arrive(live)
        if op.stage == self.last_stage:
            live.grads = [None]
            roots = [(live.exit, None)]
        else:
            pairs = zip(flat(live.exit), live.grads, strict=True)
            roots = [(x, grad) for x, grad in pairs if x.requires_grad and grad is not None]
        if live.loss is not None and live.loss.requires_grad:
            roots.append((live.loss, None))
        if roots:
            torch.autograd.backward([x for x, _ in roots], [grad for _, grad in roots])
        live.exit, live.loss, live.grads = None, None, ()
        below = step.live.get((op.stage - 1, op.micro))
        if below is not None and below.exit is not None:
            below.grads = [x.grad for x in flat(live.entry)]
        if op.stage == 0 or below is not None:
            del step.live[op.stage, op.micro]
        else:
            wanted = [x for x in flat(live.entry) if x.requires_grad]
            live.entry_grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]
            live.entry = None

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

    def _send(
        self, tensors: Sequence[Tensor], peer: int, step: _Step, spent: Sequence[torch.UntypedStorage] = ()
    ) -> None:
        if not tensors:                                   # gradients that nobody asked for
            return
        whole = [x.contiguous() for x in tensors]
        step.sends.append(_Sending(self.wires.send(whole, peer), whole, spent))
        step.settle(SENDS_UNDER_WAY)

    def _send_activation(self, op: SendActivation, step: _Step) -> None:
        out, place = step.of(op).exit, step.place(op.stage)
        if not step.training:
            del step.live[op.stage, op.micro]
        tensors, form = flat(out), self._sent.get(place)
        if form is None:
            self._sent[place] = form = Format.of(out)
            self._send([form.header(self.device)], op.peer, step)
            self.wires.offer(op.peer, nbytes_of(tensors))
        elif not form.fits(tensors):
            raise ValueError(
                f"stage {op.stage}: its output is {Format.of(out)}, but was {form} under the same key {step.key}"
            )
        # Its backward needs the nodes of the output, but not the values, unless some node saved them.
        are_spent = self._spent.get(place, ())
        spent = [x.untyped_storage() for x, is_spent in zip(tensors, are_spent, strict=False) if is_spent]
        self._send([x.detach() for x in tensors], op.peer, step, spent)
        if step.training:
            step.of(op).exit = _with_gradients(out)

    def _recv_activation(self, op: RecvActivation, step: _Step) -> None:
        live, place = step.of(op), step.place(op.stage)
        if place not in self._received:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
            self.wires.receive([header], op.peer).wait()
            self._received[place] = form = Format.read(header.tolist())
            self.wires.accept(op.peer, nbytes_of(form.empty(torch.device("meta"))))
        form = self._received[place]
        tensors = form.empty(self.device)
        live.entry = shaped(tensors, form.is_tuple)
        live.arriving = self.wires.receive([x.detach() for x in tensors], op.peer)

    def _send_grad(self, op: SendGrad, step: _Step) -> None:
        self._send(step.live.pop((op.stage, op.micro)).entry_grads, op.peer, step)

    def _recv_grad(self, op: RecvGrad, step: _Step) -> None:
        live = step.of(op)
        live.grads = [
            torch.empty(x.shape, dtype=x.dtype, device=self.device) if x.requires_grad else None
            for x in flat(live.exit)
        ]
        wanted = [grad for grad in live.grads if grad is not None]
        live.arriving = self.wires.receive(wanted, op.peer) if wanted else None

    def _reduce(self, op: ReduceGrads, step: _Step) -> None:
        if self.reduction is not None:
            self.reduction.finish(op.stage)


def _detached(x: Hidden, training: bool) -> Hidden:
    """The same values without their graph; in training they ask for gradients where they had one."""
    if isinstance(x, Tensor):
        return x.detach().requires_grad_(training and x.requires_grad)
    return tuple(_detached(part, training) for part in x)


def _with_gradients(x: Hidden | None) -> Hidden | None:
    """What a backward will ask for: of several tensors those without gradient are emptied, for they are used."""
    if not isinstance(x, tuple):
        return x
    return tuple(t if t.requires_grad else t.new_empty(0) for t in x)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _spent(out: Output, entry: Hidden | None, saved: set[int]) -> tuple[bool, ...]:
    """Whether each tensor of an output is needed no more once it is sent: a storage stays that a node saved, that is
    (part of) the input, of a parameter or of anything that was there before, or of the stage's loss and reports."""
    tensors = flat(hidden_of(out))
    keep = [*flat(entry), *(x for x in tensors if x.is_leaf or x._base is not None and x._base.is_leaf)]
    if isinstance(out, WithLoss):
        keep += [*out.reports.values(), *flat(out.loss)]
    kept = saved | {_storage(x) for x in keep}
    return tuple(_storage(x) not in kept for x in tensors)


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

# What the rank does itself, by instruction; messages fall in the phase around them.
_PHASES: dict[type, str] = {
    Forward: "forward", Backward: "backward", BackwardInput: "backward", BackwardWeight: "backward"
}
