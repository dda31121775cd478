"""Processes meet those that are there, and never those that were there before a restart."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megazero.parallel.meeting import agree_on_meeting, check_same_backend

LIMIT = timedelta(seconds=20)


def meet(store: dist.Store, ranks: range, size: int, limit: timedelta = LIMIT) -> list:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: agree_on_meeting(store, rank, size, limit), ranks))


def test_all_agree_on_one_name_and_on_another_one_the_next_time():
    store = dist.HashStore()
    first, second = (set(meet(store, range(4), 4)) for _ in range(2))
    assert len(first) == len(second) == 1 and first != second
    assert len(set(meet(store, range(2), 2)) | first | second) == 3       # fewer are left


def test_the_dead_are_waited_for_until_they_are_back():
    """What ranks 2 and 3 left behind of an earlier meeting is no answer."""
    store = dist.HashStore()
    earlier = meet(store, range(4), 4)
    found: list[str] = []
    early = threading.Thread(target=lambda: found.extend(meet(store, range(2), 4)))
    early.start()
    time.sleep(0.3)
    assert not found
    found += meet(store, range(2, 4), 4)
    early.join()
    assert len(found) == 4 and len(set(found)) == 1 and found[0] not in earlier


def test_one_who_starts_again_in_the_middle_is_met_anew():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match="rank 1 waited 0.1 s for all 3 processes to meet"):
        meet(store, range(1, 2), 3, timedelta(seconds=0.1))
    assert len(set(meet(store, range(3), 3))) == 1


def test_a_host_without_its_gpus_is_told_before_anyone_waits_for_it():
    store = dist.HashStore()
    for rank, backend in enumerate(("nccl", "nccl")):
        check_same_backend(store, rank, backend)
    with pytest.raises(ValueError, match=r"would communicate by gloo and rank 0 by nccl: .*--distributed-backend"):
        check_same_backend(store, 2, "gloo")
