"""Which experts every token of one gate call goes to, with which weights, and what that costs in balance.

A gate call sees one micro-batch of one data rank as a whole, whatever the tensor size, so that neither capacity nor
losses depend on the layout. Everything is decided alike on every rank that holds the same logits: ties go to the
lower expert and the earlier token, and what is drawn is seeded anew (parallel/random.py), so that recomputation
decides the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..config_moe import MoEConfig
from ..parallel.random import Draw


@dataclass(frozen=True)
class Gate:
    """The router of one layer on one model: what does not change from call to call."""

    moe: MoEConfig
    experts: int                # of this layer
    layer: int                  # its global number, for draws


@dataclass(frozen=True)
class Tokens:
    """What a gate call knows of its tokens, which lie batch-major: all of sequence 0, then all of sequence 1, ...

    sequences  how many sequences they are
    used       [tokens] bool; False (padding): goes nowhere, takes no place, counts nowhere. None: all are used
    counted    [tokens] bool; False (masked in the loss): routed, but not counted in the losses. None: as `used`
    draw       what random draws are seeded with; None: evaluation, where nothing is drawn
    """

    sequences: int = 1
    used: Tensor | None = None
    counted: Tensor | None = None
    draw: Draw | None = None


@dataclass(frozen=True)
class Routing:
    """What a gate call decided.

    experts  [tokens, topk] int64, the best first; of a token that is not used, too, but nothing is kept there
    weights  [tokens, topk] in the dtype of the logits, differentiable; 0 where the choice was dropped
    kept     [tokens, topk] bool
    loss     scalar, differentiable: balancing losses and z-loss, each times its coefficient
    balance  one value per kind of balancing that has a loss, without its coefficient, detached
    z        scalar, detached: mean squared logsumexp of the logits
    counts   [experts] int64: choices of used tokens before any was dropped
    dropped  scalar int64: choices of used tokens that found no place
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor
    loss: Tensor
    balance: dict[str, Tensor]
    z: Tensor
    counts: Tensor
    dropped: Tensor


def route(
    logits: Tensor,
    gate: Gate,
    *,
    tokens: Tokens = Tokens(),
    bias: Tensor | None = None,
    widen: Callable[[Tensor], Tensor] | None = None,
) -> Routing:
    """Decide about logits [tokens, experts] of one gate call, fp32 or fp64.

    bias   [experts], added to the scores where experts are chosen, never where tokens are weighed
    widen  from this call's counts [experts] to those of all data ranks and micro-batches so far: global_aux_loss
    Training is where `tokens.draw` is given: capacity, jitter and sampling follow it.
    """
    raise AssertionError("the signature alone so far")


def jittered(x: Tensor, gate: Gate, draw: Draw | None, index: int) -> Tensor:
    """The router's input [seq / tensor, batch, hidden] times 1 +- the jitter in training; `index`: the tensor rank."""
    raise AssertionError("the signature alone so far")


def moved_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The expert bias [experts] after a global batch whose counts over all its tokens are `counts` [experts]:
    bias + rate * sign(mean(counts) - counts)."""
    raise AssertionError("the signature alone so far")
