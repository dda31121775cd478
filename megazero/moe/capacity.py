"""Which choices an expert takes where it cannot take all of them.

Choices stand in one line, by rank of drop order; an expert takes the first ones of the line that are its own. Sorting
finds a choice's place in the line of its expert: memory is linear in the choices, and equal ranks keep token order.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from ..config_moe import Capacity
from ..parallel.random import seed_generator

FACTOR_STEPS = 1_000_000        # a capacity factor is a fraction with at most this denominator


def places(rule: Capacity, tokens: int | Tensor, *, topk: int, experts: int) -> int | Tensor:
    """What an expert takes: max(ceil(tokens * topk / experts * factor), minimum), at most the tokens.

    The factor counts as the decimal number that was written, so 10 tokens times 1.1 are 11. `tokens` may be a count
    on the device: then so is the result, and nobody waits for it.
    """
    assert rule.factor is not None, "without a factor there is no capacity"
    factor = Fraction(str(rule.factor)).limit_denominator(FACTOR_STEPS)
    least = -(-tokens * topk * factor.numerator // (experts * factor.denominator))
    if isinstance(least, Tensor):
        return torch.minimum(least.clamp_min(rule.minimum), tokens)
    return min(max(least, rule.minimum), tokens)


def kept_choices(
    experts: Tensor, counts: Tensor, capacity: int | Tensor, *, order: str, priority: Tensor, seed: int | None
) -> Tensor:
    """Which choices are kept: [tokens, topk] bool, of `experts` [tokens, topk] with `counts` [experts] choices each.

    `experts` is the number of experts where a choice is none. `priority` [tokens, topk] is what "probs" goes by,
    `seed` what "random" draws with.
    """
    line = line_up(experts, order=order, priority=priority, seed=seed)
    of_line = experts.flatten()[line]
    by_expert = of_line.sort(stable=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    place = torch.arange(len(line), device=line.device) - starts[by_expert.values]
    kept = torch.empty(len(line), dtype=torch.bool, device=line.device)
    kept[line[by_expert.indices]] = (place < capacity) & (by_expert.values < len(counts))
    return kept.view(experts.shape)


def line_up(experts: Tensor, *, order: str, priority: Tensor, seed: int | None) -> Tensor:
    """The choices in the order in which experts take them, each as token * topk + choice: [tokens * topk] int64."""
    tokens, topk = experts.shape
    if order == "probs":
        return priority.detach().flatten().sort(descending=True, stable=True).indices
    if order == "random":
        assert seed is not None and topk == 1, "random token selection is of one choice, in training"
        seed_generator(experts.device, seed)
        return torch.rand(tokens, device=experts.device).sort(stable=True).indices
    line = torch.arange(tokens * topk, device=experts.device)
    return line.view(tokens, topk).t().flatten() if order == "choice" else line
