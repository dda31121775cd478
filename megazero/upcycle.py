"""A dense checkpoint becomes a mixture of experts: each expert begins as a copy of its layer's MLP.

A token that goes to copies with weights that sum to one gets what the MLP gave it, so the model computes what it did
before its first step, whatever the new router says (arXiv 2212.05055). Where the sum is another number, the same for
every token, the experts' output is divided by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoint import Reader, finish, folder_of
from .checkpoint_index import INDEX
from .config import Config, LoggingConfig
from .config_checkpoint import CheckpointConfig
from .config_moe import MoEConfig
from .gpt import WORD_TABLE, GPTSetup, gpt_layers
from .moe.router import final_weights, first_weights
from .moe.selection import best, scores_of
from .parallel.groups import mesh_on_paper
from .parallel.params import ParamInfo, collect, initialize, normals
from .parallel.topology import Topology
from .tensor_file import DTYPES
from .tensor_stream import Lazy
from .weights_only import write_weights

# A parameter of all experts of a layer -> that of the MLP.
COPIED = {"up": "up.weight", "up_bias": "up.bias", "down": "down.weight", "down_bias": "down.bias"}
SILENT = "shared.down.weight"       # zero, so that a shared expert adds nothing at first
DRAWN = 2**20                       # normal numbers at once


@dataclass(frozen=True)
class Upcycling:
    """How experts are made.

    seed       of routers and of what else is new
    jitter     standard deviation of what is added to each matrix of each expert, so that they differ from the start
    on_average  scale experts where the weights of a token sum to no fixed number
    """

    seed: int = 1234
    jitter: float = 0.0
    on_average: bool = False

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed}: must be at least 0")
        if not 0 <= self.jitter < float("inf"):
            raise ValueError(f"--jitter {self.jitter}: must be a finite number of at least 0")


@dataclass(frozen=True)
class Upcycled:
    """A checkpoint with experts; `notes` say what its output is beside that of the dense one."""

    folder: Path
    config: Config
    parameters: int
    bytes: int
    notes: tuple[str, ...]


def upcycle(dense: Path, root: Path, config: Config, *, how: Upcycling, iteration: int = 0) -> Upcycled:
    """Make checkpoint `root`/iter_... of the checkpoint in folder `dense`: weights only, in its dtypes.

    `config` is that of the dense checkpoint, but for its section about experts. Raises ValueError with one line for
    what does not fit, before anything is written, and OSError where it cannot write; then there is no checkpoint.
    """
    if iteration < 0:
        raise ValueError(f"--iteration {iteration}: must be at least 0")
    reader = Reader(dense)
    check_dense(reader, config)
    scales = {experts: scale_of(config.moe, experts, how) for experts in sorted(set(config.experts)) if experts > 1}
    if (folder_of(root, iteration) / INDEX).exists():
        raise ValueError(f"--save {root}: holds a checkpoint of iteration {iteration} already")
    tensors = Sources(reader, how, scales).tensors(parameters_of(config, reader))
    saved = replace(config, checkpoint=CheckpointConfig(), logging=LoggingConfig())
    folder, size = write_weights(root, tensors, config=saved, iteration=iteration)
    finish(root, iteration)
    numbers = sum(torch.Size(lazy.shape).numel() for lazy in tensors.values())
    return Upcycled(folder, saved, numbers, size, tuple(notes_of(config.moe, how, scales)))


def check_dense(reader: Reader, config: Config) -> None:
    """ValueError where the checkpoint has experts, or where copies of its MLP are not what the flags ask for."""
    if Config.from_json(json.dumps(reader.config)).moe.any:
        raise ValueError(f"{reader.folder}: has experts already")
    if WORD_TABLE not in reader.tensors:
        raise ValueError(f"{reader.folder}: has no {WORD_TABLE}, so it is not a checkpoint of a GPT")
    moe, ffn = config.moe, config.model.ffn
    if not moe.any:
        raise ValueError("--num-experts: say how many experts a layer becomes, 2 or more")
    if moe.moe_ffn_hidden_size not in (None, ffn):
        raise ValueError(
            f"--moe-ffn-hidden-size {moe.moe_ffn_hidden_size}: an expert is a copy of the MLP, as wide as that: {ffn}"
        )


def parameters_of(config: Config, reader: Reader) -> list[ParamInfo]:
    """What the model with experts is made of, on paper, bottom up."""
    vocab = reader.tensors[WORD_TABLE].spec.shape[0]
    setup = GPTSetup(config.model, vocab, apart=False, moe=config.moe, experts=config.experts)
    with torch.device("meta"):
        infos = collect([(layer.name, layer.build(mesh_on_paper(Topology(), 0))) for layer in gpt_layers(setup)])
    return list({info.name: info for info in infos}.values())       # a tied table stands there twice


class Sources:
    """Where each parameter of the new model comes from.

    `scales` has, by the experts of a layer, the factor on their second matrix and bias.
    """

    def __init__(self, reader: Reader, how: Upcycling, scales: Mapping[int, float]) -> None:
        self.reader, self.how, self.scales = reader, how, scales

    def tensors(self, infos: list[ParamInfo]) -> dict[str, Lazy]:
        """All of them by name. ValueError where the checkpoint lacks one, has another shape, or has too many."""
        sources = {info.name: self.dense_name(info.name) for info in infos}
        for name in self.reader.tensors:
            if name not in sources.values():
                raise ValueError(f"{self.reader.folder}: holds {name}, for which its settings have no place")
        return {info.name: self._made(info, sources[info.name]) for info in infos}

    def dense_name(self, name: str) -> str | None:
        """What a parameter is a copy of; None: it is new."""
        layer, feed_forward, part = name.partition(".ffn.")
        kind, _, own = part.partition(".")
        if not feed_forward or name in self.reader.tensors:
            return name
        if kind == "experts":
            return f"{layer}.ffn.{COPIED[own]}"
        return f"{layer}.ffn.{own}" if kind == "residual" else None

    def _made(self, info: ParamInfo, source: str | None) -> Lazy:
        if source is None:
            up = f"{info.name.partition('.ffn.')[0]}.ffn.up.weight"
            return Lazy(self._dtype(up), info.spec.shape, partial(self._draw, info, self._dtype(up)))
        dtype, shape, experts = self._dtype(source), info.spec.shape, ".ffn.experts." in info.name
        stored, wanted = self.reader.tensors[source].spec.shape, shape[1:] if experts else shape
        if stored != wanted:
            folder = self.reader.folder
            raise ValueError(f"{folder}: {source} has shape {list(stored)}, its settings ask for {list(wanted)}")
        if not experts:
            return Lazy(dtype, shape, partial(self.reader.read, source, "weight"))
        first, *more = (partial(self._expert, info, source, number) for number in range(shape[0]))
        return Lazy(dtype, shape, first, tuple(more))

    def _dtype(self, name: str) -> torch.dtype:
        if name not in self.reader.tensors:
            raise ValueError(f"{self.reader.folder}: lacks the tensor {name}")
        return DTYPES[self.reader.tensors[name].dtypes["weight"]]

    def _draw(self, info: ParamInfo, dtype: torch.dtype) -> Tensor:
        """A parameter that the dense model has not [*shape], as a new model would begin with it."""
        made = torch.zeros(info.spec.shape, dtype=dtype)
        if not info.name.endswith(SILENT):
            initialize([replace(info, tensor=nn.Parameter(made))], Topology(), 0, seed=self.how.seed)
        return made

    def _expert(self, info: ParamInfo, source: str, number: int) -> Tensor:
        """One expert's part of a parameter [*the MLP's shape]."""
        made = self.reader.read(source, "weight")
        if ".ffn.experts.down" in info.name:
            made *= self.scales[info.spec.shape[0]]
        if self.how.jitter and info.decay:
            flat, first = made.view(-1), number * made.numel()
            for at in range(0, flat.numel(), DRAWN):
                part = flat[at : at + DRAWN]
                noise = normals(self.how.seed, f"{info.name} jitter", first + at, len(part))
                part += self.how.jitter * torch.from_numpy(noise).to(made.dtype)
        return made


def scale_of(moe: MoEConfig, experts: int, how: Upcycling) -> float:
    """What the experts' output is multiplied by, so that a token's weights give it back whole.

    ValueError where no number does that for every token, unless it is to be so on average.
    """
    sums = weight_sums(moe, experts)
    if not are_equal(sums) and not how.on_average:
        raise ValueError(
            f"the weights of a token's experts do not sum to one number ({router_in_flags(moe)}), so the output would "
            "change: choose a router whose weights do (docs/mixture_of_experts.md), or give --on-average"
        )
    total = float(sums[0])
    return 1.0 if isclose(total, 1.0, rel_tol=1e-12) else 1 / total


def weight_sums(moe: MoEConfig, experts: int) -> Tensor:
    """Sum of a token's weights, as the router has them where nothing is dropped, for tokens [3] of which it knows
    nothing (the first), something, and more."""
    logits = torch.outer(torch.tensor([0.0, 1.0, 3.0]), torch.linspace(-1, 1, experts)).double()
    scores = scores_of(logits, moe.moe_router_score_function)
    return final_weights(first_weights(logits, scores, best(scores, moe.topk), moe), moe).sum(1)


def are_equal(sums: Tensor) -> bool:
    """Whether these numbers [tokens] are one, but for rounding in fp64."""
    return bool(sums.max() - sums.min() <= 1e-9 * sums.max())


def router_in_flags(moe: MoEConfig) -> str:
    """What decides about the weights."""
    words = f"--moe-family {moe.family} --moe-router-topk {moe.topk}"
    words += f" --moe-router-score-function {moe.moe_router_score_function}"
    if "sinkhorn" in moe.balancing:
        words += " --moe-router-load-balancing-type sinkhorn"
    return words + (" --moe-router-pre-softmax" if moe.moe_router_pre_softmax else "")


def notes_of(moe: MoEConfig, how: Upcycling, scales: Mapping[int, float]) -> Iterator[str]:
    """What a user is to know of the output."""
    exact = True
    for experts, scale in scales.items():
        fixed = are_equal(weight_sums(moe, experts))
        exact &= fixed
        if scale != 1:
            about = "" if fixed else "about "
            yield f"weights sum to {about}{1 / scale:g} of {experts} experts, whose output is multiplied by {scale:g}"
    noisy = f", but for --jitter {how.jitter:g}" if how.jitter else ""
    yield f"the output is that of the dense model{'' if exact else ' on average'}{noisy}"
    if any(moe.capacity(training=training).factor is not None for training in (True, False)):
        yield "a token that finds no place goes without experts (--disable-moe-token-dropping: there are none)"
