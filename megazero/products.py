"""Matrix products as torch takes them, or of bf16 through fp32 on a CPU that has no instructions for bf16.

There torch's own bf16 products are 5 to 80 times slower than to widen both matrices, multiply in fp32 and round the
result. The numbers are the same: either sums in fp32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx10_1", "avx10_2")     # any of these multiplies bf16 on x86


@dataclass(frozen=True)
class Products:
    """How a run multiplies matrices of `narrow` numbers: as they are, or, where `through` is given, widened to it."""

    narrow: torch.dtype = torch.bfloat16
    through: torch.dtype | None = None

    def widens(self, x: Tensor) -> bool:
        """Whether a product with x is taken in a wider dtype."""
        return self.through is not None and x.dtype == self.narrow

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        """left [..., n] times right [n, columns] -> [..., columns]."""
        return self.call(torch.matmul, left, right)

    def into_(self, out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
        """left [rows, n] times right [n, columns], plus bias [columns], written to out [rows, columns]."""
        if self.widens(left):
            wide = left.to(self.through), right.to(self.through)
            out.copy_(torch.mm(*wide) if bias is None else torch.addmm(bias.to(self.through), *wide))
        elif bias is None:
            torch.mm(left, right, out=out)
        else:
            torch.addmm(bias, left, right, out=out)

    def add_(self, grad: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left [out, rows] times right [rows, in] to grad [out, in], which may be of a wider dtype."""
        if grad.dtype == left.dtype and not self.widens(left):
            grad.addmm_(left, right)
        else:
            grad.add_(self.of(left, right))

    def call(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """A function of products, such as attention: of the widened tensors, its result rounded."""
        if not self.widens(tensors[0]):
            return function(*tensors)
        return function(*(x.to(self.through) for x in tensors)).to(self.narrow)


def products_of(device: torch.device) -> Products:
    """What suits the processor, which is asked here and nowhere else: fp32 for bf16 on an x86 CPU without bf16
    instructions. Other processors, and those of which an older torch tells nothing, are left to torch."""
    tells = device.type == "cpu" and "get_capabilities" in vars(torch.cpu)
    has = torch.cpu.get_capabilities() if tells else {}
    lacks = has.get("architecture") == "x86_64" and not any(map(has.get, BF16_INSTRUCTIONS))
    return Products(through=torch.float32 if lacks else None)


def describe_products(products: Products, dtype: torch.dtype) -> list[str]:
    """What a run in `dtype` says of them at its start."""
    if products.through is None or dtype != products.narrow:
        return []
    return ["bf16 matrix products go through fp32, results rounded to bf16: this CPU has no bf16 instructions"]
