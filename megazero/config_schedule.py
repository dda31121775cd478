"""The sections of the configuration that say how learning rate and weight decay go: by Megatron's flags, or by one of
DeepSpeed's schedules and its parameters.

Lengths may be given in iterations or in samples, never in both, and beside either in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from .config_data import BatchConfig
from .settings import at_most_one, check_fields, flag, flag_name


class Length(NamedTuple):
    """A length as a flag gives it; `unit` is iters, samples or tokens."""

    flag: str
    value: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate and weight decay over the run; the formulas are in lr_curves.py."""

    lr: float | None = flag(None, "largest learning rate", at_least=0)
    min_lr: float = flag(0.0, "smallest learning rate", at_least=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag("linear", "the shape")
    lr_decay_iters: int | None = flag(None, "steps until the smallest rate; default: the whole run", at_least=1)
    lr_decay_samples: int | None = flag(None, "samples until the smallest rate; default: the run", at_least=1)
    lr_decay_tokens: int | None = flag(None, "tokens until the smallest rate", at_least=1)
    lr_warmup_iters: int = flag(0, "steps of warm-up", at_least=0)
    lr_warmup_samples: int = flag(0, "samples of warm-up", at_least=0)
    lr_warmup_tokens: int = flag(0, "tokens of warm-up; the decay is counted in tokens then", at_least=0)
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of the decay", at_least=0, below=1)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", at_least=0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag("exponential", "its shape")
    lr_wsd_decay_iters: int | None = flag(None, "steps of the tail of WSD", at_least=1)
    lr_wsd_decay_samples: int | None = flag(None, "samples of the tail of WSD", at_least=1)
    decoupled_lr: float | None = flag(None, "largest learning rate of embedding and head; default: --lr", at_least=0)
    decoupled_min_lr: float | None = flag(None, "their smallest; default: --min-lr", at_least=0)
    weight_decay: float = flag(0.01, "decoupled weight decay, not of biases and norms", at_least=0)
    start_weight_decay: float | None = flag(None, "weight decay at the first step", at_least=0)
    end_weight_decay: float | None = flag(None, "weight decay at the last step", at_least=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant", "shape between the two")
    override_opt_param_scheduler: bool = flag(False, "on resume this command line's schedule counts")
    use_checkpoint_opt_param_scheduler: bool = flag(False, "on resume the checkpoint's schedule counts")

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_rates()
        decays, warmups = self._decays(), self._warmups()
        at_most_one({name: value for (name, _), value in decays.items()})
        fraction = {"--lr-warmup-fraction": self.lr_warmup_fraction or None}
        at_most_one(fraction | {name: value for (name, _), value in warmups.items()})
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None and self.lr_wsd_decay_samples is None:
            raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples")
        self._check_weight_decay()
        at_most_one(
            {
                "--override-opt_param-scheduler": self.override_opt_param_scheduler,
                "--use-checkpoint-opt_param-scheduler": self.use_checkpoint_opt_param_scheduler,
            }
        )

    def decay(self, batch: BatchConfig) -> Length | None:
        """How long the decay lasts from the first step on; None: neither a flag nor the length of the run says it."""
        lengths = self._decays() | {
            ("--train-samples", "samples"): batch.train_samples,
            ("--train-iters", "iters"): batch.train_iters,
            ("--train-tokens", "tokens"): batch.train_tokens,
        }
        return next((Length(name, value, unit) for (name, unit), value in lengths.items() if value), None)

    def warmup(self, batch: BatchConfig) -> Length | None:
        """How long the warm-up lasts; None: there is none, or it is a share of an unknown length."""
        if self.lr_warmup_fraction:
            decay = self.decay(batch)
            return decay and Length("--lr-warmup-fraction", self.lr_warmup_fraction * decay.value, decay.unit)
        return next((Length(name, value, unit) for (name, unit), value in self._warmups().items() if value), None)

    def tail(self) -> Length | None:
        """How long the tail of WSD lasts."""
        return next((Length(name, value, unit) for (name, unit), value in self._tails().items() if value), None)

    def lengths(self, unit: str) -> dict[str, int]:
        """Flag -> value of what is given in "iters" or in "samples"."""
        every = self._decays() | self._warmups() | self._tails()
        return {name: value for (name, counted), value in every.items() if value and counted == unit}

    def _decays(self) -> dict[tuple[str, str], int | None]:
        return {
            ("--lr-decay-iters", "iters"): self.lr_decay_iters,
            ("--lr-decay-samples", "samples"): self.lr_decay_samples,
            ("--lr-decay-tokens", "tokens"): self.lr_decay_tokens,
        }

    def _warmups(self) -> dict[tuple[str, str], int]:
        return {
            ("--lr-warmup-iters", "iters"): self.lr_warmup_iters,
            ("--lr-warmup-samples", "samples"): self.lr_warmup_samples,
            ("--lr-warmup-tokens", "tokens"): self.lr_warmup_tokens,
        }

    def _tails(self) -> dict[tuple[str, str], int | None]:
        return {
            ("--lr-wsd-decay-iters", "iters"): self.lr_wsd_decay_iters,
            ("--lr-wsd-decay-samples", "samples"): self.lr_wsd_decay_samples,
        }

    def _check_rates(self) -> None:
        if self.decoupled_lr is None and self.decoupled_min_lr is not None:
            raise ValueError(f"--decoupled-min-lr {self.decoupled_min_lr} needs --decoupled-lr")
        small = {"--min-lr": self.min_lr}
        pairs = [("--lr", self.lr, small | {"--lr-warmup-init": self.lr_warmup_init})]
        if self.decoupled_min_lr is not None:
            small = {"--decoupled-min-lr": self.decoupled_min_lr}
        pairs.append(("--decoupled-lr", self.decoupled_lr, small))
        for large, bound, values in pairs:
            for name, value in values.items():
                if bound is not None and value > bound:
                    raise ValueError(f"{name} {value} is above {large} {bound}")

    def _check_weight_decay(self) -> None:
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        constant, given = style == "constant", [value is not None for value in (start, end)]
        if any(given) if constant else not all(given):
            rule = "excludes" if constant else "needs"
            raise ValueError(f"--weight-decay-incr-style {style} {rule} --start-weight-decay and --end-weight-decay")
        if not constant and end < start:
            raise ValueError(f"--end-weight-decay {end} is below --start-weight-decay {start}")


# Which parameters each of DeepSpeed's schedules has.
_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
PARAMETERS = {
    "LRRangeTest": (
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase",
    ),
    "OneCycle": (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
        "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
        "cycle_max_mom", "decay_mom_rate",
    ),
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": (*_WARMUP, "total_num_steps"),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "warmup_type", "cos_min_ratio"),
}  # fmt: skip

# Megatron's flags that shape a learning rate; with one of DeepSpeed's schedules they would have no meaning.
SHAPES = (
    "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens", "lr_warmup_iters",
    "lr_warmup_samples", "lr_warmup_tokens", "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_iters",
    "lr_wsd_decay_samples", "decoupled_lr",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeepSpeedScheduleConfig:
    """A learning-rate schedule of DeepSpeed, by its names; lengths count finished updates."""

    lr_scheduler: Literal["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"] | None = flag(
        None, "one of DeepSpeed's schedules; default: Megatron's, by --lr-decay-style"
    )
    lr_range_test_min_lr: float = flag(0.001, "LRRangeTest: rate of the first step", above=0)
    lr_range_test_step_size: int = flag(2000, "LRRangeTest: steps in which the rate grows once", at_least=1)
    lr_range_test_step_rate: float = flag(1.0, "LRRangeTest: times the first rate that it grows by", at_least=0)
    lr_range_test_staircase: bool = flag(False, "LRRangeTest: grow at once, not evenly over the steps")
    cycle_min_lr: float | None = flag(None, "OneCycle: rate at both ends of the cycle", at_least=0)
    cycle_max_lr: float | None = flag(None, "OneCycle: rate at its top", at_least=0)
    decay_lr_rate: float = flag(0.0, "OneCycle: after it, rate / (1 + this x steps / step size)", at_least=0)
    cycle_first_step_size: int = flag(2000, "OneCycle: steps upwards", at_least=1)
    cycle_second_step_size: int | None = flag(None, "OneCycle: steps downwards; default: as upwards", at_least=1)
    cycle_first_stair_count: int = flag(0, "OneCycle: go up in this many stairs; 0: evenly", at_least=0)
    cycle_second_stair_count: int | None = flag(None, "OneCycle: stairs downwards; default: as upwards", at_least=0)
    decay_step_size: int = flag(0, "OneCycle: steps in which the decay after the cycle acts once; 0: none", at_least=0)
    cycle_momentum: bool = flag(True, "OneCycle: move the momentum (Adam's beta1) against the rate")
    cycle_min_mom: float = flag(0.8, "OneCycle: momentum at the top, and of the first step", at_least=0, below=1)
    cycle_max_mom: float = flag(0.9, "OneCycle: momentum at the ends", at_least=0, below=1)
    decay_mom_rate: float = flag(0.0, "OneCycle: after it, momentum x (1 + this x steps / step size)", at_least=0)
    warmup_min_lr: float = flag(0.0, "WarmupLR, WarmupDecayLR: first rate", at_least=0)
    warmup_max_lr: float | None = flag(None, "WarmupLR, WarmupDecayLR: rate after it; default: --lr", at_least=0)
    warmup_num_steps: int = flag(1000, "Warmup...: steps of warm-up", at_least=1)
    warmup_type: Literal["log", "linear"] = flag("log", "Warmup...: shape of the warm-up")
    total_num_steps: int | None = flag(None, "WarmupDecayLR, WarmupCosineLR: last step; default: the run's", at_least=1)
    warmup_min_ratio: float = flag(0.0, "WarmupCosineLR: first share of --lr", at_least=0, at_most=1)
    cos_min_ratio: float = flag(0.0001, "WarmupCosineLR: last share of --lr", at_least=0, at_most=1)

    def __post_init__(self) -> None:
        check_fields(self)
        own, values = PARAMETERS.get(self.lr_scheduler or "", ()), vars(self)
        for field in fields(self):
            name, value = field.name, values[field.name]
            if name != "lr_scheduler" and name not in own and value != field.default:
                users = " or ".join(kind for kind, names in PARAMETERS.items() if name in names)
                shown = flag_name(name) if value is True else f"{flag_name(name)} {value}"
                shown = flag_name(f"no_{name}") if value is False else shown
                raise ValueError(f"{shown} goes only with --lr-scheduler {users}")
        if self.lr_scheduler == "OneCycle" and None in (self.cycle_min_lr, self.cycle_max_lr):
            raise ValueError("--lr-scheduler OneCycle needs --cycle-min-lr and --cycle-max-lr")
        for small, large in (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom"),
                             ("warmup_min_lr", "warmup_max_lr")):  # fmt: skip
            if values[large] is not None and values[small] > values[large]:
                raise ValueError(f"{flag_name(small)} {values[small]} is above {flag_name(large)} {values[large]}")


def needs_lr(lr_scheduler: str | None, warmup_max_lr: float | None) -> bool:
    """Whether the learning rate follows from --lr."""
    return lr_scheduler not in ("LRRangeTest", "OneCycle", "WarmupDecayLR") and warmup_max_lr is None


def check_schedule(batch: BatchConfig, schedule: ScheduleConfig, named: DeepSpeedScheduleConfig) -> None:
    """A run counts in iterations or in samples, never in both, its warm-up ends before its decay, and it has one shape.

    Lengths that are not in one unit are compared where the global batch is known, in make_schedule.
    """
    if named.lr_scheduler is not None:
        values = vars(schedule)
        for field in fields(schedule):
            value = values[field.name]
            if field.name in SHAPES and value != field.default:
                raise ValueError(f"--lr-scheduler {named.lr_scheduler} and {flag_name(field.name)} {value}: give one")
    _check_one_unit(batch, schedule)
    decay, warmup, tail = schedule.decay(batch), schedule.warmup(batch), schedule.tail()
    if decay is None:
        return
    if warmup is not None and warmup.unit == decay.unit:
        check_warmup(warmup, decay)
    if schedule.lr_decay_style == "WSD" and tail is not None and tail.unit == decay.unit:
        check_tail(tail, decay, warmup.value if warmup is not None and warmup.unit == decay.unit else 0.0)


def check_warmup(warmup: Length, decay: Length) -> None:
    """Raises ValueError where a warm-up, in the unit of the decay, does not end before it."""
    if warmup.value >= decay.value:
        raise ValueError(f"{warmup.flag} {warmup.value:.12g} must be below {decay.flag} {decay.value:.12g}")


def check_tail(tail: Length, decay: Length, warmup: float) -> None:
    """Raises ValueError where warm-up and tail, in the unit of the decay, do not fit into it."""
    if warmup + tail.value > decay.value:
        raise ValueError(
            f"{tail.flag} {tail.value:.12g} and a warm-up of {warmup:.12g} do not fit into "
            f"{decay.flag} {decay.value:.12g}"
        )


def _check_one_unit(batch: BatchConfig, schedule: ScheduleConfig) -> None:
    given = {"iters": schedule.lengths("iters"), "samples": schedule.lengths("samples")}
    for unit, length in (("iters", batch.train_iters), ("samples", batch.train_samples)):
        if length is not None:
            given[unit] = {f"--train-{unit}": length} | given[unit]
    if all(given.values()):
        units = ("samples", "iters") if batch.train_samples is not None else ("iters", "samples")
        both = [next(f"{name} {value}" for name, value in given[unit].items()) for unit in units]
        raise ValueError(f"{' and '.join(both)}: count all in iterations or all in samples")
