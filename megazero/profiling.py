"""A window of steps under torch's profiler: a Chrome trace of each chosen rank, and its ten costliest ops in words.

Outside the window, and where no profile is asked for, nothing is around a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function

from .config import LoggingConfig

COSTLIEST = 10


class Profile:
    """`around(iteration)` is a context for one step, those of the window under the profiler of this rank. `say` is told
    what is found: on rank 0 of the table, on none where rank 0 is not chosen."""

    def __init__(self, logging: LoggingConfig, rank: int, say: Callable[[str], None]) -> None:
        self.first, self.last = logging.profile_step_start, logging.profile_step_end
        self.folder, self.rank, self.say = Path(logging.profile_dir), rank, say
        self.chosen = logging.profile and rank in (logging.profile_ranks or (0,))
        self._profiler: profile | None = None
        self._steps = 0

    def around(self, iteration: int) -> AbstractContextManager[None]:
        """The context of a step."""
        return self._traced(iteration) if self.chosen and self.first <= iteration <= self.last else nullcontext()

    @contextmanager
    def _traced(self, iteration: int) -> Iterator[None]:
        if self._profiler is None:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._profiler.start()
        with record_function(f"iteration {iteration}"):
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        self._steps += 1
        if iteration == self.last:
            self.close(iteration)

    def close(self, iteration: int) -> None:
        """End the window, perhaps before its time, after `iteration`: write the trace and tell of it."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            if self.chosen and not self._steps:
                self.say(f"nothing to profile: no iteration from {self.first} to {self.last} was trained")
            return
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"profile_rank_{self.rank:04d}.json"
        profiler.export_chrome_trace(str(path))
        title = f"profile of rank {self.rank}, iterations {iteration + 1 - self._steps} to {iteration}"
        self.say(f"{title}: {path}\n" + costliest_ops(profiler.key_averages(), self._steps))


def costliest_ops(averages: list[FunctionEventAvg], steps: int) -> str:
    """A table of the ops that most time goes to, what they call not counted: the device's time where there is any."""
    averages = [event for event in averages if event.count and not event.is_user_annotation]
    kernels = [event for event in averages if event.device_type != DeviceType.CPU]
    spent = {event.key: (event.self_device_time_total, event.count) for event in kernels} or {
        event.key: (event.self_cpu_time_total, event.count) for event in averages
    }
    whole = sum(microseconds for microseconds, _ in spent.values())
    order = sorted(spent, key=lambda key: -spent[key][0])[:COSTLIEST]
    lines = [f"{'ms a step':>12}{'share':>8}{'calls a step':>14}  {'op on the device' if kernels else 'op'}"]
    for key in order:
        microseconds, count = spent[key]
        share = microseconds / max(whole, 1e-9)
        lines.append(f"{microseconds / steps / 1e3:12.3f}{share:8.1%}{count / steps:14.1f}  {key[:80]}")
    return "\n".join(lines)
