"""A GPT with experts as the formulas of the published systems have it, in plain torch: no layout, no dispatch, a loop
over tokens and their experts. Slow, and easy to read.

Parameters are a table by global name, tokens lie as [batch, seq]. A gate call sees a micro-batch, batch-major.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits [tokens, experts], sequences, bias -> for each token its experts with their weights, and a loss.
Gate = Callable[[Tensor, int, Tensor | None], tuple[list[list[tuple[int, Tensor]]], Tensor]]


def model_loss(
    p: Mapping[str, Tensor], batches: list[tuple[Tensor, Tensor]], layers: int, gate: Gate
) -> tuple[Tensor, Tensor]:
    """The mean over all tokens, and what is paid to the gates: a sum over layers, a mean over gate calls."""
    tokens = sum(labels.numel() for _, labels in batches)
    loss, total = torch.zeros(2, dtype=torch.float64)
    for ids, labels in batches:
        x = p["embedding.word.weight"][ids] + p["embedding.position"][: ids.shape[1]]
        for i in range(layers):
            x = x + attention(p, f"layers.{i}.attention", norm(p, f"layers.{i}.attention_norm", x))
            y, paid = ffn(p, f"layers.{i}.ffn", norm(p, f"layers.{i}.ffn_norm", x), gate)
            x, total = x + y, total + paid / len(batches)
        logits = norm(p, "final_norm.norm", x) @ p["embedding.word.weight"].T
        loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
    return loss, total


def norm(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])


def attention(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    fused = torch.einsum("bth,gcdh->btgcd", x, p[f"{name}.qkv.weight"]) + p[f"{name}.qkv.bias"]
    q, k, v = fused.unbind(3)                                               # [batch, seq, heads, head_dim]
    scores = torch.einsum("bqgd,bkgd->bgqk", q, k) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    y = torch.einsum("bgqk,bkgd->bqgd", scores.masked_fill(later, -math.inf).softmax(-1), v)
    return y.flatten(2) @ p[f"{name}.out.weight"].T + p[f"{name}.out.bias"]


def feed_forward(x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
    y = x @ up.T if up_bias is None else x @ up.T + up_bias
    y = F.gelu(y, approximate="tanh") @ down.T
    return y if down_bias is None else y + down_bias


def ffn(p: Mapping[str, Tensor], name: str, x: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """What the experts of every token make of it, and beside them a residual MLP or a shared expert."""
    rows = x.flatten(0, 1)
    chosen, paid = gate(rows @ p[f"{name}.router.weight"].T, len(x), p.get(f"{name}.router.expert_bias"))
    parts = [f"{name}.experts.{part}" for part in ("up", "up_bias", "down", "down_bias")]
    y = torch.stack([
        sum((weight * feed_forward(row, *(p[part][e] for part in parts)) for e, weight in experts), 0 * row)
        for row, experts in zip(rows, chosen, strict=True)
    ])  # fmt: skip
    if f"{name}.residual.up.weight" in p:
        beside = [f"{name}.residual.{part}" for part in ("up.weight", "up.bias", "down.weight", "down.bias")]
        mixing = (rows @ p[f"{name}.coefficient.weight"].T + p[f"{name}.coefficient.bias"]).softmax(-1)
        y = y * mixing[:, :1] + feed_forward(rows, *(p[part] for part in beside)) * mixing[:, 1:]
    if f"{name}.shared.up.weight" in p:
        shared = feed_forward(rows, p[f"{name}.shared.up.weight"], None, p[f"{name}.shared.down.weight"], None)
        y = y + shared * (rows @ p[f"{name}.shared_gate.weight"].T).sigmoid()
    return y.view_as(x), paid


def share(chosen: list[list[int]], experts: int) -> Tensor:
    """What part of all choices each expert has."""
    counts = torch.tensor([sum(e in row for row in chosen) for e in range(experts)], dtype=torch.float64)
    return counts / counts.sum()


def megatron_top2(logits: Tensor, sequences: int, bias: Tensor | None) -> tuple[list, Tensor]:
    """Nothing dropped, the softmax over the chosen two; 0.02 auxiliary loss and 0.003 z-loss."""
    chosen = logits.topk(2).indices.tolist()
    weights = [torch.stack([row[e] for e in mine]).softmax(0) for row, mine in zip(logits, chosen)]
    balance = logits.shape[1] * (share(chosen, logits.shape[1]) * logits.softmax(1).mean(0)).sum()
    paid = 0.02 * balance + 0.003 * logits.exp().sum(1).log().square().mean()
    return [list(zip(mine, weight)) for mine, weight in zip(chosen, weights)], paid


def deepspeed_top1(logits: Tensor, sequences: int, bias: Tensor | None) -> tuple[list, Tensor]:
    """The first ceil(tokens / experts) of an expert stay, at least 4; weights are not divided by anything; 0.01."""
    scores, experts = logits.softmax(1), logits.shape[1]
    first = scores.argmax(1).tolist()
    capacity = max(math.ceil(len(first) / experts), 4)
    kept = [first[:t].count(e) < capacity for t, e in enumerate(first)]
    assert not all(kept), "capacity is to matter"
    balance = experts * (share([[e] for e in first], experts) * scores.mean(0)).sum()
    return [[(e, scores[t, e])] if kept[t] else [] for t, e in enumerate(first)], 0.01 * balance


def deepseek(logits: Tensor, sequences: int, bias: Tensor | None) -> tuple[list, Tensor]:
    """Four of eight experts in two of four groups, by sigmoid and bias; weights are those of the sigmoid alone,
    divided by their sum, times 2.5; 0.05 of the loss of each sequence, which knows neither bias nor groups."""
    scores = logits.sigmoid()
    chosen = []
    for row in (scores.detach() + bias).tolist():
        worth = [sum(row[2 * g : 2 * g + 2]) for g in range(4)]
        seen = sorted(range(4), key=lambda g: -worth[g])[:2]
        chosen.append([e for e in range(8) if e // 2 in seen])
    weights = [torch.stack([row[e] for e in mine]) for row, mine in zip(scores, chosen)]
    free = scores.topk(4).indices.tolist()
    assert [sorted(row) for row in free] != chosen, "bias and groups are to matter"
    even, size, paid = scores / scores.sum(1, keepdim=True), len(chosen) // sequences, 0.0
    for start in range(0, len(chosen), size):
        own = slice(start, start + size)
        paid = paid + 0.05 / sequences * 8 * (share(free[own], 8) * even[own].mean(0)).sum()
    return [list(zip(mine, 2.5 * weight / weight.sum())) for mine, weight in zip(chosen, weights)], paid
