"""Update rules on flat slices: what is done to a master copy, given its gradient, once everything is reduced.

A rule names the kinds of state that it keeps for each element and updates all buckets at once, so that one that needs
norms or whole matrices can exchange them together. Rules for that are in files of their own: lamb.py, muon.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from .buckets import Bucket
from .params import ParamInfo


class Rule(Protocol):
    """What a step does to the slices that a rank owns."""

    def with_momentum(self, momentum: float) -> Rule:
        """The same rule with another momentum (Adam's beta 1), for schedules that move it."""

    def kinds(self, info: ParamInfo) -> tuple[str, ...]:
        """Names of the state of a parameter beside "weight", as a checkpoint tells them."""

    def update(
        self, buckets: Sequence[Bucket], grads: Sequence[Tensor], learning_rate: float, weight_decay: float, step: int
    ) -> None:
        """Change each bucket's slices by its gradient [share]; `step` counts from 1. Gradients may be overwritten."""


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015), eps after the bias correction as in torch.

    decoupled   weight decay apart from the gradient (AdamW, Loshchilov and Hutter, 2019), or as an L2 term in it
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = True

    def with_momentum(self, momentum: float) -> Adam:
        """Another beta 1."""
        return replace(self, betas=(momentum, self.betas[1]))

    def kinds(self, info: ParamInfo) -> tuple[str, ...]:
        """The two moments."""
        return ("exp_avg", "exp_avg_sq")

    def update(
        self, buckets: Sequence[Bucket], grads: Sequence[Tensor], learning_rate: float, weight_decay: float, step: int
    ) -> None:
        """One fused pass over each slice."""
        fused = adamw if self.decoupled else adam
        for bucket, grad in zip(buckets, grads, strict=True):
            before = torch.full((), float(step - 1), device=grad.device)       # torch counts this step itself
            fused(
                [bucket.weight], [grad], [bucket.state("exp_avg")], [bucket.state("exp_avg_sq")], [], [before],
                fused=True, amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=learning_rate,
                weight_decay=weight_decay if bucket.decay else 0.0, eps=self.eps, maximize=False,
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
        self, buckets: Sequence[Bucket], grads: Sequence[Tensor], learning_rate: float, weight_decay: float, step: int
    ) -> None:
        """buffer = momentum * buffer + gradient; weight -= learning rate * buffer."""
        for bucket, grad in zip(buckets, grads, strict=True):
            if bucket.decay and weight_decay:
                grad.add_(bucket.weight, alpha=weight_decay)
            buffer = bucket.state("momentum")
            buffer.mul_(self.momentum).add_(grad)
            bucket.weight.add_(buffer, alpha=-learning_rate)
