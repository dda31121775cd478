"""Watch: where the time of a rank goes. Each moment of a watched step belongs to one phase of what the rank does, or to
the wait for one group of ranks; what travels is counted beside that.

While nothing is watched, a call costs one test. No call waits for a device: on a GPU moments are events of the current
stream, which are read after the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch

OTHER = "other"                 # the phase of what stands between the named ones

Key = tuple[str, str]           # the axis of a group, and what is done over it


class Clock(Protocol):
    """Tells moments, and later the seconds between two of them."""

    def now(self) -> Any: ...

    def between(self, start: Any, end: Any) -> float: ...

    def on_host(self, moments: Sequence[Any]) -> list[float]: ...


class HostClock:
    """The clock of the process."""

    def now(self) -> float:
        return perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start

    def on_host(self, moments: Sequence[float]) -> list[float]:
        return list(moments)


class DeviceClock:
    """Moments of the current stream of a GPU. `between` waits until the later one has come, `on_host`, which tells
    `time.perf_counter()` of each, until all that is begun has."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def on_host(self, moments: Sequence[torch.cuda.Event]) -> list[float]:
        last = self.now()
        last.synchronize()
        now = perf_counter()
        return [now - moment.elapsed_time(last) / 1e3 for moment in moments]


@dataclass
class Traffic:
    """What was done over one group in one way.

    calls    as a mean of steps, perhaps no whole number
    bytes    of all calls: of the whole tensor that a call reduces, gathers, scatters, exchanges or sends
    waited   seconds in which this rank did nothing else
    lasted   seconds from the start of each call until this rank knew that it was over, summed; where the rank computes
             beside a call, more than the call itself took
    """

    calls: float = 0
    bytes: float = 0
    waited: float = 0.0
    lasted: float = 0.0


@dataclass
class StepTimes:
    """Seconds of each phase, without the waits, and the traffic over each group. Their sum is the step's time."""

    phases: dict[str, float] = field(default_factory=dict)
    traffic: dict[Key, Traffic] = field(default_factory=dict)

    def add_(self, other: StepTimes) -> None:
        """Count another step in."""
        for phase, seconds in other.phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        for key, more in other.traffic.items():
            own = self.traffic.setdefault(key, Traffic())
            own.calls, own.bytes = own.calls + more.calls, own.bytes + more.bytes
            own.waited, own.lasted = own.waited + more.waited, own.lasted + more.lasted

    def over(self, steps: int) -> StepTimes:
        """The mean of so many steps."""
        return StepTimes(
            {phase: seconds / steps for phase, seconds in self.phases.items()},
            {
                key: Traffic(t.calls / steps, t.bytes / steps, t.waited / steps, t.lasted / steps)
                for key, t in self.traffic.items()
            },
        )

    @property
    def own(self) -> float:
        """Seconds of what the rank did itself."""
        return sum(self.phases.values())

    def waited(self) -> dict[str, float]:
        """Seconds of waiting for each group, by its axis."""
        axes: dict[str, float] = {}
        for (axis, _), traffic in self.traffic.items():
            axes[axis] = axes.get(axis, 0.0) + traffic.waited
        return axes


class Recording:
    """A watched step as it was noted: where each span begins, and of each call its bytes, start and end."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.cuts: list[tuple[str | Key, Any]] = []
        self.calls: list[Call] = []

    def read(self) -> StepTimes:
        """The step's times, once it is over."""
        found, between = StepTimes(), self.clock.between
        for call in self.calls:
            traffic = found.traffic.setdefault(call.key, Traffic())
            traffic.calls, traffic.bytes = traffic.calls + 1, traffic.bytes + call.bytes
            if call.ended is not None:
                traffic.lasted += between(call.began, call.ended)
        for (label, start), (_, end) in zip(self.cuts, self.cuts[1:]):
            seconds = between(start, end)
            if isinstance(label, str):
                found.phases[label] = found.phases.get(label, 0.0) + seconds
            else:                                           # perhaps of a call that an earlier step began
                found.traffic.setdefault(label, Traffic()).waited += seconds
        return found


class Watch:
    """Handed to all that computes or communicates on a rank; `start` and `stop` stand around a step."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or HostClock()
        self.phase = OTHER
        self._recording: Recording | None = None

    def start(self) -> None:
        """A watched step begins."""
        self.phase, self._recording = OTHER, Recording(self.clock)
        self._cut(OTHER)

    def stop(self) -> Recording | None:
        """It ends. None: nothing was watched."""
        recording = self._recording
        if recording is not None:
            self._cut(OTHER)
        self._recording = None
        return recording

    def enter(self, phase: str) -> None:
        """What the rank does itself is `phase` from now on."""
        if phase != self.phase:
            self.phase = phase
            if self._recording is not None:
                self._cut(phase)

    def call(self, axis: str, kind: str, nbytes: int) -> Call | Unwatched:
        """Something over a group begins: its `over` or `underway` follows at once."""
        if self._recording is None:
            return UNWATCHED
        call = Call(self, (axis, kind), nbytes, self._cut((axis, kind)))
        self._recording.calls.append(call)
        return call

    def _cut(self, label: str | Key) -> Any:
        """One span ends and another begins. While nothing is watched any more, only the moment is told."""
        now = self.clock.now()
        if self._recording is not None:
            self._recording.cuts.append((label, now))
        return now

    def wait_for(self, key: Key) -> None:
        """The rank does nothing but wait, until `resume`."""
        self._cut(key)

    def resume(self) -> Any:
        """The wait is over. Returns the moment."""
        return self._cut(self.phase)


class Call:
    """One collective or message."""

    def __init__(self, watch: Watch, key: Key, nbytes: int, began: Any) -> None:
        self.watch, self.key, self.bytes, self.began = watch, key, nbytes, began
        self.ended: Any = None

    def over(self) -> None:
        """It blocked until it was done."""
        self.ended = self.watch.resume()

    def underway(self, works: Sequence[Any]) -> list[Underway]:
        """It goes on beside what follows, and is over when all its works have been waited for."""
        self.watch.resume()
        return [Underway(work, self) for work in works]


class Underway:
    """A work of torch.distributed whose wait is watched."""

    def __init__(self, work: Any, call: Call) -> None:
        self._work, self._call = work, call

    def wait(self) -> None:
        self._call.watch.wait_for(self._call.key)
        self._work.wait()
        self._call.over()


class Unwatched:
    """What stands in the place of a Call while nothing is watched."""

    def over(self) -> None:
        """Nothing is noted."""

    def underway(self, works: Sequence[Any]) -> Sequence[Any]:
        """The works as they are."""
        return works


UNWATCHED = Unwatched()
