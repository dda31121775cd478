"""Muon (Jordan et al., 2024): hidden matrices move by their momentum made orthogonal; the rest is Adam's.

A matrix is cut over owners and tensor ranks. For each bucket the pieces travel to the ranks that the matrices are
shared out to, are made orthogonal there, each matrix on one rank, and travel back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from .buckets import Bucket
from .collectives import all_to_all
from .groups import Group
from .params import ParamInfo
from .rules import Adam, scale_
from .shard import ShardSpec

QUINTIC = (3.4445, -4.7750, 2.0315)     # Jordan's coefficients: singular values end between 0.7 and 1.2


@dataclass(frozen=True)
class Muon:
    """momentum = mu * momentum + gradient; update = orthogonal(gradient + mu * momentum), times 0.2 * sqrt(max(rows,
    columns)), so that its elements are as large as Adam's usually are (Liu et al., 2025) and one learning rate and
    weight decay, decoupled, serve all parameters.

    adam    the rule of what is no hidden matrix: embeddings, positions, the head, norms, biases
    steps   of the Newton-Schulz iteration
    narrow  whether that runs in bf16 and not in the dtype of the master copy
    """

    momentum: float = 0.95
    steps: int = 5
    narrow: bool = False
    adam: Adam = Adam()

    def with_momentum(self, momentum: float) -> Muon:
        """Another momentum."""
        return replace(self, momentum=momentum)

    def kinds(self, info: ParamInfo) -> tuple[str, ...]:
        """The momentum of a hidden matrix, the two moments of all else."""
        return ("momentum",) if is_hidden_matrix(info) else self.adam.kinds(info)

    def update(
        self, buckets: Sequence[Bucket], grads: Sequence[Tensor], learning_rate: float, weight_decay: float, step: int,
        factor: Tensor | None = None,
    ) -> None:
        """Bucket by bucket, so that no more than one bucket's matrices are in flight."""
        scale_(grads, factor)
        pairs = list(zip(buckets, grads, strict=True))
        rest = [pair for pair in pairs if "momentum" not in pair[0].slices]
        self.adam.update([b for b, _ in rest], [g for _, g in rest], learning_rate, weight_decay, step)
        load: dict[tuple[int, int], float] = {}
        for bucket, grad in pairs:
            if "momentum" in bucket.slices:
                momentum = bucket.state("momentum")
                momentum.mul_(self.momentum).add_(grad)
                grad.add_(momentum, alpha=self.momentum)
                self._make_orthogonal_(bucket, grad, load)
                if bucket.decay:
                    bucket.weight.mul_(1 - learning_rate * weight_decay)
                bucket.weight.add_(grad, alpha=-learning_rate)
                bucket.publish()

    def _make_orthogonal_(self, bucket: Bucket, flat: Tensor, load: dict[tuple[int, int], float]) -> None:
        """This rank's slice [share] of a bucket of matrices -> the same of the matrices made orthogonal and scaled."""
        numbers, owners = range(len(bucket.infos)), bucket.owners
        expert_axis = bucket.infos[0].spec.expert_axis          # whole matrices lie along it
        tensor = next((group for group in bucket.cut if group.axis != expert_axis), Group("tensor"))
        homes = _share_out(bucket.infos, owners.size, tensor.size, load)
        spans = [[len(bucket.span(number, owner)) for number in numbers] for owner in range(owners.size)]
        over_owners = _Exchange(owners, [owner for owner, _ in homes], spans, flat)
        shards = over_owners.collect([bucket.part(number, flat) for number in numbers])
        here = [number for number in numbers if number in shards]
        sizes = [[shards[number].numel() for number in here]] * tensor.size
        over_tensor = _Exchange(tensor, [homes[number][1] for number in here], sizes, flat)
        wholes = over_tensor.collect([shards[number] for number in here])
        for at, whole in wholes.items():
            info = bucket.infos[here[at]]
            parts = whole.view(tensor.size, *info.tensor.shape)
            dim = next((d for d, axis in enumerate(info.spec.cut) if axis not in (None, expert_axis)), 0)
            done = self._orthogonal(info.spec, torch.cat(list(parts), dim))
            wholes[at] = torch.stack(done.chunk(tensor.size, dim)).flatten()
        shards = dict(zip(here, over_tensor.hand_out(wholes), strict=True))
        for number, piece in enumerate(over_owners.hand_out(shards)):
            bucket.part(number, flat).copy_(piece)

    def _orthogonal(self, spec: ShardSpec, whole: Tensor) -> Tensor:
        """A whole parameter [*spec.shape] -> each of its matrices made orthogonal and scaled, one at a time."""
        order = matrix_dims(spec)
        rows = prod(spec.shape[d] for d in order[1])
        permuted = whole.permute(*order[0], *order[1], -1)
        matrices = permuted.reshape(-1, rows, spec.shape[-1])
        scale = 0.2 * max(rows, spec.shape[-1]) ** 0.5
        for matrix in matrices:
            done = newton_schulz(matrix.bfloat16() if self.narrow else matrix, self.steps)
            matrix.copy_(done).mul_(scale)
        back = [0] * whole.dim()
        for at, d in enumerate((*order[0], *order[1], whole.dim() - 1)):
            back[d] = at
        return matrices.view(permuted.shape).permute(back)


def is_hidden_matrix(info: ParamInfo) -> bool:
    """What Muon is for: decaying weights with outputs and inputs, but for tables of ids."""
    return info.decay and len(info.spec.shape) > 1 and not info.spec.table


def matrix_dims(spec: ShardSpec) -> tuple[list[int], list[int]]:
    """(dims that count matrices, dims that make up the rows) of a parameter whose last dim is its input.

    Rows are the last output dim and any that is cut, but by expert; the others count. So gate and up are two matrices,
    each expert has its own, and a fused qkv (groups, q + 2, head_dim, hidden) makes one of the keys of all groups, one
    of the values, and one of each of the q queries that share them.
    """
    outputs = range(len(spec.shape) - 1)
    rows = [d for d in outputs if d == len(outputs) - 1 or spec.cut[d] not in (None, spec.expert_axis)]
    return [d for d in outputs if d not in rows], rows


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """The nearest matrix with singular values of about 1, by a quintic iteration. [rows, columns] -> the same."""
    a, b, c = QUINTIC
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _share_out(
    infos: Sequence[ParamInfo], owners: int, tensor: int, load: dict[tuple[int, int], float]
) -> list[tuple[int, int]]:
    """The (owner, tensor index) that each matrix goes to: whoever has the least work so far. `load` is added to."""
    homes = []
    workers = [(owner, index) for owner in range(owners) for index in range(tensor)]
    for info in infos:
        home = min(workers, key=lambda worker: (load.get(worker, 0.0), worker))
        load[home] = load.get(home, 0.0) + info.spec.numel
        homes.append(home)
    return homes


class _Exchange:
    """Items that lie in pieces on all members of a group: item i has its home on member `homes[i]`, and member m holds
    `counts[m][i]` elements of it."""

    def __init__(self, group: Group, homes: Sequence[int], counts: Sequence[Sequence[int]], like: Tensor) -> None:
        self.group, self.counts, self.like = group, counts, like
        members = range(group.size)
        self.items = [[i for i, home in enumerate(homes) if home == member] for member in members]   # of each home
        self.sent = [sum(counts[group.index][i] for i in self.items[member]) for member in members]
        self.kept = [sum(counts[member][i] for i in self.items[group.index]) for member in members]

    def collect(self, pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """This rank's piece of each item, flat -> the items at home here, whole, in the order of members."""
        mine = self.items[self.group.index]
        sent = torch.cat([self.like[:0], *(pieces[i] for items in self.items for i in items)])
        got = all_to_all(sent, self.group, self.sent, self.kept)
        parts = iter(got.split([count[i] for count in self.counts for i in mine]))
        held = [[next(parts) for _ in mine] for _ in self.counts]
        return {i: torch.cat([own[at] for own in held]) for at, i in enumerate(mine)}

    def hand_out(self, wholes: dict[int, Tensor]) -> list[Tensor]:
        """The way back: this rank's piece of each item, in order."""
        order = [i for items in self.items for i in items]
        split = [wholes[i].split([count[i] for count in self.counts]) for i in self.items[self.group.index]]
        sent = [own[member] for member in range(self.group.size) for own in split]
        got = all_to_all(torch.cat([self.like[:0], *sent]), self.group, self.kept, self.sent)
        parts = got.split([self.counts[self.group.index][i] for i in order])
        return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]
