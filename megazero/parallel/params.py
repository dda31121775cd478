"""Parameters are declared, collected and given their initial values here, and nowhere else.

A layer declares a parameter with its ShardSpec, or a plain module is adopted; `collect` lists all that a rank
holds; `initialize` fills the shards. Element i of a parameter is normal number i of a counter-based stream, so no
layout changes a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import nn

from .shard import ShardSpec
from .topology import Topology


@dataclass(frozen=True)
class Initial:
    """Initial values: normal with `std` where it is given, else the constant `fill`."""

    std: float | None = None
    fill: float = 0.0


# How a parameter that is not trained moves after a global batch: (its values, what layers reported of the batch, summed
# over micro-batches and data ranks) -> its new values, alike on every rank.
Movement = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]

ONES = Initial(fill=1.0)
ZEROS = Initial()


@dataclass(frozen=True)
class ParamInfo:
    """One parameter as the optimizer, the checkpoint and the planner see it.

    movement  None: it is trained by its gradient. Else it has none, and stays in the master dtype
    """

    name: str                  # global name, the same in every layout
    tensor: nn.Parameter       # this rank's shard, [*spec.local_shape]
    spec: ShardSpec
    initial: Initial
    decay: bool                # whether weight decay applies
    movement: Movement | None = None


@dataclass(frozen=True)
class _Declared:
    spec: ShardSpec
    initial: Initial
    decay: bool
    known_as: str | None       # global name, where it is not the path of the module
    movement: Movement | None = None


def declare(
    module: nn.Module, name: str, spec: ShardSpec, topology: Topology, *,
    initial: Initial, dtype: torch.dtype, known_as: str | None = None,
) -> nn.Parameter:
    """Register this rank's shard of a parameter on `module`; the values come later, from `initialize`.

    Weight decay applies to what has two dims or more of its own: matrices and embeddings, not biases or norms.
    """
    parameter = nn.Parameter(torch.empty(spec.local_shape(topology), dtype=dtype))
    decay = initial.std is not None
    module.register_parameter(name, parameter)
    module.__dict__.setdefault("declared", {})[name] = _Declared(spec, initial, decay, known_as)
    return parameter


def declare_moving(
    module: nn.Module, name: str, spec: ShardSpec, topology: Topology, *, dtype: torch.dtype, movement: Movement
) -> nn.Parameter:
    """Register a parameter that no gradient trains: it starts at zero, `movement` moves it after each global batch, and
    checkpoints hold it."""
    parameter = declare(module, name, spec, topology, initial=ZEROS, dtype=dtype).requires_grad_(False)
    module.__dict__["declared"][name] = _Declared(spec, ZEROS, False, None, movement)
    return parameter


def adopt(module: nn.Module, *, std: float) -> nn.Module:
    """Declare every parameter of a plain torch module, as whole on each rank; returns the module.

    Initial values: normal with `std` where a parameter has two dims or more, else zeros for what is called a bias and
    ones for the rest, which are the weights of norms. Raises ValueError, naming it, for other state, such as a running
    mean: checkpoints hold what is trained; and for a parameter that is declared already, by another layer or its own.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in module.state_dict():
        if name not in parameters or not parameters[name].requires_grad:
            raise ValueError(f"{type(module).__name__}.{name} is not trained, so no checkpoint would hold it")
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            initial = Initial(std) if parameter.ndim > 1 else ZEROS if "bias" in name else ONES
            spec = ShardSpec(tuple(parameter.shape), (None,) * parameter.ndim)
            known = part.__dict__.setdefault("declared", {})
            if name in known:
                raise ValueError(
                    f"{type(part).__name__}.{name} is declared already: each layer needs a module of its own, and one "
                    "that declares its parameters itself is not adopted"
                )
            known[name] = _Declared(spec, initial, initial.std is not None, None)
    return module


def share(module: nn.Module, path: str, known_as: str, *, tied: bool) -> None:
    """Give the declared parameter `path` of a module a global name that other layers give theirs too; `tied`: the first
    and the last pipeline rank hold it. Raises ValueError where the module has none there."""
    owner, _, name = path.rpartition(".")
    part = dict(module.named_modules()).get(owner)
    declared = {} if part is None else part.__dict__.get("declared", {})
    if name not in declared:
        raise ValueError(f"{type(module).__name__} has no parameter {path} to share as {known_as}")
    d = declared[name]
    declared[name] = replace(d, spec=replace(d.spec, tied=tied), known_as=known_as)


def join_tied(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Where one rank holds both ends of a tied parameter, let both modules hold the same object."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    for _, layer in layers:
        for module in layer.modules():
            for name, declared in module.__dict__.get("declared", {}).items():
                if declared.known_as is not None and declared.known_as in owners:
                    owner, owner_name = owners[declared.known_as]
                    first = owner.__dict__["declared"][owner_name]
                    check_alike(declared.known_as, [(d.spec.shape, d.initial) for d in (first, declared)])
                    module.register_parameter(name, owner.get_parameter(owner_name))
                elif declared.known_as is not None:
                    owners[declared.known_as] = module, name


def check_alike(name: str, holders: Iterable[tuple[tuple[int, ...], Initial]]) -> None:
    """ValueError unless all layers that share a parameter give it one shape and the same initial values."""
    told = dict.fromkeys(f"{list(shape)} with {initial}" for shape, initial in holders)
    if len(told) > 1:
        raise ValueError(f"layers that share {name} must declare it alike, not as {'; '.join(told)}")


def collect(layers: Iterable[tuple[str, nn.Module]]) -> list[ParamInfo]:
    """Every parameter of named layers with what was declared of it, in the order of the model, each once.

    Raises ValueError, naming it, for a parameter that was not declared, or that two layers hold without a name for it:
    on ranks of their own they would be two.
    """
    infos: list[ParamInfo] = []
    seen: dict[int, tuple[str, str]] = {}               # a parameter's layer, and its path
    for layer_name, layer in layers:
        for prefix, module in layer.named_modules(prefix=layer_name):
            declared = module.__dict__.get("declared", {})
            for name, tensor in module.named_parameters(recurse=False):
                if name not in declared:
                    raise ValueError(f"{prefix}.{name} was not declared: make it with params.declare")
                d, path = declared[name], f"{prefix}.{name}"
                if id(tensor) not in seen:
                    infos.append(ParamInfo(d.known_as or path, tensor, d.spec, d.initial, d.decay, d.movement))
                    seen[id(tensor)] = layer_name, path
                elif d.known_as is None and (first := seen[id(tensor)])[0] != layer_name:
                    raise ValueError(f"{path} is {first[1]} of another layer: say so (see LayerSpec.shared)")
    return infos


def initialize(infos: list[ParamInfo], topology: Topology, rank: int, *, seed: int) -> None:
    """Fill this rank's shards. A value depends on the seed, the name and its global place; padding is zero."""
    for info in infos:
        target = info.tensor.data
        if info.initial.std is None:
            target.fill_(info.initial.fill)
            continue
        box = info.spec.box(topology, rank)
        values = np.zeros(info.spec.local_shape(topology), np.float32)
        flat = values.reshape(-1)
        at = 0
        for start, count in _runs(info.spec.shape, box.start, box.shape):
            flat[at : at + count] = normals(seed, info.name, start, count)
            at += count
        target.copy_(torch.from_numpy(values)).mul_(info.initial.std)


def _runs(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    """(first flat index, length) of the contiguous runs that a box covers in a row-major tensor, in order."""
    if not prod(size):
        return
    whole = len(shape)                              # dims from here on are covered fully
    while whole > 0 and size[whole - 1] == shape[whole - 1]:
        whole -= 1
    inner = max(whole - 1, 0)                       # a run covers a range of this dim and all after it
    step = prod(shape[inner + 1 :])
    length = size[inner] * step if shape else 1
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    for outer in np.ndindex(*size[:inner]):
        first = sum((s + o) * stride for s, o, stride in zip(start, outer, strides, strict=False))
        yield first + (start[inner] * step if shape else 0), length


def normals(seed: int, name: str, start: int, count: int) -> np.ndarray:
    """Normal numbers [start, start + count) of the stream of (seed, name), float32 [count].

    Philox, a counter-based generator (Salmon et al., SC 2011), with key blake2b(seed, name), through Box-Muller
    on pairs of 32-bit words: any range is drawn without what stands before it.
    """
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
    first = start // 8 * 8                          # a block of the generator is four words of 64 bits: eight normals
    n = -(-(start + count - first) // 8) * 8
    words = np.random.Philox(key=key).advance(first // 8).random_raw(n // 2).view(np.uint32)
    radius = np.sqrt(-2.0 * np.log((words[0::2].astype(np.float64) + 0.5) * 2.0**-32))
    angle = words[1::2].astype(np.float64) * (2.0 * np.pi * 2.0**-32)
    out = np.empty(n, np.float32)
    out[0::2] = radius * np.cos(angle)
    out[1::2] = radius * np.sin(angle)
    return out[start - first : start - first + count]
