"""Which number types a run computes and remembers in.

Parameters and activations are computed in one type; what is summed over many small values (master weights, gradients,
moments, norms, losses) is kept in a wider one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import PrecisionConfig


@dataclass(frozen=True)
class Dtypes:
    """`compute`: parameters and activations. `master`: master weights, gradients and moments."""

    compute: torch.dtype
    master: torch.dtype


def residual_dtype(precision: PrecisionConfig) -> torch.dtype | None:
    """The dtype of the residual stream, where it is not that of the parameters."""
    return torch.float32 if precision.fp32_residual_connection else None


def dtypes(precision: PrecisionConfig) -> Dtypes:
    """The types of a run: fp32 throughout, bf16 or fp16 over fp32 masters, or fp64 throughout."""
    if precision.fp64:
        return Dtypes(torch.float64, torch.float64)
    if precision.fp16:
        return Dtypes(torch.float16, torch.float32)
    return Dtypes(torch.bfloat16 if precision.bf16 else torch.float32, torch.float32)
