"""Activations on a CPU: several passes of torch's own over a block of elements that stays in the cache, and their
slopes kept for the backward, where torch would take each exponential twice."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 16             # elements for each thread: five such blocks in fp32 fit a cache of two MiB


def cached_elements() -> int:
    """Of a block that all threads share."""
    return BLOCK * torch.get_num_threads()


def keeps_slope(x: Tensor) -> bool:
    """Whether the slopes of x are kept instead of x: not in a narrow dtype, which would round them, and not where a
    compiler or a GPU fuses the passes."""
    is_exact = x.dtype in (torch.float32, torch.float64)
    return is_exact and x.numel() > 0 and not x.is_cuda and not torch.compiler.is_compiling()
