"""The words a pipeline schedule is written in: plain values without tensor, group or method.

They are frozen dataclasses and not NamedTuples, because two tuples of the same numbers are equal
whatever their class, and Forward(0, 0) must not equal Backward(0, 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Run `stage` on micro-batch `micro`."""

    micro: int
    stage: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the whole backward of `stage` for micro-batch `micro`."""

    micro: int
    stage: int


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Run the part of a backward that others wait for: the gradient of the input of `stage`.

    What only the weights need is queued for BackwardWeight. The first stage runs it too, although nobody waits.
    """

    micro: int
    stage: int


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Run what BackwardInput(micro, stage) left: the gradients of the weights."""

    micro: int
    stage: int


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send the output of `stage` to the pipeline rank `peer`, which holds the stage above."""

    micro: int
    stage: int
    peer: int


@dataclass(frozen=True, slots=True)
class RecvActivation:
    """Receive the input of `stage` from the pipeline rank `peer`, which holds the stage below."""

    micro: int
    stage: int
    peer: int


@dataclass(frozen=True, slots=True)
class SendGrad:
    """Send the gradient of the input of `stage` to the pipeline rank `peer`, which holds the stage below."""

    micro: int
    stage: int
    peer: int


@dataclass(frozen=True, slots=True)
class RecvGrad:
    """Receive the gradient of the output of `stage` from the pipeline rank `peer`, which holds the stage above."""

    micro: int
    stage: int
    peer: int


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """The gradients of `stage` are complete on this rank: reduce them over the data axis."""

    stage: int


Compute = Forward | Backward | BackwardInput | BackwardWeight
Send = SendActivation | SendGrad
Recv = RecvActivation | RecvGrad
Instruction = Compute | Send | Recv | ReduceGrads

Orders = list[list[Compute]]      # for each rank, what it computes, in order
Program = list[Instruction]       # all that one rank does in a step

SHORT = {
    Forward: "F",
    Backward: "BW",
    BackwardInput: "B",
    BackwardWeight: "W",
    SendActivation: "sendA",
    RecvActivation: "recvA",
    SendGrad: "sendG",
    RecvGrad: "recvG",
    ReduceGrads: "reduce",
}


def render(items: Iterable[Instruction]) -> str:
    """One rank's order or program as a line: "recvA0<0 F0 sendA0>2 ... reduce".

    F forward, BW whole backward, B and W its two parts. The number is the micro-batch, `>` and `<` name the peer;
    where the rank holds several stages, `.c` says that the word concerns the c-th of them.
    """
    items = list(items)
    stages = sorted({item.stage for item in items})
    return " ".join(word(item, stages) for item in items)


def word(item: Instruction, stages: Sequence[int]) -> str:
    """One instruction of a rank that holds `stages`, as `render` has it."""
    text = SHORT[type(item)]
    if not isinstance(item, ReduceGrads):
        text += str(item.micro)
    if len(stages) > 1:
        text += f".{stages.index(item.stage)}"
    if isinstance(item, Send):
        text += f">{item.peer}"
    elif isinstance(item, Recv):
        text += f"<{item.peer}"
    return text
