"""Squared norm of a flat buffer:  sum_i x_i^2, in fp64 from any dtype, the same bits every time.

There is no backward. Each program leaves one partial sum and torch adds those up; which elements a program adds
depends on their number alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import jit, tl, use_triton
from .rows import shares

BLOCK = 1024                # elements that a program adds at once
PARTIALS = 2048             # programs at most: enough to fill a GPU
NORM_PART = 1 << 15         # elements that are widened at once on a CPU: they stay in the cache


def squared_norm_reference(flat: Tensor) -> Tensor:
    """The op in plain formulas: what the kernel and the torch path must equal."""
    return flat.double().square().sum()


@jit
def _partials(x_ptr, partial_ptr, count, each, BLOCK: tl.constexpr):
    """The sum of `each` blocks, added up in fp64, whose squares neither overflow nor vanish for any fp32."""
    start = tl.program_id(0).to(tl.int64) * each * BLOCK
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(each):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float64)
        total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, 0))


def _partials_of(flat: Tensor) -> Tensor:
    """fp64 [programs]."""
    flat = flat.contiguous()
    block_count = -(-flat.numel() // BLOCK)
    each, programs = shares(block_count, PARTIALS)
    partial = torch.empty(programs, dtype=torch.float64, device=flat.device)
    if programs:
        _partials[(programs,)](flat, partial, flat.numel(), each, BLOCK=BLOCK, num_warps=4)
    return partial


def squared_norm(flat: Tensor, impl: str = "auto") -> Tensor:
    """Of a 1-D tensor: fp64 scalar. `impl` as in dispatch.py.

    On a CPU vector_norm would widen each element by itself, which takes twice as long as widening part by part. Sums in
    fp32 would take a quarter, but are good to 1e-8 only: another layout's clipping would round to other bits.
    """
    if use_triton(flat, impl):
        return _partials_of(flat).sum()
    if flat.is_cuda:
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    total = torch.zeros((), dtype=torch.float64)
    for part in flat.split(NORM_PART):
        wide = part.double()
        total += torch.dot(wide, wide)
    return total
