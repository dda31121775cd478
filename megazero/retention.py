"""Which saves of a run stay, and that one run alone writes to a folder.

A save is removed only after a newer one was committed. Its index goes first, so that what is left of it, should the
removal be broken off, is not a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .checkpoint import folder_of, iterations
from .checkpoint_index import INDEX
from .tensor_file import sync_folder

LOCK = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Retention:
    """What stays beside the newest save: the last `last` ones and every multiple of `interval`; neither: all."""

    last: int | None = None
    interval: int | None = None

    def __bool__(self) -> bool:
        return self.last is not None or self.interval is not None

    def keeps(self, complete: list[int], newest: int) -> set[int]:
        """Of the iterations of complete saves, those that stay; what is later than `newest` does."""
        earlier = sorted(iteration for iteration in complete if iteration <= newest)
        kept = {iteration for iteration in complete if iteration > newest} | set(earlier[-(self.last or 1) :])
        if self.interval is not None:
            kept |= {iteration for iteration in earlier if iteration % self.interval == 0}
        return kept


def remove_old(root: Path, newest: int, rule: Retention) -> list[str]:
    """Remove what the rule does not keep now that `newest` is complete, and what is left of earlier saves without an
    index. Returns a line for each that could not be removed."""
    if not rule:
        return []
    found = list(iterations(root))
    complete = [iteration for iteration in found if (folder_of(root, iteration) / INDEX).exists()]
    kept = rule.keeps(complete, newest)
    told = []
    for iteration in sorted(found):
        if iteration < newest and iteration not in kept:
            try:
                _remove(folder_of(root, iteration))
            except OSError as error:
                told.append(f"cannot remove {folder_of(root, iteration)}: {error.strerror}")
    return told


def _remove(folder: Path) -> None:
    (folder / INDEX).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)


def lock_folder(root: Path) -> IO[str] | None:
    """Keep other runs from saving to `root` as long as the returned file is open: the system frees it when the process
    ends, however it ends. None where the file system has no locks.

    Raises ValueError where another run has it, and says which.
    """
    root.mkdir(parents=True, exist_ok=True)
    file = open(root / LOCK, "a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        if error.errno in NO_LOCKS:
            return None
        raise ValueError(f"--save {root}: another run ({holder}) is writing there: give another folder") from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
