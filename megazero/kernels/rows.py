"""Tensors seen as rows by the kernels that work along the last dim: any strides of the leading dims, 64-bit offsets.

A row wider than one block is covered by several programs, so no width is too large.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import jit, tl

FORWARD_LIMIT, BACKWARD_LIMIT = 16384, 8192  # elements of a row that one program can hold without spilling registers
PARTIALS = 512  # programs among which the rows are divided where a sum over rows is wanted


class Rows(NamedTuple):
    """x [..., hidden], contiguous in its last dim, as rows at r // inner * outer_stride + r % inner * inner_stride."""

    data: Tensor | None
    count: int
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def layout(self) -> tuple[int, int, int]:
        """The arguments of `row_start` after the row."""
        return self.inner, self.outer_stride, self.inner_stride


NO_ROWS = Rows(None, 0, 1, 0, 0)        # stands for an operand that is not there


def rows_of(x: Tensor) -> Rows:
    """x [..., hidden] as rows, without a copy where the leading dims amount to two strides (a transposed or expanded
    [seq, batch, hidden], a slice) and the last dim is contiguous."""
    dims: list[tuple[int, int]] = []  # (size, stride) of the leading dims, neighbours merged
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    count = x.shape[:-1].numel()
    if len(dims) > 2 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        return Rows(x.contiguous(), count, 1, x.shape[-1], 0)
    if len(dims) == 2:
        (_, outer_stride), (inner, inner_stride) = dims
        return Rows(x, count, inner, outer_stride, inner_stride)
    return Rows(x, count, 1, dims[0][1] if dims else 0, 0)


def shares(count: int, most: int) -> tuple[int, int]:
    """(how many each takes, programs) where at most `most` programs divide `count` among themselves."""
    each = max(1, -(-count // most))
    return each, -(-count // each)


class Sum(NamedTuple):
    """The input of a norm that may add a residual: the rows that its kernel reads, and what the norm is of.

    h     x + residual [..., hidden]; still empty where the kernel `adds` the residual's rows itself
    """

    rows: Rows
    residual: Rows
    h: Tensor
    adds: bool


def sum_of(x: Tensor, residual: Tensor | None, dtype: torch.dtype, whole: bool) -> Sum:
    """x [..., hidden] + residual, in `dtype`: by the kernel where its block is the whole row, for a row of many blocks
    is read twice anyway."""
    if residual is not None and whole:
        return Sum(rows_of(x), rows_of(residual), torch.empty(x.shape, device=x.device, dtype=dtype), True)
    h = x if residual is None else x + residual
    return Sum(rows_of(h), NO_ROWS, h, False)


@jit
def row_start(row, inner, outer_stride, inner_stride):
    """Offset of a row's first element; `row` is 64-bit, and so is the result."""
    return row // inner * outer_stride + row % inner * inner_stride


def blocks(hidden: int, dtype: torch.dtype, limit: int) -> dict:
    """The compile-time arguments that every row kernel takes: block size, whether it holds the whole row, the dtype
    of statistics, and the number of warps. `limit` is for 32-bit statistics."""
    if dtype == torch.float64:
        limit //= 2
    block = min(limit, 1 << (hidden - 1).bit_length())
    return {
        "BLOCK": block,
        "WHOLE": block >= hidden,
        "STATISTICS": tl.float64 if dtype == torch.float64 else tl.float32,
        "num_warps": min(16, max(1, block // 512)),
    }


def tiles(width: int, dtype: torch.dtype, limit: int = 1024) -> dict:
    """The compile-time arguments of kernels whose elements do not meet along a row: block size, the dtype of the
    arithmetic, and warps such that a thread moves 16 bytes of bf16 at a time."""
    block = min(limit, 1 << (width - 1).bit_length())
    return {
        "BLOCK": block,
        "WIDE": tl.float64 if dtype == torch.float64 else tl.float32,
        "num_warps": max(1, block // 256),
    }


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
