"""Which experts every token of one gate call goes to, with which weights, and what that costs in balance.

A gate call sees one micro-batch of one data rank as a whole, whatever the tensor size, so that neither capacity nor
losses depend on the layout. Everything is decided alike on every rank that holds the same logits: ties go to the
lower expert and the earlier token, and what is drawn is seeded anew (parallel/random.py), so that recomputation
decides the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config_moe import MoEConfig
from ..parallel.random import Draw, draw_seed, seed_generator
from .capacity import kept_choices, places
from .losses import balance_loss, count_by_sequence, count_choices, z_loss
from .selection import best, choose, scores_of

SUM_EPSILON = 1e-20     # beside sums of sigmoid scores, as in Megatron-LM


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
    used       [tokens] bool; False (padding): goes nowhere, takes no place, counts nowhere. None: all are used.
               Draws go by row, so padding that depends on the layout is cut off before, not marked here
    counted    [tokens] bool; False (masked in the loss): routed, but not counted in the losses. None: as `used`
    draw       what random draws are seeded with; None: evaluation, where nothing is drawn
    """

    sequences: int = 1
    used: Tensor | None = None
    counted: Tensor | None = None
    draw: Draw | None = None


ALL_TOKENS = Tokens()


@dataclass(frozen=True)
class Routing:
    """What a gate call decided.

    experts  [tokens, topk] int64, the best first; of a token that is not used, too, but nothing is kept there
    weights  [tokens, topk] in the dtype of the logits, differentiable; 0 where the choice was dropped
    kept     [tokens, topk] bool
    loss     scalar: balancing losses and z-loss, each times its coefficient; without gradient where all of them are 0
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
    tokens: Tokens = ALL_TOKENS,
    bias: Tensor | None = None,
    widen: Callable[[Tensor], Tensor] | None = None,
) -> Routing:
    """Decide about logits [tokens, experts] of one gate call, fp32 or fp64.

    bias   [experts], added to the scores where experts are chosen, never where tokens are weighed
    widen  from this call's counts [experts] to those of all data ranks and micro-batches so far: global_aux_loss
    Training is where `tokens.draw` is given: capacity and sampling follow it.
    """
    moe, used = gate.moe, tokens.used
    scores = scores_of(logits, moe.moe_router_score_function)
    experts = choose(logits, scores, moe, layer=gate.layer, draw=tokens.draw, bias=bias)
    counts = count_choices(experts, gate.experts, used)
    weights = first_weights(logits, scores, experts, moe)
    kept = keep(experts, weights, counts, gate, tokens)
    weights = final_weights(weights * kept, moe)
    balance = balance_losses(scores, experts, gate, tokens, widen)
    z = z_loss(logits if moe.moe_z_loss_coeff else logits.detach(), used if tokens.counted is None else tokens.counted)
    weighed = [value * moe.balancing[kind] for kind, value in balance.items()] + [z * (moe.moe_z_loss_coeff or 0.0)]
    loss = torch.stack(weighed).sum()
    return Routing(
        experts, weights, kept, loss, {kind: value.detach() for kind, value in balance.items()}, z.detach(), counts,
        counts.sum() - kept.sum(),
    )


def first_weights(logits: Tensor, scores: Tensor, experts: Tensor, moe: MoEConfig) -> Tensor:
    """Weights [tokens, topk] before any choice is dropped; those of "probs" are compared by these."""
    if "sinkhorn" in moe.balancing:
        return scores_of(logits, "sigmoid" if moe.topk == 1 else "softmax").gather(1, experts)
    chosen, sigmoid = scores.gather(1, experts), moe.moe_router_score_function == "sigmoid"
    if moe.deepspeed or (moe.topk == 1 if sigmoid else moe.moe_router_pre_softmax):
        return chosen
    if sigmoid:
        return chosen / (chosen.sum(1, keepdim=True) + SUM_EPSILON)
    return logits.gather(1, experts).softmax(dim=1)


def final_weights(weights: Tensor, moe: MoEConfig) -> Tensor:
    """Weights [tokens, topk] after dropping. DeepSpeed divides those of several choices by what is left of them."""
    if moe.deepspeed and moe.topk > 1 and "sinkhorn" not in moe.balancing:
        weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).eps)
    factor = moe.moe_router_topk_scaling_factor
    return weights if factor is None else weights * factor


def keep(experts: Tensor, weights: Tensor, counts: Tensor, gate: Gate, tokens: Tokens) -> Tensor:
    """Which choices [tokens, topk] find a place. A token that is not used has none."""
    used, draw = tokens.used, tokens.draw
    rule = gate.moe.capacity(training=draw is not None)
    if rule.factor is None:
        kept = torch.ones_like(experts, dtype=torch.bool)
        return kept if used is None else kept & used.unsqueeze(1)
    own = experts if used is None else experts.masked_fill(~used.unsqueeze(1), gate.experts)
    capacity = places(
        rule, len(experts) if used is None else used.sum(), topk=experts.shape[1], experts=gate.experts
    )
    seed = None if draw is None else draw_seed(draw, gate.layer, "token selection", None)
    return kept_choices(own, counts, capacity, order=rule.order, priority=weights, seed=seed)


def balance_losses(
    scores: Tensor, experts: Tensor, gate: Gate, tokens: Tokens, widen: Callable[[Tensor], Tensor] | None
) -> dict[str, Tensor]:
    """The value of each kind of balancing that has a loss, without its coefficient.

    Megatron-LM's count the choices that scores alone would make; DeepSpeed's those that were made, of two choices
    the first only.
    """
    moe, number = gate.moe, gate.experts
    counted = tokens.used if tokens.counted is None else tokens.counted
    if moe.moe_router_score_function == "sigmoid":
        scores = scores / (scores.sum(1, keepdim=True) + SUM_EPSILON)
    steered = moe.moe_router_enable_expert_bias or moe.moe_router_num_groups is not None
    made = best(scores.detach(), moe.topk) if steered and not moe.deepspeed else experts
    losses = {}
    for kind in moe.balancing:
        if kind in ("sinkhorn", "none"):
            continue
        choices = experts[:, :1] if kind == "deepspeed" and moe.topk == 2 else made
        sequences = tokens.sequences if kind == "seq_aux_loss" else 1
        counts = count_by_sequence(choices, number, sequences, counted)
        if kind == "global_aux_loss" and widen is not None:
            counts = widen(counts[0]).unsqueeze(0)
        losses[kind] = balance_loss(scores if moe.balancing[kind] else scores.detach(), counts, mask=counted)
    return losses


def jittered(x: Tensor, gate: Gate, draw: Draw | None, index: int) -> Tensor:
    """The router's input [seq / tensor, batch, hidden] times 1 +- the jitter in training; `index`: the tensor rank.

    Experts see the clean input. Ranks hold different tokens and draw for their own, as dropout does.
    """
    width = gate.moe.jitter
    if draw is None or width == 0.0:
        return x
    seed_generator(x.device, draw_seed(draw, gate.layer, "router jitter", index))
    return x * torch.empty_like(x).uniform_(1 - width, 1 + width)


def moved_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The expert bias [experts] after a global batch whose counts over all its tokens are `counts` [experts]:
    bias + rate * sign(mean(counts) - counts) (arXiv 2408.15664)."""
    counts = counts.to(torch.float64)
    return bias + rate * (counts.mean() - counts).sign().to(bias.dtype)
