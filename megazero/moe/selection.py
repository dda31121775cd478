"""From router logits to the experts of every token: scores, groups, bias, sampling, Sinkhorn.

Of equal values the lower expert counts as the better one, on every device. Nothing here is differentiable but scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config_moe import MoEConfig
from ..parallel.random import Draw, draw_seed, seed_generator

SINKHORN_TOLERANCE = 1e-4       # of the mean change of the experts' factors between two rounds
SINKHORN_EPSILON = 1e-8
SINKHORN_ROUNDS = 1000          # an end for logits that are no numbers


def scores_of(logits: Tensor, function: str) -> Tensor:
    """Scores [tokens, experts] of logits [tokens, experts]: softmax over the experts, or sigmoid."""
    return logits.softmax(dim=1) if function == "softmax" else logits.sigmoid()


def best(values: Tensor, topk: int) -> Tensor:
    """The experts with the largest values [tokens, experts], best first: [tokens, topk] int64."""
    if topk == 1:
        return values.argmax(dim=1, keepdim=True)
    return values.sort(dim=1, descending=True, stable=True).indices[:, :topk]


def choose(
    logits: Tensor, scores: Tensor, moe: MoEConfig, *, layer: int, draw: Draw | None, bias: Tensor | None
) -> Tensor:
    """The experts [tokens, topk] of logits and scores [tokens, experts]; sampled only where `draw` is given."""
    logits, scores = logits.detach(), scores.detach()
    topk = moe.topk
    if "sinkhorn" in moe.balancing:
        return best(logits if draw is None else sinkhorn(logits), topk)
    softmax = moe.moe_router_score_function == "softmax"
    values = logits if softmax and not moe.moe_router_pre_softmax else scores
    if bias is not None:
        values = values + bias.to(values.dtype)
    if moe.moe_router_num_groups is not None:
        values = within_groups(values, moe.moe_router_num_groups, moe.moe_router_group_topk, topk)
    if draw is not None and moe.deepspeed:
        if topk == 1 and moe.moe_noisy_gate_policy == "RSample":
            return best(values + gumbel(logits, draw_seed(draw, layer, "router choice", None)), 1)
        if topk == 2 and not moe.disable_moe_top2_2nd_expert_sampling:
            first = best(values, 1)
            noisy = values + gumbel(logits, draw_seed(draw, layer, "second expert", None))
            return torch.cat([first, best(noisy.scatter(1, first, -torch.inf), 1)], dim=1)
    return best(values, topk)


def within_groups(values: Tensor, groups: int, seen: int, topk: int) -> Tensor:
    """`values` [tokens, experts] with -inf outside of the `seen` best groups of each token (DeepSeek-V2 and -V3).

    Groups are neighbouring experts; a group is worth the sum of its topk / seen largest values.
    """
    each = values.unflatten(1, (groups, -1))                                     # [tokens, groups, experts / groups]
    worth = each.sort(dim=2, descending=True).values[:, :, : topk // seen].sum(2)    # [tokens, groups]
    chosen = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best(worth, seen), True)
    return each.masked_fill(~chosen.unsqueeze(2), -torch.inf).flatten(1)


def gumbel(like: Tensor, seed: int) -> Tensor:
    """Standard Gumbel draws of the shape and dtype of `like`: the argmax of logits plus these samples the softmax."""
    seed_generator(like.device, seed)
    uniform = torch.empty_like(like).uniform_().clamp_min(torch.finfo(like.dtype).tiny)
    return -(-uniform.log()).log()


def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) [tokens, experts] scaled by a factor per token and one per expert until both sum up evenly, in fp64.

    factor_t = 1 / (tokens (sum_e factor_e c_te + eps)), factor_e = 1 / (experts (sum_t factor_t c_te + eps)), in turn.
    """
    cost = logits.double().exp()
    tokens, experts = cost.shape
    of_experts = cost.new_ones(experts)
    for _ in range(SINKHORN_ROUNDS):
        of_tokens = 1 / (tokens * (cost @ of_experts + SINKHORN_EPSILON))
        before, of_experts = of_experts, 1 / (experts * (of_tokens @ cost + SINKHORN_EPSILON))
        if not (before - of_experts).abs().mean() > SINKHORN_TOLERANCE:
            break
    return of_experts * cost * of_tokens.unsqueeze(1)
