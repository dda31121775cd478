"""How far an interrupted run had come: the folder PREFIX.partial, with a small file that is replaced as a whole.

Every finished shard of the input is noted there, so that --resume goes on after the last one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megazero.data.indexed import Mark

from .inputs import Position


@dataclass(frozen=True)
class Progress:
    """All that a run has to know of what is done: for each key how much is written and how many documents are empty."""

    position: Position
    marks: tuple[Mark, ...]
    empty: tuple[int, ...]
    bad_lines: int = 0
    input_bytes: int = 0


class Journal:
    """The folder of one run, for a `with` statement: it goes away with the run, unless a shard is finished.

    `run` tells what shapes the output; a run that differs in it cannot go on with this folder. Raises ValueError
    where another process is writing into it.
    """

    def __init__(self, prefix: str, run: dict[str, Any]):
        self.folder, self._run = Path(f"{prefix}.partial"), run
        self._path = self.folder / "progress.json"
        self.kept: Progress | None = None
        self._lock: BinaryIO | None = None

    def load(self) -> Progress | None:
        """What an interrupted run has finished; None where there was no such run. ValueError: it was another run."""
        if not self._path.exists():
            return None
        noted = json.loads(self._path.read_text())
        for name, value in json.loads(json.dumps(self._run)).items():
            if noted["run"].get(name) != value:
                was = f"{name} was {noted['run'].get(name)}, now it is {value}"
                raise ValueError(f"--resume cannot go on with {self.folder}: {was}; without --resume it starts anew")
        done = noted["done"]
        marks = tuple(Mark(**mark) for mark in done["marks"])
        position, empty = Position(**done["position"]), tuple(done["empty"])
        self.kept = Progress(position, marks, empty, done["bad_lines"], done["input_bytes"])
        return self.kept

    def save(self, done: Progress) -> None:
        """Notes that all of this is on the disk."""
        new = self._path.with_suffix(".new")
        with open(new, "w") as file:
            json.dump({"run": self._run, "done": asdict(done)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
        self.kept = done

    def clear(self) -> None:
        """Forgets whatever an earlier run left."""
        for path in self.folder.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def __enter__(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / "lock", "wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ValueError(f"{self.folder} is in use: another run writes to this --output-prefix") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._lock is not None
        if kind is None or not self._path.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
