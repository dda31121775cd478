"""WeightQueue: the weight gradients of a stage's linear layers, computed at once or put off.

A linear layer's backward returns the gradient of its input and hands the rest to the queue of its stage. A full
backward runs it on the spot; the zero-bubble schedules collect it and run it where the pipeline would idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..products import Products

Work = Callable[[], None]


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient that is added to: `.grad`, made where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class WeightQueue:
    """One per stage, made with the stage and handed to its layers.

    `gradient` says where the gradient of a parameter is added up, and `arrived` is told when one micro-batch has added
    to it: the optimizer that owns flat gradients sets both. `products` is how the stage multiplies matrices.
    """

    def __init__(self, products: Products = Products()) -> None:
        self.products = products
        self.gradient: Callable[[nn.Parameter], Tensor] = gradient_of
        self.arrived: Callable[[nn.Parameter], None] = lambda parameter: None
        self._deferred: list[Work] | None = None

    @property
    def is_deferring(self) -> bool:
        """Whether what is put now runs later."""
        return self._deferred is not None

    def put(self, work: Work) -> None:
        """Run `work` now, or keep it for later while gradients are being deferred."""
        if self._deferred is None:
            work()
        else:
            self._deferred.append(work)

    @contextmanager
    def deferring(self) -> Iterator[list[Work]]:
        """What is put meanwhile is kept in the list; the caller runs it, in its order, each once."""
        assert self._deferred is None, "a backward inside a backward"
        self._deferred = []
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def add_product_(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left [out, rows] x right [rows, in] to the gradient of a parameter of out x in elements."""
        if not parameter.requires_grad:
            return
        self.products.add_(self.gradient(parameter).view(left.shape[0], right.shape[1]), left, right)
        self.arrived(parameter)

    def add_sum_of_products_(self, parameter: nn.Parameter, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`add_product_` of each pair, which may be gone when the next one comes; all of them are one arrival."""
        grad = self.gradient(parameter) if parameter.requires_grad else None
        for left, right in pairs:
            if grad is not None:
                self.products.add_(grad.view(left.shape[0], right.shape[1]), left, right)
        if grad is not None:
            self.arrived(parameter)

    def add_products_(self, parameter: nn.Parameter, left: Tensor, right: Tensor, counts: Sequence[int]) -> None:
        """For a parameter of matrices [groups, out, in] whose rows lie one group after another, counts[g] of group g:
        add left_g [out, rows] x right_g [rows, in], given left [out, all rows] and right [all rows, in]."""
        if not parameter.requires_grad:
            return
        grads = self.gradient(parameter).view(len(counts), left.shape[0], right.shape[1])
        for grad, a, b in zip(grads, left.split(counts, 1), right.split(counts), strict=True):
            self.products.add_(grad, a, b)
        self.arrived(parameter)

    def add_rows_(self, parameter: nn.Parameter, rows: Tensor, values: Tensor) -> None:
        """Add values [n, in] to the rows [n] of a parameter's gradient, in the gradient's dtype: a token that occurs
        thousands of times is summed in fp32."""
        if not parameter.requires_grad:
            return
        grad = self.gradient(parameter)
        values = values.to(grad.dtype)
        if grad.is_cuda:        # sorted first, so that equal rows are always added in one order
            grad.add_(torch.ops.aten.embedding_dense_backward(values, rows, grad.shape[0], -1, False))
        else:
            grad.index_add_(0, rows, values)
        self.arrived(parameter)

    def add_(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Add `value`, of as many elements, to the gradient of a parameter."""
        if parameter.requires_grad:
            self.gradient(parameter).view(-1).add_(value.flatten())
            self.arrived(parameter)
