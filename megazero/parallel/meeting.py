"""The meeting of a job's processes at a store that outlives them.

torchrun keeps its store over restarts, and counts them on each host by itself: where one host's processes died and the
other's were stopped, they come back under different numbers, and find the addresses of the dead. So the processes agree
on a name for this meeting that no other had: rank 0 calls those it finds present, and where all have answered its call,
all go on; who has died does not answer.
"""

from __future__ import annotations

import secrets
import socket
import time
from datetime import timedelta
from typing import Any

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 1.0       # between looks at the store: the first, and the longest


def agree_on_meeting(store: Any, rank: int, size: int, limit: timedelta) -> str:
    """The name of the meeting of `size` processes at a store of torch. Raises TimeoutError where not all come."""
    own, end, pause = secrets.token_hex(8), time.monotonic() + limit.total_seconds(), PAUSE_SECONDS
    presence = [f"meeting of {size}/{n}" for n in range(size)]
    store.set(presence[rank], own)
    called: list[bytes] = []
    while True:
        if rank == 0:
            present = store.multi_get(presence)
            name = f"meeting {own} {hash(tuple(present)):x}"
            if present != called:
                for token in present[1:]:
                    store.set(f"call {token.decode()}", name)
                called = present
            if store.check([f"{name}/{n}" for n in range(1, size)]):
                store.set(f"{name}/go", "")
                return name
        elif store.check([f"call {own}"]):
            name = store.get(f"call {own}").decode()
            store.set(f"{name}/{rank}", "")
            if store.check([f"{name}/go"]):
                return name
        if time.monotonic() > end:
            raise TimeoutError(f"rank {rank} waited {limit.total_seconds():g} s for all {size} processes to meet")
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_PAUSE_SECONDS)


def check_same_backend(store: Any, rank: int, backend: str) -> None:
    """A host whose GPUs cannot be seen would compute on its CPU and wait for the others, which it does not speak to.
    Raises ValueError on ranks of another backend than rank 0's, which asks nobody."""
    if rank == 0:
        store.set("backend", backend)
    elif (first := store.get("backend").decode()) != backend:
        raise ValueError(
            f"{socket.gethostname()} would communicate by {backend} and rank 0 by {first}: are all GPUs in order? "
            "--distributed-backend nccl or gloo on all ranks"
        )
