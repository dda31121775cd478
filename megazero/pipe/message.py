"""What a message between stages is made of, and the header that tells it once.

The receiver knows from then on how many tensors come, in which dtypes and shapes, and which of them get a gradient
back, so it can post its receives before the message is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .output import Hidden, flat

HEADER = 128        # int64 numbers of a header: 21 tensors of three dims, say

# A dtype travels as its place in this table.
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)


@dataclass(frozen=True)
class Format:
    """The tensors of a message: (dtype, whether a gradient comes back, shape) of each.

    is_tuple  whether they are a tuple for the layers, which may have one element
    """

    parts: tuple[tuple[torch.dtype, bool, tuple[int, ...]], ...]
    is_tuple: bool

    @staticmethod
    def of(x: Hidden) -> Format:
        """The format of hidden states. Raises ValueError for a tensor that has no strides, such as a sparse one."""
        for t in flat(x):
            if t.layout is not torch.strided:
                raise ValueError(f"a tensor of {t.layout} cannot be sent to the next stage; to_dense() makes one")
        return Format(tuple((t.dtype, t.requires_grad, tuple(t.shape)) for t in flat(x)), isinstance(x, tuple))

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they are what the format says."""
        if len(tensors) != len(self.parts):
            return False
        for t, (dtype, needs_grad, shape) in zip(tensors, self.parts, strict=True):
            if t.shape != shape or t.dtype is not dtype or t.requires_grad is not needs_grad:
                return False
        return True

    def header(self, device: torch.device) -> Tensor:
        """The format as numbers [HEADER]. Raises ValueError where there are too many, or a dtype is none of DTYPES."""
        numbers = [int(self.is_tuple), len(self.parts)]
        for dtype, needs_grad, shape in self.parts:
            if dtype not in DTYPES:
                raise ValueError(f"a tensor of {dtype} cannot be sent to the next stage, but any of {DTYPES}")
            numbers += [DTYPES.index(dtype), int(needs_grad), len(shape), *shape]
        if len(numbers) > HEADER:
            raise ValueError(
                f"{len(self.parts)} tensors are too many, or have too many dims, to send between stages: they take "
                f"{len(numbers)} of {HEADER} numbers ({str(self)[:100]}...)"
            )
        return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64, device=device)

    @staticmethod
    def read(header: Sequence[int]) -> Format:
        """The format that the numbers of a header say."""
        is_tuple, count, *rest = header
        parts = []
        for _ in range(count):
            dtype, needs_grad, dims, *rest = rest
            parts.append((DTYPES[dtype], bool(needs_grad), tuple(rest[:dims])))
            rest = rest[dims:]
        return Format(tuple(parts), bool(is_tuple))

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        """Tensors to receive into."""
        return tuple(
            torch.empty(shape, dtype=dtype, device=device, requires_grad=needs_grad)
            for dtype, needs_grad, shape in self.parts
        )

    def __str__(self) -> str:
        return ", ".join(f"{dtype} {list(shape)}{' with gradient' * grad}" for dtype, grad, shape in self.parts)
