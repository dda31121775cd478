"""Collectives over a Group. Each returns its argument in a group of one, so serial code is parallel code.

Plain functions first, then pairs for use inside a forward: each states what its backward does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Exchange, Group
from .shared_memory import Turn

Result = TypeVar("Result")

# torch 2.13 renamed these two and warns of the old names; 2.11 knows only the old ones.
_ALL_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_REDUCE_SCATTER = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class AgreedError(ValueError):
    """What a user, a file or a machine got wrong, raised on all ranks alike: one of them says it."""


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Sum (or "max", "min") of `x` over the group, in place."""
    if group.size > 1:
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        with group.begin("all-reduce", x.nbytes):
            dist.all_reduce(x, ops[op], group=group.handle)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """[n, ...] on each rank -> [n * size, ...] on all."""
    return start_all_gather(x, group).wait()


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """[n * size, ...] on each rank -> the summed [n, ...] of this rank."""
    return start_reduce_scatter(x, group).wait()


class Pending:
    """A collective under way; `wait` returns its `result`, which before is only memory. Holds the tensors that it
    reads until then; `finish` is what is left to do once all has arrived."""

    def __init__(
        self, result: Tensor, exchange: Exchange | None = None, source: Tensor | None = None, *,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.result, self._exchange, self._source, self._finish = result, exchange, source, finish

    def wait(self) -> Tensor:
        if self._exchange is not None:
            self._exchange.wait()
        if self._finish is not None:
            self._finish()
        self._exchange, self._source, self._finish = None, None, None
        return self.result


def start_all_gather(x: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """`all_gather` that runs on while the caller computes; into `out` where it is given."""
    if group.size == 1:
        if out is not None and out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Pending(x if out is None else out)
    x = x.contiguous()
    if out is None:
        out = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
    exchange = group.begin("all-gather", out.nbytes)
    if x.device.type != "cpu":
        return Pending(out, exchange.runs_on([_ALL_GATHER(out, x, group=group.handle, async_op=True)]), x)
    parts, turn = out.chunk(group.size), _claim(x.nbytes, group)
    if turn is not None:
        turn.lay(x)
    if parts[group.index].data_ptr() != x.data_ptr():
        parts[group.index].copy_(x)
    if turn is not None:
        return Pending(out, exchange.runs_on([turn]), x, finish=lambda: _copy_parts(turn, group.index, parts))
    # gloo gathers into memory of its own and copies it over: 480 MB take two processes 0.48 s, as broadcasts 0.10 s
    pairs = zip(parts, group.ranks, strict=True)
    works = [dist.broadcast(part, rank, group=group.handle, async_op=True) for part, rank in pairs]
    return Pending(out, exchange.runs_on(works))


def start_reduce_scatter(x: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """`reduce_scatter` that runs on while the caller computes; into `out` where it is given, which may be this rank's
    part of `x` itself."""
    if group.size == 1:
        return Pending(x)
    x = x.contiguous()
    if out is None:
        out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    exchange = group.begin("reduce-scatter", x.nbytes)
    if x.device.type != "cpu":
        return Pending(out, exchange.runs_on([_REDUCE_SCATTER(out, x, group=group.handle, async_op=True)]), x)
    parts, others = list(x.chunk(group.size)), [n for n in range(group.size) if n != group.index]
    turn = _claim(x.nbytes - parts[group.index].nbytes, group)
    if turn is not None:
        turn.lay(*(parts[n] for n in others))
        for n in others:
            parts[n] = turn.part(n, parts[n], group.index - (group.index > n))
        return Pending(out, exchange.runs_on([turn]), x, finish=lambda: _add_up(turn, parts, group.index, out))
    # gloo takes three times as long as to send each member its part: 28 ms instead of 9 for 20 MB and two processes
    sent, own = list(parts), parts[group.index]
    for n in others:
        parts[n] = torch.empty_like(own)
    works = [dist.irecv(parts[n], group.ranks[n], group.handle) for n in others]
    works += [dist.isend(sent[n], group.ranks[n], group.handle) for n in others]
    return Pending(out, exchange.runs_on(works), x, finish=lambda: _add_up(None, parts, group.index, out))


def _claim(nbytes: int, group: Group) -> Turn | None:
    """A turn of the group's shared memory, where it has any that will do."""
    return None if group.memory is None else group.memory.claim(nbytes, lambda value: gather_objects(value, group))


def _copy_parts(turn: Turn, own: int, parts: Sequence[Tensor]) -> None:
    """Every rank's part as it was laid down, but for the own."""
    for rank, part in enumerate(parts):
        if rank != own:
            part.copy_(turn.part(rank, part))
    turn.finish()


def _add_up(turn: Turn | None, parts: Sequence[Tensor], own: int, out: Tensor) -> None:
    """out = the sum of the parts in the order of the ranks, whoever owns it, so that buckets of other sizes are rounded
    alike. The part `own` may be out itself, which so is not written before that is added."""
    total = parts[0]
    for rank, part in enumerate(parts[1:], 1):
        total = torch.add(total, part, out=out if rank >= own else None if rank == 1 else total)
    if turn is not None:
        turn.finish()


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """The sum of `x` over the group, in place, while the caller computes."""
    if group.size == 1:
        return Pending(x)
    exchange = group.begin("all-reduce", x.nbytes)
    return Pending(x, exchange.runs_on([dist.all_reduce(x, group=group.handle, async_op=True)]), x)


def all_to_all(x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows of `x` for each member in turn, `send` of them; the rows that each member has for this rank, `receive` of
    them, one after the other."""
    return start_all_to_all(x, group, send, receive).wait()


def start_all_to_all(x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Pending:
    """`all_to_all` that runs on while the caller computes."""
    if group.size == 1:
        return Pending(x)
    x, out = x.contiguous(), x.new_empty(sum(receive), *x.shape[1:])
    exchange = group.begin("all-to-all", x.nbytes)
    work = dist.all_to_all_single(out, x, list(receive), list(send), group=group.handle, async_op=True)
    return Pending(out, exchange.runs_on([work]), x)


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """`x` of the group's member number `source`, in place on all."""
    if group.size > 1:
        with group.begin("broadcast", x.nbytes):
            dist.broadcast(x, group.ranks[source], group=group.handle)
    return x


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every member's small Python value, in the group's order, on all. For control, never for tensors of a model."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    with group.begin("gather-objects"):
        dist.all_gather_object(values, value, group=group.handle)
    return values


def together(group: Group, action: Callable[[], Result]) -> list[Result]:
    """`action`, free of collectives, on every rank; all results in the group's order.

    Where it raises OSError or ValueError on one rank, all ranks raise AgreedError with that line.
    """
    value, error = None, None
    try:
        value = action()
    except (OSError, ValueError) as wrong:
        error = str(wrong)
    results = gather_objects((value, error), group)
    for rank, (_, wrong) in zip(group.ranks, results, strict=True):
        if wrong is not None:
            raise AgreedError(f"{wrong} (rank {rank} of {group.size})" if group.size > 1 else wrong)
    return [result for result, _ in results]


def barrier(group: Group) -> None:
    """Wait until every member is here."""
    if group.size > 1:
        with group.begin("barrier"):
            dist.barrier(group=group.handle)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """[seq / size, ...] -> [seq, ...]. Backward sums over the group and scatters."""
    return x if group.size == 1 else _GatherSequence.apply(x, group)


def scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Partial [seq, ...] on each rank -> the summed [seq / size, ...]. Backward gathers."""
    return x if group.size == 1 else _ScatterSequence.apply(x, group)


class RowExchange:
    """Rows on their way to the members of a group and, in the backward, their gradients on the way back.

    `start` gives this rank's rows [sum of send, ...] away, `wait` returns those that came [sum of receive, ...]. What
    the caller computes in between runs beside the exchange, and its backward beside that of the gradients.
    """

    def __init__(self, group: Group, send: Sequence[int], receive: Sequence[int]) -> None:
        self.group, self.send, self.receive = group, send, receive
        self.pending: Pending | None = None
        self._sent: Tensor | None = None

    def start(self, x: Tensor) -> RowExchange:
        self._sent = x if self.group.size == 1 else _StartRows.apply(x, self)
        return self

    def wait(self) -> Tensor:
        sent, self._sent = self._sent, None
        return sent if self.group.size == 1 else _WaitForRows.apply(sent, self)


class _StartRows(torch.autograd.Function):
    """Backward waits for the gradients that _WaitForRows has sent for; what it is handed is only their place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.pending = start_all_to_all(x, exchange.group, exchange.send, exchange.receive)
        return exchange.pending.result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        pending, ctx.exchange.pending = ctx.exchange.pending, None
        return pending.wait(), None


class _WaitForRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        pending, exchange.pending = exchange.pending, None
        return pending.wait().view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.pending = start_all_to_all(grad, exchange.group, exchange.receive, exchange.send)
        return grad, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return _gathered(x, group, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grad, ctx.group, ctx.counts), None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return _scattered(x, group, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.group, ctx.counts), None, None


def gather_rows(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """[counts[i], ...] on member i -> [sum of counts, ...] on all. Backward sums over the group and scatters."""
    return x if group.size == 1 else _GatherRows.apply(x, group, counts)


def scatter_rows(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """Partial [sum of counts, ...] on each rank -> the summed [counts[i], ...] on member i. Backward gathers."""
    return x if group.size == 1 else _ScatterRows.apply(x, group, counts)


def _gathered(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """An exchange and not an all-gather, whose parts would have to be equal."""
    same = [counts[group.index]] * group.size
    return all_to_all(x.repeat(group.size, *[1] * (x.dim() - 1)), group, same, counts)


def _scattered(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    same = [counts[group.index]] * group.size
    return all_to_all(x, group, counts, same).view(group.size, counts[group.index], *x.shape[1:]).sum(0)


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size)[ctx.group.index], None


def gather_whole(x: Tensor, group: Group) -> Tensor:
    """[seq / size, ...] -> [seq, ...], of which all ranks compute the same. Backward keeps this rank's part: the
    gradients of the others are those of its own."""
    return x if group.size == 1 else _GatherWhole.apply(x, group)
