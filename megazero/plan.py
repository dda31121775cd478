"""A layout on paper: coordinates, groups, layers per stage and parameters per rank, without a process or a weight.

Stages are built on torch's meta device, so the figures come from the same declarations that a run uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .machine import Pipelining
from .parallel.groups import mesh_on_paper
from .parallel.params import ParamInfo, collect
from .parallel.topology import Coord, Topology
from .pipe.split import Split
from .pipe.stage import LayerSpec, Recompute, build_stages, cut_layers

SHOWN_RANKS = 64              # more ranks than this are printed as their first and last


@dataclass(frozen=True)
class StagePlan:
    """One pipeline rank on paper."""

    layers: tuple[str, ...]
    parameters: int             # that each of its ranks holds, padding included
    infos: tuple[ParamInfo, ...]    # of the whole model that this stage trains: a tied weight once

    @property
    def recorded(self) -> int:
        """Elements of the whole model that this stage trains: no padding, a tied weight once."""
        return sum(info.spec.numel for info in self.infos)


def plan_stages(layers: Sequence[LayerSpec], topology: Topology, how: Pipelining = Pipelining()) -> list[StagePlan]:
    """What each pipeline rank of a layout holds. Raises ValueError where an axis cannot cut the model.

    A split by measured cost is shown as an even one: nothing is measured on paper.
    """
    split = how.split if how.split.weighs != "seconds" else Split()
    cut = cut_layers(layers, how.homes(topology.pipeline), split)
    plans, seen = [], set()
    with torch.device("meta"):
        for stage in range(topology.pipeline):
            mesh = mesh_on_paper(topology, topology.rank(Coord(stage, 0, 0)))
            named = [n for s in build_stages(layers, mesh, cut, Recompute()).values() for n in s.named_layers()]
            infos = collect(named)
            fresh = tuple(i for i in infos if i.name not in seen and i.movement is None)
            seen |= {i.name for i in fresh}
            plans.append(StagePlan(tuple(name for name, _ in named), sum(i.tensor.numel() for i in infos), fresh))
    return plans


def describe_layout(layers: Sequence[LayerSpec], topology: Topology, how: Pipelining = Pipelining()) -> str:
    """What --print-layout prints."""
    plans = plan_stages(layers, topology, how)
    total = sum(p.recorded for p in plans)
    lines = [
        f"world {topology.world}: tensor {topology.tensor} x pipeline {topology.pipeline} x data {topology.data}"
        f" (expert {topology.expert}), schedule {how.schedule}, stages per rank {how.chunks}",
        f"parameters {total:,}",
        "",
        *_table(
            ("pipeline", "layers", "parameters per rank"),
            [(str(s), _span(p.layers), f"{p.parameters:,}") for s, p in enumerate(plans)],
        ),
        "",
        *_table(("layers", "parameters of each", "on a rank", "experts of each"), _layer_rows(plans, topology)),
        "",
        *_table(("rank", "pipeline", "data", "tensor", "parameters"), _rank_rows(plans, topology)),
        "",
        "groups",
    ]
    few = [f"{axis}.{degree}" for degree in topology.degrees for axis in ("expert", "expert_data")]
    expert = ("expert", "expert_data", *few) if topology.expert > 1 else ()
    for axis in ("tensor", "pipeline", "data", "tied_data", *expert):
        lines.append(f"  {axis:9} {_groups(topology, axis)}")
    return "\n".join(lines)


def _layer_rows(plans: Sequence[StagePlan], topology: Topology) -> list[tuple[str, ...]]:
    """Layers that are alike in one row, in the order of the model. A tied weight counts where it comes first."""
    layers: dict[str, list[ParamInfo]] = {}
    for info in (info for plan in plans for info in plan.infos):
        names = [name for plan in plans for name in plan.layers if info.name.startswith(f"{name}.")]
        layers.setdefault(names[0], []).append(info)
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, infos in layers.items():
        experts = {
            f"{i.spec.shape[0]} over {topology.size(i.spec.cut[0])} ranks"
            for i in infos if i.spec.cut and (i.spec.cut[0] or "").startswith("expert")
        }
        figures = (sum(i.spec.numel for i in infos), sum(i.tensor.numel() for i in infos))
        rows.setdefault((*(f"{n:,}" for n in figures), *experts), []).append(name)
    return [(_numbers(names), *row, *("",) * (3 - len(row))) for row, names in rows.items()]


def _numbers(names: Sequence[str]) -> str:
    """layers.1,3,5 where all have numbers; of many as layers.1,3,..,95."""
    numbers = [name.removeprefix("layers.") for name in names]
    if not all(map(str.isdecimal, numbers)):
        return " ".join(names)
    shown = numbers if len(numbers) <= 12 else (*numbers[:2], "..", numbers[-1])
    return f"layers.{','.join(shown)}"


def _rank_rows(plans: Sequence[StagePlan], topology: Topology) -> list[tuple[str, ...]]:
    rows = []
    for rank in _some(topology.world):
        at = topology.coord(rank)
        figures = (rank, at.pipeline, at.data, at.tensor)
        rows.append((*map(str, figures), f"{plans[at.pipeline].parameters:,}"))
    if topology.world > SHOWN_RANKS:
        rows.insert(SHOWN_RANKS // 2, ("...",) * 5)
    return rows


def _some(count: int) -> list[int]:
    """All numbers below `count`, or its first and last ones."""
    half = SHOWN_RANKS // 2
    return list(range(count)) if count <= SHOWN_RANKS else [*range(half), *range(count - half, count)]


def _groups(topology: Topology, axis: str) -> str:
    """The groups of an axis: all in a small world, else the first and how many there are."""
    first = topology.ranks_along(axis, 0)
    if topology.world > SHOWN_RANKS:
        return f"{topology.world // len(first)} of {len(first)} ranks, the first {_ranks(first)}"
    return " ".join(_ranks(g) for g in topology.groups(axis))


def _ranks(ranks: Sequence[int]) -> str:
    """{0,2,4,6}; a long one as {0,2,..,1022}."""
    return "{" + ",".join(map(str, ranks if len(ranks) <= 16 else (*ranks[:2], "..", ranks[-1]))) + "}"


def _span(names: Sequence[str]) -> str:
    """embedding layers.0-1 layers.4-5 final_norm head."""
    out: list[str] = []
    runs: list[list[int]] = []
    for name in names:
        number = name.removeprefix("layers.")
        if number == name:
            out.append(name)
            runs.append([])
        elif runs and runs[-1] and runs[-1][-1] == int(number) - 1:
            runs[-1].append(int(number))
            out[-1] = f"layers.{runs[-1][0]}-{number}"
        else:
            out.append(name)
            runs.append([int(number)])
    return " ".join(out)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]
