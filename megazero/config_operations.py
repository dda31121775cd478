"""The section of the configuration that says how a run is stopped, and what it does where something is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .settings import check_fields, flag


@dataclass(frozen=True, kw_only=True)
class OperationsConfig:
    """How a run ends before its end, and what it makes of numbers that are bad."""

    exit_signal_handler: bool = flag(
        True, "SIGTERM, SIGUSR1 or SIGINT: save and leave with code 0; --no-...: as the system does it"
    )
    hang_timeout_minutes: float | None = flag(
        None, "without any progress, end a job that hangs; 0: never; default: --distributed-timeout-minutes", at_least=0
    )
    kill_switch_path: str | None = flag(None, "save and leave as soon as there is a file of this name; rank 0 looks")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "before each update; --no-...: a step later, when nobody can say where it began"
    )
    nonfinite_action: Literal["stop", "skip"] = flag(
        "stop", "where loss or gradient is not finite: end the run, or pass over the step"
    )
    spike_action: Literal["off", "warn", "skip", "stop"] = flag("warn", "where the loss jumps, see --spike-threshold")
    spike_threshold: float = flag(
        10.0, "deviations above the median of the last losses at which a loss is a spike (docs/operations.md)", above=0
    )
    spike_window: int = flag(100, "how many losses those are", at_least=20)
    check_replicas: int | None = flag(
        None, "steps between checks that what ranks hold alike is alike in every bit; default: never", at_least=1
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name, action in (("--nonfinite-action", self.nonfinite_action), ("--spike-action", self.spike_action)):
            if action == "skip" and not self.check_for_nan_in_loss_and_grad:
                raise ValueError(f"{name} skip does not go with --no-check-for-nan-in-loss-and-grad")
