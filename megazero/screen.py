"""The console of the rank that speaks: lines, and where it is a terminal a bar below them with the time left."""

from __future__ import annotations

import sys

from tqdm import tqdm


class Screen:
    """Prints lines, and moves a bar where one is wanted and can be seen: both outputs are a terminal."""

    def __init__(self, iterations: int, *, bar: bool) -> None:
        self.iterations = iterations
        self.has_bar = bar and sys.stdout.isatty() and sys.stderr.isatty()
        self._bar: tqdm | None = None

    def print(self, line: str) -> None:
        """One line, at once, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(line, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def advance(self, done: int, note: str) -> None:
        """So many iterations are done. The first time is counted from there, so a resumed run's time left is right."""
        if not self.has_bar:
            return
        if self._bar is None:
            self._bar = tqdm(total=self.iterations, initial=done, unit="step", dynamic_ncols=True, leave=False)
            return
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
