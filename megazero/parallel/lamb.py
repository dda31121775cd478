"""LAMB (You et al., 2020): Adam whose step is scaled, parameter by parameter, to the size of the parameter.

The norms are of whole parameters, though owners and tensor ranks hold parts of them: each rank adds up its parts, and
the sums of all parameters travel together, in one tensor per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .buckets import Bucket
from .collectives import all_reduce
from .groups import Group
from .params import ParamInfo
from .rules import scale_


@dataclass(frozen=True)
class Lamb:
    """update = exp_avg / (sqrt(exp_avg_sq) + eps), both corrected for their start, + weight decay * weight;
    weight -= learning rate * ratio * update, with ratio = |weight| / |update| between the bounds of `ratio`.

    The ratio is 1 where either norm is zero, as for a bias at its first step.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    ratio: tuple[float, float] = (0.01, 10.0)

    def with_momentum(self, momentum: float) -> Lamb:
        """Another momentum."""
        return replace(self, betas=(momentum, self.betas[1]))

    def kinds(self, info: ParamInfo) -> tuple[str, ...]:
        """The two moments."""
        return ("exp_avg", "exp_avg_sq")

    def update(
        self, buckets: Sequence[Bucket], grads: Sequence[Tensor], learning_rate: float, weight_decay: float, step: int,
        factor: Tensor | None = None,
    ) -> None:
        """Three passes: the updates into the gradients' memory, the norms of all parameters, the weights."""
        scale_(grads, factor)
        for bucket, grad in zip(buckets, grads, strict=True):
            self._direct_(bucket, grad, weight_decay if bucket.decay else 0.0, step)
        squares = sums_of_squares(buckets, [[bucket.weight, grad] for bucket, grad in zip(buckets, grads, strict=True)])
        for bucket, grad, found in zip(buckets, grads, squares, strict=True):
            weight, update = found.sqrt().unbind(1)
            ratios = (weight / update).clamp(*self.ratio)
            ratios = torch.where((weight > 0) & (update > 0), ratios, 1.0).to(grad.dtype)
            for number, ratio in enumerate(ratios):
                bucket.part(number, grad).mul_(ratio)
            bucket.weight.add_(grad, alpha=-learning_rate)
            bucket.publish()

    def _direct_(self, bucket: Bucket, grad: Tensor, decay: float, step: int) -> None:
        """Gradient [share] -> the update before its ratio, in place."""
        mean, square = bucket.state("exp_avg"), bucket.state("exp_avg_sq")
        mean.lerp_(grad, 1 - self.betas[0])
        square.mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
        size = (square / (1 - self.betas[1] ** step)).sqrt_().add_(self.eps)
        torch.div(mean, size, out=grad).div_(1 - self.betas[0] ** step)
        if decay:
            grad.add_(bucket.weight, alpha=decay)


def sums_of_squares(buckets: Sequence[Bucket], flats: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """For each bucket, of each whole parameter and each of the given slices [share]: fp64 [parameters, slices].

    One all-reduce for each group among which anything is cut, however many parameters and buckets there are.
    """
    found = []
    for bucket, slices in zip(buckets, flats, strict=True):
        norms = [
            torch.linalg.vector_norm(bucket.part(number, flat)) for number in range(len(bucket.infos))
            for flat in slices
        ]
        found.append(torch.stack(norms).double().square().view(len(bucket.infos), len(slices)))
    groups: dict[tuple[int, ...], tuple[Group, list[int]]] = {}
    for number, bucket in enumerate(buckets):
        for group in (bucket.owners, *bucket.cut):
            groups.setdefault(group.ranks, (group, []))[1].append(number)
    for group, numbers in groups.values():
        if group.size > 1:
            flat = all_reduce(torch.cat([found[n].flatten() for n in numbers]), group)
            for n, part in zip(numbers, flat.split([found[n].numel() for n in numbers]), strict=True):
                found[n] = part.view(found[n].shape)
    return found
