"""ZeRO (Rajbhandari et al., 2020): each data rank owns a slice of every bucket and alone keeps its master copy and
moments. A step: sum the gradients, norm and clip, update the slices, gather the parameters.

Stage 0 is the same code whose owner is every rank, stage 2 the same with gradients that are reduced after each
backward. A data axis of one is the same code with one owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..kernels.squared_norm import squared_norm
from ..loss_scale import LossScaler
from .buckets import Bucket, Bucketing, Owned, make_buckets, place_of
from .collectives import Pending, all_reduce, gather_objects, start_all_gather
from .groups import Mesh
from .params import ParamInfo
from .reducer import Reducer
from .rules import Rule
from .weights import WeightQueue


@dataclass(frozen=True)
class Zero:
    """How a ZeroOptimizer shares its work.

    stage           of ZeRO, 0 to 2
    clip            largest gradient norm; 0: no clipping
    bucket_size     elements
    overlap_reduce  buckets are reduced while the backward runs
    overlap_gather  parameters are gathered while the next forward runs
    wire_dtype      in which gradients travel; None: as they are kept
    scaler          the loss scale's rule where losses are scaled (fp16) and a step that overflows is skipped
    norm_impl       of the squared norm: auto, torch, triton
    checked         a step whose gradient is not finite is not made, without a scaler too
    """

    stage: int = 1
    clip: float = 0.0
    bucket_size: int = 40_000_000
    overlap_reduce: bool = False
    overlap_gather: bool = False
    wire_dtype: torch.dtype | None = None
    scaler: LossScaler | None = None
    norm_impl: str = "auto"
    checked: bool = False


@dataclass(frozen=True)
class Rates:
    """What a step updates with.

    tables    the learning rate of embeddings and head, where they have their own
    momentum  of the rule (Adam's beta 1), where the schedule moves it
    """

    learning_rate: float
    weight_decay: float
    tables: float | None = None
    momentum: float | None = None


@dataclass(frozen=True)
class Update:
    """What a step did, equal on all ranks.

    norm     of the global, averaged, unscaled, unclipped gradient (L2, fp64 scalar)
    clipped  whether that was above the limit (bool scalar)
    skipped  whether nothing was done, because it is not finite or by a veto
    first    the first parameter of the model whose gradient is not finite
    """

    norm: Tensor
    clipped: Tensor
    skipped: bool = False
    first: str | None = None


def model_order(infos: Sequence[ParamInfo], homes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Where each parameter of a rank stands in the whole model, comparable between ranks: its first stage and its place
    on its rank. A tied one stands where the model begins, also for its holders at the end."""
    return {
        info.name: (0, 0) if info.spec.tied else (min(homes.get(info.name, (0,))), number)
        for number, info in enumerate(infos)
    }


class ZeroOptimizer:
    """An update rule on flat, owned slices.

    Losses are already divided by the tokens of the global batch, so gradients are sums over data ranks and
    micro-batches and have no divisor of their own.
    """

    def __init__(
        self, infos: Sequence[ParamInfo], mesh: Mesh, rule: Rule, *, dtype: torch.dtype, zero: Zero,
        homes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.mesh, self.rule, self.zero = mesh, rule, zero
        how = Bucketing(lambda info: ("weight", *rule.kinds(info)), zero.bucket_size, zero.stage, homes or {})
        self.buckets: list[Bucket] = make_buckets(infos, mesh, dtype, how)
        self.trained = [bucket for bucket in self.buckets if bucket.is_trained]
        self.reducer = Reducer(
            self.trained, overlap=zero.overlap_reduce, every=zero.stage == 2, wire_dtype=zero.wire_dtype
        )
        self._order = model_order(infos, homes or {})
        self.updates = 0                    # finished updates, for bias corrections
        self.scale = None if zero.scaler is None else zero.scaler.start()
        self._gathering: dict[int, Pending] = {}

    def attach(self, modules: Sequence[nn.Module], queues: Mapping[int, WeightQueue]) -> None:
        """Let the weight queues of stages, by number, add into the flat gradients, and modules wait for parameters
        still on their way."""
        self.reducer.queues = list(queues.values())
        for stage, queue in queues.items():
            queue.gradient, queue.arrived = partial(self.reducer.gradient, stage=stage), self.reducer.arrived
        if not self.zero.overlap_gather:
            return
        place, number = place_of(self.buckets), {id(bucket): n for n, bucket in enumerate(self.buckets)}
        for module in (m for root in modules for m in root.modules()):
            used = sorted({number[id(place[p][0])] for p in module.parameters(recurse=False)})
            if used:
                module.register_forward_pre_hook(lambda module, inputs, used=used: self._await(used))

    @property
    def loss_scale(self) -> float:
        """What losses are to be multiplied by before their backward."""
        return 1.0 if self.scale is None else self.scale.scale

    @torch.no_grad()
    def step(self, rates: Rates, veto: Tensor | None = None) -> Update:
        """One update with gradients of losses that were multiplied by `loss_scale`, which it then moves.

        Where the norm is not finite and there is a scaler or it is checked, the gradients are forgotten and nothing
        else changes, and so where `veto` (bool scalar) is true on any rank; unchecked the weights are spoiled on all
        ranks alike, and the caller stops before saving.
        """
        scale = self.loss_scale
        owned = self.reducer.owned()
        for bucket, grad in zip(self.trained, owned, strict=True):
            for group in bucket.grad_sum:
                all_reduce(grad, group)
        norm, vetoes = self._norm(owned, veto)
        norm = norm / scale
        clipped = norm > (self.zero.clip or float("inf"))
        overflow = vetoed = False
        if self.zero.scaler is not None or self.zero.checked:
            finite, vetoed = torch.stack((norm.isfinite(), vetoes > 0)).tolist()
            overflow = not finite
        if self.zero.scaler is not None and (overflow or not vetoed):
            self.scale = self.zero.scaler.after(self.scale, overflow=overflow)
        if overflow or vetoed:
            first = self.offender() if overflow else None
            self.reducer.clear()
            return Update(norm, clipped, skipped=True, first=first)
        factor = None if scale == 1.0 and not self.zero.clip else torch.full_like(norm, 1.0 / scale)
        if self.zero.clip > 0:
            factor = factor * (self.zero.clip / (norm + 1e-6)).clamp(max=1.0)
        self.updates += 1
        self.wait()
        rule = self.rule if rates.momentum is None else self.rule.with_momentum(rates.momentum)
        tables = rates.learning_rate if rates.tables is None else rates.tables
        pairs = list(zip(self.trained, owned, strict=True))
        for learning_rate in dict.fromkeys((rates.learning_rate, tables)):
            part = [p for p in pairs if (tables if p[0].infos[0].spec.table else rates.learning_rate) == learning_rate]
            rule.update(
                [b for b, _ in part], [g for _, g in part], learning_rate, rates.weight_decay, self.updates, factor
            )
        self.reducer.clear()
        self._gather([number for number, bucket in enumerate(self.buckets) if bucket.is_trained])
        return Update(norm, clipped)

    @torch.no_grad()
    def move(self, reports: Mapping[str, Tensor]) -> None:
        """After a step: what is not trained moves as the global batch's reports say, alike on every rank."""
        for bucket in self.buckets:
            for info in bucket.infos if not bucket.is_trained else ():
                info.tensor.copy_(info.movement(info.tensor, reports))

    def _norm(self, slices: Sequence[Tensor], veto: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The L2 norm over the whole model of one slice per bucket, each element once, and the number of vetoes."""
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for bucket, flat in zip(self.trained, slices, strict=True):
            if bucket.recorded:
                total[0] += squared_norm(flat, self.zero.norm_impl)
        if veto is not None:
            total[1] = veto
        all_reduce(total, self.mesh.world)
        return total[0].sqrt(), total[1]

    @torch.no_grad()
    def parameter_norm(self) -> Tensor:
        """L2 norm of all parameters of the model, fp64 scalar; called by all ranks."""
        return self._norm([bucket.weight for bucket in self.trained])[0]

    @torch.no_grad()
    def moment_norms(self) -> Tensor:
        """L2 norms of all first moments (or momenta) and of all second ones, fp64 [2]; called by all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for bucket in self.trained:
            for kind, flat in bucket.slices.items():
                if bucket.recorded and kind != "weight":
                    total[int(kind == "exp_avg_sq")] += squared_norm(flat, self.zero.norm_impl)
        return all_reduce(total, self.mesh.world).sqrt()

    @torch.no_grad()
    def zero_count(self) -> Tensor:
        """How many elements of the global gradient are exactly zero, int64 scalar; called by all ranks, before the
        step. Padding counts nowhere."""
        topology, rank = self.mesh.topology, self.mesh.rank
        total = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        for bucket, grad in zip(self.trained, self.reducer.owned(), strict=True):
            for group in bucket.grad_sum:
                grad = all_reduce(grad.clone(), group)
            for number, info in enumerate(bucket.infos if bucket.recorded else ()):
                real = max(info.spec.box(topology, rank).numel - bucket.span(number).start, 0)
                own = bucket.part(number, grad)[:real]
                total += own.numel() - own.count_nonzero()
        return all_reduce(total, self.mesh.world)

    def place(self, name: str) -> tuple[int, int]:
        """Where a parameter of this rank stands in the whole model, comparable between ranks."""
        return self._order[name]

    def offender(self) -> str | None:
        """The first parameter in the order of the model whose owned gradient is not finite on any rank; called by all,
        before the gradients are forgotten. None: all are finite."""
        found = [
            (self._order[info.name], info.name)
            for bucket, grad in zip(self.trained, self.reducer.owned(), strict=True)
            for number, info in enumerate(bucket.infos) if not bool(bucket.part(number, grad).isfinite().all())
        ]
        told = [first for first in gather_objects(min(found, default=None), self.mesh.world) if first is not None]
        return min(told)[1] if told else None

    def _gather(self, numbers: Sequence[int]) -> None:
        """Carry what owners hold of the parameters of some buckets to all ranks."""
        for number in numbers:
            bucket = self.buckets[number]
            self._gathering[number] = start_all_gather(bucket.params[bucket.slice], bucket.owners, out=bucket.params)
        if not self.zero.overlap_gather:
            self.wait()

    def _await(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            pending = self._gathering.pop(number, None)
            if pending is not None:
                pending.wait()

    def wait(self) -> None:
        """All parameters are there: before anyone reads them by another way than a module's forward."""
        self._await(list(self._gathering))

    def owned(self) -> Iterator[Owned]:
        """All state that this rank owns, in one fixed order, as writable views that loading fills."""
        for bucket in self.buckets:
            yield from bucket.owned()

    @torch.no_grad()
    def publish(self) -> None:
        """Carry the master copies, as loading left them, into the parameters of all ranks."""
        self.wait()
        for bucket in self.buckets:
            bucket.publish()
        self._gather(range(len(self.buckets)))
        self.wait()

    def bytes(self) -> dict[str, int]:
        """Bytes on this rank by class: parameters, gradients (full ones at stages 0 and 1, the slice at 2), state.

        A master copy in the dtype of the parameters is their own memory and counts there.
        """
        held = [b.share if self.zero.stage == 2 else b.params.numel() for b in self.trained]
        return {
            "parameters": sum(b.params.nbytes for b in self.buckets),
            "gradients": sum(n * b.weight.itemsize for n, b in zip(held, self.trained, strict=True))
            + self.reducer.bytes_beside,
            "master": sum(b.weight.nbytes for b in self.buckets if b.weight.dtype != b.params.dtype),
            "moments": sum(
                data.nbytes for b in self.buckets for kind, data in b.slices.items() if kind != "weight"
            ),
        }
