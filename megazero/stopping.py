"""Where a run ends that is asked to end before its last iteration: every rank at the same micro-batch.

A step may be long, so it is not finished: the micro-batches that some rank has begun are, the others are dropped on all
ranks, and with them the gradients of the step. What was before it is saved; data and draws are arithmetic, so the step
is made again as if it had never begun.
"""

from __future__ import annotations

from threading import Condition

MICRO_BATCHES = 1 << 32         # more than any step has: a position is iteration x this + micro-batches begun


class Stopped(Exception):
    """All ranks end the run here, having been asked to."""


class Stop:
    """Whether the run was asked to end, and at which position all ranks do.

    `ask`, `freeze` and `decide` come from threads that watch; the others from the one that computes. Between `freeze`
    and `decide` this rank begins no further micro-batch, but goes on with those that it has begun.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._changed = Condition()
        self._position = 0                      # the last micro-batch that this rank has begun
        self._frozen = False
        self._limit: int | None = None          # the first that no rank begins

    def ask(self, reason: str) -> None:
        """The run is to end; the first reason stays."""
        self.reason = self.reason or reason

    def enter(self, iteration: int) -> None:
        """A step begins, with its micro-batch 0 ahead."""
        with self._changed:
            self._position = iteration * MICRO_BATCHES

    def admits(self, micro: int) -> bool:
        """Whether this micro-batch of the step is run: the same answer on all ranks. May wait for their agreement."""
        at = self._position - self._position % MICRO_BATCHES + micro + 1
        if at <= self._position:
            return True
        with self._changed:
            while self._frozen and self._limit is None:
                self._changed.wait()
            if self._limit is not None and at >= self._limit:
                return False
            self._position = at
        return True

    def freeze(self) -> int:
        """How far this rank is, and will be until `decide`."""
        with self._changed:
            self._frozen = True
            return self._position

    def decide(self, furthest: int) -> None:
        """All ranks run what the furthest one has begun, and nothing beyond it."""
        with self._changed:
            self._limit = furthest + 1
            self._changed.notify_all()
