"""What a run finds out about its steps: where the time of each rank goes, what travels, who is slow, what fills memory.

Only the steps before each telling are watched, so that all others cost nothing; how a step is watched is in
parallel/watch.py.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .config import LoggingConfig
from .config_watching import WatchingConfig
from .layer_profile import LayerProfile
from .memory import GIB, MIB, Memory
from .parallel.collectives import all_reduce, gather_objects
from .parallel.groups import Mesh
from .parallel.watch import OTHER, Key, Recording, StepTimes, Traffic
from .pipe.stage import Stage

PHASES = ("data", "forward", "backward", "optimizer", OTHER)        # in the order of a step
WATCHED = 5             # steps before a telling that are watched, and whose mean is told
SLOW = 1.2              # a rank is slow that needs so many times what its peers need
SLOW_SECONDS = 1e-3     # and at least so much more


@dataclass(frozen=True)
class Told:
    """What one rank tells all others: mean times of the watched steps, and bytes by what they hold."""

    host: str
    stage: int
    times: StepTimes
    memory: Mapping[str, int]


class StepWatch:
    """Watches a run's steps as the flags ask. All ranks call its methods together.

    held    bytes of what lasts from step to step, by class, as ZeroOptimizer.bytes gives them
    stages  this rank's, for --flops-profiler
    """

    def __init__(
        self, mesh: Mesh, logging: LoggingConfig, asked: WatchingConfig,
        held: Callable[[], Mapping[str, int]] = dict, stages: Mapping[int, Stage] | None = None,
    ) -> None:
        self.mesh, self.logging, self.asked = mesh, logging, asked
        self.memory = Memory(mesh.device, held) if asked.log_memory else None
        self.layers = None if asked.flops_profiler is None else LayerProfile(asked.flops_profiler, stages or {}, mesh)
        self.last = 0                                   # iteration after which training ends
        self._times, self._steps = StepTimes(), 0
        self._best: dict[int, float] = {}               # rank -> the least it needed for itself so far

    def starts(self, done: int, last: int) -> list[str]:
        """Training goes on after iteration `done` and ends after `last`. Lines on what is asked for and cannot come."""
        self.last, step = last, self.asked.flops_profiler
        if step is None or done < step < last:
            return []
        return [
            f"--flops-profiler {step} has nothing to print: it takes that step and the next, and steps {done + 1} to "
            f"{last} are run"
        ]

    @property
    def _shows_times(self) -> bool:
        asked = self.asked
        return bool(asked.timing_log_level or asked.log_comms or self.logging.log_timers_to_tensorboard)

    def _tells(self, iteration: int) -> bool:
        """Whether the ranks compare notes after an iteration."""
        if (self._shows_times or self.memory) and self.logging.shows(iteration, self.last):
            return True
        return self._compares(iteration)

    def _compares(self, iteration: int) -> bool:
        """Whether slow ranks are looked for."""
        interval = self.asked.straggler_interval
        return self.mesh.world.size > 1 and bool(interval) and iteration % interval == 0

    def begin(self, iteration: int) -> None:
        """Before a step's first work."""
        if any(self._tells(i) for i in range(iteration, iteration + WATCHED)):
            self.mesh.watch.start()
            if self.asked.timing_log_level and self.asked.barrier_with_level_1_timing:
                all_reduce(torch.zeros(1, device=self.mesh.device), self.mesh.world)
            if self.memory is not None:
                self.memory.begin()
        if self.layers is not None:
            self.layers.begin(iteration)

    def enter(self, phase: str) -> None:
        """What this rank does from now on."""
        self.mesh.watch.enter(phase)

    def end(self) -> Recording | None:
        """After the step's last work; what was noted, to be read when the step is over on its device."""
        if self.layers is not None:
            self.layers.end()
        return self.mesh.watch.stop()

    def figures(self, iteration: int, recording: Recording | None) -> tuple[dict[str, Any], list[str]]:
        """After an iteration: what the log is to hold beside its usual figures, and lines for people.

        timers   seconds of a step by phase, and of waiting for each group as "wait for AXIS": the longest of any rank
        comms    of each group and collective: calls, bytes, seconds and bytes a second over the bus
        memory_classes   bytes of the fullest rank, by class
        """
        lines = [] if self.layers is None else self.layers.lines(iteration)
        if recording is not None:
            self._times.add_(recording.read())
            self._steps += 1
        if not self._steps or not self._tells(iteration):
            return {}, lines
        own = self._times.over(self._steps)
        self._times, self._steps = StepTimes(), 0
        memory = {} if self.memory is None else self.memory.read()
        told = gather_objects(Told(socket.gethostname(), self.mesh.stage, own, memory), self.mesh.world)
        found: dict[str, Any] = {"timers": {name: max(each) for name, each in spread(told).items()}}
        lines += self.slow_ranks(told) if self._compares(iteration) else []
        if not self.logging.shows(iteration, self.last):
            return found, lines
        if self.asked.timing_log_level:
            lines += time_lines(told, self.asked.timing_log_option, groups=self.asked.timing_log_level > 1)
        if self.asked.log_comms:
            found["comms"] = traffic_of(told, lambda axis: self.mesh.along(axis).size)
            lines += traffic_table(found["comms"]) if found["comms"] else ["one rank: nothing to communicate"]
        if self.memory is not None:
            found["memory_classes"] = {name: max(one.memory[name] for one in told) for name in memory}
            lines.append(memory_line(found["memory_classes"]))
        return found, lines

    def slow_ranks(self, told: Sequence[Told]) -> Iterator[str]:
        """A line for each rank that needs much longer for itself than the others of its pipeline stage; one that is
        alone there, than it did before."""
        for rank, one in enumerate(told):
            peers = [other for at, other in enumerate(told) if at != rank and other.stage == one.stage]
            best = self._best.get(rank, one.times.own)
            self._best[rank] = min(best, one.times.own)
            usual = statistics.median(peer.times.own for peer in peers) if peers else best
            excess = one.times.own - usual
            if one.times.own <= SLOW * usual or excess < SLOW_SECONDS:
                continue
            whose = "the median of the other ranks of its stage" if peers else "its own best so far"
            worst = ""
            if peers:
                more = {
                    phase: one.times.phases.get(phase, 0.0)
                    - statistics.median(peer.times.phases.get(phase, 0.0) for peer in peers)
                    for phase in PHASES
                }
                phase = max(more, key=more.__getitem__)
                worst = f", {1e3 * more[phase]:.1f} ms of it in {phase}"
            yield (
                f"rank {rank} on {one.host} is slow: of a step it needs {1e3 * one.times.own:.1f} ms for itself, "
                f"{one.times.own / usual:.2f} times {whose}: {1e3 * excess:.1f} ms more{worst}"
            )


def spread(told: Sequence[Told], *, groups: bool = True) -> dict[str, list[float]]:
    """Seconds of each phase on every rank, and of the waits for each group, or (without `groups`) for all together."""
    rows = []
    for one in told:
        waits = {f"wait for {axis}": seconds for axis, seconds in one.times.waited().items()}
        rows.append(one.times.phases | (waits if groups else {"communication": sum(waits.values())}))
    names = [name for name in PHASES if any(name in row for row in rows)]
    names += sorted({name for row in rows for name in row} - {*names})
    return {name: [row.get(name, 0.0) for row in rows] for name in names}


def time_lines(told: Sequence[Told], option: str, *, groups: bool) -> list[str]:
    """Milliseconds of a step: the longest of the ranks (max), shortest and longest (minmax), or a line for each."""
    times = spread(told, groups=groups)
    if option == "all":
        return [
            f"ms of a step on rank {rank} | " + " | ".join(f"{name} {1e3 * s[rank]:.2f}" for name, s in times.items())
            for rank in range(len(told))
        ]

    def shown(each: Sequence[float]) -> str:
        return f"{1e3 * max(each):.2f}" if option == "max" else f"{1e3 * min(each):.2f} to {1e3 * max(each):.2f}"

    title = "longest of the ranks" if option == "max" else "shortest to longest of the ranks"
    return [f"ms of a step, {title} | " + " | ".join(f"{name} {shown(each)}" for name, each in times.items())]


def bus_factor(kind: str, ranks: int) -> float:
    """What of its bytes a collective must send over each rank's wire at least: of all-reduce 2 (n - 1) / n, of what
    gathers, scatters or exchanges (n - 1) / n; a broadcast or a message sends all."""
    if kind == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all-gather", "reduce-scatter", "all-to-all") else 1.0


def traffic_of(told: Sequence[Told], size: Callable[[str], int]) -> list[dict[str, Any]]:
    """Of each group and collective: of a step calls, bytes and seconds, the largest of any rank; and bytes a second
    over the bus on the rank that waited least for the others."""
    keys: list[Key] = sorted({key for one in told for key in one.times.traffic})
    rows = []
    for axis, kind in keys:
        each = [one.times.traffic[axis, kind] for one in told if (axis, kind) in one.times.traffic]
        factor = bus_factor(kind, size(axis))
        rows.append({
            "group": axis, "ranks": size(axis), "collective": kind,
            "calls": max(t.calls for t in each), "bytes": max(t.bytes for t in each),
            "waited": max(t.waited for t in each), "lasted": max(t.lasted for t in each),
            "bus_bytes_per_second": max(bandwidth(t, factor) for t in each),
        })  # fmt: skip
    return rows


def bandwidth(traffic: Traffic, factor: float) -> float:
    """Bytes a second over the bus; 0 where nothing was timed."""
    return factor * traffic.bytes / traffic.lasted if traffic.lasted else 0.0


def traffic_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """`traffic_of` for people."""
    lines = [
        f"{'group':<14}{'ranks':>6}  {'collective':<15}{'calls':>7}{'MiB':>10}{'waited ms':>11}{'lasted ms':>11}"
        f"{'bus GB/s':>10}  of a step, the largest of any rank"
    ]
    for row in rows:
        lines.append(
            f"{row['group']:<14}{row['ranks']:>6}  {row['collective']:<15}{row['calls']:>7.4g}"
            f"{row['bytes'] / 2**20:>10.3f}"
            f"{1e3 * row['waited']:>11.2f}{1e3 * row['lasted']:>11.2f}{row['bus_bytes_per_second'] / 1e9:>10.3g}"
        )
    return lines


def memory_line(memory: Mapping[str, int]) -> str:
    """Memory of the fullest rank, by class."""
    unit, size_of_unit = ("GiB", GIB) if max(memory.values()) >= GIB else ("MiB", MIB)
    told = " | ".join(f"{name} {size / size_of_unit:.3f}" for name, size in memory.items())
    return f"{unit} of the fullest rank | {told}"
