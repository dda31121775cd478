"""Processes that encode: blocks go out to whoever is free, results come back in order, a death is told by name.

Every process has two lines to its parent, so that the next block is on its way while one is being encoded.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TypeVar

from .encoding import Encoded, Encoder, Settings, use_one_core
from .inputs import Files, Lines

ROOT = Path(__file__).resolve().parent.parent
LINES = 2  # to each worker
BLOCKS_AHEAD = 2 * LINES  # for each worker, read and encoded before their turn to be written
SECONDS_TO_END = 5.0  # between closing its lines and being gone
BYTES_AHEAD = 1 << 26  # of all blocks together; a single one may be larger
# One core is one worker, so no library needs threads of its own; said before any is imported.
PROGRAM = """
import os, sys
os.putenv("OPENBLAS_NUM_THREADS", "1")
sys.path[0] = sys.argv[1]
from data_tools.encoding import serve
serve(*map(int, sys.argv[2:]))
"""
Place = TypeVar("Place")


class WorkerDied(ChildProcessError):
    """A worker ended before its work; the message says which and how."""


class Worker:
    """One process, started at once."""

    def __init__(self, number: int, workers: int, settings: Settings):
        pairs = [socket.socketpair() for _ in range(LINES)]
        theirs = [child.fileno() for _, child in pairs]
        command = [sys.executable, "-c", PROGRAM, str(ROOT), *map(str, theirs)]
        self.name = f"worker {number} of {workers}"
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs)
        self.lines = [Connection(parent.detach()) for parent, _ in pairs]
        for _, child in pairs:
            child.close()
        self._settings = settings

    def introduce(self) -> None:
        """Tells the process its settings, which must come first."""
        try:
            self.lines[0].send(self._settings)
        except OSError as error:
            raise WorkerDied(self.obituary()) from error

    def wait(self) -> None:
        """Returns when the process is ready to encode."""
        try:
            self.lines[0].recv()
        except (EOFError, OSError) as error:
            raise WorkerDied(self.obituary()) from error

    def ask(self, line: int, block: Lines | Files) -> Encoded:
        """Has a block encoded. WorkerDied if nobody answers."""
        try:
            self.lines[line].send(block)
            return self.lines[line].recv()
        except (EOFError, OSError) as error:
            raise WorkerDied(self.obituary()) from error

    def obituary(self) -> str:
        """Which worker this is, and how its process ended."""
        try:
            code = self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return f"{self.name}, process {self.process.pid}, answers no more"
        end = f"ended with exit code {code}"
        if code < 0:
            end = f"was killed by {signal.Signals(-code).name}" + " (out of memory?)" * (code == -signal.SIGKILL)
        return f"{self.name}, process {self.process.pid}, {end}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Workers:
    """Some processes that encode blocks for a `with` statement. A single one is this process itself."""

    def __init__(self, number: int, settings: Settings):
        self._died, self._lock = "", Lock()
        self._workers: list[Worker] = []
        try:
            for worker in range(number if number > 1 else 0):
                self._workers.append(Worker(worker + 1, number, settings))
            for worker in self._workers:
                worker.introduce()
        except BaseException:
            self.close()
            raise
        self._threads = ThreadPoolExecutor(max(1, LINES * number))
        self._free: SimpleQueue[tuple[Worker, int]] = SimpleQueue()
        for line in range(LINES):
            for worker in self._workers:
                self._free.put((worker, line))

    def wait(self) -> None:
        """Returns when all processes are ready."""
        for worker in self._workers:
            worker.wait()

    def encode(
        self, encoder: Encoder, blocks: Iterator[tuple[Lines | Files, Place]]
    ) -> Iterator[tuple[Encoded, Place]]:
        """The encoded blocks in order, each with what came beside it. A few wait at any time, whatever the input.

        `encoder` is used where this process is the only worker. WorkerDied when one does.
        """
        if not self._workers:
            use_one_core()
            yield from ((encoder.encode(block), place) for block, place in blocks)
            return
        waiting: deque[tuple[Future[Encoded], Place, int]] = deque()
        ahead = 0
        for block, place in blocks:
            waiting.append((self._threads.submit(self._ask, block), place, block.size))
            ahead += block.size
            while len(waiting) > BLOCKS_AHEAD * len(self._workers) or (ahead > BYTES_AHEAD and len(waiting) > 1):
                result, place, size = waiting.popleft()
                ahead -= size
                yield result.result(), place
        for result, place, _ in waiting:
            yield result.result(), place

    def _ask(self, block: Lines | Files) -> Encoded:
        worker, line = self._free.get()
        try:
            return worker.ask(line, block)
        except WorkerDied as error:
            with self._lock:
                self._died = self._died or str(error)
            for other in self._workers:  # so that nobody waits for what others still do
                other.process.kill()
            raise WorkerDied(self._died) from error
        finally:
            self._free.put((worker, line))

    def close(self) -> None:
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._threads.shutdown(cancel_futures=True)
