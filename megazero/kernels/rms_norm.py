"""rms_norm over the last dim:  y = xhat * weight,  xhat = x * rstd,  rstd = (mean(x^2) + eps)^-1/2.

    g  = dy * weight
    dx = rstd * (g - xhat * mean(g * xhat))
    dweight = sum(dy * xhat)          over rows

Statistics in fp32 (fp64 for fp64); sums over rows are deterministic: one partial row a program, added up by torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import jit, tl, use_triton
from .rows import BACKWARD_LIMIT, FORWARD_LIMIT, PARTIALS, blocks, row_start, rows_of, statistics_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op in plain formulas: what the kernel and torch's fused op must equal."""
    wide = x.to(statistics_dtype(x.dtype))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * weight).to(x.dtype)


@jit
def _moments(
    x_ptr, rstd_ptr, hidden, eps, x_inner, x_outer_stride, x_inner_stride,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """rstd of one row that is wider than a block."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_start(row, x_inner, x_outer_stride, x_inner_stride)
    total = tl.zeros((BLOCK,), STATISTICS)
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < hidden, other=0.0).to(STATISTICS)
        total += x * x
    tl.store(rstd_ptr + row, 1.0 / tl.sqrt(tl.sum(total, 0) / hidden + eps))


@jit
def _forward(
    x_ptr, w_ptr, y_ptr, rstd_ptr, hidden, eps, x_inner, x_outer_stride, x_inner_stride,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """One block of one row; rstd is taken here if the block is the WHOLE row, else read."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < hidden
    x_ptr += row_start(row, x_inner, x_outer_stride, x_inner_stride)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(STATISTICS)
    if WHOLE:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / hidden + eps)
        tl.store(rstd_ptr + row, rstd)
    else:
        rstd = tl.load(rstd_ptr + row)
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(STATISTICS)
    tl.store(y_ptr + row * hidden + at, x * rstd * w, mask=mask)


@jit
def _means(
    x_ptr, w_ptr, dy_ptr, rstd_ptr, mean_gx_ptr, hidden,
    x_inner, x_outer_stride, x_inner_stride, dy_inner, dy_outer_stride, dy_inner_stride,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """mean(g * xhat) of one row that is wider than a block."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_start(row, x_inner, x_outer_stride, x_inner_stride)
    dy_ptr += row_start(row, dy_inner, dy_outer_stride, dy_inner_stride)
    total = tl.zeros((BLOCK,), STATISTICS)
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < hidden
        g = tl.load(dy_ptr + at, mask=mask, other=0.0).to(STATISTICS)
        g *= tl.load(w_ptr + at, mask=mask, other=0.0).to(STATISTICS)
        total += g * tl.load(x_ptr + at, mask=mask, other=0.0).to(STATISTICS)
    tl.store(mean_gx_ptr + row, tl.sum(total, 0) * tl.load(rstd_ptr + row) / hidden)


@jit
def _backward(
    x_ptr, w_ptr, dy_ptr, dx_ptr, rstd_ptr, mean_gx_ptr, dw_ptr, rows, each, hidden,
    x_inner, x_outer_stride, x_inner_stride, dy_inner, dy_outer_stride, dy_inner_stride,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """One block of `each` rows: their dx, and the sum of their dweight as one partial row."""
    program = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < hidden
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(STATISTICS)
    dw = tl.zeros((BLOCK,), STATISTICS)
    for row in range(program * each, min(program * each + each, rows)):
        x_start = row_start(row, x_inner, x_outer_stride, x_inner_stride)
        dy_start = row_start(row, dy_inner, dy_outer_stride, dy_inner_stride)
        x = tl.load(x_ptr + x_start + at, mask=mask, other=0.0).to(STATISTICS)
        dy = tl.load(dy_ptr + dy_start + at, mask=mask, other=0.0).to(STATISTICS)
        rstd = tl.load(rstd_ptr + row)
        xhat = x * rstd
        g = dy * w
        if WHOLE:
            mean_gx = tl.sum(g * xhat, 0) / hidden
        else:
            mean_gx = tl.load(mean_gx_ptr + row)
        tl.store(dx_ptr + row * hidden + at, rstd * (g - xhat * mean_gx), mask=mask)
        dw += dy * xhat
    tl.store(dw_ptr + program * hidden + at, dw, mask=mask)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, hidden = rows_of(x), x.shape[-1]
        static = blocks(hidden, x.dtype, FORWARD_LIMIT)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = torch.empty(rows.count, device=x.device, dtype=statistics_dtype(x.dtype))
        if rows.count:
            if not static["WHOLE"]:
                _moments[(rows.count,)](rows.data, rstd, hidden, eps, *rows.layout, **static)
            _forward[(rows.count, -(-hidden // static["BLOCK"]))](
                rows.data, weight, y, rstd, hidden, eps, *rows.layout, **static
            )
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        rows, dy_rows, hidden = rows_of(x), rows_of(dy), x.shape[-1]
        static = blocks(hidden, x.dtype, BACKWARD_LIMIT)
        each = max(1, -(-rows.count // PARTIALS))
        programs = -(-rows.count // each)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dw = torch.empty(programs, hidden, device=x.device, dtype=rstd.dtype)
        mean_gx = torch.empty(1 if static["WHOLE"] else rows.count, device=x.device, dtype=rstd.dtype)
        if rows.count:
            if not static["WHOLE"]:
                _means[(rows.count,)](
                    rows.data, weight, dy_rows.data, rstd, mean_gx, hidden, *rows.layout, *dy_rows.layout, **static
                )
            _backward[(programs, -(-hidden // static["BLOCK"]))](
                rows.data, weight, dy_rows.data, dx, rstd, mean_gx, dw, rows.count, each, hidden,
                *rows.layout, *dy_rows.layout, **static,
            )  # fmt: skip
        return dx, dw.sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, impl: str = "auto") -> Tensor:
    """x [..., hidden], weight [hidden] -> [..., hidden] in x's dtype.

    `impl` as in dispatch.py; the torch path is torch's own fused op.
    """
    if use_triton(x, impl):
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
