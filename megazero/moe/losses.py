"""What a router pays for crowding its experts, and for large logits: losses without their coefficients.

Every balance loss is 1 where choices are even and the number of experts where one expert gets all (but for topk > 1,
where it cannot): experts * sum_e (share of choices)_e * (mean score)_e. Shares are counts and have no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_choices(experts: Tensor, number: int, mask: Tensor | None = None) -> Tensor:
    """How often each of `number` experts was chosen in `experts` [tokens, topk], by tokens of `mask`: int64."""
    return count_by_sequence(experts, number, 1, mask)[0]


def count_by_sequence(experts: Tensor, number: int, sequences: int, mask: Tensor | None) -> Tensor:
    """Choices of each expert in each sequence: [sequences, experts] int64, of batch-major experts [tokens, topk]."""
    flat = experts if mask is None else experts.masked_fill(~mask.unsqueeze(1), number)
    row = torch.arange(sequences, device=experts.device).view(-1, 1) * (number + 1)
    at = flat.reshape(sequences, -1) + row
    counts = torch.zeros(sequences * (number + 1), dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, at.flatten(), torch.ones_like(at).flatten()).view(sequences, -1)[:, :number]


def mean_scores(scores: Tensor, sequences: int, mask: Tensor | None) -> Tensor:
    """Mean scores of each sequence over the tokens of `mask`: [sequences, experts], 0 where there are none."""
    each = scores.unflatten(0, (sequences, -1))
    if mask is None:
        return each.mean(1)
    part = mask.view(sequences, -1, 1).to(scores.dtype)
    return (each * part).sum(1) / part.sum(1).clamp_min(1)


def balance_loss(scores: Tensor, counts: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """experts * mean over sequences of sum_e share_e * mean_score_e, a scalar.

    scores  [tokens, experts], of all experts, batch-major
    counts  [sequences, experts] choices: shares are taken of them, whatever tokens they count
    """
    shares = counts.to(scores.dtype) / counts.sum(1, keepdim=True).clamp_min(1).to(scores.dtype)
    each = (shares * mean_scores(scores, len(counts), mask)).sum(1)
    return scores.shape[1] * each.mean()


def z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, equation 5), a scalar."""
    square = logits.logsumexp(dim=1).square()
    if mask is None:
        return square.mean()
    part = mask.to(logits.dtype)
    return (square * part).sum() / part.sum().clamp_min(1)
