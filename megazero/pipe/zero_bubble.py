"""Zero-bubble schedules: backwards in two parts, so that the gradients of weights fill what would be idle time.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241): ZB-H1. Qi et al. 2024, "Pipeline Parallelism
with Controllable Memory" (arXiv 2405.15362): ZB-V. Stages are numbered as the model's depth runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .instructions import BackwardInput, BackwardWeight, Compute, Forward, Orders

F, B, W = Forward, BackwardInput, BackwardWeight
Kind = type[Forward] | type[BackwardInput] | type[BackwardWeight]


def zb_h1(ranks: int, micros: int, chunks: int = 1) -> Orders:
    """1F1B whose weight gradients wait until a rank would be idle, but no longer than memory allows.

    Every rank holds at most min(ranks, micros) micro-batches until their weight gradient, which is what the first
    rank of 1F1B holds. Stage r lives on rank r.
    """
    orders = []
    for r in range(ranks):
        order = _Order([r], micros)
        for _ in range(ranks - 1 - r):
            order.add((F, 0))
        for _ in range(r):
            order.add((F, 0), (B, 0))
        while order.left(F, 0):
            order.add((F, 0), (B, 0), (W, 0))
        while order.left(B, 0):
            order.add((B, 0), (W, 0))
        while order.left(W, 0):
            order.add((W, 0))
        orders.append(order.steps)
    return orders


def zb_v(ranks: int, micros: int, chunks: int = 2) -> Orders:
    """No rank is idle between its first and its last step where F = B = W and micros >= 2 ranks - 1.

    The model runs down the ranks and up again: rank r holds stage r and stage 2 ranks - 1 - r, so the first rank
    holds both ends and the loss. Every rank holds at most 2 ranks micro-batches of one of its stages. With fewer
    micro-batches the order is that of 2 ranks - 1 of them, without those that do not exist.
    """
    orders = []
    for r in range(ranks):
        order = _Order([r, 2 * ranks - 1 - r], max(micros, 2 * ranks - 1))
        for _ in range(2 * (ranks - r) - 1):
            order.add((F, 0))
        for _ in range(r):
            order.add((F, 1), (F, 0))
        for _ in range(ranks - r):
            order.add((F, 1), (B, 1), (W, 1))
        while order.left(F, 0) or order.left(F, 1):
            order.add((F, 0), (B, 0), (W, 0), (F, 1), (B, 1), (W, 1))
        for _ in range(r):
            order.add((B, 0), (B, 1))
        for _ in range(ranks - r):
            order.add((B, 0), (W, 0))
        for chunk in (1, 0):
            while order.left(W, chunk):
                order.add((W, chunk))
        orders.append([step for step in order.steps if step.micro < micros])
    return orders


class _Order:
    """One rank's order in the making. Each kind of step on each stage runs over the micro-batches 0, 1, 2, ..."""

    def __init__(self, stages: Sequence[int], micros: int) -> None:
        self.stages, self.micros = stages, micros
        self.steps: list[Compute] = []
        self._done = {(kind, chunk): 0 for kind in (F, B, W) for chunk in range(len(stages))}

    def left(self, kind: Kind, chunk: int) -> int:
        """Micro-batches that have not had this step."""
        return self.micros - self._done[kind, chunk]

    def add(self, *steps: tuple[Kind, int]) -> None:
        """The next micro-batch of each (kind, chunk), where one is left."""
        for kind, chunk in steps:
            if self.left(kind, chunk):
                self.steps.append(kind(self._done[kind, chunk], self.stages[chunk]))
                self._done[kind, chunk] += 1
