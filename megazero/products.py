"""Matrix products as torch takes them, and on some CPUs in the way that is quicker there.

Of fp32 torch takes products by MKL, which gives AMD's processors no AVX-512: oneDNN, which is a part of torch as well
and takes its products of bf16, is 2.2 times as fast there. Of bf16, on a CPU without instructions for it, torch's own
products are 5 to 80 times slower than to widen both matrices, multiply in fp32 and round the result. The numbers are
the same: either sums in fp32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Library = Literal["auto", "torch", "onednn"]

LARGE = 8               # times as large as the other matrix: one that oneDNN had better not copy, which it does with a
                        # left one that does not lie row by row
SMALL = 2**20           # multiplications of a product that is over before oneDNN has looked up how to take it
ROWS = 64               # oneDNN takes a multiple of so many, torch the rest: of each shape it keeps about a megabyte
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx10_1", "avx10_2")     # any of these multiplies bf16 on x86


@dataclass(frozen=True)
class Products:
    """How a run multiplies matrices.

    narrow, through     `narrow` numbers as they are, or, where `through` is given, widened to it
    onednn              fp32 by oneDNN, whose results may differ in the last digit
    """

    narrow: torch.dtype = torch.bfloat16
    through: torch.dtype | None = None
    onednn: bool = False

    def widens(self, x: Tensor) -> bool:
        """Whether a product with x is taken in a wider dtype."""
        return self.through is not None and x.dtype == self.narrow

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        """left [..., n] times right [n, columns] -> [..., columns]."""
        return self.call(self._of_rows, left, right)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., n] times the transpose of weight [columns, n], plus bias [columns] -> [..., columns], a tensor of its
        own that may be changed in place."""
        if self._suits_onednn(x, weight.shape[0]):
            return self._of_rows(x, weight.T, bias)
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        self.into_(out.flatten(0, -2), x.flatten(0, -2), weight.T, bias)
        return out

    def into_(self, out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
        """left [rows, n] times right [n, columns], plus bias [columns], written to out [rows, columns]."""
        if self.widens(left):
            wide = left.to(self.through), right.to(self.through), None if bias is None else bias.to(self.through)
            out.copy_(self._of_rows(*wide))
        elif self._suits_onednn(left, right.shape[1]):
            out.copy_(self._of_rows(left, right, bias))
        elif bias is None:
            torch.mm(left, right, out=out)
        else:
            torch.addmm(bias, left, right, out=out)

    def add_(self, grad: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left [out, rows] times right [rows, in] to grad [out, in], which may be of a wider dtype."""
        if not self._suits_onednn(left, right.shape[1]):
            if grad.dtype == left.dtype and not self.widens(left):
                grad.addmm_(left, right)
            else:
                grad.add_(self.call(self._product, left, right))
        elif rest := right.shape[0] % ROWS:
            Products().add_(grad, left[:, -rest:], right[-rest:])
            if len(right) > rest:
                self.add_(grad, left[:, :-rest], right[:-rest])
        elif left.numel() > LARGE * right.numel() and not left.is_contiguous():
            grad.add_(self._product(right.T, left.T).T)
        else:
            grad.add_(self._product(left, right))

    def call(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """A function of products, such as attention: of the widened tensors, its result rounded."""
        if not self.widens(tensors[0]):
            return function(*tensors)
        return function(*(x.to(self.through) for x in tensors)).to(self.narrow)

    def _of_rows(self, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        """left [..., n] times right [n, columns], plus bias [columns], where the rows may be any number."""
        rest = left.shape[:-1].numel() % ROWS if self._suits_onednn(left, right.shape[1]) else 0
        if not rest:
            return self._product(left, right, bias)
        out = left.new_empty(*left.shape[:-1], right.shape[1])
        to, rows = out.flatten(0, -2), left.flatten(0, -2)
        if len(rows) > rest:
            to[:-rest] = self._product(rows[:-rest], right, bias)
        Products().into_(to[-rest:], rows[-rest:], right, bias)
        return out

    def _product(self, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        """left [..., n] times right [n, columns], plus bias [columns], by the library that suits."""
        if self._suits_onednn(left, right.shape[1]):
            rows = torch.ops.mkldnn._linear_pointwise(left.flatten(0, -2), right.T, bias, "none", [], "")
            return torch.ops.aten._unsafe_view(rows, (*left.shape[:-1], rows.shape[1]))      # to autograd no view
        return torch.matmul(left, right) if bias is None else torch.addmm(bias, left, right)

    def _suits_onednn(self, left: Tensor, columns: int) -> bool:
        return self.onednn and left.dtype == torch.float32 and left.numel() * columns >= SMALL


def products_of(device: torch.device, library: Library = "auto") -> Products:
    """What suits the processor, which is asked here and nowhere else: on x86, oneDNN for fp32 on those of AMD with
    AVX-512, and fp32 for bf16 where there are no bf16 instructions. Other processors, and those of which an older torch
    tells nothing, are left to torch. Raises ValueError where oneDNN is asked for and is not there.
    """
    there = device.type == "cpu" and torch.backends.mkldnn.is_available()
    if library == "onednn" and not there:
        raise ValueError("--cpu-matmul onednn: needs a run on a CPU and a torch with oneDNN")
    tells = device.type == "cpu" and "get_capabilities" in vars(torch.cpu)
    has = torch.cpu.get_capabilities() if tells else {}
    of_x86 = has.get("architecture") == "x86_64"
    lacks = of_x86 and not any(map(has.get, BF16_INSTRUCTIONS))
    of_amd = of_x86 and bool(has.get("sse4a") and has.get("avx512_f"))         # nobody else has sse4a
    onednn = library == "onednn" or library == "auto" and of_amd and there and torch.backends.mkl.is_available()
    return Products(through=torch.float32 if lacks else None, onednn=onednn)


def describe_products(products: Products, dtype: torch.dtype) -> list[str]:
    """What a run in `dtype` says of them at its start."""
    told, widens = [], products.through is not None and dtype == products.narrow
    if widens:
        told.append("bf16 matrix products go through fp32, results rounded to bf16: this CPU has no bf16 instructions")
    if products.onednn and (widens or dtype == torch.float32):
        told.append("fp32 matrix products by oneDNN (--cpu-matmul torch: as torch takes them)")
    return told
