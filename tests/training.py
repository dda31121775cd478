"""Trains small models through the product's own front door, on any number of ranks, and compares what comes out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import pretrain_gpt
from megazero.flags import parse
from megazero.parallel.groups import World, open_mesh
from megazero.parallel.shard import Box, owned_boxes
from megazero.trainer import Trainer
from tests.harness import on_ranks

# The model that CASES are about: 4 layers, width 32, a prime vocabulary, global batch 8; clipping is active.
SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 97 "
    "--make-vocab-size-divisible-by 1 --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-3 "
    "--lr-decay-style constant --weight-decay 0.1 --clip-grad 0.5 --attention-dropout 0 --hidden-dropout 0 "
    "--mock-data --tokenizer-type NullTokenizer --num-workers 0"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 4 "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
)


# (global name, kind), global shape, box, values.
Piece = tuple[tuple[str, str], tuple[int, ...], Box, Tensor]


class Recorder:
    """Stands where the metrics stand and keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[dict] = []
        self.evaluations: list[tuple[str, int, float]] = []
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def train(self, record: dict) -> None:
        self.steps.append(record)

    def evaluation(self, part: str, iteration: int, loss: float) -> None:
        self.evaluations.append((part, iteration, loss))

    def took(self, what: str, iteration: int, seconds: float) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Outcome:
    """A finished run. `state` has every tensor whole, by (global name, kind)."""

    steps: list[dict]
    state: dict[tuple[str, str], Tensor]
    evaluations: list[tuple[str, int, float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)      # what `look` returned on each rank

    @property
    def losses(self) -> list[float]:
        return [step["lm_loss"] for step in self.steps]

    @property
    def norms(self) -> list[float]:
        return [step["grad_norm"] for step in self.steps]


def train(flags: str, layout: tuple[int, int, int] = (1, 1, 1), *, look: Callable[[Trainer], Any] | None = None,
          iterations: int | None = None, timeout: float = 60, before: Callable[[Trainer], None] | None = None,
          base: str = SMALL,
          ) -> Outcome:
    """Run `flags` (over `base`) in a layout (tensor, pipeline, data); `look` is called with each rank's trainer at the
    end, `before` at the start. `iterations` stops early, as if interrupted."""
    tensor, pipeline, data = layout
    argv = f"{base} {flags} --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}".split()
    results = on_ranks(
        math.prod(layout), functools.partial(train_rank, argv, math.prod(layout), look, iterations, before),
        timeout=timeout,
    )
    first = results[0][0]
    state = assemble([pieces for _, pieces, _ in results])
    return Outcome(first.steps, state, first.evaluations, first.said, [seen for _, _, seen in results])


def train_rank(argv: Sequence[str], world: int, look: Callable[[Trainer], Any] | None,
               iterations: int | None, before: Callable[[Trainer], None] | None = None) -> tuple[Recorder, list, Any]:
    """One rank of `train`: its record, its recorded pieces of the state, and what `look` saw."""
    config, _ = parse(argv)
    plan = pretrain_gpt.prepare(config, World(0, world, 0))
    mesh, record = open_mesh(plan.topology), Recorder()
    trainer, progress = pretrain_gpt.build(plan, mesh, record)
    target = iterations or plan.iterations
    if before is not None:
        before(trainer)
    trainer.train(progress, target, plan.config.checkpoint.interval)
    return record, pieces_of(trainer), None if look is None else look(trainer)


def pieces_of(trainer: Trainer) -> list[Piece]:
    """What this rank records of the state, copied."""
    mesh, pieces = trainer.machine.mesh, []
    for bucket in trainer.machine.optimizer.buckets:
        for owned in bucket.owned() if bucket.recorded else ():
            at, spec = 0, owned.info.spec
            for box in owned_boxes(spec, mesh.topology, mesh.rank, owned.start, owned.stop):
                data = owned.data[at : at + box.numel].reshape(box.shape).clone()
                pieces.append(((owned.info.name, owned.kind), spec.shape, box, data))
                at += box.numel
    return pieces


def assemble(parts: Sequence[Sequence[Piece]]) -> dict:
    """Whole tensors from the pieces of all ranks; every element must come exactly once."""
    whole: dict[tuple[str, str], Tensor] = {}
    for key, shape, box, data in (piece for part in parts for piece in part):
        tensor = whole.setdefault(key, torch.full(shape, math.nan, dtype=data.dtype))
        assert tensor[box.slices()].isnan().all(), f"{key} {box} comes twice"
        tensor[box.slices()] = data
    missing = [key for key, tensor in whole.items() if tensor.isnan().any()]
    assert not missing, f"{missing} are not covered"
    return whole


def distance(a: Outcome, b: Outcome, learning_rate: float = 1e-3) -> dict[str, float]:
    """The largest differences in the measures of the house: losses and norms relative to b's; a weight's
    max|a - b| / max(max|b|, learning rate); a moment's by norm."""
    assert a.state.keys() == b.state.keys()
    assert len(a.steps) == len(b.steps) > 0

    def numbers(x: list[float], y: list[float]) -> float:
        return max(abs(p - q) / abs(q) for p, q in zip(x, y, strict=True))

    def weight(key: tuple[str, str]) -> float:
        return ((a.state[key] - b.state[key]).abs().max() / max(b.state[key].abs().max().item(), learning_rate)).item()

    def moment(key: tuple[str, str]) -> float:
        size = b.state[key].norm().item()
        return (a.state[key] - b.state[key]).norm().item() / size if size else a.state[key].norm().item()

    return {
        "loss": numbers(a.losses, b.losses),
        "norm": numbers(a.norms, b.norms),
        "weights": max(weight(key) for key in a.state if key[1] == "weight"),
        "moments": max(moment(key) for key in a.state if key[1] != "weight"),
    }
