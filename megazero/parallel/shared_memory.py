"""Memory that the ranks of a group on one host share: a collective lays its tensor there and the others read it.

Gloo carries all bytes through sockets, copies them several times, and wakes threads of its own for each message. Here
they are copied once and read where they lie; a number beside them says how far each rank has come.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path("/dev/shm")
ORDERED = ("x86_64", "AMD64")       # processors on which whoever sees the number sees what was laid down before it
SLOTS = 4                   # turns that may be under way; two are, beside one that not all ranks are known to have read
SMALLEST, LARGEST = 1 << 20, 1 << 26        # bytes of a slot; what is larger goes another way
HEADER = 64                 # bytes before the slots: the number of turns laid down, and the bytes of each slot's turn
SPIN_SECONDS, NAP_SECONDS, CHECK_SECONDS = 2e-3, 1e-4, 1.0      # of waiting: watch; then look now and then; who lives

Tell = Callable[[Any], list[Any]]           # this rank's value -> those of all, in order


class SharedMemory:
    """One rank's view of it. All ranks of the group claim, read and finish turns in one order, with equal sizes.

    `limit` is how many seconds the others are waited for.
    """

    def __init__(self, index: int, limit: float) -> None:
        self.index, self.limit = index, limit
        self._ring = Ring(index, (), limit)
        self._is_possible = platform.machine() in ORDERED

    def claim(self, nbytes: int, tell: Tell) -> Turn | None:
        """The next turn, in which each rank may lay down so many bytes. None on all ranks where that cannot be: too
        many bytes, no free slot, ranks on several hosts, no such memory."""
        if not self._is_possible or nbytes > LARGEST:
            return None
        if nbytes > self._ring.capacity:
            self._is_possible = self._grow(max(SMALLEST, 1 << (nbytes - 1).bit_length()), tell)
        return self._ring.claim(nbytes) if self._is_possible else None

    def _grow(self, capacity: int, tell: Tell) -> bool:
        """Make a ring of larger slots, and forget the one before; whether it could be made."""
        path = _file(HEADER + capacity * SLOTS)
        told = tell((path, os.getpid()))
        missing = any(path is None for path, _ in told)
        every = [None if missing else _mapped(path, process, capacity) for path, process in told]
        is_possible = all(tell(None not in every))
        if path is not None:
            os.unlink(path)                             # its memory goes with the last rank that has it mapped
        if is_possible:
            self._ring = Ring(self.index, every, self.limit)
        return is_possible


@dataclass(frozen=True)
class Segment:
    """What one rank lays down. header: turns laid down so far, then the bytes that each slot holds."""

    process: int
    header: memoryview
    slots: Tensor           # uint8 [SLOTS, capacity]


class Ring:
    """Segments of one size, one of each rank, their slots used in turn."""

    def __init__(self, index: int, segments: Sequence[Segment], limit: float) -> None:
        self.index, self.segments, self.limit = index, segments, limit
        self.capacity = segments[0].slots.shape[1] if segments else 0
        self._turns = 0                                 # begun
        self._read = 0                                  # turns before this one have been read here,
        self._read_by_all = 0                           # and those before this one by all ranks, as far as is known
        self._later: set[int] = set()                   # turns that have been read before an earlier one

    def claim(self, nbytes: int) -> Turn | None:
        """The next turn, or None while its slot may still be read by another rank."""
        if self._turns - SLOTS >= self._read_by_all:
            return None
        self._turns += 1
        return Turn(self, self._turns - 1, nbytes, self._read)

    def finish(self, turn: Turn) -> None:
        """This rank has read a turn. That all have begun it shows what all had read before they did."""
        self._read_by_all = max(self._read_by_all, turn.read_before)
        self._later.add(turn.number)
        while self._read in self._later:
            self._later.remove(self._read)
            self._read += 1


class Turn:
    """One collective's slot on every rank.

    read_before  turns before this one had been read when it began, on every rank
    """

    def __init__(self, ring: Ring, number: int, nbytes: int, read_before: int) -> None:
        self.ring, self.number, self.nbytes, self.read_before = ring, number, nbytes, read_before

    def part(self, rank: int, like: Tensor, at: int = 0) -> Tensor:
        """Part number `at` of what a rank lays down, each part made as `like`."""
        slot = self.ring.segments[rank].slots[self.number % SLOTS]
        return slot[at * like.nbytes : (at + 1) * like.nbytes].view(like.dtype).view(like.shape)

    def lay(self, *parts: Tensor) -> None:
        """Lay the parts down and let the others read them."""
        for at, x in enumerate(parts):
            self.part(self.ring.index, x, at).copy_(x)
        header = self.ring.segments[self.ring.index].header
        header[1 + self.number % SLOTS] = self.nbytes
        header[0] = self.number + 1

    def wait(self) -> None:
        """Wait until all ranks have laid down theirs. Raises ConnectionError where one has died or takes too long."""
        for rank, segment in enumerate(self.ring.segments):
            if segment.header[0] <= self.number:
                _wait_for(segment, rank, self.number, self.ring.limit)
            assert segment.header[1 + self.number % SLOTS] == self.nbytes, "ranks are not in the same collective"

    def finish(self) -> None:
        """Nothing more will be read here."""
        self.ring.finish(self)


def _wait_for(segment: Segment, rank: int, number: int, limit: float) -> None:
    started = time.monotonic()
    checked = started + CHECK_SECONDS
    while segment.header[0] <= number:
        now = time.monotonic()
        if now - started < SPIN_SECONDS:
            os.sched_yield()
            continue
        if now > checked:
            checked = now + CHECK_SECONDS
            if not _is_alive(segment.process):
                raise ConnectionError(f"rank {rank} of a tensor group, process {segment.process}, has died")
            if now - started > limit:
                raise ConnectionError(f"rank {rank} of a tensor group gave no word for {limit:.0f} s")
        time.sleep(NAP_SECONDS)


def _is_alive(process: int) -> bool:
    """Whether it runs: one that was killed and not yet buried does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _file(nbytes: int) -> str | None:
    """A new file of shared memory, its pages reserved; None where there is none to be had."""
    path = FOLDER / f"megazero-{uuid.uuid4().hex}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(file)
    return str(path)


def _mapped(path: str, process: int, capacity: int) -> Segment | None:
    """A rank's segment; None where this host knows no such file or no such process."""
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), HEADER + SLOTS * capacity)
    except OSError:
        return None
    slots = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER).view(SLOTS, capacity)
    return Segment(process, memoryview(memory)[:HEADER].cast("q"), slots) if _is_alive(process) else None
