"""Update rules on flat slices: what is done to a master copy, given its gradient, once everything is reduced.

A rule names the kinds of state that it keeps for each element and updates all buckets at once, so that one that needs
norms or whole matrices can exchange them together. Rules for that are in files of their own: lamb.py, muon.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ..kernels.adam import AdamStep, adam_
from .buckets import Bucket
from .params import ParamInfo


class Rule(Protocol):
    """What a step does to the slices that a rank owns."""

    def with_momentum(self, momentum: float) -> Rule:
        """The same rule with another momentum (Adam's beta 1), for schedules that move it."""

    def kinds(self, info: ParamInfo) -> tuple[str, ...]:
        """Names of the state of a parameter beside "weight", as a checkpoint tells them."""

    def update(
        self, buckets: Sequence[Bucket], grads: Sequence[Tensor], learning_rate: float, weight_decay: float, step: int,
        factor: Tensor | None = None,
    ) -> None:
        """Change each bucket's slices, and this rank's part of its parameters, by its gradient [share] times `factor`
        (a scalar; None: 1). `step` counts from 1. Gradients may be overwritten."""


def scale_(grads: Sequence[Tensor], factor: Tensor | None) -> None:
    """Multiply each gradient by a scalar on its device; None: leave them."""
    if factor is not None:
        for grad in grads:
            grad.mul_(factor.to(grad.dtype))


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015), eps after the bias correction as in torch.

    decoupled   weight decay apart from the gradient (AdamW, Loshchilov and Hutter, 2019), or as an L2 term in it
    impl        of the fused pass: auto, torch, triton
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = True
    impl: str = "auto"

    def with_momentum(self, momentum: float) -> Adam:
        """Another beta 1."""
        return replace(self, betas=(momentum, self.betas[1]))

    def kinds(self, info: ParamInfo) -> tuple[str, ...]:
        """The two moments."""
        return ("exp_avg", "exp_avg_sq")

    def update(
        self, buckets: Sequence[Bucket], grads: Sequence[Tensor], learning_rate: float, weight_decay: float, step: int,
        factor: Tensor | None = None,
    ) -> None:
        """One fused pass over each slice."""
        for bucket, grad in zip(buckets, grads, strict=True):
            decay = weight_decay if bucket.decay else 0.0
            adam_(
                bucket.weight, grad, bucket.state("exp_avg"), bucket.state("exp_avg_sq"),
                AdamStep(learning_rate, self.betas, self.eps, decay, self.decoupled, step),
                factor=factor, copy=bucket.copy, impl=self.impl,
            )


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum; weight decay is an L2 term of the gradient, as in torch."""

    momentum: float = 0.9

    def with_momentum(self, momentum: float) -> SGD:
        """Another momentum."""
        return replace(self, momentum=momentum)

    def kinds(self, info: ParamInfo) -> tuple[str, ...]:
        """The running sum of gradients."""
        return ("momentum",)

    def update(
        self, buckets: Sequence[Bucket], grads: Sequence[Tensor], learning_rate: float, weight_decay: float, step: int,
        factor: Tensor | None = None,
    ) -> None:
        """buffer = momentum * buffer + gradient; weight -= learning rate * buffer."""
        scale_(grads, factor)
        for bucket, grad in zip(buckets, grads, strict=True):
            if bucket.decay and weight_decay:
                grad.add_(bucket.weight, alpha=weight_decay)
            buffer = bucket.state("momentum")
            buffer.mul_(self.momentum).add_(grad)
            bucket.weight.add_(buffer, alpha=-learning_rate)
            bucket.publish()
