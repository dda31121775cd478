"""Ranks of a run as a launcher starts them, and the saves that they leave: for scripts that stop and kill them."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import torch

from megazero.checkpoint import Reader, folder_of, iterations
from megazero.checkpoint_index import INDEX

ROOT = Path(__file__).resolve().parent.parent
# Imported before ranks are forked; the last one is what the first backward imports.
PRELOADED = ("__main__", "pretrain_gpt", "torch.fx.experimental.symbolic_shapes")


def start_ranks(words: Sequence[str], ranks: int, out: TextIO) -> list[subprocess.Popen]:
    """pretrain_gpt.py on so many ranks of this host. What rank 0 says, and all that goes wrong, is written to `out`."""
    port, processes = free_port(), []
    for rank in range(ranks):
        place = [f"{name}={value}" for name, value in variables(rank, ranks, port).items()]
        processes.append(subprocess.Popen(
            ["env", *place, sys.executable, "pretrain_gpt.py", *words], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=out if rank == 0 else subprocess.DEVNULL, stderr=out,
        ))  # fmt: skip
    return processes


class Forked:
    """A rank of `fork_ranks`, with what is used here of a subprocess.Popen."""

    def __init__(self, process: BaseProcess) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """The exit code, None: it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        """The exit code, when it is over."""
        self._process.join()
        return self._process.exitcode


def fork_ranks(words: Sequence[str], ranks: int, out: TextIO) -> list[Forked]:
    """As `start_ranks`, but forked from a process that has imported everything, which saves seconds."""
    context, port, processes = multiprocessing.get_context("forkserver"), free_port(), []
    context.set_forkserver_preload(list(PRELOADED))
    for rank in range(ranks):
        place = (out.name if rank == 0 else os.devnull, out.name)
        process = context.Process(target=_rank, args=(list(words), variables(rank, ranks, port), place), daemon=True)
        process.start()
        processes.append(Forked(process))
    return processes


def _rank(words: list[str], environment: dict[str, str], places: tuple[str, str]) -> None:
    """The front door in a process of its own, with files for what it says to stdout and to stderr."""
    os.environ.update(environment)
    for number, place in enumerate(places, 1):
        os.dup2(os.open(place, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    torch.set_num_threads(1)
    sys.argv[1:] = words
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def read_save(folder: Path) -> dict:
    """Every tensor of a save, verified, by name and kind."""
    reader = Reader(folder)
    return {(name, kind): reader.read(name, kind) for name, entry in reader.tensors.items() for kind in entry.dtypes}


def examine(root: Path) -> tuple[list[int], dict[int, str]]:
    """The iterations of saves whose every byte is what was written, in order; and what is wrong with those that call
    themselves complete and are not."""
    sound, spoiled = [], {}
    for iteration in sorted(iterations(root)):
        if (folder_of(root, iteration) / INDEX).exists():
            try:
                read_save(folder_of(root, iteration))
                sound.append(iteration)
            except (ValueError, OSError) as error:
                spoiled[iteration] = str(error)
    return sound, spoiled


def is_saving(root: Path) -> bool:
    """Whether a save has begun that has not come to its end."""
    newest = max(iterations(root), default=None)
    return newest is not None and not (folder_of(root, newest) / INDEX).exists()
