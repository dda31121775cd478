"""Topology: how the ranks of the world lie on the axes. Arithmetic only; no torch, no process group.

Two views of the same ranks. Dense: (pipeline, data, tensor), tensor fastest, so that the ranks of one
tensor group are neighbours on a node. Expert: (pipeline, expert_data, expert, expert_tensor), where
expert_tensor is the tensor size (experts live inside the data axis) or 1 (experts are cut over data x tensor).
A layer with few experts may cut them `n` ways only, a divisor of the expert size: along the axis "expert.n", whose
replicas lie along "expert_data.n".
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

AXES = (
    "tensor", "pipeline", "data", "expert_tensor", "expert", "expert_data", "model", "stage", "ends", "tied_data",
    "world",
)


class Coord(NamedTuple):
    """The place of a rank in the dense view."""

    pipeline: int
    data: int
    tensor: int


class _Factor(NamedTuple):
    """One digit of a rank's number: it takes `size` values, `stride` ranks apart."""

    stride: int
    size: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes. `expert` must divide `data` (times `tensor`, where `expert_tensor` is 1).

    degrees   in how many parts layers cut their experts that have fewer than `expert` parts: divisors of it
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int | None = None      # None: as large as tensor
    degrees: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = {"pipeline": self.pipeline, "data": self.data, "tensor": self.tensor, "expert": self.expert}
        for axis, size in sizes.items():
            if size < 1:
                raise ValueError(f"the {axis} axis has size {size}; it must be at least 1")
        if self.expert_tensor not in (None, 1, self.tensor):
            raise ValueError(f"expert_tensor ({self.expert_tensor}) must be 1 or the tensor size ({self.tensor})")
        if self._expert_ranks % self.expert:
            raise ValueError(f"expert ({self.expert}) must divide the {self._expert_ranks} ranks that share experts")
        for degree in self.degrees:
            if degree < 1 or self.expert % degree:
                raise ValueError(f"a layer cannot cut its experts {degree} ways where expert is {self.expert}")

    @property
    def _expert_ranks(self) -> int:
        """Ranks of a stage over which experts may be cut."""
        return self.data * self.tensor // (self.expert_tensor or self.tensor)

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

    def expert_axis(self, degree: int) -> str:
        """The axis along which a layer cuts its experts `degree` ways."""
        return "expert" if degree == self.expert else f"expert.{degree}"

    def _factors(self, axis: str) -> tuple[_Factor, ...]:
        """The digits that move along `axis`, slowest first."""
        axis, _, of = axis.partition(".")
        degree = int(of or self.expert)
        stage = self.data * self.tensor
        expert_tensor = self.expert_tensor or self.tensor
        tensor, data, pipeline = _Factor(1, self.tensor), _Factor(self.tensor, self.data), _Factor(stage, self.pipeline)
        ends = _Factor(stage * max(self.pipeline - 1, 1), min(self.pipeline, 2))
        return {
            "tensor": (tensor,),
            "data": (data,),
            "pipeline": (pipeline,),
            "expert_tensor": (_Factor(1, expert_tensor),),
            "expert": (_Factor(expert_tensor, degree),),
            "expert_data": (_Factor(expert_tensor * degree, self._expert_ranks // degree),),
            "model": (pipeline, tensor),
            "stage": (data, tensor),
            "ends": (ends,),
            "tied_data": (ends, data),
            "world": (pipeline, data, tensor),
        }[axis]

    def _is_between(self, rank: int) -> bool:
        """Whether `rank` is on neither the first nor the last stage."""
        return 0 < self.coord(rank).pipeline < self.pipeline - 1

    def size(self, axis: str) -> int:
        """How many ranks lie along `axis` (for `ends` and `tied_data`: as the first and the last stage see it)."""
        return prod(f.size for f in self._factors(axis))

    def coord(self, rank: int) -> Coord:
        rest, tensor = divmod(rank, self.tensor)
        return Coord(*divmod(rest, self.data), tensor)

    def rank(self, coord: Coord) -> int:
        return (coord.pipeline * self.data + coord.data) * self.tensor + coord.tensor

    def index(self, axis: str, rank: int) -> int:
        """The place of `rank` along `axis`; 0 for a middle stage along `ends` and `tied_data`."""
        if axis in ("ends", "tied_data") and self._is_between(rank):
            return 0
        at = 0
        for f in self._factors(axis):
            at = at * f.size + rank // f.stride % f.size if f.size > 1 else at
        return at

    def ranks_along(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` alone, in order. A middle stage is alone along the ends."""
        if axis in ("ends", "tied_data") and self._is_between(rank):
            return (rank,)
        factors = [f for f in self._factors(axis) if f.size > 1]
        ranks = [rank - sum(rank // f.stride % f.size * f.stride for f in factors)]
        for f in factors:
            ranks = [r + i * f.stride for r in ranks for i in range(f.size)]
        return tuple(ranks)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The world cut into groups along `axis`; every rank is in one of them. For tests and printing."""
        return sorted({self.ranks_along(axis, r) for r in range(self.world)})
