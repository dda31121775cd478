"""A model is a list of layers; a pipeline stage is a slice of that list.

LayerSpec says how to build a layer and what it costs; `cut_layers` cuts the list into stages; Stage runs its
slice, recomputing those layers in the backward that it is told to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import MicroBatch
from ..parallel.groups import Mesh, mesh_on_paper
from ..parallel.params import collect, join_tied, share
from ..parallel.random import recompute
from ..parallel.topology import Topology
from ..parallel.weights import WeightQueue
from .output import Hidden, Output, check_output, flat, hidden_of, shaped, with_losses_of
from .split import Split


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model.

    name          global name; parameters are called after it
    build         makes the layer's module for a mesh; it maps (hidden states, MicroBatch) on. Hidden states are a
                  tensor, as [seq / tensor, batch, hidden], or a tuple of tensors of any kind; the first layer gets None
    cost          relative time of the layer, by which stages are balanced; 0 for what is negligible
    recomputable  whether full recomputation may drop its activations
    shared        parameters (their paths in the module) that it has in common with other layers, and the global name
                  that these give them too. Such layers stand on one rank, or on the first and the last stage

    Raises ValueError for a cost below 0.
    """

    name: str
    build: Callable[[Mesh], nn.Module]
    cost: float = 1.0
    recomputable: bool = False
    shared: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.cost < math.inf:
            raise ValueError(f"layer {self.name}: a cost of {self.cost}, but it must be 0 or more")


@dataclass(frozen=True)
class Recompute:
    """Full recomputation: none, "uniform" (`count` layers together) or "block" (the first `count` of a stage)."""

    method: str | None = None
    count: int = 1


@dataclass(frozen=True)
class Cut:
    """Where the layers are: the slice of the list that each stage has, and the pipeline rank that holds the stage."""

    slices: tuple[range, ...]
    homes: tuple[int, ...]

    def held_by(self, rank: int) -> list[int]:
        """The stages of a pipeline rank."""
        return [stage for stage, home in enumerate(self.homes) if home == rank]


def cut_layers(
    layers: Sequence[LayerSpec], homes: Sequence[int], split: Split = Split(), seconds: Sequence[float] | None = None
) -> Cut:
    """Cut the list into one slice per stage. `seconds` of each layer are needed where the split is by measured cost.

    Raises ValueError where a stage would get no layer.
    """
    weights = parameters_of(layers) if split.weighs == "parameters" else seconds
    names, costs = [layer.name for layer in layers], [layer.cost for layer in layers]
    return Cut(tuple(split.ranges(names, costs, homes, weights)), tuple(homes))


def parameters_of(layers: Sequence[LayerSpec]) -> list[float]:
    """How many parameters each layer has, without padding; found on the meta device."""
    mesh = mesh_on_paper(Topology(), 0)
    with torch.device("meta"):
        return [float(sum(i.spec.numel for i in collect([(layer.name, layer.build(mesh))]))) for layer in layers]


class Stage(nn.Module):
    """Consecutive layers of the model as one callable: (hidden states or None, MicroBatch) -> Output."""

    def __init__(
        self, layers: Sequence[tuple[LayerSpec, nn.Module]], how: Recompute, weights: WeightQueue
    ) -> None:
        super().__init__()
        self.weights = weights
        self.names = [spec.name for spec, _ in layers]
        self.layers = nn.ModuleList(module for _, module in layers)
        self.segments = _segments([spec.recomputable for spec, _ in layers], how)

    def named_layers(self) -> list[tuple[str, nn.Module]]:
        """The layers under their global names."""
        return list(zip(self.names, self.layers, strict=True))

    def forward(self, x: Hidden | None, batch: MicroBatch) -> Output:
        parts: list[Output] = []
        if torch.is_grad_enabled():
            x = writable(x)
        for segment, again in self.segments:
            again = again and torch.is_grad_enabled()
            own = replace(batch, kept={}) if again and isinstance(batch, MicroBatch) else batch
            run = partial(self._run, segment, own, isinstance(x, tuple))
            parts.append(recompute(run, *flat(x)) if again else run(*flat(x)))
            x = hidden_of(parts[-1])
        return with_losses_of(x, *parts)

    def _run(self, segment: range, batch: MicroBatch, is_tuple: bool, *tensors: Tensor) -> Output:
        """Consecutive layers on flat hidden states: what recomputation can keep and run again."""
        x, parts = shaped(tensors, is_tuple), []
        for i in segment:
            parts.append(self.layers[i](x, batch))
            check_output(parts[-1], self.names[i])
            x = hidden_of(parts[-1])
        return with_losses_of(x, *parts)


class _Handed(torch.autograd.Function):
    """A stage's input as an ordinary tensor of the graph, with the same memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def writable(x: Hidden | None) -> Hidden | None:
    """`x` so that a layer may work on it in place, as it may where the layer before stands on the same stage: torch
    refuses that for a leaf with gradient, which is what a stage is handed."""
    tensors = tuple(_Handed.apply(t) if t.is_leaf and t.requires_grad else t for t in flat(x))
    return shaped(tensors, isinstance(x, tuple))


def _segments(recomputable: list[bool], how: Recompute) -> list[tuple[range, bool]]:
    """Cut a stage into ranges of layers that run as they are, or are recomputed together."""
    budget = {None: 0, "uniform": len(recomputable), "block": how.count}[how.method]
    together = how.count if how.method == "uniform" else 1
    out: list[tuple[range, bool]] = []
    for i, able in enumerate(recomputable):
        again = able and budget > 0
        budget -= again
        last, last_again = out[-1] if out else (range(0), not again)
        if out and last_again == again and (not again or len(last) < together):
            out[-1] = (range(last.start, i + 1), again)
        else:
            out.append((range(i, i + 1), again))
    return out


def shared_apart(layers: Sequence[LayerSpec], cut: Cut) -> dict[str, bool]:
    """Of each parameter that layers share whether two ranks hold it. Raises ValueError where they would be others than
    those of the first and the last stage, or where one layer shares alone."""
    holders: dict[str, list[tuple[str, int]]] = {}
    for number, part in enumerate(cut.slices):
        for layer in (layers[i] for i in part):
            for name in layer.shared.values():
                holders.setdefault(name, []).append((layer.name, number))
    apart = {}
    for name, held in holders.items():
        apart[name] = len({cut.homes[stage] for _, stage in held}) > 1
        where = ", ".join(f"{layer} on stage {stage}" for layer, stage in held)
        if len(held) == 1:
            raise ValueError(f"the shared parameter {name} is named by one layer alone: {where}")
        if apart[name] and not {stage for _, stage in held} <= {0, len(cut.slices) - 1}:
            raise ValueError(
                f"the layers that share {name} must stand on one rank, or on the first and the last of "
                f"{len(cut.slices)} stages: {where}"
            )
    return apart


def build_stages(layers: Sequence[LayerSpec], mesh: Mesh, cut: Cut, how: Recompute) -> dict[int, Stage]:
    """This rank's stages by number. Where it holds both ends of a tied parameter, both hold the same object."""
    stages, apart = {}, shared_apart(layers, cut)
    for number in cut.held_by(mesh.stage):
        own = replace(mesh, weights=WeightQueue(mesh.weights.products))
        part = [(layers[i], layers[i].build(own)) for i in cut.slices[number]]
        for layer, module in part:
            for path, name in layer.shared.items():
                share(module, path, name, tied=apart[name])
        stages[number] = Stage(part, how, own.weights)
    join_tied([named for stage in stages.values() for named in stage.named_layers()])
    return stages
