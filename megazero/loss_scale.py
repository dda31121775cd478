"""The loss scale of fp16: a factor that keeps small gradients from vanishing, and that is taken out before the update.

A step whose gradient overflows is skipped, and the factor moves by the rule of Megatron (DynamicGradScaler) or of
DeepSpeed (DynamicLossScaler). The state is a value that follows from the overflows alone: equal on all ranks, and all
that a checkpoint has to keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .config_precision import PrecisionConfig

LARGEST = 2.0**127      # of the scales: the next power of two is infinite in fp32


@dataclass(frozen=True)
class ScaleState:
    """What the loss scale is, and what it needs to remember of the steps so far.

    clean         steps without overflow since the last one with, or since the start
    hysteresis    the scale halves at the overflow that finds 1 here; those before it lower this number
    skipped       steps with overflow in the whole run
    consecutive   of these, how many came last, one after another
    at_floor      of these, how many should have lowered the scale and found it at its smallest
    """

    scale: float
    dynamic: bool = False
    clean: int = 0
    hysteresis: int = 1
    skipped: int = 0
    consecutive: int = 0
    at_floor: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it, in every digit."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LossScaler:
    """The rule by which the loss scale moves. Without fp16 it is constantly 1.

    grows_late   DeepSpeed doubles at the clean step after `window` clean ones, Megatron at the last of them
    """

    first: float
    dynamic: bool
    grows_late: bool
    window: int
    hysteresis: int
    consecutive_hysteresis: bool
    smallest: float
    stops_at_floor: bool
    skips_allowed: int

    def start(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(self.first, self.dynamic, hysteresis=self.hysteresis)

    def resume(self, saved: Mapping[str, Any] | None) -> ScaleState:
        """The state to go on with from that of a checkpoint; None: it has none.

        Where the checkpoint's scale was of another kind than this run's (dynamic or constant), or constant with another
        value, only the counts go on. Raises ValueError for what no state could be.
        """
        if saved is None:
            return self.start()
        try:
            state = ScaleState(**saved)
        except TypeError as wrong:
            raise ValueError(f"the checkpoint's loss scale is {dict(saved)}: {wrong}") from wrong
        if not (0 < state.scale < math.inf):
            raise ValueError(f"the checkpoint's loss scale is {state.scale}: must be a finite number above 0")
        if not (self.dynamic and state.dynamic):
            return replace(self.start(), skipped=state.skipped, consecutive=state.consecutive)
        return replace(
            state, scale=max(state.scale, self.smallest), hysteresis=min(state.hysteresis, self.hysteresis)
        )

    def after(self, state: ScaleState, *, overflow: bool) -> ScaleState:
        """The state after a step from `state`; `overflow`: the step found infinity or NaN on any rank and is skipped.

        Both rules in one: `clean` goes on counting over a growth, so the scale grows at each multiple of the window.
        """
        if overflow:
            return self._after_overflow(state)
        clean = state.clean + 1
        grown = state.clean if self.grows_late else clean
        if not self.dynamic or grown == 0 or grown % self.window:
            left = self.hysteresis if self.consecutive_hysteresis else state.hysteresis
            return replace(state, clean=clean, hysteresis=left, consecutive=0, at_floor=0)
        return replace(
            state, scale=min(state.scale * 2, LARGEST), clean=clean, hysteresis=self.hysteresis, consecutive=0,
            at_floor=0,
        )

    def _after_overflow(self, state: ScaleState) -> ScaleState:
        counted = replace(state, clean=0, skipped=state.skipped + 1, consecutive=state.consecutive + 1)
        if not self.dynamic:
            return counted
        if state.hysteresis > 1:
            return replace(counted, hysteresis=state.hysteresis - 1)
        if state.scale <= self.smallest:
            return replace(counted, at_floor=state.at_floor + 1)
        return replace(counted, scale=max(state.scale / 2, self.smallest))

    def reason_to_stop(self, state: ScaleState, first: str) -> str | None:
        """Why a run must not go on after the skipped step that led to `state`; None: it may.

        `first` names the first parameter whose gradient is not finite, as it is to be shown.
        """
        where = f"first in the gradient of {first}"
        if self.stops_at_floor and state.at_floor:
            return (
                f"overflow at the smallest loss scale {state.scale:g}, {where}: --min-loss-scale {self.smallest:g} and "
                f"--loss-scale-floor stop end the run here, after {state.skipped} skipped steps in all"
            )
        if self.skips_allowed and state.consecutive >= self.skips_allowed:
            return (
                f"{state.consecutive} steps in a row were skipped for overflow, the last one {where}, and the loss "
                f"scale is {state.scale:g} by now: so many end the run (--max-consecutive-skips)"
            )
        return None


def make_loss_scaler(precision: PrecisionConfig) -> LossScaler:
    """The rule that the flags ask for."""
    return LossScaler(
        first=precision.first_loss_scale,
        dynamic=precision.dynamic_loss_scale,
        grows_late=precision.loss_scaler == "deepspeed",
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        consecutive_hysteresis=precision.consecutive_hysteresis,
        smallest=precision.min_loss_scale,
        stops_at_floor=precision.stops_at_floor,
        skips_allowed=precision.skips_allowed,
    )
