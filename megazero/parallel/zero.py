"""ZeRO stage 1 (Rajbhandari et al., 2020): each data rank owns a slice of every bucket and alone keeps its master
copy and moments. A step: reduce-scatter the gradients, norm and clip, update the slices, all-gather the parameters.

A data axis of one is the same code with one owner.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .buckets import Bucket, Owned, make_buckets
from .collectives import all_reduce, start_all_gather, start_reduce_scatter
from .groups import Mesh
from .params import ParamInfo


class ZeroAdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) on flat, owned slices.

    Losses are already divided by the tokens of the global batch, so gradients are sums over data ranks and
    micro-batches and have no divisor of their own.
    """

    def __init__(
        self, infos: list[ParamInfo], mesh: Mesh, *, dtype: torch.dtype, betas: tuple[float, float], eps: float,
        clip: float,
    ) -> None:
        self.mesh, self.betas, self.eps, self.clip = mesh, betas, eps, clip
        self.buckets: list[Bucket] = make_buckets(infos, mesh, dtype)
        self.updates = 0                    # finished updates, for Adam's bias correction

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float) -> Tensor:
        """One update. Returns the L2 norm of the global, averaged, unclipped gradient: fp64 scalar, equal on all ranks.

        Where the norm is not finite the weights are spoiled on all ranks alike: the caller stops before saving.
        """
        owned = self._reduce()
        norm = self._norm(owned)
        if self.clip > 0:
            factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            for grad in owned:
                grad.mul_(factor.to(grad.dtype))
        self.updates += 1
        gathering = []
        for bucket, grad in zip(self.buckets, owned, strict=True):
            self._update(bucket, grad, learning_rate, weight_decay if bucket.decay else 0.0)
            mine = bucket.params[bucket.slice]
            mine.copy_(bucket.weight)
            gathering.append(start_all_gather(mine, bucket.owners, out=bucket.params))
            bucket.grads.zero_()
        for pending in gathering:
            pending.wait()
        return norm

    def _reduce(self) -> list[Tensor]:
        """This rank's slice of every bucket's gradient, summed over data and over the axes where it is partial."""
        pending = []
        for bucket in self.buckets:
            bucket.check_views()
            pending.append(start_reduce_scatter(bucket.grads, bucket.owners))
        owned = [p.wait() for p in pending]
        for bucket, grad in zip(self.buckets, owned, strict=True):
            for group in bucket.grad_sum:
                all_reduce(grad, group)
        return owned

    def _norm(self, owned: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for bucket, grad in zip(self.buckets, owned, strict=True):
            if bucket.recorded:
                total += torch.linalg.vector_norm(grad).double().square()
        return all_reduce(total, self.mesh.world).sqrt()

    def _update(self, bucket: Bucket, grad: Tensor, learning_rate: float, weight_decay: float) -> None:
        steps = torch.full((), float(self.updates - 1), device=grad.device)      # adamw counts this update itself
        adamw(
            [bucket.weight], [grad], [bucket.exp_avg], [bucket.exp_avg_sq], [], [steps], fused=True,
            amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=learning_rate, weight_decay=weight_decay,
            eps=self.eps, maximize=False,
        )

    def owned(self) -> Iterator[Owned]:
        """All state that this rank owns, in one fixed order, as writable views that loading fills."""
        for bucket in self.buckets:
            yield from bucket.owned()

    @torch.no_grad()
    def publish(self) -> None:
        """Carry the master copies, as loading left them, into the parameters of all ranks."""
        for bucket in self.buckets:
            mine = bucket.params[bucket.slice]
            mine.copy_(bucket.weight)
            start_all_gather(mine, bucket.owners, out=bucket.params).wait()
