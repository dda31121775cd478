"""softmax of scaled attention scores over the keys that a query may see.

    y_j  = exp(s x_j - m) / Z,  m = max_i s x_i,  Z = sum_i exp(s x_i - m)
    dx_j = s y_j (dy_j - sum_i y_i dy_i)

Visible are the keys up to the query's own (`causal`; the last query sees the last key) for which `mask` is true. A row
that sees nothing is zeros, and so is its gradient; a NaN that is seen spoils its row alone.
Statistics in fp32 (fp64 for fp64). What a causal mask hides is not read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import jit, tl, use_triton
from .rows import BACKWARD_LIMIT, FORWARD_LIMIT, blocks, statistics_dtype


def softmax_reference(x: Tensor, scale: float = 1.0, *, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """The op in plain formulas: what the kernel must equal."""
    wide = x.to(statistics_dtype(x.dtype)) * scale
    visible = _visible(x, causal, mask)
    if visible is None:
        visible = torch.ones((), dtype=torch.bool, device=x.device)
    wide = wide.masked_fill(~visible, -torch.inf)
    top = wide.amax(-1, keepdim=True)
    nothing = top == -torch.inf
    exponentials = (wide - top.masked_fill(nothing, 0.0)).exp()
    total = exponentials.sum(-1, keepdim=True)
    return (exponentials / total.masked_fill(nothing, 1.0)).to(x.dtype)


def _visible(x: Tensor, causal: bool, mask: Tensor | None) -> Tensor | None:
    """bool, broadcastable to x [..., queries, keys]; None: all."""
    if not causal:
        return mask
    below = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(x.shape[-1] - x.shape[-2])
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
def _limit(stop, keys):
    """Where loads end: `stop` as a multiple of 16, which vectors need."""
    return tl.minimum(keys, (stop + 15) // 16 * 16)


@jit
def _scores(
    x_row, mask_row, at, stop, keys, scale, x_key_stride, mask_key_stride,
    MASKED: tl.constexpr, STATISTICS: tl.constexpr,
):
    """The scaled scores of a row at `at`, -inf where hidden."""
    visible = at < stop
    limit = _limit(stop, keys)
    place = at.to(tl.int64)
    if MASKED:
        visible = visible & (tl.load(mask_row + place * mask_key_stride, mask=at < limit, other=0) != 0)
    x = tl.load(x_row + place * x_key_stride, mask=at < limit, other=0.0).to(STATISTICS)
    return tl.where(visible, x * tl.full(at.shape, scale, STATISTICS), -float("inf"))


@jit
def _moments(
    x_ptr, mask_ptr, top_ptr, total_ptr, heads, queries, keys, scale: tl.float64,
    x_outer_stride, x_inner_stride, x_query_stride, x_key_stride,
    mask_outer_stride, mask_inner_stride, mask_query_stride, mask_key_stride,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """m and Z of one row that is wider than a block, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    stop = _stop(row, queries, keys, CAUSAL)
    x_ptr += _start(row, heads, queries, x_outer_stride, x_inner_stride, x_query_stride)
    mask_ptr += _start(row, heads, queries, mask_outer_stride, mask_inner_stride, mask_query_stride)
    top = tl.full((BLOCK,), -float("inf"), STATISTICS)
    total = tl.zeros((BLOCK,), STATISTICS)
    for start in range(0, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _scores(x_ptr, mask_ptr, at, stop, keys, scale, x_key_stride, mask_key_stride, MASKED, STATISTICS)
        higher = tl.maximum(top, x)
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - finite) + tl.exp(x - finite)
        top = higher
    highest = tl.max(top, 0)
    finite = tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(top_ptr + row, finite)
    tl.store(total_ptr + row, tl.sum(total * tl.exp(top - finite), 0))


@jit
def _forward(
    x_ptr, mask_ptr, y_ptr, top_ptr, total_ptr, heads, queries, keys, scale: tl.float64,
    x_outer_stride, x_inner_stride, x_query_stride, x_key_stride,
    mask_outer_stride, mask_inner_stride, mask_query_stride, mask_key_stride,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """One block of one row; its statistics are taken here if the block is the WHOLE row, else read."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stop = _stop(row, queries, keys, CAUSAL)
    x_ptr += _start(row, heads, queries, x_outer_stride, x_inner_stride, x_query_stride)
    mask_ptr += _start(row, heads, queries, mask_outer_stride, mask_inner_stride, mask_query_stride)
    x = _scores(x_ptr, mask_ptr, at, stop, keys, scale, x_key_stride, mask_key_stride, MASKED, STATISTICS)
    if WHOLE:
        top = tl.max(x, 0)
        x = tl.exp(x - tl.where(top == -float("inf"), 0.0, top))
        total = tl.sum(x, 0)
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
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """One block of one row's dx."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stop = _stop(row, queries, keys, CAUSAL)
    dy_ptr += _start(row, heads, queries, dy_outer_stride, dy_inner_stride, dy_query_stride)
    limit = _limit(stop, keys)
    y = tl.load(y_ptr + row * keys + at, mask=at < limit, other=0.0).to(STATISTICS)
    dy = tl.load(dy_ptr + at.to(tl.int64) * dy_key_stride, mask=at < limit, other=0.0).to(STATISTICS)
    if WHOLE:
        dot = tl.sum(tl.where(at < stop, y * dy, 0.0), 0)
    else:
        dot = tl.load(dot_ptr + row)
    dx = tl.full((BLOCK,), scale, STATISTICS) * y * (dy - dot)
    dx = tl.where(at < stop, dx, 0.0)
    tl.store(dx_ptr + row * keys + at, dx, mask=at < keys)


def _four(x: Tensor) -> Tensor:
    """x [..., queries, keys] as [outer, heads, queries, keys], without a copy where it has at most four dims."""
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        four = _four(x)
        rows, (heads, queries, keys) = four.shape[:3].numel(), four.shape[1:]
        static = blocks(max(1, keys), x.dtype, FORWARD_LIMIT)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        top, total = torch.empty(2, 1 if static["WHOLE"] else rows, device=x.device, dtype=statistics_dtype(x.dtype))
        if y.numel():
            seen = four if mask is None else _four(mask.expand(x.shape)).view(torch.uint8)
            layout = (heads, queries, keys, float(scale), *four.stride(), *seen.stride())
            options = {"CAUSAL": causal, "MASKED": mask is not None, **static}
            if not static["WHOLE"]:
                _moments[(rows,)](four, seen, top, total, *layout, **options)
            _forward[(rows, -(-keys // static["BLOCK"]))](four, seen, y, top, total, *layout, **options)
        ctx.save_for_backward(y)
        ctx.scale, ctx.causal = float(scale), causal
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        four = _four(dy)
        rows, (heads, queries, keys) = four.shape[:3].numel(), four.shape[1:]
        static = blocks(max(1, keys), y.dtype, BACKWARD_LIMIT)
        dx = torch.empty_like(y)
        dot = torch.empty(1 if static["WHOLE"] else rows, device=y.device, dtype=statistics_dtype(y.dtype))
        if y.numel():
            if not static["WHOLE"]:
                _dots[(rows,)](y, four, dot, heads, queries, keys, *four.stride(), CAUSAL=ctx.causal, **static)
            _backward[(rows, -(-keys // static["BLOCK"]))](
                y, four, dx, dot, heads, queries, keys, ctx.scale, *four.stride(), CAUSAL=ctx.causal, **static
            )
        return dx, None, None, None


def softmax(
    x: Tensor, scale: float = 1.0, *, causal: bool = False, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """x [..., queries, keys], mask bool, broadcastable to it and true where a query may look -> the same in x's dtype.

    `impl` as in dispatch.py; the torch path is torch's own softmax (with scores of -inf alone, NaN).
    """
    if use_triton(x, impl):
        return _Softmax.apply(x, mask, scale, causal)
    visible = _visible(x, causal, mask)
    y = x if scale == 1.0 else x.to(statistics_dtype(x.dtype)) * scale     # the scaled scores may be beyond fp16
    if visible is None:
        return y.softmax(-1).to(x.dtype)
    y = y.masked_fill(~visible, -torch.inf).softmax(-1).to(x.dtype)
    if mask is None and x.shape[-1] >= x.shape[-2]:
        return y                                           # every row sees its own key
    return y.masked_fill(~visible.any(-1, keepdim=True), 0.0)
