"""The settings of what a run measures of itself: phases, communication, memory, and where that is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .settings import check_fields, flag


@dataclass(frozen=True, kw_only=True)
class WatchingConfig:
    """What a run measures of itself, and to whom else it is told."""

    timing_log_level: int = flag(
        0, "with lines of --log-interval, what a step spends: 0 nothing, 1 by phase, 2 communication by group too",
        at_least=0, at_most=2,
    )
    timing_log_option: Literal["max", "minmax", "all"] = flag("minmax", "of the ranks' times: which are shown")
    barrier_with_level_1_timing: bool = flag(False, "let the ranks meet before each watched step, from level 1 on")
    log_comms: bool = flag(False, "with lines of --log-interval, calls, bytes, time and bandwidth of each collective")
    log_memory: bool = flag(False, "with lines of --log-interval, memory by what it holds, of the fullest rank")
    straggler_interval: int = flag(
        100, "steps between comparisons of what the ranks do themselves, which name a slow one; 0: never", at_least=0
    )
    flops_profiler: int | None = flag(
        None, "at this step, print parameters, operations and time of each kind of layer", at_least=1
    )
    peak_tflops: float | None = flag(
        None, "TFLOP/s that a device could do, for MFU; default: known of some GPUs, else MFU is left out", above=0
    )
    progress_bar: bool = flag(True, "a bar with the time left, where the output is a terminal")
    wandb_project: str | None = flag(None, "project of Weights & Biases that gets TensorBoard's figures too")
    wandb_exp_name: str | None = flag(None, "name of the run there; without a project it says nothing")
    wandb_entity: str | None = flag(None, "who owns it there")
    wandb_save_dir: str | None = flag(None, "folder of its files here")

    def __post_init__(self) -> None:
        check_fields(self)
