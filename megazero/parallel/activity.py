"""What a rank is doing with others: written by the thread that computes, read by one that watches."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

# What a rank waits for: the name of a collective or message, the axis of its group, and the ranks that take part.
Wait = tuple[str, str, tuple[int, ...]]


class Activity:
    """Of one process. `beats` grows with everything that is begun or ended, so a rank whose beats stand still hangs.

    phase        of the run, as it is to be shown
    instruction  of the pipeline's program: its words, its place, and how many there are
    waiting      for what; None: it computes
    begun        collectives by the axis of their group
    """

    def __init__(self) -> None:
        self.beats = 0
        self.phase = "start-up"
        self.instruction: tuple[Any, int, int] | None = None
        self.waiting: Wait | None = None
        self.begun: Counter[str] = Counter()

    def enter(self, phase: str) -> None:
        """Another part of the run begins."""
        self.phase, self.instruction = phase, None
        self.beats += 1

    def run(self, instruction: Any, at: int, count: int) -> None:
        """An instruction begins, number `at` of `count`."""
        self.instruction = instruction, at, count
        self.beats += 1

    def begin(self, axis: str) -> None:
        """A collective of a group along `axis` begins."""
        self.begun[axis] += 1
        self.beats += 1

    def waits(self, name: str, axis: str, ranks: tuple[int, ...]) -> Waiting:
        """A context in which this rank waits for others."""
        return Waiting(self, (name, axis, ranks))


class Waiting:
    """See Activity.waits."""

    def __init__(self, activity: Activity, what: Wait) -> None:
        self.activity, self.what = activity, what

    def __enter__(self) -> None:
        self.activity.waiting = self.what

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:                       # else it is shown where it waited
            self.activity.waiting = None
        self.activity.beats += 1
