"""The order of samples of Megatron core, for a run that began there: `--sample-order megatron`.

Documents, samples and blends come exactly as in core, for the same seed, sequence length, split, weights and numbers
of samples. As in core a split is cut by *sequences*, which are documents only where each was written as one, and an
epoch border is no border of samples: epochs are shuffled together, the last one apart where little of it is used.
Everything is built in memory when the first sample is read; there is no cache, and nothing is written.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .documents import TokenFile

SURPLUS = 0.005  # core makes so many more samples of each corpus of a blend than it means to draw
FULL_EPOCH = 0.80  # the last epoch is shuffled apart where less of it is used
CHUNK = 1 << 16  # positions by which the order of a blend grows
FEW = 16  # so many corpora are compared one by one faster than by arrays


def index_dtype(largest: int) -> np.dtype:
    """The narrowest of int32 and int64 that holds `largest`."""
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def shuffle_dtype(size: int) -> np.dtype:
    """What core shuffles `size` sample numbers in: uint32, and int64 from 2^32 - 2 on."""
    return np.dtype(np.uint32 if size < np.iinfo(np.uint32).max - 1 else np.int64)


def sample_count(tokens: int, epochs: int, seq_length: int) -> int:
    """Samples in `epochs` times `tokens` tokens; neighbours share a token."""
    return (epochs * tokens - 1) // seq_length


def epochs_for(samples: int, tokens: int, seq_length: int) -> tuple[int, bool]:
    """(epochs of `tokens` tokens that hold `samples` samples, whether the last of them is shuffled apart)."""
    epochs = -(-(samples * seq_length + 1) // tokens)
    if epochs == 1:
        return 1, False
    in_last = samples - sample_count(tokens, epochs - 1, seq_length)
    return epochs, in_last < int(FULL_EPOCH * sample_count(tokens, 1, seq_length))


class MegatronOrder:
    """Core's three indices, of sequences first to last - 1 with `lengths` tokens, for `samples` samples or one epoch.

    documents  [epochs * sequences], numbers of sequences in the order in which they are read
    ends       int64 [epochs * sequences], tokens read up to the end of each
    shuffle    [samples], the k-th sample begins at token shuffle[k] * seq_length
    """

    def __init__(self, lengths: NDArray[np.int32], first: int, seq_length: int, *, samples: int | None, seed: int):
        tokens = int(lengths.sum(dtype=np.int64))
        epochs, apart = (1, False) if samples is None else epochs_for(samples, tokens, seq_length)
        self.first, self.lengths, self.seq_length = first, lengths, seq_length
        random = np.random.RandomState(seed)
        groups = (epochs - 1, 1) if apart else (epochs,)
        self.documents = np.concatenate([self._shuffled_documents(random, group) for group in groups])
        self.ends = np.cumsum(lengths[self.documents - first], dtype=np.int64)
        size = sample_count(tokens, epochs, seq_length)
        border = sample_count(tokens, epochs - 1, seq_length) if apart else size
        self.shuffle = np.arange(size, dtype=shuffle_dtype(size))
        random.shuffle(self.shuffle[:border])
        if apart:
            random.shuffle(self.shuffle[border:])

    def _shuffled_documents(self, random: np.random.RandomState, epochs: int) -> NDArray[np.integer]:
        last = self.first + len(self.lengths)
        documents = np.tile(np.arange(self.first, last, dtype=index_dtype(last)), epochs)
        random.shuffle(documents)
        return documents

    def row(self, j: int) -> tuple[int, int]:
        """Row j of core's sample index: (position in `documents`, offset in that document) of token j * seq_length."""
        token = j * self.seq_length
        position = int(np.searchsorted(self.ends, token, side="right"))
        return position, token - int(self.ends[position]) + int(self.lengths[self.documents[position] - self.first])

    def pieces(self, k: int) -> Iterator[tuple[int, int, int]]:
        """(sequence, offset, tokens) of each piece of sample k, seq_length + 1 tokens in all."""
        position, offset = self.row(int(self.shuffle[k]))
        left = self.seq_length + 1
        while left:
            sequence = int(self.documents[position])
            count = min(left, int(self.lengths[sequence - self.first]) - offset)
            if count:
                yield sequence, offset, count
            position, offset, left = position + 1, 0, left - count


class MegatronSamples:
    """Samples of sequences first to last - 1 of a token file in core's order; `len` is how many there are.

    `samples` is how many the run takes of them, which the order depends on; None: those of one epoch, as core builds
    a corpus of a blend without weights. Raises ValueError where there are no tokens.
    """

    def __init__(
        self, reader: TokenFile, sequences: tuple[int, int], seq_length: int, *, samples: int | None, seed: int,
        name: str = "samples",
    ):  # fmt: skip
        if not 0 <= seed < 2**32:
            raise ValueError(f"--seed {seed}: --sample-order megatron takes seeds from 0 to 2^32 - 1")
        self.reader, self.sequences, self.seq_length = reader, sequences, seq_length
        self.samples, self.seed, self.name = samples, seed, name
        self._lengths = reader.lengths[sequences[0] : sequences[1]]
        tokens = int(self._lengths.sum(dtype=np.int64))
        if tokens < 1:
            raise ValueError(f"{name} has no tokens")
        epochs = 1 if samples is None else epochs_for(samples, tokens, seq_length)[0]
        self._size = sample_count(tokens, epochs, seq_length)
        self._lock = threading.Lock()
        self._order: MegatronOrder | None = None

    def __len__(self) -> int:
        return self._size

    @property
    def order(self) -> MegatronOrder:
        """The indices, built once, by the first thread that needs them."""
        with self._lock:
            if self._order is None:
                self._order = MegatronOrder(
                    self._lengths, self.sequences[0], self.seq_length, samples=self.samples, seed=self.seed
                )
            return self._order

    def tokens(self, k: int) -> NDArray[np.int64]:
        """Sample k, [seq_length + 1]. IndexError past the samples that the order was made for."""
        if not 0 <= k < self._size:
            raise IndexError(f"sample {k} of {self._size} that --sample-order megatron made of {self.name}")
        places = ((self.reader.first_token(sequence) + offset, count) for sequence, offset, count in self._pieces(k))
        return np.concatenate([self.reader.read(start, count) for start, count in places])

    def rows(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Samples `numbers`, [len(numbers), seq_length + 1]."""
        return np.stack([self.tokens(k) for k in numbers])

    def begins(self, k: int) -> NDArray[np.bool_]:
        """Which tokens of sample k are the first of a sequence, [seq_length + 1]: it follows one from elsewhere."""
        marks, at = np.zeros(self.seq_length + 1, np.bool_), 0
        for _, offset, count in self._pieces(k):
            marks[at] = offset == 0
            at += count
        return marks

    def describe(self, k: int, place: int) -> str:
        """Where token `place` of sample k stands, in words."""
        pieces = list(self._pieces(k))
        ends = np.cumsum([count for _, _, count in pieces])
        sequence = pieces[int(np.searchsorted(ends, place, side="right"))][0]
        return f"sequence {sequence} of {self.reader.prefix}"

    def _pieces(self, k: int) -> Iterator[tuple[int, int, int]]:
        return self.order.pieces(k)


class GreedyOrder:
    """Core's blend of corpora: position i goes to the largest w_d max(i, 1) - (samples of d so far), the first of
    equals, in double precision. `len` is the number of positions; they are made as far as they are asked for.

    With `sizes` a corpus leaves once it has given so many samples.
    """

    def __init__(self, shares: Sequence[float], size: int, *, sizes: Sequence[int] | None = None):
        self._shares, self._size = list(shares), size
        self._limits = [math.inf] * len(shares) if sizes is None else [float(limit) for limit in sizes]
        self._counts = [0] * len(shares)
        self._chunks: list[tuple[NDArray[np.integer], NDArray[np.int64]]] = []  # corpora and samples of CHUNK positions
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def place(self, k: int) -> tuple[int, int]:
        """(corpus, sample of it) of position k."""
        if not 0 <= k < self._size:
            raise IndexError(f"sample {k} of {self._size} that --sample-order megatron made of a blend")
        chunk, at = divmod(k, CHUNK)
        with self._lock:
            while chunk >= len(self._chunks):
                self._chunks.append(self._next_chunk())
        corpora, samples = self._chunks[chunk]
        return int(corpora[at]), int(samples[at])

    def _next_chunk(self) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        start, before = len(self._chunks) * CHUNK, list(self._counts)
        stop = min(start + CHUNK, self._size)
        choose = self._choose_one_by_one if len(self._shares) <= FEW else self._choose_by_arrays
        corpora = np.fromiter(choose(range(start, stop)), np.int16, stop - start)
        samples = np.empty(len(corpora), np.int64)
        for corpus in np.unique(corpora).tolist():
            mine = corpora == corpus
            samples[mine] = np.arange(before[corpus], self._counts[corpus])
        return corpora, samples

    def _choose_one_by_one(self, positions: range) -> Iterator[int]:
        shares, counts, limits = self._shares, self._counts, self._limits
        absent = [0.0 if count < limit else -math.inf for count, limit in zip(counts, limits)]
        for i in positions:
            at = float(max(i, 1))
            errors = [share * at - count + gone for share, count, gone in zip(shares, counts, absent)]
            corpus = errors.index(max(errors))
            counts[corpus] += 1
            if counts[corpus] >= limits[corpus]:
                absent[corpus] = -math.inf
            yield corpus

    def _choose_by_arrays(self, positions: range) -> Iterator[int]:
        shares, counts, limits = (np.array(values, float) for values in (self._shares, self._counts, self._limits))
        absent = np.where(counts < limits, 0.0, -math.inf)
        for i in positions:
            corpus = int(np.argmax(shares * float(max(i, 1)) - counts + absent))
            counts[corpus] += 1
            self._counts[corpus] += 1
            if counts[corpus] >= limits[corpus]:
                absent[corpus] = -math.inf
            yield corpus


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights as shares of their sum, in double precision."""
    values = np.asarray([float(weight) for weight in weights])
    return (values / np.sum(values)).tolist()


def samples_of_corpora(samples: int, weights: Sequence[float]) -> list[int]:
    """How many samples core makes of each corpus of a blend from which a run takes `samples`."""
    return [math.ceil(math.ceil(samples * share) * (1 + SURPLUS)) for share in normalized(weights)]


def weighted_order(samples: int, weights: Sequence[float]) -> GreedyOrder:
    """Core's blend by weight for a run that takes `samples` samples."""
    shares = normalized(weights)
    size = sum(math.ceil(samples * share) for share in shares)
    return GreedyOrder(normalized(shares), size)  # core normalizes twice, which may move the last bit


def exhaustive_order(sizes: Sequence[int]) -> GreedyOrder:
    """Core's blend without weights: each corpus by its number of samples, read once."""
    return GreedyOrder(normalized(sizes), sum(sizes), sizes=sizes)
