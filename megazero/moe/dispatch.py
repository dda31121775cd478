"""Rows to the ranks that hold their experts, and back. Nothing here knows how experts are chosen or what they compute.

A row is one choice of one token. Rows are sorted by expert, so that no one-hot product is taken and memory is linear
in the tokens; the counts of all experts are exchanged first, for rows travel in parts of any size, and none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..parallel.collectives import RowExchange, all_gather, all_to_all, gather_rows, scatter_rows
from ..parallel.groups import Group


@dataclass(frozen=True)
class Ranks:
    """Among whom the experts of a layer are dealt out, and among whom each of them is cut."""

    expert: Group
    expert_tensor: Group


@dataclass(frozen=True)
class Journey:
    """Where the rows of one forward go, the same there and back. Lists are on the host.

    order    [rows] int64: the choice (token * topk + number) that each row is of; rows lie expert by expert
    place    [tokens, topk] int64: the row of each choice; any one where it was dropped
    kept     [tokens, topk] bool: which choices have a row; None: all
    send     rows to each rank of the expert axis
    receive  rows from each of them
    peers    rows that each rank of the expert-tensor axis received: all of them work on all of these
    group    [rows here] int64: where the rows stand, as they arrive, that lie expert by expert; None: as they arrive
    back     [rows here] int64: the inverse
    counts   rows of each local expert
    """

    order: Tensor
    place: Tensor
    kept: Tensor | None
    send: Sequence[int]
    receive: Sequence[int]
    peers: Sequence[int]
    group: Tensor | None
    back: Tensor | None
    counts: Sequence[int]


def plan_journey(chosen: Tensor, kept: Tensor, experts: int, ranks: Ranks) -> Journey:
    """chosen [tokens, topk] int64 in 0 .. experts - 1, kept [tokens, topk] bool. All ranks call it together.

    Member i of the expert axis holds the experts from i * experts / size on. Waits once for the device.
    """
    members, peers = ranks.expert.size, ranks.expert_tensor.size
    local = experts // members
    flat = chosen.masked_fill(~kept, experts).flatten()
    order = flat.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    here = all_to_all(counts, ranks.expert, [local] * members, [local] * members)
    table = all_gather(here, ranks.expert_tensor).view(peers, members, local)
    told = torch.cat([counts.view(members, local).sum(1), table.sum((0, 1)), table.sum(2).flatten()]).tolist()
    send, per_expert, arrived = told[:members], told[members : members + local], told[members + local :]
    rows = sum(send)
    receive = arrived[ranks.expert_tensor.index * members :][:members]
    per_peer = [sum(arrived[peer * members : (peer + 1) * members]) for peer in range(peers)]
    group = back = None
    if local > 1 and members * peers > 1:
        group = _by_expert(table.view(-1, local), sum(per_expert))
        back = torch.empty_like(group).scatter_(0, group, torch.arange(len(group), device=group.device))
    return Journey(
        order[:rows], place.clamp_(max=max(rows - 1, 0)).view_as(chosen), None if rows == len(flat) else kept,
        send, receive, per_peer, group, back, per_expert,
    )


def _by_expert(table: Tensor, rows: int) -> Tensor:
    """Rows lie source by source, and of each source expert by expert: table [sources, experts] of them. Where they
    stand that lie expert by expert, and of each expert source by source: [rows]."""
    flat = table.flatten()
    starts = (flat.cumsum(0) - flat).view(table.shape).T.flatten()
    sizes = table.T.flatten()
    return torch.arange(rows, device=table.device) + torch.repeat_interleave(
        starts - (sizes.cumsum(0) - sizes), sizes, output_size=rows
    )


class _Spread(torch.autograd.Function):
    """Tokens [tokens, hidden] -> rows [rows, hidden]. Backward sums over the rows of a token in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return x.index_select(0, journey.order // journey.place.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        place, kept = ctx.journey.place, ctx.journey.kept
        if not len(grad):
            return grad.new_zeros(len(place), grad.shape[1]), None
        total = None
        for number in range(place.shape[1]):
            part = grad.index_select(0, place[:, number])
            if kept is not None:
                part.masked_fill_(~kept[:, number : number + 1], 0.0)
            total = part if total is None else total.add_(part)
        return total, None


class _Combine(torch.autograd.Function):
    """Rows [rows, hidden], weights [tokens, topk] (0 where dropped) -> their sums by token [tokens, hidden]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, journey: Journey) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.journey, place = journey, journey.place
        if not len(rows):
            return rows.new_zeros(len(place), rows.shape[1])
        out = rows.index_select(0, place[:, 0]).mul_(weights[:, :1])
        for number in range(1, place.shape[1]):
            out.addcmul_(rows.index_select(0, place[:, number]), weights[:, number : number + 1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (rows, weights), order = ctx.saved_tensors, ctx.journey.order
        of_rows = grad.index_select(0, order // weights.shape[1])
        of_weights = torch.zeros_like(weights)
        of_weights.view(-1)[order] = (of_rows * rows).sum(1)
        return of_rows.mul_(weights.flatten()[order].unsqueeze(1)), of_weights, None


class _Reorder(torch.autograd.Function):
    """Rows in another order; backward puts them back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.back), None, None


class Dispatch:
    """One forward's rows on a journey: `send`, then `apply` what their experts do, which brings them back.

    What is computed between the two runs beside the exchange.
    """

    def __init__(self, journey: Journey, ranks: Ranks) -> None:
        self.journey, self.ranks = journey, ranks

    def send(self, x: Tensor) -> RowExchange:
        """Start the way of the tokens [tokens, hidden] to their experts."""
        journey = self.journey
        rows = _Spread.apply(x, journey)
        return RowExchange(self.ranks.expert, journey.send, journey.receive).start(rows)

    def apply(self, sent: RowExchange, experts: Callable[[Tensor, Sequence[int]], Tensor], weights: Tensor) -> Tensor:
        """The weighted sum over each token's experts, [tokens, hidden]; weights [tokens, topk], 0 where dropped.

        `experts` maps rows [rows here, hidden], which lie expert by expert, and their counts to as many rows: partial
        sums, where the experts are cut.
        """
        journey, tensor = self.journey, self.ranks.expert_tensor
        rows = gather_rows(sent.wait(), tensor, journey.peers)
        if journey.group is not None:
            rows = _Reorder.apply(rows, journey.group, journey.back)
        rows = experts(rows, journey.counts)
        if journey.group is not None:
            rows = _Reorder.apply(rows, journey.back, journey.group)
        rows = scatter_rows(rows, tensor, journey.peers)
        rows = RowExchange(self.ranks.expert, journey.receive, journey.send).start(rows).wait()
        return _Combine.apply(rows, weights, journey)
