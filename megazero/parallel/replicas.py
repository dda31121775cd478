"""Whether what several ranks hold alike is alike in every bit, by a fingerprint of each parameter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .collectives import all_reduce, gather_objects
from .groups import Group, Mesh
from .shard import is_cut_by_tensor
from .zero import ZeroOptimizer

ROW = 256               # elements whose sum is weighted by its place
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}     # a type of so many bytes


def fingerprint(x: Tensor) -> Tensor:
    """Of the bits of a contiguous tensor: [2] int64, the sum, and that of rows times odd numbers, both modulo 2^64. Any
    single element that differs changes both, and rows that have changed places the second."""
    bits = x.reshape(-1).view(WHOLE[x.element_size()])
    rows = bits[: len(bits) // ROW * ROW].view(-1, ROW).sum(1, dtype=torch.int64)
    rest = bits[len(rows) * ROW :].sum(dtype=torch.int64)
    weights = torch.arange(1, 2 * len(rows) + 2, 2, device=x.device)
    return torch.stack((rows.sum() + rest, (rows * weights[:-1]).sum() + rest * weights[-1]))


@dataclass
class _Held:
    """What the ranks of a group hold alike."""

    group: Group
    names: list[str] = field(default_factory=list)
    prints: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def first_difference(optimizer: ZeroOptimizer, mesh: Mesh) -> str | None:
    """The first parameter, or state of one, that two ranks should hold alike and do not, with the ranks that differ
    from most; None: all are alike in every bit. Called by all ranks, which all get the same answer."""
    optimizer.wait()
    held: dict[str, _Held] = {}
    for bucket in optimizer.buckets:
        alike = {"": bucket.params}
        if bucket.owners.size == 1:                         # at stage 0 of ZeRO the state is everywhere as well
            alike |= {f" ({kind})": data for kind, data in bucket.slices.items()}
        spread = [bucket.copies]
        if not is_cut_by_tensor(bucket.infos[0].spec, mesh.topology):
            spread.append(mesh.tensor)
        for kind, flat in alike.items():
            for number, info in enumerate(bucket.infos):
                own = fingerprint(bucket.view(number, flat))
                for group in (group for group in spread if group.size > 1):
                    here = held.setdefault(group.axis, _Held(group))
                    here.names.append(info.name + kind)
                    here.prints.append(own)
    found = [_differing(held[axis]) for axis in sorted(held)]       # all of them, for others may differ in one alone
    differing = next((text for text in found if text is not None), None)
    worst = all_reduce(torch.tensor(float(differing is not None), device=mesh.device), mesh.world, "max")
    if not worst.item():
        return None
    return next(text for text in gather_objects(differing, mesh.world) if text is not None)


def _differing(held: _Held) -> str | None:
    """The first name whose fingerprint is not the same on all ranks of a group, and the ranks that are alone with
    theirs."""
    own, group = torch.stack(held.prints), held.group
    high, low = all_reduce(own.clone(), group, "max"), all_reduce(own.clone(), group, "min")
    unlike = (high != low).any(1).nonzero()
    if not len(unlike):
        return None
    at = int(unlike[0])
    prints = gather_objects(tuple(own[at].tolist()), group)
    usual = Counter(prints).most_common(1)[0][0]
    odd = [str(rank) for rank, found in zip(group.ranks, prints, strict=True) if found != usual]
    same = [str(rank) for rank, found in zip(group.ranks, prints, strict=True) if found == usual]
    return f"{held.names[at]} on rank {', '.join(odd)} is not as on rank {', '.join(same)}"
