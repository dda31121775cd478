"""Buckets: parameters that are treated alike lie in one flat buffer, their gradients in another.

The parameters and their gradients are views of the flat buffers, so a backward adds straight into what is reduced.
A rank owns one slice of each bucket and keeps its master copy and the optimizer's state there, in fp32 (or fp64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from .groups import Group, Mesh
from .params import ParamInfo
from .shard import ShardSpec, is_cut_by_tensor, is_recorded

ADAM_KINDS = ("weight", "exp_avg", "exp_avg_sq")     # what an owner keeps of each element: the master copy and moments
ALIGN = 16              # elements: a slice of fp32 begins at a multiple of 64 bytes
BUCKET_SIZE = 40_000_000


@dataclass(frozen=True)
class Owned:
    """A flat range [start, stop) of a parameter's local shard that this rank owns; `data` is a view, 1-D."""

    info: ParamInfo
    kind: str
    start: int
    stop: int
    data: Tensor


def adam_kinds(info: ParamInfo) -> tuple[str, ...]:
    """What Adam's owner keeps, whatever the parameter."""
    return ADAM_KINDS


@dataclass(frozen=True)
class Bucketing:
    """How parameters are put into buckets.

    kinds   of state that an owner keeps of each element of a parameter, the master copy "weight" first
    size    elements after which a bucket is closed
    stage   of ZeRO: 0 leaves everything on every data rank, 1 cuts the state, 2 also the gradients between backwards
    homes   the pipeline stages of this rank that use a parameter, by its name
    """

    kinds: Callable[[ParamInfo], tuple[str, ...]] = adam_kinds
    size: int = BUCKET_SIZE
    stage: int = 1
    homes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Bucket:
    """One flat group of parameters on this rank. Sizes are in elements."""

    infos: list[ParamInfo]
    starts: list[int]           # where each parameter begins in the flat buffers
    axis: str                   # the data axis over which gradients are summed
    copies: Group               # the ranks along it
    owners: Group               # those among which the bucket is cut: `copies`, or this rank alone at stage 0
    grad_sum: list[Group]       # where gradients are partial sums beside the data axis
    cut: list[Group]            # among whose ranks each parameter is cut, beside the owners
    homes: tuple[int, ...]      # pipeline stages of this rank that use it
    recorded: bool              # whether this rank's slice counts in the norm and is saved
    decay: bool
    params: Tensor              # flat, model dtype
    slices: dict[str, Tensor]   # this rank's slice of each kind; "weight" is a part of `params` where dtypes agree
    grads: Tensor | None        # flat, master dtype; None while stage 2 holds no full gradient

    @property
    def weight(self) -> Tensor:
        """The master copy of this rank's slice."""
        return self.slices["weight"]

    @property
    def share(self) -> int:
        """Elements that each owner holds."""
        return self.weight.numel()

    @property
    def slice(self) -> slice:
        return slice(self.owners.index * self.share, (self.owners.index + 1) * self.share)

    @property
    def copy(self) -> Tensor | None:
        """What the model computes with of this rank's slice, [share]; None where that is the master copy itself."""
        return None if self.weight.dtype == self.params.dtype else self.params[self.slice]

    def publish(self) -> None:
        """Round the master copy into this rank's slice of the parameters."""
        if self.copy is not None:
            self.copy.copy_(self.weight)

    def state(self, kind: str) -> Tensor:
        """This rank's slice of one kind, [share]."""
        return self.slices[kind]

    @property
    def is_trained(self) -> bool:
        """Whether its parameters have gradients; else they move in a way of their own."""
        return self.infos[0].movement is None

    def gradient(self, number: int) -> Tensor:
        """The flat gradient of parameter `number`, in its shape; the buffer is made where there is none."""
        if self.grads is None:
            self.grads = torch.zeros(self.params.numel(), dtype=self.weight.dtype, device=self.params.device)
        return self.view(number, self.grads)

    def view(self, number: int, flat: Tensor) -> Tensor:
        """Parameter `number` in a buffer of the size of the whole bucket, in its shape."""
        start, tensor = self.starts[number], self.infos[number].tensor
        return flat[start : start + tensor.numel()].view(tensor.shape)

    def check_views(self) -> None:
        """Autograd must have added into the flat gradients: a replaced `.grad` would be lost without a word."""
        assert self.grads is not None
        for info, start in zip(self.infos, self.starts, strict=True):
            grad = info.tensor.grad
            expected = self.grads.data_ptr() + start * self.grads.element_size()
            assert grad is not None and grad.data_ptr() == expected, f"{info.name}: its gradient left the flat buffer"

    def span(self, number: int, owner: int | None = None) -> range:
        """The flat elements of parameter `number` that an owner holds (None: this rank); it may be empty."""
        low = (self.owners.index if owner is None else owner) * self.share - self.starts[number]
        numel = self.infos[number].tensor.numel()
        return range(min(max(low, 0), numel), max(min(low + self.share, numel), 0))

    def part(self, number: int, flat: Tensor) -> Tensor:
        """What stands in `flat`, of the size of this rank's slice, of parameter `number`: a view, 1-D."""
        span = self.span(number)
        at = self.starts[number] + span.start - self.slice.start
        return flat[at : at + len(span)] if span else flat[:0]

    def owned(self) -> Iterator[Owned]:
        """What this rank owns of each parameter, as writable views of each kind."""
        for number, info in enumerate(self.infos):
            span = self.span(number)
            for kind, data in self.slices.items() if span else ():
                yield Owned(info, kind, span.start, span.stop, self.part(number, data))


def make_buckets(
    infos: Sequence[ParamInfo], mesh: Mesh, dtype: torch.dtype, how: Bucketing | None = None
) -> list[Bucket]:
    """Move the parameters into buckets, in a fixed order that every owner composes alike.

    `dtype` is that of the model; the parameters come in the master dtype and with their initial values, which become
    the master copy before they are rounded. What a backward reaches first stands first; a parameter that several
    holders share comes last, but for those that no backward reaches.
    """
    how = how or Bucketing()
    alike: dict[tuple, list[ParamInfo]] = {}
    # The first and the last rank come upon what they share in other orders.
    for info in sorted(infos, key=lambda info: info.name if info.spec.tied else ""):
        spec, homes = info.spec, how.homes.get(info.name, ())
        is_cut = (is_cut_by_tensor(spec, mesh.topology), *_axes(spec))
        is_shared = spec.data_axis == "tied_data" or len(homes) > 1
        latest_first = tuple(-home for home in homes)
        key = (
            info.movement is not None, is_shared, latest_first, spec.data_axis, spec.grad_sum, is_cut, info.decay,
            spec.table, how.kinds(info),
        )
        alike.setdefault(key, []).append(info)
    return [_make_bucket(part, mesh, dtype, how) for key in sorted(alike) for part in _cut(alike[key], how.size)]


def _axes(spec: ShardSpec) -> list[str]:
    """The axes that cut a parameter."""
    return sorted({axis for axis in spec.cut if axis is not None})


def _cut(infos: list[ParamInfo], size: int) -> list[list[ParamInfo]]:
    """Parts of at least `size` elements, from the end of the model, where a backward begins."""
    parts: list[list[ParamInfo]] = []
    held = size
    for info in reversed(infos):
        if held >= size:
            parts.append([])
            held = 0
        parts[-1].insert(0, info)
        held += info.tensor.numel()
    return parts


def _make_bucket(infos: list[ParamInfo], mesh: Mesh, dtype: torch.dtype, how: Bucketing) -> Bucket:
    spec, first = infos[0].spec, infos[0].tensor
    copies = mesh.along(spec.data_axis)
    owners = copies if how.stage else replace(copies, ranks=(mesh.rank,), index=0, handle=None)
    starts, end = [], 0
    for info in infos:
        starts.append(end)
        end += info.tensor.numel()
    unit = owners.size * ALIGN
    size = -(-end // unit) * unit
    flat = torch.zeros(size, dtype=first.dtype, device=first.device)
    for info, start in zip(infos, starts, strict=True):
        flat[start : start + info.tensor.numel()] = info.tensor.data.flatten()
    mine = slice(owners.index * (size // owners.size), (owners.index + 1) * (size // owners.size))
    is_trained = infos[0].movement is None
    params = flat.to(dtype) if is_trained else flat
    slices = {"weight": flat[mine] if params is flat else flat[mine].clone()}
    kinds = how.kinds(infos[0]) if is_trained else ()
    slices |= {kind: torch.zeros_like(slices["weight"]) for kind in kinds if kind != "weight"}
    recorded = is_recorded(spec, mesh.topology, mesh.rank) and (how.stage > 0 or copies.index == 0)
    bucket = Bucket(
        infos, starts, spec.data_axis, copies, owners, [mesh.along(axis) for axis in spec.grad_sum],
        [mesh.along(axis) for axis in _axes(spec)], how.homes.get(infos[0].name, ()), recorded, infos[0].decay,
        params, slices, None,
    )
    for number, info in enumerate(infos):
        info.tensor.data = params[starts[number] : starts[number] + info.tensor.numel()].view(info.tensor.shape)
        if is_trained:
            info.tensor.grad_dtype = flat.dtype
            info.tensor.grad = bucket.gradient(number) if how.stage < 2 else None
    return bucket


def place_of(buckets: Sequence[Bucket]) -> dict[nn.Parameter, tuple[Bucket, int]]:
    """Each parameter's bucket and its number in there."""
    return {info.tensor: (bucket, number) for bucket in buckets for number, info in enumerate(bucket.infos)}
