"""Puts the documents of token files in random order, with memory for a part of them only.

Every document draws a number, a hash of the seed and of its place; the new order is that of the numbers. Documents are
dealt into files by the first bits of their number, then one file after the other is sorted: all reading and writing
goes from begin to end of a file, and neither memory nor the number of files changes the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.data.samples import GOLDEN, MASK, hash_words, mix

DOCUMENT = np.dtype([("draw", "<u8"), ("tokens", "<i8"), ("sequences", "<i8")])


class Piece(NamedTuple):
    """Some documents: see IndexedWriter.add_documents."""

    ids: NDArray[np.integer]
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]

    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each document, [documents]."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        return np.diff(ends[np.concatenate([[0], np.cumsum(self.counts)])])

    def order(self, order: NDArray[np.int64]) -> Piece:
        """Those of these documents whose numbers are in `order`, in that order."""
        ids = _slices(self.ids, self.tokens(), order)
        return Piece(ids, _slices(self.lengths, self.counts, order), self.counts[order])


def _slices(values: NDArray, lengths: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray:
    """Of the slices of `values` that have these lengths, those in `order`, one after the other."""
    ends = np.cumsum(lengths)
    stops = ends[order].tolist()
    starts = (ends - lengths)[order].tolist()
    return np.concatenate([values[:0], *(values[start:stop] for start, stop in zip(starts, stops))])


def draws(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """The numbers of `count` documents from number `first` on; all documents have different ones, [count]."""
    steps = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(GOLDEN)
    return mix(steps + np.uint64(hash_words(seed) & MASK))


class Buckets:
    """Documents dealt into files in `folder`: into 2^bits of them, by the first bits of their draw."""

    def __init__(self, folder: Path, *, bits: int, dtype: np.dtype, seed: int):
        self._folder, self._bits, self._dtype, self._seed = folder, bits, dtype, seed
        self._dealt = 0

    def add(self, piece: Piece) -> None:
        """Deals some more documents."""
        table = np.empty(len(piece.counts), DOCUMENT)
        table["draw"] = draws(self._seed, self._dealt, len(table))
        table["tokens"], table["sequences"] = piece.tokens(), piece.counts
        self._dealt += len(table)
        bucket = (table["draw"] >> np.uint64(63 - self._bits) >> np.uint64(1)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        borders = np.searchsorted(bucket[order], np.arange((1 << self._bits) + 1))
        for number in np.flatnonzero(np.diff(borders)).tolist():
            mine = order[borders[number] : borders[number + 1]]
            part = piece.order(mine)
            for name, values in (
                ("ids", part.ids.astype(self._dtype)),
                ("lengths", part.lengths),
                ("table", table[mine]),
            ):
                with open(self._folder / f"{number}.{name}", "ab") as file:
                    file.write(values.tobytes())

    def sorted(self, tokens: int) -> Iterator[Piece]:
        """All documents in their new order, about so many tokens at a time. The files go as they are used up."""
        for number in range(1 << self._bits):
            paths = [self._folder / f"{number}.{name}" for name in ("ids", "lengths", "table")]
            if not paths[-1].exists():
                continue
            ids, lengths, table = (
                np.fromfile(path, dtype) for path, dtype in zip(paths, (self._dtype, "<i8", DOCUMENT))
            )
            bucket = Piece(ids, lengths, table["sequences"])
            order = np.argsort(table["draw"])
            part = np.cumsum(table["tokens"][order]) // tokens
            for some in np.split(order, np.flatnonzero(np.diff(part)) + 1):
                yield bucket.order(some)
            for path in paths:
                path.unlink()
