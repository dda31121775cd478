"""rms_norm over the last dim:  y = xhat * weight,  xhat = x * rstd,  rstd = (mean(x^2) + eps)^-1/2.

    g  = dy * weight
    dx = rstd * (g - xhat * mean(g * xhat))
    dweight = sum(dy * xhat)          over rows

With a residual it is h = x + residual that is normed, h is a result too, and its gradient dh is added to dx.

Statistics in fp32 (fp64 for fp64); sums over rows are deterministic: one partial row a program, added up by torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import compiled, jit, tl, use_compiled, use_triton
from .rows import (
    BACKWARD_LIMIT,
    FORWARD_LIMIT,
    NO_ROWS,
    PARTIALS,
    blocks,
    row_start,
    rows_of,
    shares,
    statistics_dtype,
    sum_of,
)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op in plain formulas: what the kernel and torch's fused op must equal."""
    wide = x.to(statistics_dtype(x.dtype))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op that adds in plain formulas."""
    h = residual + x
    return rms_norm_reference(h, weight, eps), h


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
    x_ptr, r_ptr, h_ptr, w_ptr, y_ptr, rstd_ptr, hidden, eps,
    x_inner, x_outer_stride, x_inner_stride, r_inner, r_outer_stride, r_inner_stride,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """One block of one row; rstd is taken here if the block is the WHOLE row, else read. With ADDS it is h = x +
    residual that is normed."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < hidden
    x_ptr += row_start(row, x_inner, x_outer_stride, x_inner_stride)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(STATISTICS)
    if ADDS:
        r_ptr += row_start(row, r_inner, r_outer_stride, r_inner_stride)
        sums = x + tl.load(r_ptr + at, mask=mask, other=0.0).to(STATISTICS)
        tl.store(h_ptr + row * hidden + at, sums, mask=mask)
        x = sums.to(h_ptr.dtype.element_ty).to(STATISTICS)      # as the backward will read it
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
    x_ptr, w_ptr, dy_ptr, dh_ptr, dx_ptr, rstd_ptr, mean_gx_ptr, dw_ptr, rows, each, hidden,
    x_inner, x_outer_stride, x_inner_stride, dy_inner, dy_outer_stride, dy_inner_stride,
    dh_inner, dh_outer_stride, dh_inner_stride,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, STATISTICS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """One block of `each` rows: their dx (with ADDS plus dh), and the sum of their dweight as one partial row."""
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
        dx = rstd * (g - xhat * mean_gx)
        if ADDS:
            dh_start = row_start(row, dh_inner, dh_outer_stride, dh_inner_stride)
            dx += tl.load(dh_ptr + dh_start + at, mask=mask, other=0.0).to(STATISTICS)
        tl.store(dx_ptr + row * hidden + at, dx, mask=mask)
        dw += dy * xhat
    tl.store(dw_ptr + program * hidden + at, dw, mask=mask)


class _RMSNorm(torch.autograd.Function):
    """y, and h = x + residual beside it where there is a residual."""

    @staticmethod
    def forward(
        ctx, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
        dtype, hidden = torch.promote_types(*ctx.dtypes), x.shape[-1]
        static = blocks(hidden, dtype, FORWARD_LIMIT)
        rows, r_rows, h, adds = sum_of(x, residual, dtype, static["WHOLE"])
        y = torch.empty(x.shape, device=x.device, dtype=dtype)
        rstd = torch.empty(rows.count, device=x.device, dtype=statistics_dtype(dtype))
        if rows.count:
            if not static["WHOLE"]:
                _moments[(rows.count,)](rows.data, rstd, hidden, eps, *rows.layout, **static)
            _forward[(rows.count, -(-hidden // static["BLOCK"]))](
                rows.data, r_rows.data, h if adds else None, weight, y, rstd, hidden, eps,
                *rows.layout, *r_rows.layout, **static, ADDS=adds,
            )  # fmt: skip
        ctx.save_for_backward(h, weight, rstd)
        return y if residual is None else (y, h)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, dh: Tensor | None = None) -> tuple[Tensor | None, ...]:
        h, weight, rstd = ctx.saved_tensors
        rows, dy_rows, hidden = rows_of(h), rows_of(dy), h.shape[-1]
        dh_rows = NO_ROWS if dh is None else rows_of(dh)
        static = blocks(hidden, h.dtype, BACKWARD_LIMIT)
        each, programs = shares(rows.count, PARTIALS)
        dx = torch.empty_like(h, memory_format=torch.contiguous_format)
        dw = torch.empty(programs, hidden, device=h.device, dtype=rstd.dtype)
        mean_gx = torch.empty(1 if static["WHOLE"] else rows.count, device=h.device, dtype=rstd.dtype)
        if rows.count:
            if not static["WHOLE"]:
                _means[(rows.count,)](
                    rows.data, weight, dy_rows.data, rstd, mean_gx, hidden, *rows.layout, *dy_rows.layout, **static
                )
            _backward[(programs, -(-hidden // static["BLOCK"]))](
                rows.data, weight, dy_rows.data, dh_rows.data, dx, rstd, mean_gx, dw, rows.count, each, hidden,
                *rows.layout, *dy_rows.layout, *dh_rows.layout, **static, ADDS=dh is not None,
            )  # fmt: skip
        x_dtype, residual_dtype = ctx.dtypes
        return dx.to(x_dtype), None if dh is None else dx.to(residual_dtype), dw.sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, impl: str = "auto") -> Tensor:
    """x [..., hidden], weight [hidden] -> [..., hidden] in x's dtype.

    `impl` as in dispatch.py; the torch path is torch's own fused op.
    """
    if use_triton(x, impl):
        return _RMSNorm.apply(x, None, weight, eps)
    if use_compiled(x, impl):
        return compiled(rms_norm_reference)(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) of h = x + residual, both [..., hidden] in the wider of the two dtypes. The kernel writes h as
    it norms it, and adds its gradient where it has that of the norm. `impl` as in dispatch.py."""
    if use_triton(x, impl):
        return _RMSNorm.apply(x, residual, weight, eps)
    if use_compiled(x, impl):
        return compiled(add_rms_norm_reference)(x, residual, weight, eps)
    h = residual + x
    return rms_norm(h, weight, eps, impl), h
