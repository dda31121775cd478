"""Sample k of a corpus as arithmetic: a pure function of a seed and k, without an index that is built, kept or shipped.

The documents of a split lie one after the other in one stream of tokens, which is cut into windows of seq_length + 1
tokens (neighbours share one token: the last label is the next first input). Windows begin and end anywhere in a
document. A keyed permutation says which window is the k-th sample; each epoch visits every window once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import DataConfig
from .indexed import IndexedReader

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = 8  # four are visibly not random on small sets


def mix(x: int) -> int:
    """The finalizer of splitmix64: 64 bits to 64 bits, one to one. Takes ints below 2^64 and arrays of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


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
        self._keys = [hash_words(key, number) for number in range(ROUNDS)]

    def __call__(self, k: int) -> int:
        if not 0 <= k < self.size:
            raise IndexError(f"{k} is not in a permutation of {self.size} elements")
        rows, columns, keys = self._rows, self._columns, self._keys
        left, right = divmod(k, columns)
        while True:
            for number in range(0, ROUNDS, 2):
                left = (left + mix(right + keys[number] & MASK)) % rows
                right = (right + mix(left + keys[number + 1] & MASK)) % columns
            if left * columns + right < self.size:
                return left * columns + right


def split_documents(weights: Sequence[float], documents: int) -> list[tuple[int, int]]:
    """For each weight the first document of its part and the one after its last.

    The borders are Megatron's: the weights so far, as a share of all, times the documents, rounded half to even.
    """
    borders, total = [0.0], sum(weights)
    for weight in weights:
        borders.append(borders[-1] + weight / total)
    ends = [min(round(border * documents), documents) for border in borders]
    return list(zip(ends[:-1], ends[1:]))


class Stream:
    """Tokens start to stop of a token file, as a circle. `len` is the number of tokens."""

    def __init__(self, reader: IndexedReader, start: int, stop: int):
        if not 0 <= start < stop <= reader.num_tokens:
            raise ValueError(f"tokens {start} to {stop} of {reader.num_tokens} in {reader.prefix}.bin: nothing to read")
        self.reader, self.start, self.stop = reader, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, position: int, count: int) -> NDArray[np.int64]:
        """`count` tokens from `position` on, going round as often as need be, [count]."""
        position %= len(self)
        ahead = len(self) - position
        if count <= ahead:
            return self.reader.read(self.start + position, count)
        if count > len(self):
            return np.resize(np.roll(self.reader.read(self.start, len(self)), -position), count)
        head, tail = self.reader.read(self.start + position, ahead), self.reader.read(self.start, count - ahead)
        return np.concatenate([head, tail])


class SampleSource(Protocol):
    """What a loader reads from: any number k >= 0 has a sample."""

    name: str
    seq_length: int

    def tokens(self, k: int) -> NDArray[np.int64]:
        """Sample k, [seq_length + 1]: inputs are all but the last token, labels all but the first."""
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

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of {self._size} in an epoch of {self.name}")
        return self.tokens(index)

    def tokens(self, k: int) -> NDArray[np.int64]:
        """Sample k, [seq_length + 1]."""
        return self.stream.read(self.position(k), self.seq_length + 1)

    def position(self, k: int) -> int:
        """The token of the stream, taken as a circle, at which sample k begins."""
        if k < 0:
            raise IndexError(f"sample {k} of {self.name}")
        epoch, window = divmod(k, self._size)
        if not self.shuffle:
            return window * self.seq_length
        offset = hash_words(self.seed, epoch, 1) % self.seq_length if epoch else 0
        return offset + Permutation(self._size, hash_words(self.seed, epoch, 0))(window) * self.seq_length


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


@dataclass(frozen=True)
class Parts:
    """The samples of the three parts of a split; None: no document fell into it."""

    train: Samples | MockSamples | None
    valid: Samples | MockSamples | None
    test: Samples | MockSamples | None


def open_samples(
    data: DataConfig, *, seq_length: int, vocab_size: int, seed: int, fingerprint: str | None = None
) -> Parts:
    """Opens what --data-path or --mock-data names. vocab_size and fingerprint are the tokenizer's.

    Raises ValueError for a missing or damaged file and for one whose sidecar tells of another vocabulary.
    """
    seeds = [hash_words(seed, part) for part in range(3)]
    if data.mock_data:
        return Parts(*(MockSamples(vocab_size, seq_length, part_seed) for part_seed in seeds))
    if not data.data_path:
        raise ValueError("no data: give --data-path PREFIX or --mock-data")
    (prefix,) = data.data_path
    reader = IndexedReader(prefix)
    _check_vocabulary(reader, vocab_size, fingerprint)
    parts: list[Samples | None] = []
    for name, part_seed, (first, last) in zip(
        ("train", "valid", "test"), seeds, split_documents(data.split_weights, reader.num_documents)
    ):
        start, stop = (reader.first_token(int(reader.document_index[document])) for document in (first, last))
        name = f"the {name} part of {reader.prefix}"
        parts.append(
            Samples(Stream(reader, start, stop), seq_length, seed=part_seed, name=name) if start < stop else None
        )
    return Parts(*parts)


def _check_vocabulary(reader: IndexedReader, vocab_size: int, fingerprint: str | None) -> None:
    told = reader.sidecar
    if told is None:
        return
    if told.vocab_size > vocab_size:
        raise ValueError(
            f"--data-path {reader.prefix} was made with a vocabulary of {told.vocab_size}, "
            f"the tokenizer (--tokenizer-type, --vocab-size) has {vocab_size}"
        )
    if told.fingerprint and fingerprint and told.fingerprint != fingerprint:
        raise ValueError(
            f"--data-path {reader.prefix} was made with the tokenizer {told.fingerprint}, "
            f"--tokenizer-type and --tokenizer-model give {fingerprint}"
        )
