"""bias_gelu:  y = gelu(z),  z = x + bias;  gelu(z) = z * phi(z), phi the normal distribution, exact or by tanh.

    exact   phi = (1 + erf(z / sqrt 2)) / 2                       dz = dy * (phi + z * exp(-z^2 / 2) / sqrt(2 pi))
    tanh    phi = (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)),  u = sqrt(2 / pi) * (z + 0.044715 z^3)
            dz  = dy * (phi + z * 2 phi (1 - phi) * du/dz),  du/dz = sqrt(2 / pi) * (1 + 3 * 0.044715 z^2)
    dx = dz,  dbias = sum(dz)          over rows

The sum over rows is deterministic: one partial row a program, added up by torch (Hendrycks and Gimpel, 2016).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import compiled, jit, tl, use_compiled, use_triton
from .rows import PARTIALS, row_start, rows_of, shares, statistics_dtype, tiles


def bias_gelu_reference(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """The op in plain formulas: what the kernel must equal."""
    z = x.to(statistics_dtype(x.dtype))
    if bias is not None:
        z = z + bias
    if approximate == "tanh":
        phi = (1 + (math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)).tanh()) / 2
    else:
        phi = (1 + (z / math.sqrt(2)).erf()) / 2
    return (z * phi).to(x.dtype)


@jit
def _phi(z, TANH: tl.constexpr):
    """The normal distribution at z; exp(-2 u) may be infinite, and phi is then 0."""
    if TANH:
        phi = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    else:
        phi = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
    return phi


@jit
def _forward(
    x_ptr, b_ptr, y_ptr, width, x_inner, x_outer_stride, x_inner_stride,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, BIASED: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    x_ptr += row_start(row, x_inner, x_outer_stride, x_inner_stride)
    z = tl.load(x_ptr + at, mask=mask, other=0.0).to(WIDE)
    if BIASED:
        z += tl.load(b_ptr + at, mask=mask, other=0.0).to(WIDE)
    tl.store(y_ptr + row * width + at, z * _phi(z, TANH), mask=mask)


@jit
def _backward(
    x_ptr, b_ptr, dy_ptr, dx_ptr, db_ptr, rows, each, width,
    x_inner, x_outer_stride, x_inner_stride, dy_inner, dy_outer_stride, dy_inner_stride,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, BIASED: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """One block of `each` rows: their dx, and its sum as one partial row."""
    program = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    if BIASED:
        b = tl.load(b_ptr + at, mask=mask, other=0.0).to(WIDE)
        db = tl.zeros((BLOCK,), WIDE)
    for row in range(program * each, min(program * each + each, rows)):
        x_start = row_start(row, x_inner, x_outer_stride, x_inner_stride)
        dy_start = row_start(row, dy_inner, dy_outer_stride, dy_inner_stride)
        z = tl.load(x_ptr + x_start + at, mask=mask, other=0.0).to(WIDE)
        dy = tl.load(dy_ptr + dy_start + at, mask=mask, other=0.0).to(WIDE)
        if BIASED:
            z += b
        phi = _phi(z, TANH)
        if TANH:
            slope = 2.0 * phi * (1.0 - phi) * (0.7978845608028654 + 0.10703222440890037 * z * z)
        else:
            slope = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        dx = dy * (phi + z * slope)
        tl.store(dx_ptr + row * width + at, dx, mask=mask)
        if BIASED:
            db += dx
    if BIASED:
        tl.store(db_ptr + program * width + at, db, mask=mask)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        rows, width = rows_of(x), x.shape[-1]
        static = tiles(width, x.dtype) | {"BIASED": bias is not None, "TANH": approximate == "tanh"}
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        if rows.count:
            _forward[(rows.count, -(-width // static["BLOCK"]))](rows.data, bias, y, width, *rows.layout, **static)
        ctx.save_for_backward(x, bias)
        ctx.static = static
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        rows, dy_rows, width, static = rows_of(x), rows_of(dy), x.shape[-1], ctx.static
        each, programs = (1, rows.count) if bias is None else shares(rows.count, PARTIALS)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        db = None if bias is None else torch.empty(programs, width, device=x.device, dtype=statistics_dtype(x.dtype))
        if rows.count:
            _backward[(programs, -(-width // static["BLOCK"]))](
                rows.data, bias, dy_rows.data, dx, db, rows.count, each, width,
                *rows.layout, *dy_rows.layout, **static,
            )  # fmt: skip
        return dx, None if db is None else db.sum(0), None


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "none", impl: str = "auto") -> Tensor:
    """x [..., ffn], bias [ffn] or None -> [..., ffn] in x's dtype; `approximate` is "none" (exact) or "tanh".

    `impl` as in dispatch.py.
    """
    if use_triton(x, impl):
        return _BiasGelu.apply(x, bias, approximate)
    if use_compiled(x, impl, has_own=True):
        return compiled(bias_gelu_reference)(x, bias, approximate)
    return F.gelu(x if bias is None else x + bias, approximate=approximate)
