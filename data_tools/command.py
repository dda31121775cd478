"""How a command of this folder ends: with a JSON summary, or with one line of what is wrong, and nothing half-done."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """The command was told to stop by a signal."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def _stop(number: int, frame: FrameType | None) -> None:
    for other in STOP_SIGNALS:  # a second one must not disturb the cleaning up
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


def make_folder_of(flag: str, path: str | os.PathLike) -> None:
    """Makes the folder of a file that is to be written. ValueError, with the flag: it cannot be, or not written to."""
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag} {path}: the folder {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {path}: the folder {folder} may not be written to")


def command(name: str, work: Callable[[], Iterable[object]], *, left: Callable[[], str] = str) -> None:
    """Runs `work` and prints each of its results: a text as it is, all else as a line of JSON.

    ValueError and OSError become a line on stderr and exit code 1; a signal that asks to stop, a line and 128 plus its
    number, after everything is cleaned up. `left` adds to such a line what is left of the work.
    """
    before = {number: signal.signal(number, _stop) for number in STOP_SIGNALS}
    try:
        for result in work():
            print(result if isinstance(result, str) else json.dumps(result))
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: error: {error}{left()}")
    except Stopped as stopped:
        print(f"{name}: {stopped}{left()}", file=sys.stderr)
        sys.exit(128 + stopped.number)
    finally:
        for number, action in before.items():
            signal.signal(number, action)
