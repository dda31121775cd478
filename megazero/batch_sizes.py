"""What a step takes. The size of the global batch is a pure function of the samples consumed so far: constant, in a
ramp, or in steps; the tokens of a sample are one of the step's number.

So a resumed run goes on exactly where it was, and what a run consumes is known before it starts.
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

    def stays_for(self, consumed_samples: int) -> int | None:
        """Steps from `consumed_samples` on that have its size; None: all."""
        later = bisect.bisect_right(self.starts, consumed_samples)
        if later == len(self.starts):
            return None
        return -(-(self.starts[later] - consumed_samples) // self.at(consumed_samples))


@dataclass(frozen=True)
class SeqLengths:
    """From step `starts[i]` on, counted from 1, a sample has `lengths[i]` tokens. The first start is 1; starts grow."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.lengths) > 0 and self.starts[0] == 1 and min(self.lengths) > 0, self
        assert all(a < b for a, b in zip(self.starts, self.starts[1:])), self

    def at(self, step: int) -> int:
        """Tokens of a sample of step `step`, which is 1 for the first."""
        return self.lengths[bisect.bisect_right(self.starts, step) - 1]

    def stays_for(self, step: int) -> int | None:
        """Steps from `step` on that have its length; None: all."""
        later = bisect.bisect_right(self.starts, step)
        return None if later == len(self.starts) else self.starts[later] - step


def constant(size: int) -> BatchSizes:
    """Batches of one size."""
    return BatchSizes((0,), (size,))


def lengths_of(seq_length: int | SeqLengths) -> SeqLengths:
    """Samples of one length, where it is a number."""
    return SeqLengths((1,), (seq_length,)) if isinstance(seq_length, int) else seq_length


def tokens_of(samples: int, sizes: BatchSizes, lengths: SeqLengths) -> int:
    """Tokens of the first `samples` samples of a run."""
    tokens = before = 0
    for stop, length in zip((*lengths.starts[1:], None), lengths.lengths):
        end = samples if stop is None else min(samples, sizes.consumed(stop - 1))
        tokens, before = tokens + (end - before) * length, end
    return tokens


def samples_of(tokens: int, sizes: BatchSizes, lengths: SeqLengths) -> int:
    """Whole samples in the first `tokens` tokens of a run."""
    samples = 0
    for stop, length in zip(lengths.starts[1:], lengths.lengths):
        here = sizes.consumed(stop - 1) - samples
        if tokens < here * length:
            return samples + tokens // length
        tokens, samples = tokens - here * length, samples + here
    return samples + tokens // lengths.lengths[-1]


def steps_to(
    tokens: int, sizes: BatchSizes, lengths: SeqLengths, *, done: int = 0, samples: int = 0, consumed: int = 0
) -> int:
    """Optimizer steps until `tokens` are consumed, after `done` steps that took so many samples and tokens."""
    steps = 0
    while consumed < tokens:
        size, length = sizes.at(samples), lengths.at(done + steps + 1)
        changes = sizes.stays_for(samples), lengths.stays_for(done + steps + 1)
        needed = -(-(tokens - consumed) // (size * length))
        here = min(needed, *(needed if change is None else change for change in changes))
        steps, samples, consumed = steps + here, samples + here * size, consumed + here * size * length
    return steps


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


def staircase(words: Sequence[str], seq_length: int | SeqLengths) -> BatchSizes:
    """The sizes of "TOKENS:SIZE TOKENS:SIZE ...", such as "0:768 250B:1536"; suffixes K, M, B, T.

    A size counts from so many consumed samples on as TOKENS hold: TOKENS // seq_length, as in Megatron, where all
    samples are of one length. Raises ValueError.
    """
    shown, found = f'--step-batch-size-schedule "{" ".join(words)}"', []
    for entry in " ".join(words).replace(",", " ").split():
        parts = re.fullmatch(r"(\d+\.?\d*)([KMBT]?):(\d+)", entry.upper())
        if parts is None:
            raise ValueError(f"{shown}: {entry} is not TOKENS:SIZE, such as 250B:1536")
        found.append((int(float(parts[1]) * SUFFIXES[parts[2]]), int(parts[3])))
    starts: list[int] = []
    sizes: list[int] = []
    for tokens, size in sorted(found):
        before = BatchSizes(tuple(starts), tuple(sizes)) if starts else constant(1)
        starts.append(samples_of(tokens, before, lengths_of(seq_length)))
        sizes.append(size)
        if starts[0] != 0 or starts[-1] in starts[:-1] or size < 1:
            raise ValueError(
                f"{shown}: begins at {starts} samples with sizes {sizes}; must begin at 0, each entry at another "
                "sample, and sizes must be at least 1"
            )
    if not found:
        raise ValueError(f"{shown}: has no entry")
    return BatchSizes(tuple(starts), tuple(sizes))
