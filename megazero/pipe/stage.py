"""A model is a list of layers; a pipeline stage is a slice of that list.

LayerSpec says how to build a layer and what it costs; `split_layers` cuts the list into stages; Stage runs its
slice, recomputing those layers in the backward that it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.batch import MicroBatch
from ..parallel.groups import Mesh
from ..parallel.params import join_tied
from ..parallel.random import recompute


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model.

    name          global name; parameters are called after it
    build         makes the layer's module for a mesh; it maps ([seq / tensor, batch, hidden], MicroBatch) on
    cost          relative time of the layer, by which stages are balanced; 0 for what is negligible
    recomputable  whether full recomputation may drop its activations
    """

    name: str
    build: Callable[[Mesh], nn.Module]
    cost: float = 1.0
    recomputable: bool = False


@dataclass(frozen=True)
class Recompute:
    """Full recomputation: none, "uniform" (`count` layers together) or "block" (the first `count` of a stage)."""

    method: str | None = None
    count: int = 1


def split_layers(layers: Sequence[LayerSpec], stages: int) -> list[range]:
    """Cut the list into `stages` slices with equal numbers of costly layers; earlier stages take the remainder.

    Layers without cost go with the costly layer before them, or at the front with the first. Raises ValueError
    where a stage would get no costly layer.
    """
    costly = [i for i, layer in enumerate(layers) if layer.cost > 0]
    if len(costly) < stages:
        raise ValueError(f"{len(costly)} layers cannot fill {stages} pipeline stages (--pipeline-model-parallel-size)")
    share, rest = divmod(len(costly), stages)
    firsts = [costly[s * share + min(s, rest)] for s in range(stages)]
    edges = [0, *firsts[1:], len(layers)]
    return [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]


class Stage(nn.Module):
    """Consecutive layers of the model as one callable: (x or None, MicroBatch) -> Tensor."""

    def __init__(self, layers: Sequence[tuple[LayerSpec, nn.Module]], how: Recompute) -> None:
        super().__init__()
        self.names = [spec.name for spec, _ in layers]
        self.layers = nn.ModuleList(module for _, module in layers)
        self.segments = _segments([spec.recomputable for spec, _ in layers], how)

    def named_layers(self) -> list[tuple[str, nn.Module]]:
        """The layers under their global names."""
        return list(zip(self.names, self.layers, strict=True))

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        for segment, again in self.segments:
            def run(y: Tensor | None, segment: range = segment) -> Tensor | None:
                for i in segment:
                    y = self.layers[i](y, batch)
                return y

            x = recompute(run, x) if again and torch.is_grad_enabled() else run(x)
        return x


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


def build_stages(layers: Sequence[LayerSpec], mesh: Mesh, how: Recompute) -> dict[int, Stage]:
    """This rank's stages by number: slice s of the list lives on pipeline rank s modulo the pipeline size."""
    size = mesh.topology.pipeline
    slices = split_layers(layers, size)
    stages = {
        number: Stage([(layers[i], layers[i].build(mesh)) for i in part], how)
        for number, part in enumerate(slices) if number % size == mesh.stage
    }
    join_tied([named for stage in stages.values() for named in stage.named_layers()])
    return stages
