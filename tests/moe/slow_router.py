"""The gates of the published systems, transcribed literally from their formulas with loops: slow, and easy to read.

Everything is a plain number or a list of them. Logits are a list of rows. Nothing is sampled.
"""

from __future__ import annotations

import math


def softmax(row):
    parts = [math.exp(x - max(row)) for x in row]
    return [part / sum(parts) for part in parts]


def sigmoid(row):
    return [1 / (1 + math.exp(-x)) for x in row]


def largest(values, k):
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:k]


def deepspeed_gate(logits, k, capacity, policy):
    """Weights as {(token, expert): weight} of the kept choices, and the auxiliary loss, of DeepSpeed's three gates.

    policy: "first" (top-2: first choices, then second ones), "position", "probs".
    """
    tokens, experts = len(logits), len(logits[0])
    p = [softmax(row) for row in logits]
    chosen = [largest(row, k) for row in logits]
    counted = [row[:1] for row in chosen] if k == 2 else chosen
    loss = sum(
        sum(p[t][e] for t in range(tokens)) / tokens * sum(e in row for row in counted) / tokens
        for e in range(experts)
    )  # fmt: skip
    loss *= experts / len(counted[0])
    kept = {}
    for e in range(experts):
        asking = [(t, chosen[t].index(e)) for t in range(tokens) if e in chosen[t]]
        if policy == "first":
            asking.sort(key=lambda place: (place[1], place[0]))
        if policy == "probs":
            asking.sort(key=lambda place: (-p[place[0]][e], place[0]))
        for t, _ in asking[:capacity]:
            kept[t, e] = p[t][e]
    if k > 1:
        sums = [sum(weight for (t, _), weight in kept.items() if t == token) for token in range(tokens)]
        kept = {(t, e): weight / max(sums[t], 2.220446049250313e-16) for (t, e), weight in kept.items()}
    return kept, loss


def megatron_gate(logits, k, *, function, pre, scale=1.0, bias=None, groups=None, capacity=None, policy="probs"):
    """The same of Megatron-core's gate; `groups` is (number, kept)."""
    tokens, experts = len(logits), len(logits[0])
    chosen, weights = [], []
    for row in logits:
        scores = softmax(row) if function == "softmax" and pre else row if function == "softmax" else sigmoid(row)
        values = [s + (bias[e] if bias else 0.0) for e, s in enumerate(scores)]
        if groups:
            number, seen = groups
            size = experts // number
            worth = [sum(sorted(values[g * size : (g + 1) * size])[-(k // seen) :]) for g in range(number)]
            open_groups = largest(worth, seen)
            values = [v if e // size in open_groups else -math.inf for e, v in enumerate(values)]
        mine = largest(values, k)
        if function == "softmax":
            weight = [scores[e] for e in mine] if pre else softmax([row[e] for e in mine])
        else:
            total = sum(scores[e] for e in mine) + 1e-20
            weight = [scores[e] / total if k > 1 else scores[e] for e in mine]
        chosen.append(mine)
        weights.append([w * scale for w in weight])
    kept = {}
    for e in range(experts):
        asking = [(t, chosen[t].index(e)) for t in range(tokens) if e in chosen[t]]
        if policy == "probs":
            asking.sort(key=lambda place: (-weights[place[0]][place[1]], place[0]))
        for t, j in asking[: tokens if capacity is None else capacity]:
            kept[t, e] = weights[t][j]
    return kept, megatron_aux_loss(logits, k, function)


def megatron_aux_loss(logits, k, function):
    tokens, experts = len(logits), len(logits[0])
    scores = [softmax(row) for row in logits]
    if function == "sigmoid":
        scores = [[s / (sum(sigmoid(row)) + 1e-20) for s in sigmoid(row)] for row in logits]
    chosen = [largest(row, k) for row in logits]
    return sum(
        experts / (k * tokens**2) * sum(row[e] for row in scores) * sum(e in row for row in chosen)
        for e in range(experts)
    )  # fmt: skip
