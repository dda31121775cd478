"""Memory on a CPU: what is freed stays with the process, for a training step asks for the same sizes again.

glibc's malloc hands large blocks back to the system when they are freed and gets them anew, page by page, each page
cleared by the kernel: a twentieth of a step. Threads beside the main one keep their own rules.
"""

from __future__ import annotations

import ctypes

# glibc's names and numbers (malloc.h), and what is asked for: blocks below a GiB come from the heap, which is never
# trimmed and grows by 64 MiB at a time.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEEP = ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))


def keep_freed_memory() -> bool:
    """Tell malloc; whether it listens: another one than glibc's is left as it is."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):        # no such function; no such library; not on this system
        return False
    return all(mallopt(name, value) == 1 for name, value in KEEP)
