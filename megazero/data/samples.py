"""Sample k of a corpus as arithmetic: a pure function of a seed and k, without an index that is built, kept or shipped.

The documents of a split lie one after the other in one stream of tokens, which is cut into windows of seq_length + 1
tokens (neighbours share one token: the last label is the next first input). Windows begin and end anywhere in a
document. A keyed permutation says which window is the k-th sample; each epoch visits every window once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .documents import Documents, TokenFile

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = 8  # four are visibly not random on small sets
FEW = 48  # so many samples are placed one by one faster than by arrays


def mix(x: int) -> int:
    """The finalizer of splitmix64: 64 bits to 64 bits, one to one. Takes ints below 2^64 and arrays of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def _mix_(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of an array, which is overwritten."""
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x


def hash_words(*words: int) -> int:
    """64 bits that depend on each of the integers and on their order."""
    h = 0
    for word in words:
        h = mix(h + GOLDEN + (word & MASK) & MASK)
    return h


class Permutation:
    """A keyed permutation of range(size) in constant memory; `permutation(k)` is where k goes.

    A Feistel network on pairs (left, right) of a rows x columns rectangle, sides as equal as can be, which adds a hash
    of one half to the other in turn; a result past the end goes through again until it falls inside (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). The rectangle has less than sqrt(size) cells too many.
    """

    def __init__(self, size: int, key: int):
        if size < 1:
            raise ValueError(f"a permutation of {size} elements")
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        keys = [hash_words(key, number) for number in range(ROUNDS)]
        self._key_pairs = list(zip(keys[::2], keys[1::2]))

    def __call__(self, k: int) -> int:
        if not 0 <= k < self.size:
            raise IndexError(f"{k} is not in a permutation of {self.size} elements")
        rows, columns = self._rows, self._columns
        left, right = divmod(k, columns)
        while True:
            for left_key, right_key in self._key_pairs:  # `mix` written out: calling it would take half of the time
                x = right + left_key & MASK
                x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
                x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
                left = (left + (x ^ x >> 31)) % rows
                x = left + right_key & MASK
                x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
                x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
                right = (right + (x ^ x >> 31)) % columns
            if left * columns + right < self.size:
                return left * columns + right

    def many(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each of `numbers` goes, of the same shape."""
        images = numbers.astype(np.uint64)
        if len(images) and int(images.max()) >= self.size:
            raise IndexError(f"{images.max()} is not in a permutation of {self.size} elements")
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        walking = np.arange(len(images))
        while len(walking):
            left, right = np.divmod(images[walking], columns)
            for left_key, right_key in self._key_pairs:
                left = (left + _mix_(right + np.uint64(left_key)) % rows) % rows
                right = (right + _mix_(left + np.uint64(right_key)) % columns) % columns
            images[walking] = left * columns + right
            walking = walking[images[walking] >= self.size]
        return images.astype(np.int64)


class Stream:
    """The tokens of documents first to last - 1 of a token file, as a circle. `len` is the number of tokens."""

    def __init__(self, reader: TokenFile, first: int, last: int):
        self.reader, self.documents = reader, Documents(reader, first, last)
        self.start, self.stop = self.documents.start, self.documents.stop
        if self.start >= self.stop:
            raise ValueError(f"documents {first} to {last} of {reader.prefix}: they have no tokens")

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, position: int, count: int) -> NDArray[np.int64]:
        """`count` tokens from `position` on, going round as often as need be, [count]."""
        parts = [self.reader.read(self.start + at, length) for at, length in self._pieces(position, count)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def rows(self, positions: list[int], count: int) -> NDArray[np.integer]:
        """`count` tokens from each of `positions` on, [len(positions), count], in the dtype of the file."""
        length, start = len(self), self.start
        straight = [start + at for at in positions if at + count <= length]
        if len(straight) == len(positions):
            return self.reader.read_rows(straight, count)
        return np.stack([self.read(position, count) for position in positions]).astype(self.reader.dtype)

    def begins(self, position: int, count: int) -> NDArray[np.bool_]:
        """Which of `count` tokens from `position` on are the first of a document, [count]."""
        marks, done = np.zeros(count, np.bool_), 0
        for at, length in self._pieces(position, count):
            tokens = self.documents.starts_within(self.start + at, self.start + at + length)
            marks[tokens - (self.start + at) + done] = True
            done += length
        return marks

    def document(self, position: int) -> int:
        """The number in the file of the document at `position`."""
        return self.documents.find(self.start + position % len(self))

    def _pieces(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """(where, how many) of the runs of tokens that make up `count` tokens of the circle from `position` on."""
        at = position % len(self)
        while count > 0:
            length = min(count, len(self) - at)
            yield at, length
            at, count = 0, count - length


class SampleSource(Protocol):
    """What a loader reads from: any number k >= 0 has a sample. Safe to ask from many threads."""

    name: str
    seq_length: int

    def rows(self, numbers: Sequence[int]) -> NDArray[np.integer]:
        """Samples `numbers`, [len(numbers), seq_length + 1]: inputs are all but the last token, labels all but the
        first."""
        ...

    def begins(self, k: int) -> NDArray[np.bool_]:
        """Which tokens of sample k are the first of a document of the corpus, [seq_length + 1]."""
        ...

    def describe(self, k: int, place: int) -> str:
        """Where token `place` of sample k stands, in words."""
        ...


class Samples:
    """The samples of one stream, in keyed order, for ever: epoch after epoch, each a full pass with its own key.

    `len` is the number of samples of an epoch, floor((tokens - 1) / seq_length); windows move by a keyed offset from
    epoch to epoch. A stream shorter than one sample goes round within it. `samples[i]` is sample i of the first epoch,
    IndexError from len on; `tokens(k)` takes any k >= 0. Without shuffle the windows come as they lie in the stream.
    """

    def __init__(self, stream: Stream, seq_length: int, *, seed: int, shuffle: bool = True, name: str = "samples"):
        if seq_length < 1:
            raise ValueError(f"--seq-length {seq_length}: at least 1")
        self.stream, self.seq_length, self.seed, self.shuffle, self.name = stream, seq_length, seed, shuffle, name
        self._size = max(1, (len(stream) - 1) // seq_length)
        self._last = (0, *self._epoch(0))  # the epoch that was asked for last; replaced as a whole

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of {self._size} in an epoch of {self.name}")
        return self.tokens(index)

    def tokens(self, k: int) -> NDArray[np.int64]:
        """Sample k, [seq_length + 1]."""
        return self.stream.read(self.position(k), self.seq_length + 1)

    def rows(self, numbers: Sequence[int]) -> NDArray[np.integer]:
        """Samples `numbers`, [len(numbers), seq_length + 1], in the dtype of the file."""
        return self.stream.rows(self.positions(numbers), self.seq_length + 1)

    def begins(self, k: int) -> NDArray[np.bool_]:
        """Which tokens of sample k are the first of a document, [seq_length + 1]."""
        return self.stream.begins(self.position(k), self.seq_length + 1)

    def describe(self, k: int, place: int) -> str:
        """Where token `place` of sample k stands, in words."""
        return f"document {self.stream.document(self.position(k) + place)} of {self.stream.reader.prefix}"

    def position(self, k: int) -> int:
        """The token of the stream, taken as a circle, at which sample k begins."""
        if k < 0:
            raise IndexError(f"sample {k} of {self.name}")
        epoch, window = divmod(k, self._size)
        if not self.shuffle:
            return window * self.seq_length
        last, offset, permutation = self._last
        if last != epoch:
            offset, permutation = self._epoch(epoch)
            self._last = epoch, offset, permutation
        return offset + permutation(window) * self.seq_length

    def positions(self, numbers: Sequence[int]) -> list[int]:
        """`position` of each of `numbers`, faster where they are many."""
        if len(numbers) <= FEW or not self.shuffle:
            return [self.position(k) for k in numbers]
        if min(numbers) < 0:
            raise IndexError(f"sample {min(numbers)} of {self.name}")
        epochs, windows = np.divmod(np.asarray(numbers, np.int64), self._size)
        positions = np.empty(len(windows), np.int64)
        for epoch in np.unique(epochs).tolist():
            offset, permutation = self._epoch(epoch)
            mine = epochs == epoch
            positions[mine] = offset + permutation.many(windows[mine]) * self.seq_length
        return positions.tolist()

    def _epoch(self, epoch: int) -> tuple[int, Permutation]:
        """How far the windows of an epoch are moved, and their order."""
        offset = hash_words(self.seed, epoch, 1) % self.seq_length if epoch else 0
        return offset, Permutation(self._size, hash_words(self.seed, epoch, 0))


class MockSamples:
    """Made-up samples that a model can learn: the next token is the last one plus a constant, modulo the vocabulary.

    One token in eight is drawn anew instead, so the best loss is well above zero. The constant depends on the
    vocabulary alone, so that what is learnt on one seed holds on another.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int):
        if vocab_size < 1 or seq_length < 1:
            raise ValueError(f"--mock-data needs --vocab-size and --seq-length above 0, not {vocab_size}, {seq_length}")
        self.vocab_size, self.seq_length, self.seed, self.name = vocab_size, seq_length, seed, "--mock-data"
        self._step = round(vocab_size * 0.618)

    def rows(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Samples `numbers`, [len(numbers), seq_length + 1]."""
        return np.stack([self.tokens(k) for k in numbers])

    def begins(self, k: int) -> NDArray[np.bool_]:
        """Nowhere: there are no documents, [seq_length + 1]."""
        return np.zeros(self.seq_length + 1, np.bool_)

    def describe(self, k: int, place: int) -> str:
        """Where token `place` of sample k stands, in words."""
        return f"token {place} of sample {k} of {self.name}"

    def tokens(self, k: int) -> NDArray[np.int64]:
        """Sample k, [seq_length + 1]."""
        if k < 0:
            raise IndexError(f"sample {k} of {self.name}")
        at = np.arange(self.seq_length + 1, dtype=np.uint64)
        draws = mix(at + np.uint64(hash_words(self.seed, k)))  # wraps at 2^64
        anew = draws >> np.uint64(61) == 0
        anew[0] = True
        last = np.maximum.accumulate(np.where(anew, at, np.uint64(0))).astype(np.int64)
        first = ((draws & np.uint64(MASK >> 3)) % np.uint64(self.vocab_size)).astype(np.int64)
        return (first[last] + (at.astype(np.int64) - last) * self._step) % self.vocab_size
