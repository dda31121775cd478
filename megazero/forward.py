"""A model that only runs forward on the ranks of a mesh: stages without gradients, filled from a checkpoint.

Generation and evaluation stand on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from .data.batch import MicroBatch
from .parallel.collectives import together
from .parallel.groups import Mesh
from .parallel.params import collect
from .parallel.shard import ShardSpec
from .parallel.topology import Topology
from .pipe.engine import PipeEngine
from .pipe.instructions import Program
from .pipe.lower import add_communication
from .pipe.output import Hidden, Output, hidden_of
from .pipe.p2p import Wires, edges_of
from .pipe.schedule import forward_only
from .pipe.stage import LayerSpec, Recompute, build_stages, cut_layers

OfLogits = Callable[[Tensor, MicroBatch], Tensor]


class Weights(Protocol):
    """Where parameters come from: a checkpoint's Reader, or the like."""

    def read_flat(
        self, name: str, kind: str, spec: ShardSpec, *, topology: Topology, rank: int, start: int, stop: int,
    ) -> Tensor:
        """Flat elements [start, stop) of the shard that `rank` of `topology` holds, padding zero, [stop - start]."""
        ...


class ForwardModel:
    """This rank's stages of a model, one per pipeline rank. All ranks call its methods together.

    output  what the last stage makes of its logits [seq, batch, padded vocab / tensor]; None: they are the output
    """

    def __init__(self, layers: Sequence[LayerSpec], mesh: Mesh, *, output: OfLogits | None = None) -> None:
        self.mesh, ranks = mesh, mesh.pipeline.size
        with mesh.device:
            self.stages = build_stages(layers, mesh, cut_layers(layers, list(range(ranks))), Recompute())
        last = ranks - 1
        runs: dict[int, Callable[[Hidden | None, MicroBatch], Output]] = dict(self.stages)
        if output is not None and last in runs:
            logits = self.stages[last]
            runs[last] = lambda x, batch: output(hidden_of(logits(x, replace(batch, labels=None))), batch)

        @cache
        def programs(micro_batches: int) -> list[Program]:
            return add_communication(forward_only(ranks, micro_batches, 1), ranks)

        self._programs = programs
        wires = Wires(mesh.pipeline, edges_of(programs(1)))
        self.engine = PipeEngine(runs, last, wires, device=mesh.device)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Fill the parameters, whatever layout wrote them, in this model's dtype.

        Raises AgreedError where a rank cannot read.
        """
        mesh = self.mesh

        def fill() -> None:
            for info in collect([named for stage in self.stages.values() for named in stage.named_layers()]):
                flat = info.tensor.data.view(-1)
                values = weights.read_flat(
                    info.name, "weight", info.spec, topology=mesh.topology, rank=mesh.rank, start=0, stop=flat.numel()
                )
                flat.copy_(values)

        together(mesh.world, fill)

    def run(self, batches: Sequence[MicroBatch], key: Hashable) -> list[Tensor]:
        """The output of each micro-batch on the last stage, [] on the others; all are of the shape that `key` stands
        for, the same on all ranks, and lie on this rank's device."""
        return self.engine.run(self._programs(len(batches))[self.mesh.stage], batches, key)
