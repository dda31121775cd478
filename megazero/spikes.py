"""When a loss is a spike: far above what the steps before it had, in their own measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LEAST = 20              # losses that must be known before any is called a spike
NORMAL = 1.4826         # of a normal distribution, its standard deviation over the median distance from its median
FLOOR = 0.01            # of the median: a deviation is at least this, for losses that hardly move


@dataclass(frozen=True)
class SpikeRule:
    """A loss is a spike above median + threshold x deviation of the last `window` losses that were none, where the
    deviation is 1.4826 x the median distance from the median, and at least a hundredth of the median."""

    threshold: float = 10.0
    window: int = 100

    def keep(self, losses: Sequence[float], loss: float) -> tuple[float, ...]:
        """What later losses are compared with, after one that is no spike."""
        return (*losses, loss)[-self.window :]

    def level(self, losses: Sequence[float]) -> float | None:
        """Above this a loss is a spike; None: too few are known."""
        if len(losses) < LEAST:
            return None
        middle = median(losses)
        deviation = NORMAL * median(abs(loss - middle) for loss in losses)
        return middle + self.threshold * max(deviation, FLOOR * abs(middle))

    def describes(self, losses: Sequence[float], loss: float) -> str | None:
        """What is to be said of a loss that is a spike after `losses`; None: it is none."""
        level = self.level(losses)
        if level is None or not loss > level:
            return None
        return (
            f"loss {loss:.6f} is a spike: the last {len(losses)} have the median {median(losses):.6f}, and "
            f"--spike-threshold {self.threshold:g} deviations above it is {level:.6f}"
        )
