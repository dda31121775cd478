"""What is shown of a job that hangs: which rank waits for whom, in which instruction, and where in the code."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping

from .parallel.activity import Activity


def describe(activity: Activity) -> str:
    """What a rank does, in one line."""
    words = [activity.phase]
    if activity.instruction is not None:
        op, at, count = activity.instruction
        words.append(f"instruction {at + 1} of {count}: {op}")
    if activity.waiting is None:
        words.append("waits for nobody")
    else:
        name, axis, ranks = activity.waiting
        if name in ("send", "receive"):
            words.append(f"waits in a {name} {'to' if name == 'send' else 'from'} rank {ranks[0]}")
        else:
            words.append(f"waits in {name} over {axis} (ranks {', '.join(map(str, ranks))})")
    begun = ", ".join(f"{axis} {count}" for axis, count in sorted(activity.begun.items()))
    return "; ".join([*words, f"collectives begun so far: {begun or 'none'}"])


def table(doing: Mapping[int, str], size: int) -> str:
    """One line for all ranks that do the same."""
    alike: dict[str, list[int]] = {}
    for rank in range(size):
        alike.setdefault(doing.get(rank, "does not answer"), []).append(rank)
    return "\n".join(
        f"  rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in alike.items()
    )


def stacks() -> str:
    """Where this process's threads are in the code: the main one, and those that run this package beside it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        text = "".join(traceback.format_stack(frame))
        watching = ident == own or names.get(ident) in ("signals", "guard")
        if ident == main or not watching and "megazero" in text:
            parts.append(f"  thread {names.get(ident, ident)}:\n{text}")
    return "".join(parts)
