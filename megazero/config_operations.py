"""The section of the configuration that says how a run is stopped, and when it counts as hanging."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import check_fields, flag


@dataclass(frozen=True, kw_only=True)
class OperationsConfig:
    """How a run ends before its end."""

    exit_signal_handler: bool = flag(
        True, "SIGTERM, SIGUSR1 or SIGINT: save and leave with code 0; --no-...: as the system does it"
    )
    hang_timeout_minutes: float | None = flag(
        None, "without any progress, end a job that hangs; 0: never; default: --distributed-timeout-minutes", at_least=0
    )
    kill_switch_path: str | None = flag(None, "save and leave as soon as there is a file of this name; rank 0 looks")

    def __post_init__(self) -> None:
        check_fields(self)
