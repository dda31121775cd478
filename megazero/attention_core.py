"""The core of attention, softmax(q k^T / sqrt(d)) v, by torch's fused op or in three steps of our own.

Three steps (matrix product, softmax kernel, matrix product) keep the probabilities, which the fused op does not. They
are for what it does not offer, for comparing, and for hardware where it is slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels.dispatch import Kernels
from .kernels.softmax import seen_by_causal, softmax


@dataclass(frozen=True)
class Rule:
    """What a layer's attention has beside masks.

    window   keys before its own that a query sees; None: all of them
    sink     [heads], the score of attending to nothing (see kernels/softmax.py). By three steps only.
    divisor  what scores are divided by before the softmax, which multiplies them again, so that fp16 holds them; None:
             nothing of the kind. By three steps only.
    """

    window: int | None = None
    sink: Tensor | None = None
    divisor: float | None = None

    @property
    def needs_three_steps(self) -> bool:
        return self.sink is not None or self.divisor is not None


PLAIN = Rule()


def attention_core(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, kernels: Kernels, rule: Rule = PLAIN
) -> Tensor:
    """q [batch, heads, seq, head_dim], k and v [batch, groups, seq, head_dim] -> as q, a group for heads / groups.

    mask      bool [batch, 1, seq, seq], true where a query may look; None: up to its own key
    dropout   of probabilities, drawn from the device's default generator
    """
    if mask is not None and rule.window is not None:
        mask = mask & seen_by_causal(q.shape[2], k.shape[2], rule.window, q.device)
    if kernels.attention == "unfused" or (kernels.attention == "auto" and rule.needs_three_steps):
        return _three_steps(q, k, v, mask, dropout=dropout, rule=rule, impl=kernels.impl("softmax"))
    assert not rule.needs_three_steps
    if mask is None and rule.window is not None:
        mask = seen_by_causal(q.shape[2], k.shape[2], rule.window, q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )


def _three_steps(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, rule: Rule, impl: str
) -> Tensor:
    """As `attention_core`. Heads of a group stand below each other, so that its keys and values are not repeated."""
    batch, groups, keys = k.shape[:3]
    grouped = q.unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)         # [batch * groups, heads of it * seq, d]
    divisor, window = rule.divisor or 1.0, rule.window if mask is None else None
    scale = 1.0 / (math.sqrt(q.shape[-1]) * divisor)
    scores = torch.baddbmm(
        q.new_empty(()), grouped, k.flatten(0, 1).mT, beta=0.0, alpha=scale
    ).view(batch, groups * (q.shape[1] // groups), q.shape[2], keys)           # [batch, heads, seq, seq]
    probabilities = softmax(
        scores, divisor, causal=mask is None, mask=mask, window=window, sink=rule.sink, impl=impl
    )
    if dropout:
        probabilities = torch.native_dropout(probabilities, dropout, True)[0]
    rows = probabilities.view(batch * groups, -1, keys)
    return torch.bmm(rows, v.flatten(0, 1)).view(q.shape)
