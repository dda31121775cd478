"""Machine: this rank's part of what computes, assembled from a list of layers and a mesh.

It is made alike for GPT and for a model of one's own: stages, parameters with their initial values, optimizer,
programs and the engine that runs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .config import OptimizerConfig
from .data.batch import MicroBatch
from .moe.students import Distillation
from .parallel.collectives import all_reduce, broadcast, gather_objects
from .parallel.groups import Mesh
from .parallel.lamb import Lamb
from .parallel.muon import Muon
from .parallel.params import ParamInfo, check_alike, collect, initialize
from .parallel.reports import ReportTable
from .parallel.rules import SGD, Adam, Rule
from .parallel.zero import Zero, ZeroOptimizer
from .pipe.engine import PipeEngine
from .pipe.instructions import Orders, Program
from .pipe.lower import add_communication
from .pipe.output import Hidden, flat, hidden_of, shaped
from .pipe.p2p import Wires, edges_of
from .pipe.schedule import SCHEDULES, Schedule, forward_only
from .pipe.split import Split
from .pipe.stage import Cut, LayerSpec, Recompute, Stage, build_stages, cut_layers, writable
from .precision import Dtypes

MEASURED_RUNS = 3        # forwards and backwards of each layer when a split is by measured cost; the fastest counts


@dataclass(frozen=True)
class Pipelining:
    """How the depth is cut and run: the schedule's name, stages per rank, the rule by which layers are cut, and of an
    interleaved schedule how many micro-batches go through a stage in one go; None: as many as ranks."""

    schedule: str = "1f1b"
    chunks: int = 1
    split: Split = Split()
    group: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"--pipeline-schedule {self.schedule}: must be one of {', '.join(SCHEDULES)}")

    @property
    def order(self) -> Schedule:
        return SCHEDULES[self.schedule].in_groups(self.group)

    def homes(self, ranks: int) -> list[int]:
        """The pipeline rank of each stage."""
        return self.order.homes(ranks, self.chunks)


@dataclass(frozen=True)
class Setup:
    """What a machine is to do.

    figures  what a log says of the layers' reports, given their sums and the micro-batches of the global batch
    """

    dtypes: Dtypes = Dtypes(torch.float32, torch.float32)
    optimizer: OptimizerConfig = OptimizerConfig()
    zero: Zero = Zero(clip=1.0)
    pipelining: Pipelining = Pipelining()
    recompute: Recompute = Recompute()
    seed: int = 1234
    figures: Callable[[Mapping[str, Tensor], int], dict[str, Any]] = lambda reports, micro_batches: {}
    adam_impl: str = "auto"


@dataclass(frozen=True)
class Machine:
    """Engine, optimizer and programs of one rank.

    train_program, evaluate_program   of a number of micro-batches, each made once
    last                              the place along the pipeline where the loss is known
    figures                           as in Setup
    distillation                      how the student in it is taught, where it is
    """

    mesh: Mesh
    engine: PipeEngine
    optimizer: ZeroOptimizer
    train_program: Callable[[int], Program]
    evaluate_program: Callable[[int], Program]
    last: int
    table: ReportTable
    figures: Callable[[Mapping[str, Tensor], int], dict[str, Any]]
    distillation: Distillation | None = None

    def reports(self) -> dict[str, Tensor]:
        """What layers reported in the last `loss`, summed over micro-batches and data ranks; equal on all ranks, which
        call it together."""
        return self.table.collect(self.engine.reports)

    def loss(self, batches: Sequence[MicroBatch], program: Program, *, key: Hashable = None) -> Tensor:
        """Run `program`, with its backwards if it has any; the summed loss of all data ranks, fp64 scalar on all.

        Where training steps have hidden states of several shapes, or evaluations have, `key` says of which this one's
        are, the same on all ranks: the sequence length, say.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for loss in self.engine.run(program, batches, key):
            total += loss
        return broadcast(all_reduce(total, self.mesh.data), self.mesh.pipeline, self.last)


def assemble(layers: Sequence[LayerSpec], mesh: Mesh, setup: Setup, example: MicroBatch | None = None) -> Machine:
    """Build this rank's stages of `layers` and all that trains them. All ranks call it together.

    `example` is a micro-batch to time the layers with where the split is by measured cost.
    """
    ranks, how = mesh.pipeline.size, setup.pipelining
    placed = how.homes(ranks)

    def programs(orders: Callable[[int, int, int], Orders], micro_batches: int) -> list[Program]:
        return add_communication(orders(ranks, micro_batches, how.chunks), len(placed))

    @cache                              # of this rank's alone: those of 64 ranks and 512 micro-batches are 13 MB
    def train(micro_batches: int) -> Program:
        return programs(how.order, micro_batches)[mesh.stage]

    @cache
    def evaluate(micro_batches: int) -> Program:
        return programs(how.order.forward_only, micro_batches)[mesh.stage]

    wires = Wires(mesh.pipeline, edges_of(programs(how.order, 1)))      # the same for any number of micro-batches
    seconds = None
    if how.split.weighs == "seconds":
        if example is None:
            raise ValueError(f"--pipeline-split {how.split.method}: it needs a micro-batch to time the layers with")
        seconds = measured_seconds(layers, wires, mesh, setup, example)
    cut = cut_layers(layers, placed, how.split, seconds)
    stages = _initialized(layers, mesh, cut, setup)
    homes: dict[str, tuple[int, ...]] = {}
    for number, stage in stages.items():
        for info in collect(stage.named_layers()):
            homes[info.name] = (*homes.get(info.name, ()), number)
    infos = collect([named for stage in stages.values() for named in stage.named_layers()])
    optimizer = ZeroOptimizer(
        infos, mesh, rule_of(setup.optimizer, setup.adam_impl), dtype=setup.dtypes.compute, zero=setup.zero, homes=homes
    )
    queues = {number: stage.weights for number, stage in stages.items()}
    optimizer.attach(list(stages.values()), queues)

    engine = PipeEngine(
        stages, len(placed) - 1, wires, device=mesh.device,
        queues=queues, reduction=optimizer.reducer,
    )
    return Machine(
        mesh, engine, optimizer, train, evaluate, placed[-1], ReportTable(mesh), setup.figures,
    )


def rule_of(config: OptimizerConfig, adam_impl: str = "auto") -> Rule:
    """The update rule that the flags name, with that implementation of Adam's pass."""
    betas = config.adam_beta1, config.adam_beta2
    if config.optimizer == "sgd":
        return SGD(config.sgd_momentum)
    if config.optimizer == "lamb":
        return Lamb(betas, config.adam_eps, (config.lamb_min_coeff, config.lamb_max_coeff))
    adam = Adam(betas, config.adam_eps, config.decoupled_weight_decay, adam_impl)
    if config.optimizer == "muon":
        return Muon(config.muon_momentum, config.muon_num_ns_steps, config.muon_bf16, adam)
    return adam


def _initialized(layers: Sequence[LayerSpec], mesh: Mesh, cut: Cut, setup: Setup) -> dict[int, Stage]:
    """This rank's stages with their initial values, in the master dtype."""
    with mesh.device:
        stages = build_stages(layers, mesh, cut, setup.recompute)
    for stage in stages.values():
        stage.to(setup.dtypes.master)
    infos = collect([named for stage in stages.values() for named in stage.named_layers()])
    if any(layer.shared for layer in layers):
        _check_shared(infos, mesh)
    initialize(infos, mesh.topology, mesh.rank, seed=setup.seed)
    return stages


def _check_shared(infos: Sequence[ParamInfo], mesh: Mesh) -> None:
    """ValueError, on all ranks, where the first and the last one declare a parameter that they share differently."""
    mine = {info.name: (info.spec.shape, info.initial) for info in infos if info.spec.tied}
    told = gather_objects(mine, mesh.pipeline)
    for name in dict.fromkeys(name for held in told for name in held):
        check_alike(name, [held[name] for held in told if name in held])


def measured_seconds(
    layers: Sequence[LayerSpec], wires: Wires, mesh: Mesh, setup: Setup, example: MicroBatch
) -> list[float]:
    """Seconds of each layer's forward and backward, the same list on all ranks.

    Each pipeline rank times the layers that an even cut would give it, on the hidden states that one forward of the
    whole model brings them; of the ranks that time a layer the slowest counts. Layers without cost (see LayerSpec) are
    timed too.
    """
    ranks = mesh.pipeline.size
    stages = _initialized(layers, mesh, cut_layers(layers, range(ranks)), replace(setup, recompute=Recompute()))
    named, inputs = stages[mesh.stage].named_layers(), []

    def run_and_keep(x: Hidden | None, batch: MicroBatch) -> Hidden:
        for _, layer in named:
            inputs.append(x)
            x = hidden_of(layer(x, batch))
        return x

    program = add_communication(forward_only(ranks, 1), ranks)[mesh.stage]
    PipeEngine({mesh.stage: run_and_keep}, ranks - 1, wires, device=mesh.device).run(program, [example])
    found = {
        name: min(_seconds(layer, x, example) for _ in range(MEASURED_RUNS))
        for (name, layer), x in zip(named, inputs, strict=True)
    }
    told = gather_objects(found, mesh.world)
    return [max(seconds.get(layer.name, 0.0) for seconds in told) for layer in layers]


def _seconds(layer: nn.Module, x: Hidden | None, example: MicroBatch) -> float:
    tensors = tuple(t.detach().clone().requires_grad_(t.is_floating_point()) for t in flat(x))
    entry = writable(shaped(tensors, isinstance(x, tuple)))
    start = time.perf_counter()
    out = hidden_of(layer(entry, example))
    roots = [y for y in flat(out) if y.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(y) for y in roots])
    for device in {y.device for y in roots if y.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
