"""Random draws without history, and recomputation.

Before a layer draws, the device's default generator is seeded with a hash of (seed, iteration, global
micro-batch, layer, purpose, tensor index where the drawn tensor is cut). No generator state is ever saved:
schedules, recomputation, resuming and the data-parallel size cannot change a mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Draw = tuple[int, int, int]          # (seed, iteration, global micro-batch)


def draw_seed(draw: Draw, layer: int, purpose: str, index: int | None) -> int:
    """The seed of one draw, 64 bits. `index` is the tensor index where the tensor is cut over tensor, else None."""
    text = f"{draw[0]}/{draw[1]}/{draw[2]}/{layer}/{purpose}/{'whole' if index is None else index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_generator(device: torch.device, seed: int) -> None:
    """Set the default generator of `device`, from which torch's dropout draws."""
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_draw(device: torch.device, draw: Draw, layer: int, purpose: str, index: int | None) -> int:
    """Seed the default generator of `device` for one draw. Returns the seed, for kernels that draw by themselves."""
    seed = draw_seed(draw, layer, purpose, index)
    seed_generator(device, seed)
    return seed


def dropout(x: Tensor, probability: float, draw: Draw | None, *, layer: int, purpose: str, index: int | None) -> Tensor:
    """Zero elements of `x` with `probability` and scale the rest; `draw` None (evaluation) leaves `x` alone.

    Ranks that hold the same tensor pass index None and share the mask; ranks that hold parts pass their index.
    """
    if draw is None or probability == 0.0:
        return x
    seed_draw(x.device, draw, layer, purpose, index)
    return torch.native_dropout(x, probability, True)[0]       # keeps one byte per element for the backward


def recompute(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """`function(*inputs)` that keeps only its inputs for the backward and runs again there.

    Bit-neutral: draws are seeded again by the layers themselves, so no generator state needs to be kept.
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
