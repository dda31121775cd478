"""The size of the global batch as a pure function of the samples consumed so far: constant, in a ramp, or in steps.

Whatever is asked follows from the number of consumed samples alone, so a resumed run goes on exactly where it was.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSizes:
    """From `starts[i]` consumed samples on a global batch has `sizes[i]` samples. The first start is 0; starts grow."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.sizes) > 0 == self.starts[0] and min(self.sizes) > 0, self
        assert all(a < b for a, b in zip(self.starts, self.starts[1:])), self

    def at(self, consumed_samples: int) -> int:
        """Samples of the global batch that begins at `consumed_samples`."""
        return self.sizes[bisect.bisect_right(self.starts, consumed_samples) - 1]

    @property
    def last(self) -> int:
        """The size that is reached in the end."""
        return self.sizes[-1]

    def rounded(self, unit: int) -> BatchSizes:
        """The same sizes, each the largest multiple of `unit` that is not above it. ValueError where that is none."""
        if min(self.sizes) < unit:
            raise ValueError(
                f"--decrease-batch-size-if-needed: a global batch of {min(self.sizes)} is below --micro-batch-size x "
                f"data size = {unit}"
            )
        return BatchSizes(self.starts, tuple(size // unit * unit for size in self.sizes))

    def steps(self, samples: int, consumed_samples: int = 0) -> int:
        """Optimizer steps from `consumed_samples` until `samples` are consumed, the last batch whole."""
        steps = 0
        for stop, size in zip((*self.starts[1:], samples), self.sizes):
            here = max(0, -(-(min(stop, samples) - consumed_samples) // size))
            steps, consumed_samples = steps + here, consumed_samples + here * size
        return steps

    def consumed(self, steps: int) -> int:
        """Samples consumed after so many optimizer steps from the beginning."""
        samples = 0
        for stop, size in zip(self.starts[1:], self.sizes):
            here = min(steps, max(0, -(-(stop - samples) // size)))
            steps, samples = steps - here, samples + here * size
        return samples + steps * self.last


def constant(size: int) -> BatchSizes:
    """Batches of one size."""
    return BatchSizes((0,), (size,))


def ramp(start: int, increment: int, samples: int, last: int) -> BatchSizes:
    """From `start` to `last` by `increment`, evenly spread over the first `samples` samples.

    Megatron's rule, in its arithmetic: start + int(consumed / (samples / number of increments)) * increment up to
    consumed = samples, then `last`. Raises ValueError where the increments do not lead from start to last.
    """
    if start < 1 or increment < 1 or samples < 0:
        raise ValueError(f"--rampup-batch-size {start} {increment} {samples}: must be at least 1, 1 and 0")
    if last < start or (last - start) % increment:
        raise ValueError(
            f"--rampup-batch-size {start} {increment} {samples}: increments of {increment} do not lead from {start} to "
            f"--global-batch-size {last}"
        )
    increments = (last - start) // increment
    begins = {0: start}
    for number in range(1, increments + 1):
        begin = -(-number * samples // increments)
        if samples and int(begin / (samples / increments)) < number:  # the quotient was rounded down
            begin += 1
        begins[begin] = start + number * increment  # of several that begin at once the largest counts
    return BatchSizes(tuple(begins), tuple(begins.values()))


def staircase(words: Sequence[str], seq_length: int) -> BatchSizes:
    """The sizes of "TOKENS:SIZE TOKENS:SIZE ...", such as "0:768 250B:1536"; suffixes K, M, B, T.

    A size counts from TOKENS // seq_length consumed samples on, as in Megatron. Raises ValueError.
    """
    shown, found = f'--step-batch-size-schedule "{" ".join(words)}"', []
    for entry in " ".join(words).replace(",", " ").split():
        parts = re.fullmatch(r"(\d+\.?\d*)([KMBT]?):(\d+)", entry.upper())
        if parts is None:
            raise ValueError(f"{shown}: {entry} is not TOKENS:SIZE, such as 250B:1536")
        found.append((int(float(parts[1]) * SUFFIXES[parts[2]]) // seq_length, int(parts[3])))
    found.sort()
    starts, sizes = tuple(start for start, _ in found), tuple(size for _, size in found)
    if not found or starts[0] != 0 or len(set(starts)) < len(starts) or min(sizes) < 1:
        raise ValueError(
            f"{shown}: begins at {list(starts)} samples with sizes {list(sizes)}; must begin at 0, each entry at "
            "another sample, and sizes must be at least 1"
        )
    return BatchSizes(starts, sizes)
