"""A model of one's own: plain torch modules and a loss, trained by the same engine, ZeRO and checkpoints as GPT.

    with open_ranks(Topology(pipeline=2, data=2)) as mesh:
        model = OwnModel([plain("first", make_first), ...], loss, mesh, Setup())
        model.train(example, steps=1000, micro_batches=8, learning_rate=1e-3)

examples/own_model.py is a whole program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from . import snapshot
from .checkpoint_index import read_index
from .machine import Setup, assemble
from .parallel.collectives import AgreedError, all_reduce
from .parallel.groups import Group, Mesh, World, choose_device, connect, disconnect, open_mesh
from .parallel.layers import gather_linear
from .parallel.params import adopt
from .parallel.random import Draw, draw_seed, seed_generator
from .parallel.topology import Topology
from .parallel.weights import WeightQueue
from .parallel.zero import Rates
from .pipe.instructions import Program
from .pipe.output import Hidden, Output, WithLoss, flat
from .pipe.stage import LayerSpec
from .products import products_of
from .trainer import Progress


@dataclass(frozen=True)
class Example:
    """A micro-batch: what the first layer reads, and what the loss compares the output of the last one with.

    Each is a tensor or a tuple of tensors. The rest OwnModel sets:
    draw   root of the layers' random draws; None: the modules are in evaluation mode
    scale  what losses are multiplied by, so that those of a global batch add up to their mean
    """

    inputs: Hidden
    targets: Hidden
    draw: Draw | None = None
    scale: float = 1.0


@contextmanager
def open_ranks(topology: Topology) -> Iterator[Mesh]:
    """Meet the processes that torchrun started, and leave them in good order. One process needs no torchrun.

    Raises ValueError where their number is not the topology's.
    """
    world = World.from_environment()
    if world.size != topology.world:
        raise ValueError(f"{topology} needs {topology.world} processes, {world.size} were started")
    device, backend = choose_device("auto", world.local_rank)
    connect(world, device, backend)
    yield open_mesh(topology, device, products_of(device))
    disconnect()                        # not after an error: who waits for this rank hears of it by its end


def plain(
    name: str, make: Callable[[], nn.Module], *, std: float = 0.02, cost: float = 1.0, recomputable: bool = False,
    shared: Mapping[str, str] | None = None, split_backward: bool = False,
) -> LayerSpec:
    """A layer made of a plain torch module that maps one tensor on, or several: what a layer returns as a tuple the
    next one gets as its arguments. The first layer of a model gets the inputs.

    `make` makes a new module each time. `std` is that of its initial values: see `adopt`. What it draws in training, in
    dropout say, depends on the layer and the micro-batch alone, so neither recomputation nor any layout changes it. It
    may return WithLoss: its own loss counts as the model's does, by its mean over the micro-batches. What it has in
    common with another layer `shared` says, as LayerSpec has it: {"weight": "words"} on an nn.Embedding and on an
    nn.Linear without bias ties these. With `split_backward` zero-bubble schedules put the weight gradients of its
    nn.Linear modules off, as they do with GPT's; its forward may then take no gradients of its own.
    """
    def build(mesh: Mesh) -> nn.Module:
        module = make()
        if not isinstance(module, nn.Module):
            raise ValueError(f"layer {name}: make() gave {type(module).__name__}, which is no torch.nn.Module")
        hooks = _Hooks(name)
        adopt(module, std=std).register_forward_pre_hook(hooks.before)
        module.register_forward_hook(hooks.after)
        for linear in [part for part in module.modules() if split_backward and type(part) is nn.Linear]:
            linear.forward = partial(_split_linear, linear, mesh.weights)
        return module

    return LayerSpec(name, build, cost, recomputable, dict(shared or {}))


def _split_linear(linear: nn.Linear, queue: WeightQueue, x: Tensor) -> Tensor:
    """[..., in] -> [..., out], whose weight gradients the stage's queue adds."""
    rows = x.reshape(-1, 1, x.shape[-1])
    y = gather_linear(rows, linear.weight, linear.bias, Group("tensor"), queue)
    return y.view(*x.shape[:-1], y.shape[-1])


class _Hooks:
    """What stands between the engine, which gives layers (hidden states or None, Example), and a plain module."""

    def __init__(self, name: str) -> None:
        self.name, self.scale = name, 1.0

    def before(self, module: nn.Module, given: tuple[Hidden | None, Example]) -> tuple[Tensor, ...]:
        x, example = given
        self.scale, inputs = example.scale, flat(example.inputs)
        module.train(example.draw is not None)
        if example.draw is not None:
            seed_generator(inputs[0].device, draw_seed(example.draw, 0, self.name, None))
        return inputs if x is None else flat(x)

    def after(self, module: nn.Module, given: tuple[Tensor, ...], output: Output) -> Output:
        if isinstance(output, WithLoss) and output.loss is not None:
            return replace(output, loss=output.loss * self.scale)
        return output


class _Loss(nn.Module):
    """The last layer."""

    def __init__(self, loss: Callable[[Hidden, Hidden], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Hidden, example: Example) -> Tensor:
        loss = self.loss(x, example.targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss must be a tensor without dims, as mean() gives it, not {what}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError("the loss depends on no parameter by way of gradients: was it, or the output, detached?")
        return loss * example.scale


@dataclass(frozen=True)
class _Settings:
    """What a checkpoint says of how it was made."""

    layers: tuple[str, ...]
    schedule: str
    seed: int

    def to_json(self) -> str:
        return json.dumps(vars(self))


class OwnModel:
    """A model in training. All ranks call its methods together.

    layers   bottom up, made by `plain` or as LayerSpec of modules that take (hidden states or None, Example)
    loss     (output of the last layer, targets) -> scalar, the mean over a micro-batch
    example  a micro-batch to time the layers with, needed where they are cut by measured cost

    Raises ValueError for what is no layer, and for two layers of one name.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], loss: Callable[[Hidden, Hidden], Tensor], mesh: Mesh, setup: Setup,
        example: Example | None = None,
    ) -> None:
        self.mesh, self.setup, self.steps = mesh, setup, 0
        self.layers = [*layers, LayerSpec("loss", lambda mesh: _Loss(loss), cost=0.0)]
        known: set[str] = set()
        for place, layer in enumerate(self.layers):
            if not isinstance(layer, LayerSpec):
                raise ValueError(f"layer {place} is {type(layer).__name__}, not LayerSpec: make it with own.plain")
            if layer.name in known:
                raise ValueError(f"two layers are called {layer.name}, but parameters are called after their layer")
            known.add(layer.name)
        if example is not None:
            example = _on(mesh.device, example)
        self.machine = assemble(self.layers, mesh, setup, example)

    def train(
        self, example: Callable[[int], Example], *, steps: int, micro_batches: int, learning_rate: float,
        weight_decay: float = 0.0, save: Path | None = None,
    ) -> list[float]:
        """Train up to step `steps`; returns the losses, which rank 0 also prints.

        A step takes the next `micro_batches` numbers, which the data ranks share in turn; `example` maps a number to
        a micro-batch. With `save` it goes on from the newest checkpoint there is, and leaves one.
        """
        data, losses = self.mesh.data, []
        if micro_batches % data.size:
            raise ValueError(f"{micro_batches} micro-batches of a step are not evenly shared by {data.size} data ranks")
        if save is not None:
            self.load(save)
        while self.steps < steps:
            first = self.steps * micro_batches
            mine = range(first + data.index, first + micro_batches, data.size)
            losses.append(self.step(list(map(example, mine)), learning_rate=learning_rate, weight_decay=weight_decay))
            if self.mesh.rank == 0:
                print(f"step {self.steps}: loss {losses[-1]:.6f}")
        if save is not None and losses:
            self.save(save)
        return losses

    def step(self, examples: Sequence[Example], *, learning_rate: float, weight_decay: float = 0.0) -> float:
        """Train on this data rank's micro-batches; returns the mean loss over those of all data ranks.

        Data ranks bring micro-batches of one shape; ranks that differ along the pipeline alone bring the same ones.
        Raises AgreedError where the loss or the gradient is not a finite number.
        """
        self.steps += 1
        data = self.mesh.data
        drawn = [
            replace(example, draw=(self.setup.seed, self.steps, m * data.size + data.index))
            for m, example in enumerate(examples)
        ]
        loss = self._mean(drawn, self.machine.train_program(len(drawn)))
        update = self.machine.optimizer.step(Rates(learning_rate, weight_decay))
        norm = update.norm.item()
        if not (update.skipped or math.isfinite(loss) and math.isfinite(norm)):
            raise AgreedError(f"step {self.steps}: loss {loss}, gradient norm {norm}: not finite")
        return loss

    def evaluate(self, examples: Sequence[Example]) -> float:
        """The mean loss, with the modules in evaluation mode."""
        return self._mean(examples, self.machine.evaluate_program(len(examples)))

    def _mean(self, examples: Sequence[Example], program: Program) -> float:
        device, loss_scale = self.mesh.device, self.machine.optimizer.loss_scale
        count = all_reduce(torch.tensor(float(len(examples)), device=device), self.mesh.data)
        here = [replace(_on(device, example), scale=loss_scale / count.item()) for example in examples]
        shapes = tuple(part.shape for part in (*flat(here[0].inputs), *flat(here[0].targets)))
        return self.machine.loss(here, program, key=shapes).item() / loss_scale

    def reports(self) -> dict[str, Tensor]:
        """What layers reported in the last step or evaluation (WithLoss), summed over the micro-batches of all data
        ranks."""
        return self.machine.reports()

    def save(self, root: Path) -> Path:
        """Save all state under `root`; any layout can load it. Returns the checkpoint's folder."""
        setup, names = self.setup, tuple(layer.name for layer in self.layers)
        settings = _Settings(names, setup.pipelining.schedule, setup.seed)
        return snapshot.save(root, self.machine.optimizer, self.mesh, config=settings, progress=Progress(self.steps))

    def load(self, root: Path) -> bool:
        """Go on from the newest complete checkpoint under `root`; False where there is none."""
        folder = snapshot.find(root, None, say=print if self.mesh.rank == 0 else lambda line: None)
        if folder is not None:
            self._check(folder)
            self.steps = snapshot.load(folder, self.machine.optimizer, self.mesh, moments=True).iteration
        return folder is not None

    def _check(self, folder: Path) -> None:
        """ValueError where a checkpoint was made by other layers."""
        saved, mine = read_index(folder)[0].config["layers"], [layer.name for layer in self.layers]
        if saved != mine:
            raise ValueError(f"{folder}: holds the layers {', '.join(saved)}, but the model's are {', '.join(mine)}")


def _on(device: torch.device, example: Example) -> Example:
    """The example on the device."""
    inputs, targets = (
        tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device)
        for x in (example.inputs, example.targets)
    )
    return replace(example, inputs=inputs, targets=targets)
