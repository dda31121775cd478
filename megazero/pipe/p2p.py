"""Messages between pipeline ranks: asynchronous sends and receives on a two-rank group per directed edge.

A group of its own for each direction of each pair means that messages need no tags, arrive in the order in
which both programs name them, and never queue behind a message of another edge; on gloo and NCCL alike. Where two
ranks compute on CPUs of one host, messages go through memory that they share instead (`line.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.groups import Exchange, Group, new_group
from . import line
from .instructions import Program, Send
from .line import Line

# What gloo and NCCL both carry; any other dtype travels as bytes.
CARRIED = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool,
)

Edge = tuple[int, int]          # (from, to), as places along the pipeline

YES, NO = b"y", b"n"            # whether a line that was offered is on this host


def edges_of(programs: Iterable[Program]) -> set[Edge]:
    """The directed edges that the programs of all ranks send along."""
    return {(rank, op.peer) for rank, program in enumerate(programs) for op in program if isinstance(op, Send)}


def edge_rounds(edges: Iterable[Edge]) -> list[list[Edge]]:
    """The edges in rounds in which no rank occurs twice, so that groups are made without waiting in a circle."""
    left, rounds = sorted(set(edges)), []
    while left:
        busy: set[int] = set()
        this = []
        for edge in left:
            if not busy & set(edge):
                this.append(edge)
                busy |= set(edge)
        rounds.append(this)
        left = [edge for edge in left if edge not in this]
    return rounds


class Wires:
    """The edges that this rank takes part in. Every rank of the pipeline makes them, in the same order."""

    def __init__(self, pipeline: Group, edges: Iterable[Edge]) -> None:
        self.pipeline = pipeline
        self._handles: dict[tuple[int, ...], Any] = {}
        self._lines: dict[int, Line | None] = {}            # by the other end; None: there can be none
        for this in edge_rounds(edges):
            mine = next((edge for edge in this if pipeline.index in edge), (pipeline.index,))
            self._handles[mine] = new_group(tuple(sorted(pipeline.ranks[i] for i in mine)))

    def send(self, tensors: Sequence[Tensor], to: int) -> Exchange:
        """Start sending; wait() of what is returned says that the contiguous tensors may be changed again."""
        peer = self.pipeline.ranks[to]
        message = self.pipeline.begin_message("send", peer, sum(x.nbytes for x in tensors))
        if (own := self._line(to, tensors)) is not None:
            return message.runs_on([own.send(tensors)])
        handle = self._handles[self.pipeline.index, to]
        return message.runs_on([dist.isend(_sendable(x), peer, group=handle) for x in tensors])

    def receive(self, tensors: Sequence[Tensor], source: int) -> Exchange:
        """Start receiving into the tensors; wait() of what is returned says that they are filled."""
        peer = self.pipeline.ranks[source]
        message = self.pipeline.begin_message("receive", peer, sum(x.nbytes for x in tensors))
        if (own := self._line(source, tensors)) is not None:
            return message.runs_on([own.receive(tensors)])
        handle = self._handles[source, self.pipeline.index]
        return message.runs_on([dist.irecv(_sendable(x), peer, group=handle) for x in tensors])

    def _line(self, other: int, tensors: Sequence[Tensor]) -> Line | None:
        """What carries the message, the same at both its ends; None: the group of its edge."""
        own = self._lines.get(other)
        return own if own is not None and line.nbytes_of(tensors) <= own.capacity else None

    def offer(self, to: int, nbytes: int) -> None:
        """Make a line for messages of so many bytes both ways, where there can be one, and wait until `to`, which is to
        `accept` it, is here. Both do so at the same place in the order of their messages."""
        if not self._wants_line(to, nbytes):
            return
        handle, offer = self._handles[self.pipeline.index, to], line.offered(nbytes)
        self._tell(line.NOBODY if offer is None else offer.name, to, handle)
        is_taken = self._hear(1, to, handle) == YES
        self._lines[to] = None if offer is None else offer.conclude(is_taken, to, self.pipeline.patience)

    def accept(self, source: int, nbytes: int) -> None:
        """The other end of `offer`."""
        if not self._wants_line(source, nbytes):
            return
        handle = self._handles[source, self.pipeline.index]
        wire = line.joined(self._hear(line.NAME, source, handle))
        self._tell(NO if wire is None else YES, source, handle)
        self._lines[source] = None if wire is None else line.taken(wire, source, self.pipeline.patience)

    def _wants_line(self, other: int, nbytes: int) -> bool:
        """Whether one is to be made, or one for larger messages: the same at both ends."""
        own = self._lines.get(other)
        if self.pipeline.patience is None or nbytes > line.LARGEST or other in self._lines and own is None:
            return False
        return own is None or own.capacity < nbytes

    def _tell(self, words: bytes, to: int, handle: Any) -> None:
        with self.pipeline.begin_message("send", self.pipeline.ranks[to], len(words)):
            dist.send(torch.tensor(list(words), dtype=torch.uint8), self.pipeline.ranks[to], group=handle)

    def _hear(self, count: int, source: int, handle: Any) -> bytes:
        words = torch.empty(count, dtype=torch.uint8)
        with self.pipeline.begin_message("receive", self.pipeline.ranks[source], count):
            dist.recv(words, self.pipeline.ranks[source], group=handle)
        return bytes(words.tolist())


def _sendable(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor in a dtype that is carried."""
    return x if x.dtype in CARRIED else x.reshape(-1).view(torch.uint8)
