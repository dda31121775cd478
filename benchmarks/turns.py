"""Contenders take turns, each in processes of its own as its users start it: none runs in a heap that another warmed.

Medians of the ratios within a round are to be compared, so that a machine with other work is fair to all.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import multiprocessing

WAIT_SECONDS = 600      # for a process to be built or to take its turn
REST_SECONDS = 0.05     # between turns: the threads of the last one spin for a while before they sleep


@dataclass(frozen=True)
class Contender:
    """What a turn does, and what is told before the first one: numbers that say what it computes, and bytes of
    whatever the benchmark compares."""

    step: Callable[[], object]
    numbers: Sequence[float] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Turns:
    """What a contender showed: seconds of each of its turns, of the slowest rank; those that processors worked on it,
    all threads of the first rank together; and what it told of itself."""

    seconds: list[float]
    worked: list[float]
    numbers: Sequence[float]
    bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


Build = Callable[[str, int, Namespace], Contender]      # of a contender's name and a rank; at the top of a module


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def take_turns(
    build: Build, names: Sequence[str], args: Namespace, *, ranks: int = 1, threads: int, rounds: int,
    own: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> dict[str, Turns]:
    """Rounds in which each contender has one turn, another one first each time. `own` has ranks and threads of those
    that have others."""
    start = multiprocessing.get_context("forkserver")       # that has torch, and computes nothing
    start.set_forkserver_preload(["torch"])
    lines: dict[str, list[Connection]] = {name: [] for name in names}
    found: dict[str, Turns] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            size, each = own.get(name, (ranks, threads))
            for rank in range(size):
                here, there = start.Pipe()
                place = (str(Path(folder, str(number))), rank, size)
                start.Process(target=_serve, args=(build, name, args, each, place, there), daemon=True).start()
                there.close()
                lines[name].append(here)
            told = [_hear(line, name) for line in lines[name]]      # before the next one: building takes memory
            found[name] = Turns([], [], *told[0])
        for turn in range(rounds):
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                time.sleep(REST_SECONDS)
                for line in lines[name]:
                    line.send(True)
                seconds, worked = zip(*(_hear(line, name) for line in lines[name]), strict=True)
                found[name].seconds.append(max(seconds))
                found[name].worked.append(worked[0])
        for line in (line for each in lines.values() for line in each):
            line.send(False)
    return found


def _hear(line: Connection, name: str) -> tuple:
    if not line.poll(WAIT_SECONDS):
        sys.exit(f"{name}: no word from its process for {WAIT_SECONDS} s")
    try:
        return line.recv()
    except EOFError:
        sys.exit(f"{name}: its process has ended")


def _is_next(line: Connection) -> bool:
    """Whether there is another turn: the end of the one who counts them is the end of all."""
    try:
        return line.recv()
    except EOFError:
        return False


def _serve(
    build: Build, name: str, args: Namespace, threads: int, place: tuple[str, int, int], line: Connection
) -> None:
    """One process of a contender; `place` is the file where its ranks meet, its rank, and how many they are."""
    torch.set_num_threads(threads)
    meet, rank, ranks = place
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(meet, ranks), rank=rank, world_size=ranks)
    contender = build(name, rank, args)
    line.send((contender.numbers, contender.bytes))
    gc.disable()
    while _is_next(line):
        if ranks > 1:
            dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        contender.step()
        took = (time.perf_counter() - start, time.process_time() - worked)
        gc.collect()
        line.send(took)
    if ranks > 1:
        dist.destroy_process_group()
