"""The section of the configuration that says in which number types a run computes, and how fp16 scales its loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .settings import at_most_one, check_fields, flag

# Skipped steps in a row that are borne beyond those that lead from the initial loss scale down to the smallest.
PATIENCE = 10


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Numbers: fp32 unless told otherwise. The loss scale concerns fp16 alone."""

    bf16: bool = flag(False, "parameters and activations in bfloat16; masters, gradients and moments in fp32")
    fp16: bool = flag(False, "the same in half precision, with a scaled loss")
    fp64: bool = flag(False, "everything in double precision, for proofs")
    fp32_residual_connection: bool = flag(False, "the residual stream in fp32, with --bf16 or --fp16")
    grad_reduce_in_bf16: bool = flag(False, "with --bf16: sum gradients over ranks in bfloat16, not fp32")
    loss_scaler: Literal["megatron", "deepspeed"] = flag("megatron", "whose rule moves a dynamic loss scale")
    loss_scale: float | None = flag(None, "a constant loss scale; default, and 0: dynamic", at_least=0)
    initial_loss_scale: float | None = flag(
        None, "dynamic scale at the start; default: 2^32, with --loss-scaler deepspeed 2^16", above=0
    )
    initial_scale_power: int | None = flag(None, "the same as a power of two", at_least=0, at_most=127)
    min_loss_scale: float = flag(1.0, "smallest dynamic scale", above=0)
    loss_scale_window: int = flag(1000, "clean steps before the scale doubles", at_least=1)
    hysteresis: int = flag(2, "overflows before the scale halves", at_least=1)
    consecutive_hysteresis: bool = flag(False, "count only overflows in a row for --hysteresis")
    loss_scale_floor: Literal["stay", "stop"] | None = flag(
        None, "at an overflow at the smallest scale; default: stay, with --loss-scaler deepspeed stop the run"
    )
    max_consecutive_skips: int | None = flag(
        None, f"skipped steps in a row that end the run; 0: never; default: {PATIENCE} at the smallest scale",
        at_least=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        at_most_one({"--fp16": self.fp16, "--bf16": self.bf16, "--fp64": self.fp64})
        if self.fp32_residual_connection and not (self.bf16 or self.fp16):
            raise ValueError("--fp32-residual-connection needs --bf16 or --fp16")
        if self.grad_reduce_in_bf16 and not self.bf16:
            raise ValueError("--grad-reduce-in-bf16 needs --bf16")
        given, power = self.initial_loss_scale, self.initial_scale_power
        if given is not None and power is not None:
            raise ValueError(f"--initial-loss-scale {given} and --initial-scale-power {power}: give one of them")
        if self.dynamic_loss_scale and self.first_loss_scale < self.min_loss_scale:
            name = "--initial-loss-scale" if power is None else f"--initial-scale-power {power}, which is"
            raise ValueError(f"{name} {self.first_loss_scale:g} is below --min-loss-scale {self.min_loss_scale:g}")

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self.fp16 and not self.loss_scale

    @property
    def first_loss_scale(self) -> float:
        """The loss scale of the first step."""
        if not self.fp16:
            return 1.0
        if self.loss_scale:
            return self.loss_scale
        if self.initial_scale_power is not None:
            return 2.0**self.initial_scale_power
        return self.initial_loss_scale or (2.0**32 if self.loss_scaler == "megatron" else 2.0**16)

    @property
    def stops_at_floor(self) -> bool:
        """Whether an overflow that finds the loss scale at its smallest ends the run."""
        return (self.loss_scale_floor or ("stay" if self.loss_scaler == "megatron" else "stop")) == "stop"

    @property
    def skips_allowed(self) -> int:
        """This many skipped steps in a row end the run; 0: no number does."""
        if self.max_consecutive_skips is not None:
            return self.max_consecutive_skips
        if not self.dynamic_loss_scale:
            return PATIENCE
        return math.ceil(math.log2(self.first_loss_scale / self.min_loss_scale)) + self.hysteresis - 1 + PATIENCE
