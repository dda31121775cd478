"""dropout_add:  y = residual + keep * (x + bias) / (1 - p),  keep drawn with probability 1 - p for each element.

    dx = dy * keep / (1 - p),  dresidual = dy,  dbias = sum(dx)          over rows

The kernel draws `keep` by counters (draws.py), in the backward again: only the seed is kept. torch's path draws from
the default generator and keeps a byte an element. Sums over rows are deterministic: one partial row a program.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import compiled, jit, tl, use_compiled, use_triton
from .draws import keep, keep_reference
from .rows import PARTIALS, row_start, rows_of, shares, statistics_dtype, tiles


def dropout_add_reference(
    x: Tensor, residual: Tensor, bias: Tensor | None, probability: float = 0.0, seed: int = 0
) -> Tensor:
    """The op in plain formulas: what the kernel must equal."""
    exact = statistics_dtype(torch.promote_types(x.dtype, residual.dtype))
    z = x.to(exact) if bias is None else x.to(exact) + bias
    if probability:
        width = x.shape[-1]
        z = z * keep_reference(seed, x.numel() // max(width, 1), width, probability).view(x.shape) / (1 - probability)
    return (residual + z).to(torch.promote_types(x.dtype, residual.dtype))


@jit
def _forward(
    x_ptr, b_ptr, r_ptr, y_ptr, width, probability, seed,
    x_inner, x_outer_stride, x_inner_stride, r_inner, r_outer_stride, r_inner_stride,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, BIASED: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    x_start = row_start(row, x_inner, x_outer_stride, x_inner_stride)
    r_start = row_start(row, r_inner, r_outer_stride, r_inner_stride)
    x = tl.load(x_ptr + x_start + at, mask=mask, other=0.0).to(WIDE)
    r = tl.load(r_ptr + r_start + at, mask=mask, other=0.0).to(WIDE)
    if BIASED:
        x += tl.load(b_ptr + at, mask=mask, other=0.0).to(WIDE)
    if DROPS:
        scale = 1.0 / tl.to_tensor(1.0 - probability).to(WIDE)
        x = tl.where(keep(seed, row, tl.program_id(1), probability, BLOCK), x * scale, 0.0)
    tl.store(y_ptr + row * width + at, r + x, mask=mask)


@jit
def _backward(
    dy_ptr, dx_ptr, db_ptr, rows, each, width, probability, seed, dy_inner, dy_outer_stride, dy_inner_stride,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """One block of `each` rows: their dx, and its sum as one partial row."""
    program = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    scale = 1.0 / tl.to_tensor(1.0 - probability).to(WIDE)
    db = tl.zeros((BLOCK,), WIDE)
    for row in range(program * each, min(program * each + each, rows)):
        dy_start = row_start(row, dy_inner, dy_outer_stride, dy_inner_stride)
        dy = tl.load(dy_ptr + dy_start + at, mask=mask, other=0.0).to(WIDE)
        dx = tl.where(keep(seed, row, tl.program_id(1), probability, BLOCK), dy * scale, 0.0)
        tl.store(dx_ptr + row * width + at, dx, mask=mask)
        db += dx
    if BIASED:
        tl.store(db_ptr + program * width + at, db, mask=mask)


def _tiles(width: int, dtype: torch.dtype) -> dict:
    static = tiles(width, dtype)
    return static | {"BLOCK": max(4, static["BLOCK"])}      # numbers are drawn by four


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor, bias: Tensor | None, probability: float, seed: int) -> Tensor:
        rows, r_rows, width = rows_of(x), rows_of(residual), x.shape[-1]
        y = torch.empty(x.shape, device=x.device, dtype=torch.promote_types(x.dtype, residual.dtype))
        static = _tiles(width, y.dtype)
        if rows.count:
            _forward[(rows.count, -(-width // static["BLOCK"]))](
                rows.data, bias, r_rows.data, y, width, probability, seed, *rows.layout, *r_rows.layout,
                **static, BIASED=bias is not None, DROPS=probability > 0.0,
            )  # fmt: skip
        ctx.how = probability, seed, x.dtype, residual.dtype, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        probability, seed, x_dtype, residual_dtype, biased = ctx.how
        rows, width, exact = rows_of(dy), dy.shape[-1], statistics_dtype(dy.dtype)
        if not probability:
            db = dy.sum(tuple(range(dy.dim() - 1)), dtype=exact) if biased else None
            return dy.to(x_dtype), dy.to(residual_dtype), db, None, None
        static = _tiles(width, dy.dtype)
        each, programs = shares(rows.count, PARTIALS) if biased else (1, rows.count)
        dx = torch.empty(dy.shape, device=dy.device, dtype=x_dtype)
        db = torch.empty(programs, width, device=dy.device, dtype=exact) if biased else None
        if rows.count:
            _backward[(programs, -(-width // static["BLOCK"]))](
                rows.data, dx, db, rows.count, each, width, probability, seed, *rows.layout, **static, BIASED=biased
            )
        return dx, dy.to(residual_dtype), None if db is None else db.sum(0), None, None


def dropout_add(
    x: Tensor, residual: Tensor, bias: Tensor | None = None, probability: float = 0.0, seed: int = 0,
    impl: str = "auto",
) -> Tensor:
    """x and residual [..., hidden], bias [hidden] or None -> [..., hidden] in the wider of the two dtypes.

    The kernel draws from `seed` (64 bits); torch's path from the default generator, which the caller has seeded.
    `impl` as in dispatch.py.
    """
    if (probability or bias is not None) and use_triton(x, impl):
        return _DropoutAdd.apply(x, residual, bias, probability, seed % 2**63)
    if not probability and use_compiled(x, impl):      # draws come from the generator that was seeded for them
        return compiled(dropout_add_reference)(x, residual, bias)
    y = x if bias is None else x + bias
    return residual + (torch.native_dropout(y, probability, True)[0] if probability else y)
