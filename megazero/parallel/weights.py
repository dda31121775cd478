"""WeightQueue: the weight gradients of a stage's linear layers, computed at once or put off.

A linear layer's backward returns the gradient of its input and hands the rest to the queue of its stage. A full
backward runs it on the spot; the zero-bubble schedules collect it and run it where the pipeline would idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Work = Callable[[], None]


class WeightQueue:
    """One per stage, made with the stage and handed to its layers."""

    def __init__(self) -> None:
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


def add_product_(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Add left [out, rows] x right [rows, in] to the gradient of a parameter with out x in elements, in its dtype."""
    grad = gradient_of(parameter).view(left.shape[0], right.shape[1])
    if grad.dtype == left.dtype:
        grad.addmm_(left, right)
    else:
        grad.add_(left @ right)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient that is added to: a view of the flat buffer where the optimizer has made one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
