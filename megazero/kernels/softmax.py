"""softmax of scaled attention scores over the keys that a query may see.

    y_j  = exp(s x_j - m) / Z,  m = max_i s x_i,  Z = sum_i exp(s x_i - m)
    dx_j = s y_j (dy_j - sum_i y_i dy_i)

Visible are the keys up to the query's own (`causal`; the last query sees the last key), of these the own one and
`window` before it where that is given, for which `mask` is true. A row that sees nothing is zeros, and so is its
gradient; a NaN that is seen spoils its row alone. With a sink b, one number for each head, a row attends to nothing too
(Xiao et al., 2023; with b = 0 Miller's softmax off by one):

    m = max(b, max_i s x_i),  Z = exp(b - m) + sum_i exp(s x_i - m),  db = -sum_rows exp(b - m) / Z sum_i y_i dy_i

Statistics in fp32 (fp64 for fp64). What a causal mask hides is not read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import jit, tl, use_triton
from .rows import BACKWARD_LIMIT, FORWARD_LIMIT, blocks, statistics_dtype


def softmax_reference(
    x: Tensor, scale: float = 1.0, *, causal: bool = False, mask: Tensor | None = None, window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The op in plain formulas: what the kernel must equal."""
    wide = x.to(statistics_dtype(x.dtype)) * scale
    visible = _visible(x, causal, mask, window)
    if visible is None:
        visible = torch.ones((), dtype=torch.bool, device=x.device)
    wide = wide.masked_fill(~visible, -torch.inf)
    if sink is not None:                               # a key more, which is cut off again
        column = sink.to(wide.dtype)[:, None, None].expand(*wide.shape[:-1], 1)
        wide = torch.cat((wide, column), dim=-1)
    top = wide.amax(-1, keepdim=True)
    nothing = top == -torch.inf
    exponentials = (wide - top.masked_fill(nothing, 0.0)).exp()
    total = exponentials.sum(-1, keepdim=True)
    return (exponentials / total.masked_fill(nothing, 1.0))[..., : x.shape[-1]].to(x.dtype)


def seen_by_causal(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys]: up to the query's own key, where a window is given from `window` before that on."""
    diagonal = keys - queries
    below = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal)
    return below if window is None else below.triu(diagonal - window)


def _visible(x: Tensor, causal: bool, mask: Tensor | None, window: int | None) -> Tensor | None:
    """bool, broadcastable to x [..., queries, keys]; None: all."""
    if not causal:
        return mask
    below = seen_by_causal(*x.shape[-2:], window, x.device)
    return below if mask is None else below & mask


@jit
def _start(row, heads, queries, outer_stride, inner_stride, query_stride):
    """Offset of a row's first element; `row` is 64-bit, and so is the result."""
    pair = row // queries
    return pair // heads * outer_stride + pair % heads * inner_stride + row % queries * query_stride


@jit
def _stop(row, queries, keys, CAUSAL: tl.constexpr):
    """Keys that the row may see: all, or where it is causal those up to its own place."""
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, (row % queries).to(tl.int32) + 1 + keys - queries)
    return stop


@jit
def _first(stop, window, WINDOWED: tl.constexpr):
    """The first key that the row may see, where it sees those before `stop`."""
    first = 0
    if WINDOWED:
        first = tl.maximum(0, stop - 1 - window)
    return first


@jit
def _limit(stop, keys):
    """Where loads end: `stop` as a multiple of 16, which vectors need."""
    return tl.minimum(keys, (stop + 15) // 16 * 16)


@jit
def _scores(
    x_row, mask_row, at, first, stop, keys, scale, x_key_stride, mask_key_stride,
    MASKED: tl.constexpr, STATISTICS: tl.constexpr,
):
    """The scaled scores of a row at `at`, -inf where hidden."""
    visible = (at >= first) & (at < stop)
    limit = _limit(stop, keys)
    place = at.to(tl.int64)
    if MASKED:
        visible = visible & (tl.load(mask_row + place * mask_key_stride, mask=at < limit, other=0) != 0)
    x = tl.load(x_row + place * x_key_stride, mask=at < limit, other=0.0).to(STATISTICS)
    return tl.where(visible, x * tl.full(at.shape, scale, STATISTICS), -float("inf"))


@jit
def _moments(
    x_ptr, mask_ptr, sink_ptr, top_ptr, total_ptr, heads, queries, keys, window, scale: tl.float64,
    x_outer_stride, x_inner_stride, x_query_stride, x_key_stride,
    mask_outer_stride, mask_inner_stride, mask_query_stride, mask_key_stride,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, SINK: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """m and Z of one row that is wider than a block, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    stop = _stop(row, queries, keys, CAUSAL)
    first = _first(stop, window, WINDOWED)
    x_ptr += _start(row, heads, queries, x_outer_stride, x_inner_stride, x_query_stride)
    mask_ptr += _start(row, heads, queries, mask_outer_stride, mask_inner_stride, mask_query_stride)
    top = tl.full((BLOCK,), -float("inf"), STATISTICS)
    total = tl.zeros((BLOCK,), STATISTICS)
    for start in range(first // BLOCK * BLOCK, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _scores(x_ptr, mask_ptr, at, first, stop, keys, scale, x_key_stride, mask_key_stride, MASKED, STATISTICS)
        higher = tl.maximum(top, x)
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - finite) + tl.exp(x - finite)
        top = higher
    highest = tl.max(top, 0)
    if SINK:
        sink = tl.load(sink_ptr + row // queries % heads).to(STATISTICS)
        highest = tl.maximum(highest, sink)
    finite = tl.where(highest == -float("inf"), 0.0, highest)
    whole = tl.sum(total * tl.exp(top - finite), 0)
    if SINK:
        whole += tl.exp(sink - finite)
    tl.store(top_ptr + row, finite)
    tl.store(total_ptr + row, whole)


@jit
def _forward(
    x_ptr, mask_ptr, sink_ptr, y_ptr, top_ptr, total_ptr, heads, queries, keys, window, scale: tl.float64,
    x_outer_stride, x_inner_stride, x_query_stride, x_key_stride,
    mask_outer_stride, mask_inner_stride, mask_query_stride, mask_key_stride,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, SINK: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """One block of one row; its statistics are taken here if the block is the WHOLE row, and kept where there is a
    sink, else read."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stop = _stop(row, queries, keys, CAUSAL)
    first = _first(stop, window, WINDOWED)
    x_ptr += _start(row, heads, queries, x_outer_stride, x_inner_stride, x_query_stride)
    mask_ptr += _start(row, heads, queries, mask_outer_stride, mask_inner_stride, mask_query_stride)
    x = _scores(x_ptr, mask_ptr, at, first, stop, keys, scale, x_key_stride, mask_key_stride, MASKED, STATISTICS)
    if WHOLE:
        top = tl.max(x, 0)
        if SINK:
            sink = tl.load(sink_ptr + row // queries % heads).to(STATISTICS)
            top = tl.maximum(top, sink)
        top = tl.where(top == -float("inf"), 0.0, top)
        x = tl.exp(x - top)
        total = tl.sum(x, 0)
        if SINK:
            total += tl.exp(sink - top)
            tl.store(top_ptr + row, top)
            tl.store(total_ptr + row, total)
    else:
        x = tl.exp(x - tl.load(top_ptr + row))
        total = tl.load(total_ptr + row)
    tl.store(y_ptr + row * keys + at, x / tl.where(total == 0.0, 1.0, total), mask=at < keys)


@jit
def _dots(
    y_ptr, dy_ptr, dot_ptr, heads, queries, keys, dy_outer_stride, dy_inner_stride, dy_query_stride, dy_key_stride,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """sum(y * dy) of one row that is wider than a block."""
    row = tl.program_id(0).to(tl.int64)
    stop = _stop(row, queries, keys, CAUSAL)
    dy_ptr += _start(row, heads, queries, dy_outer_stride, dy_inner_stride, dy_query_stride)
    limit = _limit(stop, keys)
    total = tl.zeros((BLOCK,), STATISTICS)
    for start in range(0, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + row * keys + at, mask=at < limit, other=0.0).to(STATISTICS)
        dy = tl.load(dy_ptr + at.to(tl.int64) * dy_key_stride, mask=at < limit, other=0.0).to(STATISTICS)
        total += tl.where(at < stop, y * dy, 0.0)
    tl.store(dot_ptr + row, tl.sum(total, 0))


@jit
def _backward(
    y_ptr, dy_ptr, dx_ptr, dot_ptr, heads, queries, keys, scale: tl.float64,
    dy_outer_stride, dy_inner_stride, dy_query_stride, dy_key_stride,
    CAUSAL: tl.constexpr, SINK: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """One block of one row's dx; the row's sum of y dy is kept where there is a sink."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stop = _stop(row, queries, keys, CAUSAL)
    dy_ptr += _start(row, heads, queries, dy_outer_stride, dy_inner_stride, dy_query_stride)
    limit = _limit(stop, keys)
    y = tl.load(y_ptr + row * keys + at, mask=at < limit, other=0.0).to(STATISTICS)
    dy = tl.load(dy_ptr + at.to(tl.int64) * dy_key_stride, mask=at < limit, other=0.0).to(STATISTICS)
    if WHOLE:
        dot = tl.sum(tl.where(at < stop, y * dy, 0.0), 0)
        if SINK:
            tl.store(dot_ptr + row, dot)
    else:
        dot = tl.load(dot_ptr + row)
    dx = tl.full((BLOCK,), scale, STATISTICS) * y * (dy - dot)
    dx = tl.where(at < stop, dx, 0.0)
    tl.store(dx_ptr + row * keys + at, dx, mask=at < keys)


def _four(x: Tensor) -> Tensor:
    """x [..., queries, keys] as [outer, heads, queries, keys], without a copy where it has at most four dims."""
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


def _by_head(sink: Tensor, x: Tensor, heads: int) -> Tensor:
    """sink [heads] -> that of each row of x [..., heads, queries, keys], flat."""
    return sink[:, None].expand(x.shape[:-2].numel() // max(heads, 1), heads, x.shape[-2]).flatten()


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float, causal: bool, window: int | None
    ) -> Tensor:
        four = _four(x)
        rows, (heads, queries, keys) = four.shape[:3].numel(), four.shape[1:]
        static = blocks(max(1, keys), x.dtype, FORWARD_LIMIT)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kept = 1 if static["WHOLE"] and sink is None else rows
        top, total = torch.empty(2, kept, device=x.device, dtype=statistics_dtype(x.dtype))
        if y.numel():
            seen = four if mask is None else _four(mask.expand(x.shape)).view(torch.uint8)
            pull = four if sink is None else sink.contiguous()
            layout = (heads, queries, keys, window or 0, float(scale), *four.stride(), *seen.stride())
            given = {"WINDOWED": window is not None, "MASKED": mask is not None, "SINK": sink is not None}
            options = {"CAUSAL": causal, **given, **static}
            if not static["WHOLE"]:
                _moments[(rows,)](four, seen, pull, top, total, *layout, **options)
            _forward[(rows, -(-keys // static["BLOCK"]))](four, seen, pull, y, top, total, *layout, **options)
        by_head = None if sink is None else _by_head(sink.to(top.dtype), x, heads)
        share = None if sink is None else (by_head - top).exp_().div_(total)        # of each row, that of the sink
        ctx.save_for_backward(y, share)
        ctx.scale, ctx.causal, ctx.sink_dtype = float(scale), causal, None if sink is None else sink.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, Tensor | None, None, None, None]:
        y, share = ctx.saved_tensors
        four = _four(dy)
        rows, (heads, queries, keys) = four.shape[:3].numel(), four.shape[1:]
        static = blocks(max(1, keys), y.dtype, BACKWARD_LIMIT)
        dx = torch.empty_like(y)
        kept = 1 if static["WHOLE"] and share is None else rows
        dot = torch.zeros(kept, device=y.device, dtype=statistics_dtype(y.dtype))
        if y.numel():
            if not static["WHOLE"]:
                _dots[(rows,)](y, four, dot, heads, queries, keys, *four.stride(), CAUSAL=ctx.causal, **static)
            _backward[(rows, -(-keys // static["BLOCK"]))](
                y, four, dx, dot, heads, queries, keys, ctx.scale, *four.stride(), CAUSAL=ctx.causal,
                SINK=share is not None, **static,
            )
        if share is None:
            return dx, None, None, None, None, None
        dsink = -(share * dot).view(-1, heads, queries).sum((0, 2)).to(ctx.sink_dtype)
        return dx, None, dsink, None, None, None


def softmax(
    x: Tensor, scale: float = 1.0, *, causal: bool = False, mask: Tensor | None = None, window: int | None = None,
    sink: Tensor | None = None, impl: str = "auto",
) -> Tensor:
    """x [..., queries, keys], mask bool, broadcastable to it and true where a query may look -> the same in x's dtype.

    `window` goes with `causal`; `sink` [heads] with x [..., heads, queries, keys]. `impl` as in dispatch.py; the torch
    path is torch's own softmax (with scores of -inf alone, NaN).
    """
    assert window is None or causal
    if use_triton(x, impl):
        return _Softmax.apply(x, mask, sink, scale, causal, window)
    visible = _visible(x, causal, mask, window)
    if sink is not None:
        wide = x.to(statistics_dtype(x.dtype)) * scale
        wide = wide if visible is None else wide.masked_fill(~visible, -torch.inf)
        total = wide.logsumexp(-1, keepdim=True).logaddexp(sink.to(wide.dtype)[:, None, None])
        return (wide - total).exp().to(x.dtype)
    y = x if scale == 1.0 else x.to(statistics_dtype(x.dtype)) * scale     # the scaled scores may be beyond fp16
    if visible is None:
        return y.softmax(-1).to(x.dtype)
    y = y.masked_fill(~visible, -torch.inf).softmax(-1).to(x.dtype)
    if mask is None and x.shape[-1] >= x.shape[-2]:
        return y                                           # every row sees its own key
    return y.masked_fill(~visible.any(-1, keepdim=True), 0.0)
