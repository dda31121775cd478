"""swiglu:  y = silu(gate) * up  of x = [gate, up] along the last dim,  silu(g) = g * s,  s = 1 / (1 + exp(-g)).

    dgate = dy * up * s * (1 + g * (1 - s))
    dup   = dy * silu(g)

The kernel keeps nothing but x: one read of each operand and one write of each result (Shazeer, 2020). In fp32 and fp64
on a CPU both slopes are kept instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .cached import cached_elements, keeps_slope
from .dispatch import compiled, jit, tl, use_compiled, use_triton
from .rows import row_start, rows_of, statistics_dtype, tiles


def swiglu_reference(x: Tensor) -> Tensor:
    """The op in plain formulas: what the kernel must equal."""
    gate, up = x.to(statistics_dtype(x.dtype)).chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up).to(x.dtype)


@jit
def _forward(
    x_ptr, y_ptr, width, x_inner, x_outer_stride, x_inner_stride,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One block of one row of y."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    x_ptr += row_start(row, x_inner, x_outer_stride, x_inner_stride)
    gate = tl.load(x_ptr + at, mask=mask, other=0.0).to(WIDE)
    up = tl.load(x_ptr + width + at, mask=mask, other=0.0).to(WIDE)
    tl.store(y_ptr + row * width + at, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@jit
def _backward(
    x_ptr, dy_ptr, dx_ptr, width, x_inner, x_outer_stride, x_inner_stride, dy_inner, dy_outer_stride, dy_inner_stride,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One block of one row of dgate and of dup."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    x_ptr += row_start(row, x_inner, x_outer_stride, x_inner_stride)
    dy_ptr += row_start(row, dy_inner, dy_outer_stride, dy_inner_stride)
    dx_ptr += row * 2 * width
    gate = tl.load(x_ptr + at, mask=mask, other=0.0).to(WIDE)
    up = tl.load(x_ptr + width + at, mask=mask, other=0.0).to(WIDE)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(WIDE)
    s = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(dx_ptr + at, dy * up * s * (1.0 + gate * (1.0 - s)), mask=mask)
    tl.store(dx_ptr + width + at, dy * gate * s, mask=mask)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        rows, width = rows_of(x), x.shape[-1] // 2
        static = tiles(width, x.dtype)
        y = x.new_empty(*x.shape[:-1], width)
        if rows.count:
            _forward[(rows.count, -(-width // static["BLOCK"]))](rows.data, y, width, *rows.layout, **static)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows, dy_rows, width = rows_of(x), rows_of(dy), x.shape[-1] // 2
        static = tiles(width, x.dtype)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        if rows.count:
            _backward[(rows.count, -(-width // static["BLOCK"]))](
                rows.data, dy_rows.data, dx, width, *rows.layout, *dy_rows.layout, **static
            )
        return dx


def value_and_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    """y [..., ffn] and, for a CPU, what dx [..., 2 ffn] is in both halves over dy: one pass over blocks of rows that
    stay in the cache, and no exponential is taken twice."""
    width = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * width)
    y, slopes, one = x.new_empty(len(rows), width), torch.empty_like(rows), x.new_ones(())
    block = max(1, cached_elements() // max(width, 1))
    for x_part, y_part, slopes_part in zip(*(z.split(block) for z in (rows, y, slopes)), strict=True):
        gate, up = x_part.chunk(2, dim=1)
        of_gate, silu = slopes_part.chunk(2, dim=1)
        share = gate.sigmoid()
        torch.mul(gate, share, out=silu)
        torch.lerp(silu, one, share, out=of_gate).mul_(up)      # s + g s (1 - s), from the nearer end
        torch.mul(silu, up, out=y_part)
    return y.view(*x.shape[:-1], width), slopes.view(x.shape)


def times_slopes(dy: Tensor, slopes: Tensor) -> Tensor:
    """dy [..., ffn], slopes [..., 2 ffn] -> dx [..., 2 ffn]."""
    halves = slopes.unflatten(-1, (2, -1))
    return (halves * dy.unsqueeze(-2)).flatten(-2)


class _SwiGLUWithSlopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y, slopes = value_and_slopes(x)
        ctx.save_for_backward(slopes)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        (slopes,) = ctx.saved_tensors
        return times_slopes(dy, slopes)


def swiglu(x: Tensor, impl: str = "auto") -> Tensor:
    """x = [gate, up] [..., 2 ffn] -> [..., ffn] in x's dtype. `impl` as in dispatch.py."""
    if use_triton(x, impl):
        return _SwiGLU.apply(x)
    if use_compiled(x, impl):
        return compiled(swiglu_reference)(x)
    if x.requires_grad and keeps_slope(x):
        return _SwiGLUWithSlopes.apply(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
