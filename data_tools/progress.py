"""Shows how far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """A bar over the bytes of the input on disk, with documents/s, MB/s of text and the time left."""

    def __init__(self, total_bytes: int, *, done_bytes: int = 0, interval: int = 1000):
        """`interval`: documents between updates."""
        self._interval, self._total, self._first = interval, total_bytes, done_bytes
        self._start = self._last_line = time.monotonic()
        self._shown = 0
        self._bar = tqdm(
            total=total_bytes or None,
            initial=min(done_bytes, total_bytes),
            disable=None,  # where stderr is no terminal
            miniters=1,
            bar_format="{percentage:3.0f}%|{bar}| {remaining} left{postfix}" if total_bytes else "{elapsed}{postfix}",
        )

    def update(self, disk_bytes: int, documents: int, text_bytes: int, *, last: bool = False) -> None:
        """`disk_bytes` are done in all; documents and bytes of text are those of this run."""
        if documents < self._shown + self._interval and not last:
            return
        self._shown, now = documents, time.monotonic()
        seconds = max(now - self._start, 1e-3)
        speed = (
            f"{documents:,} documents, {documents / seconds:,.0f} documents/s, {text_bytes / seconds / 1e6:.1f} MB/s"
        )
        if not self._bar.disable:
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update(disk_bytes - self._bar.n)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"{self._share(disk_bytes, seconds)}{speed}", file=sys.stderr, flush=True)

    def _share(self, disk_bytes: int, seconds: float) -> str:
        if not self._total or disk_bytes <= self._first:
            return ""
        left = seconds * max(self._total - disk_bytes, 0) / (disk_bytes - self._first)
        return f"{disk_bytes / self._total:.0%}, {tqdm.format_interval(left)} left: "

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
