"""Buckets: parameters that are treated alike lie in one flat buffer, their gradients in another.

The parameters and their gradients are views of the flat buffers, so autograd adds straight into what is
reduced. A rank owns one slice of each bucket and keeps its master copy and moments there, in fp32 (or fp64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .groups import Group, Mesh
from .params import ParamInfo
from .shard import is_cut_by_tensor, is_recorded

KINDS = ("weight", "exp_avg", "exp_avg_sq")          # what an owner keeps of each element
ALIGN = 16              # elements: a slice begins at a multiple of 64 bytes


@dataclass(frozen=True)
class Owned:
    """A flat range [start, stop) of a parameter's local shard that this rank owns; `data` is a view, 1-D."""

    info: ParamInfo
    kind: str           # one of KINDS
    start: int
    stop: int
    data: Tensor


@dataclass
class Bucket:
    """One flat group of parameters on this rank. Sizes are in elements."""

    infos: list[ParamInfo]
    starts: list[int]           # where each parameter begins in the flat buffers
    axis: str                   # the data axis over which the bucket is cut
    owners: Group
    grad_sum: list[Group]       # where gradients are partial sums beside the data axis
    recorded: bool              # whether this rank's elements count in the norm and are saved
    decay: bool
    params: Tensor              # flat, model dtype
    grads: Tensor               # flat, master dtype
    weight: Tensor              # this rank's slice: the master copy
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def share(self) -> int:
        """Elements that each owner holds."""
        return self.weight.numel()

    @property
    def slice(self) -> slice:
        return slice(self.owners.index * self.share, (self.owners.index + 1) * self.share)

    def state(self, kind: str) -> Tensor:
        """This rank's slice of one of KINDS, [share]."""
        return {"weight": self.weight, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}[kind]

    def check_views(self) -> None:
        """Autograd must have added into the flat gradients: a replaced `.grad` would be lost without a word."""
        for info, start in zip(self.infos, self.starts, strict=True):
            grad = info.tensor.grad
            expected = self.grads.data_ptr() + start * self.grads.element_size()
            assert grad is not None and grad.data_ptr() == expected, f"{info.name}: its gradient left the flat buffer"

    def owned(self) -> Iterator[Owned]:
        """What this rank owns of each parameter, as writable views of weight, exp_avg and exp_avg_sq."""
        mine = self.slice
        for info, start in zip(self.infos, self.starts, strict=True):
            low, high = max(start, mine.start), min(start + info.tensor.numel(), mine.stop)
            if low < high:
                for kind in KINDS:
                    data = self.state(kind)[low - mine.start : high - mine.start]
                    yield Owned(info, kind, low - start, high - start, data)


def make_buckets(infos: list[ParamInfo], mesh: Mesh, dtype: torch.dtype) -> list[Bucket]:
    """Move the parameters into buckets, in a fixed order that every owner composes alike.

    `dtype` is that of the model; the parameters come in the master dtype and with their initial values, which
    become the master copy before they are rounded. A tied parameter has a bucket of its own, the last.
    """
    alike: dict[tuple, list[ParamInfo]] = {}
    for info in infos:
        spec = info.spec
        is_cut = is_cut_by_tensor(spec, mesh.topology)
        key = (spec.data_axis == "tied_data", spec.data_axis, spec.grad_sum, is_cut, info.decay)
        alike.setdefault(key, []).append(info)
    return [_make_bucket(alike[key], mesh, dtype) for key in sorted(alike)]


def _make_bucket(infos: list[ParamInfo], mesh: Mesh, dtype: torch.dtype) -> Bucket:
    spec, first = infos[0].spec, infos[0].tensor
    owners = mesh.along(spec.data_axis)
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
    weight = flat[mine].clone()
    params, grads = flat.to(dtype), torch.zeros_like(flat)
    for info, start in zip(infos, starts, strict=True):
        view, shape = slice(start, start + info.tensor.numel()), info.tensor.shape
        info.tensor.data = params[view].view(shape)
        info.tensor.grad_dtype = grads.dtype
        info.tensor.grad = grads[view].view(shape)
    return Bucket(
        infos, starts, spec.data_axis, owners, [mesh.along(axis) for axis in spec.grad_sum],
        is_recorded(spec, mesh.topology, mesh.rank), infos[0].decay,
        params, grads, weight, torch.zeros_like(weight), torch.zeros_like(weight),
    )
