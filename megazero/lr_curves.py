"""The learning rate of each schedule as a formula: Megatron's curves, and DeepSpeed's schedules by their names.

Each is a frozen value, and its rate a pure function of what the run has done. Nothing is stored, so that nothing has to
be restored and no optimizer can carry an old value along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_MOMENTUM = 0.999       # a momentum of 1 would never forget, one above it would explode


@dataclass(frozen=True)
class Done:
    """What schedules count: finished updates, and the samples and tokens they took. A skipped step is not in it."""

    updates: int = 0
    samples: int = 0
    tokens: int = 0


def falling(style: str, progress: float) -> float:
    """A curve from 1 at progress 0 to 0 at progress 1."""
    curves = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "exponential": 2 * 0.5**progress - 1,
        "minus_sqrt": 1 - math.sqrt(progress),
    }
    return curves[style]


@dataclass(frozen=True, kw_only=True)
class MegatronCurve:
    """A warm-up from init to max, then a decay from max to min (Megatron's OptimizerParamScheduler).

    `unit` says whether lengths count samples or tokens. With `warmup_samples` the warm-up counts samples though the
    decay counts tokens; `warmup` is then the tokens at its end, from which the decay starts.
    """

    max_lr: float
    min_lr: float
    init_lr: float
    warmup: float
    decay: float
    style: str
    tail: float
    tail_style: str
    unit: str = "samples"
    warmup_samples: float | None = None

    def learning_rate(self, done: Done) -> float:
        n = done.tokens if self.unit == "tokens" else done.samples
        warming, warm = (n, self.warmup) if self.warmup_samples is None else (done.samples, self.warmup_samples)
        if warm > 0 and warming <= warm:
            return self.init_lr + (self.max_lr - self.init_lr) * warming / warm
        if self.style == "constant":
            return self.max_lr
        if n > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(n, 1)))
        if self.style == "WSD":
            start = self.decay - self.tail
            share = 1.0 if n <= start else falling(self.tail_style, (n - start) / self.tail)
        else:
            # below 0 only where the samples of the warm-up held fewer tokens than usual
            share = falling(self.style, max(0.0, (n - self.warmup) / (self.decay - self.warmup)))
        return self.min_lr + share * (self.max_lr - self.min_lr)


@dataclass(frozen=True, kw_only=True)
class LRRangeTest:
    """A rate that grows by `rate` times `min_lr` in every `size` updates, evenly or at once (Smith, 2018)."""

    min_lr: float
    size: int
    rate: float
    staircase: bool

    def learning_rate(self, done: Done) -> float:
        grown = done.updates // self.size if self.staircase else done.updates / self.size
        return self.min_lr * (1 + self.rate * grown)


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    """Up from min to max in `first` updates and down again in `second`, the momentum the other way; then a decay.

    DeepSpeed's values with two exceptions: the momentum stops below 1 where it grows after the cycle, and the second
    moment's decay stays the optimizer's, where DeepSpeed sets 0.99. As there, the first update has `min_momentum`.
    """

    min_lr: float
    max_lr: float
    first: int
    second: int
    first_stairs: int
    second_stairs: int
    min_momentum: float | None      # None: the momentum stays the optimizer's
    max_momentum: float
    decay_size: int                 # updates after the cycle in which the decay acts once; 0: it never does
    decay_rate: float
    momentum_rate: float

    def learning_rate(self, done: Done) -> float:
        return self.min_lr / self._decayed(done, self.decay_rate) + (self.max_lr - self.min_lr) * self._height(done)

    def momentum(self, done: Done) -> float | None:
        if self.min_momentum is None:
            return None
        if done.updates == 0:
            return self.min_momentum
        inside = self.max_momentum - (self.max_momentum - self.min_momentum) * self._height(done)
        grown = self._decayed(done, self.momentum_rate)
        return inside if grown == 1 else min(inside * grown, max(MOST_MOMENTUM, self.max_momentum))

    def clamped_from(self) -> int | None:
        """After how many updates the momentum would first pass its bound; None: never."""
        most = max(MOST_MOMENTUM, self.max_momentum)
        if self.min_momentum is None or not (self.decay_size and self.momentum_rate and self.max_momentum):
            return None
        after = (most / self.max_momentum - 1) / self.momentum_rate * self.decay_size
        return self.first + self.second + math.floor(after) + 1

    def _height(self, done: Done) -> float:
        """Where in the cycle: 0 at its ends and after it, 1 at its top."""
        n, total = done.updates, self.first + self.second
        if n >= total:
            return 0.0
        rises = n <= self.first
        steps, size = (n, self.first) if rises else (total - n, self.second)
        stairs = self.first_stairs if rises else self.second_stairs
        return steps * stairs // size / stairs if stairs else steps / size

    def _decayed(self, done: Done, rate: float) -> float:
        """1 in the cycle; after it what the decay of `rate` has come to."""
        after = done.updates - self.first - self.second
        return 1 + rate * after / self.decay_size if after > 0 and self.decay_size else 1.0


def warmed(index: int, steps: int, shape: str) -> float:
    """The share of a warm-up of DeepSpeed that is done at its step `index`, which starts at 0."""
    return index / steps if shape == "linear" else math.log(index + 1) / math.log(steps)


@dataclass(frozen=True, kw_only=True)
class WarmupLR:
    """From min to max in a warm-up, then constant; with `total` (WarmupDecayLR) linearly down to min at that step.

    DeepSpeed's values: its first two updates both run at min.
    """

    min_lr: float
    max_lr: float
    steps: int          # at least 2
    shape: str          # log or linear
    total: int | None

    def learning_rate(self, done: Done) -> float:
        index = done.updates - 1
        if index < self.steps:
            share = warmed(max(index, 0), self.steps, self.shape)
        elif self.total is None:
            share = 1.0
        else:
            share = max(0.0, (self.total - index) / max(1, self.total - self.steps))
        return self.min_lr + (self.max_lr - self.min_lr) * share


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR:
    """Shares of a rate: from `min_ratio` to 1 in a warm-up, then along a cosine to `last_ratio` at step `total`.

    DeepSpeed's values: its first update runs at 0.
    """

    lr: float
    min_ratio: float
    last_ratio: float
    steps: int          # at least 2
    shape: str          # log or linear
    total: int

    def learning_rate(self, done: Done) -> float:
        index = done.updates - 1
        if index < 0:
            return 0.0
        if index < self.steps:
            return self.lr * (self.min_ratio + (1 - self.min_ratio) * warmed(index, self.steps, self.shape))
        progress = min(1.0, (index - self.steps + 1) / max(1, self.total - self.steps))
        return self.lr * (self.last_ratio + (1 - self.last_ratio) * falling("cosine", progress))


Curve = MegatronCurve | LRRangeTest | OneCycle | WarmupLR | WarmupCosineLR


@dataclass(frozen=True)
class WeightDecay:
    """From start to end over `length` samples (Megatron)."""

    start: float
    end: float
    length: int
    style: str

    def at(self, samples: int) -> float:
        if self.style == "constant" or samples >= self.length:
            return self.end
        return self.start + (1 - falling(self.style, samples / self.length)) * (self.end - self.start)
