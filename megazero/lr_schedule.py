"""Learning rate and weight decay as pure functions of the samples consumed so far.

The rules are Megatron's (OptimizerParamScheduler): lengths count samples, iteration flags are multiplied by the global
batch, and step k updates with the values at k - 1 finished steps. Nothing is stored, so nothing has to be restored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .config import BatchConfig, ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The two curves of a run; every length is in samples."""

    max_lr: float
    min_lr: float
    init_lr: float
    warmup: float
    decay: int
    style: str
    tail: int
    tail_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_length: int
    weight_decay_style: str

    def at(self, consumed_samples: int) -> tuple[float, float]:
        """(learning rate, weight decay) of the step that follows `consumed_samples` samples."""
        return self.learning_rate(consumed_samples), self.weight_decay(consumed_samples)

    def learning_rate(self, n: int) -> float:
        """Warm-up from init to max, then a decay from max to min that ends at `decay` samples."""
        if self.warmup > 0 and n <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * n / self.warmup
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
            share = falling(self.style, (n - self.warmup) / (self.decay - self.warmup))
        return self.min_lr + share * (self.max_lr - self.min_lr)

    def weight_decay(self, n: int) -> float:
        """From start to end over the length of the run."""
        if self.weight_decay_style == "constant" or n >= self.weight_decay_length:
            return self.end_weight_decay
        grown = 1 - falling(self.weight_decay_style, n / self.weight_decay_length)
        return self.start_weight_decay + grown * (self.end_weight_decay - self.start_weight_decay)


def falling(style: str, progress: float) -> float:
    """A curve from 1 at progress 0 to 0 at progress 1."""
    curves = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "exponential": 2 * 0.5**progress - 1,
        "minus_sqrt": 1 - math.sqrt(progress),
    }
    return curves[style]


def make_schedule(schedule: ScheduleConfig, batch: BatchConfig, global_batch: int) -> Schedule:
    """The schedule of a run whose steps take `global_batch` samples. ValueError without --lr or a training length."""
    if schedule.lr is None:
        raise ValueError("the learning rate is missing: give --lr")
    if batch.train_samples is None:
        length, unit, flags = batch.iterations(global_batch), global_batch, schedule.lengths("iters")
    else:
        length, unit, flags = batch.train_samples, 1, schedule.lengths("samples")
    decay, warmup, tail = flags.values()
    decay = (decay or length) * unit
    constant = schedule.weight_decay_incr_style == "constant"
    return Schedule(
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        init_lr=schedule.lr_warmup_init,
        warmup=(warmup or 0) * unit if schedule.lr_warmup_fraction is None else schedule.lr_warmup_fraction * decay,
        decay=decay,
        style=schedule.lr_decay_style,
        tail=(tail or 0) * unit,
        tail_style=schedule.lr_wsd_decay_style,
        start_weight_decay=schedule.weight_decay if constant else schedule.start_weight_decay,
        end_weight_decay=schedule.weight_decay if constant else schedule.end_weight_decay,
        weight_decay_length=length * unit,
        weight_decay_style=schedule.weight_decay_incr_style,
    )


def print_lr_lines(schedule: Schedule, starts: Iterable[int]) -> Iterator[str]:
    """One JSON object per step, which begins at so many consumed samples: what it updates with."""
    for step, consumed_samples in enumerate(starts, 1):
        learning_rate, weight_decay = schedule.at(consumed_samples)
        yield json.dumps({"step": step, "learning_rate": learning_rate, "weight_decay": weight_decay})
