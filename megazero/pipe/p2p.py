"""Messages between pipeline ranks: asynchronous sends and receives on a two-rank group per directed edge.

A group of its own for each direction of each pair means that messages need no tags, arrive in the order in
which both programs name them, and never queue behind a message of another edge; on gloo and NCCL alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.groups import Exchange, Group, new_group
from .instructions import Send
from .lower import Program

# What gloo and NCCL both carry; any other dtype travels as bytes.
CARRIED = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool,
)

Edge = tuple[int, int]          # (from, to), as places along the pipeline


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
        for this in edge_rounds(edges):
            mine = next((edge for edge in this if pipeline.index in edge), (pipeline.index,))
            self._handles[mine] = new_group(tuple(sorted(pipeline.ranks[i] for i in mine)))

    def send(self, x: Tensor, to: int) -> Exchange:
        """Start sending; wait() of what is returned says that `x` may be changed again."""
        peer, handle = self.pipeline.ranks[to], self._handles[self.pipeline.index, to]
        message = self.pipeline.begin_message("send", peer, x.nbytes)
        return message.runs_on([dist.isend(_sendable(x), peer, group=handle)])

    def receive(self, x: Tensor, source: int) -> Exchange:
        """Start receiving into `x`; wait() of what is returned says that `x` is there."""
        peer, handle = self.pipeline.ranks[source], self._handles[source, self.pipeline.index]
        message = self.pipeline.begin_message("receive", peer, x.nbytes)
        return message.runs_on([dist.irecv(_sendable(x), peer, group=handle)])


def _sendable(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor in a dtype that is carried."""
    return x if x.dtype in CARRIED else x.reshape(-1).view(torch.uint8)
