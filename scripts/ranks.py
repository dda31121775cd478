"""Ranks of a run as a launcher starts them, and the saves that they leave: for scripts that stop and kill them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from megazero.checkpoint import Reader, folder_of, iterations
from megazero.checkpoint_index import INDEX

ROOT = Path(__file__).resolve().parent.parent


def start_ranks(words: Sequence[str], ranks: int, out: TextIO) -> list[subprocess.Popen]:
    """pretrain_gpt.py on so many ranks of this host. What rank 0 says, and all that goes wrong, is written to `out`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        place = [f"RANK={rank}", f"LOCAL_RANK={rank}", f"WORLD_SIZE={ranks}", f"MASTER_PORT={port}",
                 "MASTER_ADDR=127.0.0.1", "OMP_NUM_THREADS=1", "PYTHONUNBUFFERED=1"]
        processes.append(subprocess.Popen(
            ["env", *place, sys.executable, "pretrain_gpt.py", *words], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=out if rank == 0 else subprocess.DEVNULL, stderr=out,
        ))  # fmt: skip
    return processes


def read_save(folder: Path) -> dict:
    """Every tensor of a save, verified, by name and kind."""
    reader = Reader(folder)
    return {(name, kind): reader.read(name, kind) for name, entry in reader.tensors.items() for kind in entry.dtypes}


def spoiled(root: Path) -> list[str]:
    """Complete saves with bytes that are not what was written, a line each."""
    wrong = []
    for iteration in iterations(root) if root.exists() else ():
        if (folder_of(root, iteration) / INDEX).exists():
            try:
                read_save(folder_of(root, iteration))
            except (ValueError, OSError) as error:
                wrong.append(f"spoiled: {error}")
    return wrong
