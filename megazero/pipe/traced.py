"""A run's trace read back: what each rank did in a step, and how long the same step takes on paper."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from .instructions import (
    SHORT,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)
from .lower import add_communication, needs
from .simulate import Step, Taken, simulate

STEPS = (Forward, BackwardInput, BackwardWeight, Backward)
KINDS = {word: kind for kind in STEPS for word in (kind.__name__, SHORT[kind])}
WAIT = "Wait"                   # kind of the events between a step's turn and the arrival of its tensors
MESSAGES = {WAIT, *(kind.__name__ for kind in (SendActivation, SendGrad, RecvActivation, RecvGrad))}


@dataclass(frozen=True)
class Traced:
    """What one rank did in one iteration: its steps, in order, and when it handed over or waited for messages;
    milliseconds."""

    steps: tuple[Step, ...]
    messages: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A pipeline's step beside the same step on paper, where messages take no time; milliseconds.

    run    from the first step's start to the last one's end
    taken  on paper, each step as long as it was
    even   on paper, each step as long as steps of its kind and stage were on average
    """

    run: float
    taken: float
    even: float


def read_trace(folder: Path, iteration: int | None) -> tuple[int | None, dict[int, Traced]]:
    """Each rank's part of an iteration (None: the last one there is), from the moment that the first step began.

    The files are Chrome traces, one per rank, whose name ends in the rank: events with ts and dur in microseconds; args
    say kind, micro and stage, and may say the iteration. Raises ValueError for what is none.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"--trace {folder}: there is no .json file")
    found = {_rank(file): _events(file) for file in files}
    known = {n for events in found.values() for n, _, _ in events if n is not None}
    wanted = iteration if iteration is not None else max(known, default=None)
    if iteration is not None and iteration not in known:
        raise ValueError(f"--iteration {iteration}: the trace holds {sorted(known) or 'no numbers of iterations'}")
    chosen = {
        rank: sorted(((start, end, op) for n, op, (start, end) in events if n in (None, wanted)), key=lambda e: e[:2])
        for rank, events in sorted(found.items())
    }
    begun = [start for events in chosen.values() for start, _, op in events if op is not None]
    if not begun:
        raise ValueError(f"--trace {folder}: no forward or backward is in it")
    first, rows = min(begun), {}
    for rank, events in chosen.items():
        times = [(op, (start - first) / 1e3, (end - first) / 1e3) for start, end, op in events]
        rows[rank] = Traced(
            tuple(Step(op, start, end) for op, start, end in times if op is not None),
            tuple((max(start, 0.0), end) for op, start, end in times if op is None and end > 0),
        )
    return wanted, rows


def events_of(file: Path) -> list[dict[str, Any]]:
    """The events of a trace file. Raises ValueError where it is none."""
    try:
        read = json.loads(file.read_text())
        return list(read["traceEvents"] if isinstance(read, dict) else read)
    except (ValueError, KeyError, TypeError) as wrong:
        raise ValueError(f"{file}: not a trace of a pipeline: {wrong}") from wrong


def _rank(file: Path) -> int:
    digits = re.findall(r"\d+", file.stem)
    if not digits:
        raise ValueError(f"{file}: the name must say the rank, as trace_rank_0003.json")
    return int(digits[-1])


def _events(file: Path) -> list[tuple[int | None, Compute | None, tuple[float, float]]]:
    """(iteration, step or None for a message, its time in microseconds) of each of these in a trace file."""
    out = []
    try:
        for event in events_of(file):
            args = event.get("args", {})
            kind = KINDS.get(args.get("kind"))
            if event.get("ph", "X") == "X" and (kind is not None or args.get("kind") in MESSAGES):
                op, start = kind and kind(int(args["micro"]), int(args["stage"])), float(event["ts"])
                out.append((args.get("iteration"), op, (start, start + float(event["dur"]))))
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ValueError(f"{file}: not a trace of a pipeline: {wrong}") from wrong
    return out


def pipelines(rows: Mapping[int, Traced]) -> list[list[int]]:
    """The ranks of each pipeline. Ranks that hold the same stages are its data and tensor ranks, which are in one order
    on every stage, so the first of each make the first pipeline."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, row in sorted(rows.items()):
        alike.setdefault(tuple(sorted({step.op.stage for step in row.steps})), []).append(rank)
    alike.pop((), None)
    return [list(ranks) for ranks in zip(*alike.values(), strict=False)]


def stage_means(rows: Mapping[int, Traced]) -> dict[tuple[type[Compute], int], float]:
    """The mean time of each kind of step on each stage."""
    times: dict[tuple[type[Compute], int], list[float]] = {}
    for row in rows.values():
        for step in row.steps:
            times.setdefault((type(step.op), step.op.stage), []).append(step.end - step.start)
    return {place: mean(these) for place, these in times.items()}


def compare(rows: Mapping[int, Traced]) -> Comparison | None:
    """The pipeline that ended last, on paper; None where the trace does not hold a whole pipeline's step."""
    whole = pipelines(rows)
    if not whole:
        return None
    last = max(whole, key=lambda ranks: max(rows[rank].steps[-1].end for rank in ranks))
    mine, means = {rank: rows[rank] for rank in last}, stage_means(rows)
    steps = [step for row in mine.values() for step in row.steps]
    stages = 1 + max(step.op.stage for step in steps)
    try:
        programs = add_communication([[step.op for step in row.steps] for row in mine.values()], stages)
    except ValueError:                      # a rank's file is not there, or not all of its events
        return None
    taken = {step.op: step.end - step.start for step in steps}
    even = {op: means[type(op), op.stage] for op in taken}
    run = max(step.end for step in steps) - min(step.start for step in steps)
    return Comparison(run, simulate(programs, Taken(taken)).makespan, simulate(programs, Taken(even)).makespan)


def clock_lag(rows: Mapping[int, Traced]) -> float:
    """By how much at most a step began before what it needs from another rank had ended: the clocks of these ranks
    differ by at least as much."""
    lag = 0.0
    for ranks in pipelines(rows):
        steps = [(rank, step) for rank in ranks for step in rows[rank].steps]
        stages = 1 + max(step.op.stage for _, step in steps)
        ends = {
            (type(step.op) is not Forward, step.op.micro, step.op.stage): (rank, step.end)
            for rank, step in steps if type(step.op) is not BackwardWeight
        }
        for rank, step in steps:
            for need in needs(step.op, stages):
                holder, end = ends.get(need, (rank, 0.0))
                lag = max(lag, end - step.start if holder != rank else 0.0)
    return lag
