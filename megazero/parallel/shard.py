"""ShardSpec: what a parameter is in the whole model, and which part of it one rank holds.

A spec names the global size of each dim and the axis of the topology that cuts it. All that is known of a
parameter's place (local shape, who holds a copy, what ZeRO owns, what a checkpoint writes) is read off the
spec and the topology. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from .topology import Topology


class Box(NamedTuple):
    """An axis-aligned block of a tensor: where it starts and how far it goes, dim by dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shift(self, by: tuple[int, ...]) -> Box:
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)

    def slices(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Index of this block in an array whose first element stands at `origin`."""
        origin = origin or (0,) * len(self.start)
        return tuple(slice(s - o, s - o + n) for s, n, o in zip(self.start, self.shape, origin, strict=True))

    def meet(self, other: Box) -> Box | None:
        """The common part of two blocks, or None."""
        low = tuple(map(max, self.start, other.start))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        shape = tuple(min(a + m, b + n) - at for at, (a, m, b, n) in zip(low, ends, strict=True))
        return Box(low, shape) if all(n > 0 for n in shape) else None


@dataclass(frozen=True)
class ShardSpec:
    """Where one parameter lies.

    shape     global sizes, one per logical dim, without padding
    cut       for each dim the axis that cuts it, or None
    grad_sum  axes over which the parameter is whole but its gradient is a partial sum (norms under a cut sequence)
    tied      the first and the last stage hold this one parameter under one global name
    padded    size of dim 0 with padding rows at its end (a vocabulary that the tensor size does not divide)
    table     its rows belong to ids (tokens, positions) one by one: embeddings and the head, no hidden matrix
    """

    shape: tuple[int, ...]
    cut: tuple[str | None, ...]
    grad_sum: tuple[str, ...] = ()
    tied: bool = False
    padded: int | None = None
    table: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.cut):
            raise ValueError(f"a parameter of {len(self.shape)} dims was given {len(self.cut)} cuts")
        if self.padded is not None and self.padded < self.shape[0]:
            raise ValueError(f"dim 0 padded to {self.padded} is smaller than its {self.shape[0]} rows")

    @property
    def numel(self) -> int:
        """Elements of the whole parameter, without padding."""
        return prod(self.shape)

    @property
    def expert_axis(self) -> str | None:
        """The axis over which its experts are dealt out, such as "expert" or "expert.2"; None: it has none."""
        return next((axis for axis in self.cut if axis is not None and axis.partition(".")[0] == "expert"), None)

    @property
    def is_expert(self) -> bool:
        return self.expert_axis is not None

    @property
    def data_axis(self) -> str:
        """The axis over which copies of this parameter sum their gradients, and over which ZeRO cuts it."""
        if self.expert_axis is not None:
            return self.expert_axis.replace("expert", "expert_data")
        return "tied_data" if self.tied else "data"

    def _sizes(self) -> tuple[int, ...]:
        return self.shape if self.padded is None else (self.padded, *self.shape[1:])

    def local_shape(self, topology: Topology) -> tuple[int, ...]:
        """Shape of one rank's shard, padding rows included. Raises ValueError where an axis does not divide its dim."""
        out = []
        for n, axis in zip(self._sizes(), self.cut, strict=True):
            ways = 1 if axis is None else topology.size(axis)
            if n % ways:
                raise ValueError(f"a dim of {n} cannot be cut {ways} ways along the {axis} axis")
            out.append(n // ways)
        return tuple(out)

    def box(self, topology: Topology, rank: int) -> Box:
        """The real elements that `rank` holds: a prefix of its flat shard, since padding ends dim 0."""
        local = self.local_shape(topology)
        start = tuple(
            0 if axis is None else topology.index(axis, rank) * n for n, axis in zip(local, self.cut, strict=True)
        )
        shape = tuple(max(0, min(n, total - at)) for n, total, at in zip(local, self.shape, start, strict=True))
        return Box(start, shape)


def flat_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that flat elements [start, stop) of a row-major tensor cover, in order: at most 2 * ndim - 1."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    head = start - first * row                       # where the range begins in its first row
    tail = stop - last * row                         # where it ends in its last row
    if first == last and tail - head < row:
        yield from _in_row(shape, first, head, tail)
        return
    if head:
        yield from _in_row(shape, first, head, row)
        first += 1
    whole = last + (tail == row) - first
    if whole > 0:
        yield Box((first,) + (0,) * (len(shape) - 1), (whole,) + shape[1:])
    if tail < row:
        yield from _in_row(shape, last, 0, tail)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_to_boxes(shape[1:], start, stop):
        yield Box((row, *box.start), (1, *box.shape))


def owned_boxes(spec: ShardSpec, topology: Topology, rank: int, start: int, stop: int) -> list[Box]:
    """The global boxes behind flat elements [start, stop) of this rank's shard; padding has none."""
    mine = spec.box(topology, rank)
    return [b.shift(mine.start) for b in flat_to_boxes(mine.shape, start, min(stop, mine.numel))]


def is_recorded(spec: ShardSpec, topology: Topology, rank: int) -> bool:
    """Whether this rank's copy counts (norm, count, saving): of the ranks that own an element one says yes."""
    return is_cut_by_tensor(spec, topology) or topology.index("tensor", rank) == 0


def is_cut_by_tensor(spec: ShardSpec, topology: Topology) -> bool:
    """Whether the ranks of a tensor group own different elements: where experts are cut over data x tensor, they do."""
    return "tensor" in spec.cut or (spec.is_expert and ("expert_tensor" in spec.cut or topology.expert_tensor == 1))
