"""Learning rate, weight decay and momentum of each step as pure functions of what was done before it.

Step k updates with the values at k - 1 finished updates. The rules are Megatron's, whose lengths count samples (those
in iterations are multiplied by the global batch) or tokens, or those of one of DeepSpeed's schedules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .batch_sizes import BatchSizes, SeqLengths, constant, lengths_of, tokens_of
from .config import BatchConfig, DeepSpeedScheduleConfig, ScheduleConfig
from .config_schedule import Length, check_tail, check_warmup, needs_lr
from .lr_curves import Curve, Done, LRRangeTest, MegatronCurve, OneCycle, WarmupCosineLR, WarmupLR, WeightDecay


@dataclass(frozen=True)
class Rates:
    """What one step updates with. `momentum` (Adam's beta1) is None where the schedule leaves it to the optimizer."""

    learning_rate: float
    weight_decay: float
    momentum: float | None = None


@dataclass(frozen=True)
class Schedule:
    """The curves of a run."""

    curve: Curve
    decay: WeightDecay

    def at(self, done: Done) -> Rates:
        """What the step that follows `done` updates with."""
        momentum = self.curve.momentum(done) if isinstance(self.curve, OneCycle) else None
        return Rates(self.curve.learning_rate(done), self.decay.at(done.samples), momentum)

    def warnings(self, steps: int) -> list[str]:
        """What in a run of so many steps will not go as the flags say, one line each."""
        clamped = self.curve.clamped_from() if isinstance(self.curve, OneCycle) else None
        if clamped is None or clamped >= steps:
            return []
        most = self.curve.momentum(Done(clamped))
        return [f"the momentum of OneCycle would grow past {most:g} at step {clamped + 1}: it stays there from then on"]


def make_schedule(
    schedule: ScheduleConfig, batch: BatchConfig, sizes: BatchSizes | int, *,
    seq_length: int | SeqLengths | None = None, named: DeepSpeedScheduleConfig | None = None,
) -> Schedule:
    """The schedule of a run; `sizes` are the samples of its global batches, `seq_length` the tokens of a sample: each a
    number, or what it is when.

    `named`: parameters of one of DeepSpeed's schedules, if its `lr_scheduler` names one. Raises ValueError without
    --lr where it is needed, without a training length, and for a warm-up that does not end before the decay.
    """
    named = named or DeepSpeedScheduleConfig()
    sizes = constant(sizes) if isinstance(sizes, int) else sizes
    if schedule.lr is None and needs_lr(named.lr_scheduler, named.warmup_max_lr):
        raise ValueError("the learning rate is missing: give --lr")
    steps = batch.iterations(sizes, seq_length=seq_length)
    if named.lr_scheduler is None:
        curve: Curve = megatron_curve(schedule, batch, sizes, seq_length)
    else:
        curve = deepspeed_curve(named, schedule.lr, steps)
    style, decay = schedule.weight_decay_incr_style, schedule.weight_decay
    ends = (decay, decay) if style == "constant" else (schedule.start_weight_decay, schedule.end_weight_decay)
    length = batch.train_samples or batch.samples_of_tokens(sizes, seq_length)
    if batch.train_iters is not None:
        length = batch.train_iters * sizes.last
    return Schedule(curve, WeightDecay(*ends, length, style))


def megatron_curve(
    schedule: ScheduleConfig, batch: BatchConfig, sizes: BatchSizes, seq_length: int | SeqLengths | None
) -> MegatronCurve:
    """Megatron's curve with all lengths in samples; in tokens where the decay or the warm-up is given in tokens."""
    decay, warmup, tail = schedule.decay(batch), schedule.warmup(batch), schedule.tail()
    assert decay is not None, "the run has a length"
    unit = "tokens" if "tokens" in {length.unit for length in (decay, warmup) if length is not None} else "samples"

    def in_samples(length: Length) -> float:
        return length.value * (sizes.last if length.unit == "iters" else 1)

    def counted(length: Length | None) -> Length:
        if length is None:
            return Length("", 0, unit)
        if length.unit == "tokens":
            return length
        samples = in_samples(length)
        if unit == "samples":
            return length._replace(value=samples)
        assert seq_length is not None, "lengths in tokens are asked for, so the tokens of a sample must be given"
        return length._replace(value=tokens_of(samples, sizes, lengths_of(seq_length)))

    long, warm, last = counted(decay), counted(warmup), counted(tail)
    check_warmup(warm, long)
    if schedule.lr_decay_style == "WSD":
        check_tail(last, long, warm.value)
    by_samples = warmup is not None and warmup.unit != "tokens" and unit == "tokens"
    return MegatronCurve(
        max_lr=schedule.lr, min_lr=schedule.min_lr, init_lr=schedule.lr_warmup_init, warmup=warm.value,
        decay=long.value, style=schedule.lr_decay_style, tail=last.value, tail_style=schedule.lr_wsd_decay_style,
        unit=unit, warmup_samples=in_samples(warmup) if by_samples else None,
    )  # fmt: skip


def deepspeed_curve(named: DeepSpeedScheduleConfig, lr: float | None, steps: int) -> Curve:
    """The schedule that `named` names, in a run of so many steps."""
    kind, total = named.lr_scheduler, named.total_num_steps or steps
    warming = max(2, named.warmup_num_steps)
    if kind == "LRRangeTest":
        return LRRangeTest(
            min_lr=named.lr_range_test_min_lr, size=named.lr_range_test_step_size,
            rate=named.lr_range_test_step_rate, staircase=named.lr_range_test_staircase,
        )  # fmt: skip
    if kind == "OneCycle":
        first, stairs = named.cycle_first_step_size, named.cycle_first_stair_count
        down = named.cycle_second_stair_count
        return OneCycle(
            min_lr=named.cycle_min_lr, max_lr=named.cycle_max_lr,
            first=first, second=named.cycle_second_step_size or first,
            first_stairs=stairs, second_stairs=stairs if down is None else down,
            min_momentum=named.cycle_min_mom if named.cycle_momentum else None, max_momentum=named.cycle_max_mom,
            decay_size=named.decay_step_size, decay_rate=named.decay_lr_rate, momentum_rate=named.decay_mom_rate,
        )  # fmt: skip
    if kind == "WarmupCosineLR":
        return WarmupCosineLR(
            lr=lr, min_ratio=named.warmup_min_ratio, last_ratio=named.cos_min_ratio, steps=warming,
            shape=named.warmup_type, total=total,
        )  # fmt: skip
    largest = lr if named.warmup_max_lr is None else named.warmup_max_lr
    return WarmupLR(
        min_lr=named.warmup_min_lr, max_lr=0.001 if largest is None else largest, steps=warming,
        shape=named.warmup_type, total=total if kind == "WarmupDecayLR" else None,
    )  # fmt: skip


def decoupled(schedule: Schedule, config: ScheduleConfig) -> Schedule | None:
    """The schedule of embedding and head where --decoupled-lr gives them their own rates: of the same shape."""
    if config.decoupled_lr is None or not isinstance(schedule.curve, MegatronCurve):
        return None
    least = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return replace(schedule, curve=replace(schedule.curve, max_lr=config.decoupled_lr, min_lr=least))


def print_lr_lines(schedule: Schedule, starts: Iterable[Done]) -> Iterator[str]:
    """One JSON object per step, before which so much was done: what it updates with."""
    for step, done in enumerate(starts, 1):
        rates = schedule.at(done)
        line = {"step": step, "learning_rate": rates.learning_rate, "weight_decay": rates.weight_decay}
        yield json.dumps(line if rates.momentum is None else line | {"momentum": rates.momentum})
