"""Memory of a rank by what it holds: parameters, gradients, optimizer state, and what a step needs beside them.

On a GPU torch's allocator is asked; on a CPU the kernel, of the whole process.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

MIB, GIB = 2**20, 2**30
PROCESS = Path("/proc/self")


class Memory:
    """`begin` before a step and `read` after it. It is made before the first one.

    held  bytes of what lasts from step to step, by class, as ZeroOptimizer.bytes gives them
    """

    def __init__(self, device: torch.device, held: Callable[[], Mapping[str, int]]) -> None:
        self.device, self.held = device, held
        self._before = resident()       # of a process: what later steps leave behind is theirs

    def begin(self) -> None:
        """The peak is that of what follows."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            forget_peak()

    def read(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer (master copies and moments); of activations and whatever else
        a step needs for a while; of the rest that was there before; and the peak of all. On a GPU also what the
        allocator has taken."""
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_resident()
        held = self.held()
        classes = {
            "parameters": held.get("parameters", 0), "gradients": held.get("gradients", 0),
            "optimizer": held.get("master", 0) + held.get("moments", 0),
        }
        known = sum(classes.values())
        found = classes | {
            "activations": max(peak - self._before, 0), "rest": max(self._before - known, 0), "peak": peak,
        }
        return found | {"reserved": torch.cuda.memory_reserved(self.device)} if on_gpu else found


def resident() -> int:
    """Bytes that this process has in memory now; where the kernel does not tell, at most so far."""
    return _told("VmRSS") or peak_resident()


def peak_resident() -> int:
    """The most bytes that it had, since `forget_peak` where there is such a thing."""
    return _told("VmHWM") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    """Let the peak begin anew, where the kernel can."""
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:                 # another system, or a container that forbids it: the peak is that of the whole run
        pass


def _told(field: str) -> int | None:
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", (PROCESS / "status").read_text())
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])
