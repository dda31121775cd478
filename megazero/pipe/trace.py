"""What a rank's pipeline did, as a Chrome trace: one event per instruction, to be drawn or opened in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .engine import Timed
from .instructions import Backward, BackwardInput, Forward, RecvActivation, RecvGrad, ReduceGrads, word
from .traced import WAIT

# What brings the tensors that a step waits for.
BROUGHT_BY = {Forward: RecvActivation, Backward: RecvGrad, BackwardInput: RecvGrad}


def seconds_to_epoch() -> float:
    """What makes the engine's times those of the clock of day, which ranks of several hosts have in common."""
    return time.time() - time.perf_counter()


def write_trace(
    folder: Path, rank: int, steps: Sequence[Sequence[Timed]], last_iteration: int, *, shift: float
) -> Path:
    """Write `folder/trace_rank_0003.json`; the steps are those up to `last_iteration`. Times are microseconds, of the
    engine's clock and `shift` seconds. An event for the whole iteration holds those of its instructions; where a step
    had to wait for its tensors, an event before it says so."""
    events: list[dict[str, Any]] = [
        {"name": name, "ph": "M", "pid": 0, "tid": rank, "args": args}
        for name, args in (("thread_name", {"name": f"rank {rank}"}), ("thread_sort_index", {"sort_index": rank}))
    ]
    for number, step in enumerate(steps, start=last_iteration - len(steps) + 1):
        for name, args, start, end in _told(step):
            event = {"name": name or f"iteration {number}", "ph": "X", "pid": 0, "tid": rank}
            event |= {"ts": (start + shift) * 1e6, "dur": (end - start) * 1e6}
            events.append({**event, "args": {**args, "iteration": number}})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trace_rank_{rank:04d}.json"
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _told(step: Sequence[Timed]) -> Iterator[tuple[str, dict[str, Any], float, float]]:
    """(name, what it was, start, end) of each event of a step; the first is the whole of it and has no name."""
    if not step:
        return
    yield "", {"kind": "Iteration"}, step[0][1], step[-1][2]
    stages, before = sorted({op.stage for op, _, _ in step}), step[0][1]
    messages = {(type(op), op.micro, op.stage): op for op, _, _ in step if isinstance(op, RecvActivation | RecvGrad)}
    for op, start, end in step:
        args = {"kind": type(op).__name__, "stage": op.stage}
        if not isinstance(op, ReduceGrads):
            args["micro"] = op.micro
            message = messages.pop((BROUGHT_BY.get(type(op)), op.micro, op.stage), None)
            if message is not None and start > before:
                yield f"wait {word(message, stages)}", {**args, "kind": WAIT}, before, start
        yield word(op, stages), args, start, end
        before = end
