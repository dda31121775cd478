"""A layout on paper: coordinates, groups, layers per stage, parameters and memory per rank, without a process.

Stages are built on torch's meta device, so parameters come from the same declarations that a run uses; bytes, bubble
and operations from the planner's arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .machine import Pipelining
from .parallel.groups import mesh_on_paper
from .parallel.params import ParamInfo, collect
from .parallel.topology import Coord, Topology
from .pipe.split import Split
from .pipe.stage import LayerSpec, Recompute, build_stages, cut_layers
from .planner.footprint import footprints
from .planner.layout import Layout
from .planner.step import counted_bubble, step_flops

SHOWN_RANKS = 64              # more ranks than this are printed as their first and last
RANK = ("rank", "pipeline", "data", "tensor", "parameters")


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


def describe_layout(
    layers: Sequence[LayerSpec], topology: Topology, layout: Layout, how: Pipelining = Pipelining(), *,
    memory_gb: float | None = None, as_json: bool = False,
) -> str:
    """What --print-layout prints: tables, or a JSON object of the same.

    topology, layout   the ranks and their axes; the same with the model and its batch
    memory_gb          of a device: then it is said whether the fullest rank fits
    """
    plans = plan_stages(layers, topology, how)
    held, (needed, spent) = footprints(layout), step_flops(layout)
    fullest = max(held, key=lambda rank: rank.total)
    report = {
        "world": topology.world,
        "axes": {axis: topology.size(axis) for axis in ("tensor", "pipeline", "data", "expert", "expert_tensor")},
        "schedule": how.schedule, "stages_per_rank": how.chunks, "recompute": layout.recompute,
        "micro_batch": layout.micro_batch, "micro_batches": layout.micro_batches, "global_batch": layout.batch,
        "zero_stage": layout.zero, "parameters": sum(p.recorded for p in plans),
        "pipeline": [
            {"layers": list(plan.layers), "parameters": plan.parameters, "bytes": rank.classes}
            for plan, rank in zip(plans, held, strict=True)
        ],
        "layers": [
            dict(zip(("layers", "parameters_of_each", "on_a_rank", "experts_of_each"), row, strict=True))
            for row in _layer_rows(plans, topology)
        ],
        "ranks": [dict(zip(RANK, row, strict=True)) for row in _rank_rows(plans, topology)],
        "groups": {axis: _group(topology, axis) for axis in _axes(topology)},
        "bubble": counted_bubble(layout), "flops_of_a_step": needed, "flops_with_recomputation": spent,
        "published_states": [rank.published for rank in held] if layout.optimizer == "adam" else None,
        "device_memory_gb": memory_gb, "fits": memory_gb is None or fullest.total <= memory_gb * 1e9,
    }
    return json.dumps(report, indent=2) if as_json else "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> list[str]:
    """The report for people."""
    axes = report["axes"]
    return [
        f"world {report['world']}: tensor {axes['tensor']} x pipeline {axes['pipeline']} x data {axes['data']}"
        f" (expert {axes['expert']}), schedule {report['schedule']}, stages per rank {report['stages_per_rank']}",
        f"parameters {report['parameters']:,}",
        "",
        *_table(
            ("pipeline", "layers", "parameters per rank"),
            [(str(s), _span(of["layers"]), f"{of['parameters']:,}") for s, of in enumerate(report["pipeline"])],
        ),
        "",
        *_table(
            ("layers", "parameters of each", "on a rank", "experts of each"),
            [tuple(_shown(cell) for cell in row.values()) for row in report["layers"]],
        ),
        "",
        *_memory_lines(report),
        "",
        *_table(RANK, [tuple(_shown(cell) for cell in row.values()) for row in _with_gap(report["ranks"])]),
        "",
        "groups",
        *(f"  {axis:9} {_groups(group)}" for axis, group in report["groups"].items()),
    ]


def _memory_lines(report: Mapping[str, Any]) -> list[str]:
    """Memory per rank, bubble and operations."""
    stages = [stage["bytes"] for stage in report["pipeline"]]
    fullest = max(stage["in all"] for stage in stages)
    unit, name = (1e9, "GB") if fullest >= 1e9 else (1e6, "MB")
    rows = [(str(s), *(f"{held / unit:.2f}" for held in stage.values())) for s, stage in enumerate(stages)]
    again = {None: "nothing recomputed", "selective": "attention's core recomputed", "full": "blocks recomputed"}
    lines = [
        f"memory per rank in {name}: ZeRO stage {report['zero_stage']}, micro-batches of {report['micro_batch']}, "
        f"{again[report['recompute']]}",
        *_table(("pipeline", *stages[0]), rows),
    ]
    if (published := report["published_states"]) is not None:
        lines.append(
            f"states by the published 16 bytes per parameter, of which 2 are a gradient's: "
            f"{min(published) / unit:.2f} to {max(published) / unit:.2f} {name} per rank"
        )
    if report["device_memory_gb"] is not None:
        words = "it fits" if report["fits"] else "it does not fit"
        lines.append(f"{words}: {fullest / 1e9:.4g} GB are needed of --device-memory-gb {report['device_memory_gb']:g}")
    return [
        *lines,
        f"bubble {report['bubble']:.1%} in a step of {report['micro_batches']} micro-batches, by operations",
        f"operations of a step of {report['global_batch']} samples {report['flops_of_a_step']:.5g}, with recomputation "
        f"{report['flops_with_recomputation']:.5g}",
    ]


def _layer_rows(plans: Sequence[StagePlan], topology: Topology) -> list[tuple[str, int, int, str]]:
    """Layers that are alike in one row, in the order of the model. A tied weight counts where it comes first."""
    layers: dict[str, list[ParamInfo]] = {}
    for info in (info for plan in plans for info in plan.infos):
        names = [name for plan in plans for name in plan.layers if info.name.startswith(f"{name}.")]
        layers.setdefault(names[0], []).append(info)
    rows: dict[tuple[int, int, str], list[str]] = {}
    for name, infos in layers.items():
        experts = {
            f"{i.spec.shape[0]} over {topology.size(i.spec.cut[0])} ranks"
            for i in infos if i.spec.cut and (i.spec.cut[0] or "").startswith("expert")
        }
        figures = sum(i.spec.numel for i in infos), sum(i.tensor.numel() for i in infos)
        rows.setdefault((*figures, *(experts or {""})), []).append(name)
    return [(_numbers(names), *row) for row, names in rows.items()]


def _numbers(names: Sequence[str]) -> str:
    """layers.1,3,5 where all have numbers; of many as layers.1,3,..,95."""
    numbers = [name.removeprefix("layers.") for name in names]
    if not all(map(str.isdecimal, numbers)):
        return " ".join(names)
    shown = numbers if len(numbers) <= 12 else (*numbers[:2], "..", numbers[-1])
    return f"layers.{','.join(shown)}"


def _rank_rows(plans: Sequence[StagePlan], topology: Topology) -> list[tuple[int, ...]]:
    """Of all ranks of a small world, or of the first and last ones."""
    half = SHOWN_RANKS // 2
    world = range(topology.world)
    shown = world if len(world) <= SHOWN_RANKS else (*world[:half], *world[-half:])
    return [(rank, *topology.coord(rank), plans[topology.coord(rank).pipeline].parameters) for rank in shown]


def _with_gap(rows: list[dict[str, int]]) -> list[dict[str, Any]]:
    """With a row of dots where ranks are left out."""
    gaps = [n for n in range(1, len(rows)) if rows[n]["rank"] != rows[n - 1]["rank"] + 1]
    return [row for n, row in enumerate(rows) for row in ([dict.fromkeys(RANK, "...")] if n in gaps else []) + [row]]


def _axes(topology: Topology) -> list[str]:
    """Those whose groups are shown."""
    few = [f"{axis}.{degree}" for degree in topology.degrees for axis in ("expert", "expert_data")]
    expert = ("expert", "expert_data", *few) if topology.expert > 1 else ()
    return ["tensor", "pipeline", "data", "tied_data", *expert]


def _group(topology: Topology, axis: str) -> dict[str, Any]:
    """The groups of an axis: size, number, the first, and in a small world all."""
    first = topology.ranks_along(axis, 0)
    found = {"size": len(first), "count": topology.world // len(first), "first": first}
    return found | ({} if topology.world > SHOWN_RANKS else {"all": topology.groups(axis)})


def _groups(group: Mapping[str, Any]) -> str:
    """The groups of an axis in words."""
    if "all" not in group:
        return f"{group['count']} of {group['size']} ranks, the first {_ranks(group['first'])}"
    return " ".join(_ranks(ranks) for ranks in group["all"])


def _shown(cell: Any) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


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
