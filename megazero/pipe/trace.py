"""What a rank's pipeline did, as a Chrome trace: one event per instruction, to be drawn or opened in a browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .engine import Timed
from .instructions import ReduceGrads, render


def write_trace(folder: Path, rank: int, steps: Sequence[Sequence[Timed]], last_iteration: int) -> Path:
    """Write `folder/trace_rank_0003.json`; the steps are those up to `last_iteration`. Times are microseconds."""
    events = []
    for number, step in enumerate(steps, start=last_iteration - len(steps) + 1):
        for op, start, end in step:
            args = {"kind": type(op).__name__, "stage": op.stage, "iteration": number}
            if not isinstance(op, ReduceGrads):
                args["micro"] = op.micro
            times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            events.append({"name": render([op]), "ph": "X", "pid": 0, "tid": rank, "args": args, **times})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trace_rank_{rank:04d}.json"
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path
