"""Global batches of one data rank: a pure function of the samples consumed so far, with a read-ahead in threads.

Global micro-batch g = m * data_size + data_index holds samples consumed + [g * micro_batch_size, (g + 1) *
micro_batch_size), so the global batch is the same set of samples whatever the micro-batch and the data size.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..batch_sizes import BatchSizes, SeqLengths
from .batch import MicroBatch
from .samples import SampleSource

RUN = 1 << 19  # tokens that one worker reads at least, where there are so many


@dataclass(frozen=True)
class Share:
    """The part of each global batch that one data rank reads, in micro-batches of `micro_batch_size` samples each."""

    micro_batch_size: int
    sizes: BatchSizes
    data_index: int = 0
    data_size: int = 1

    def __post_init__(self) -> None:
        assert self.micro_batch_size > 0 and 0 <= self.data_index < self.data_size, self
        assert not any(size % (self.micro_batch_size * self.data_size) for size in self.sizes.sizes), self

    def micro_batches(self, consumed_samples: int) -> int:
        """Micro-batches of this rank in the global batch that begins at `consumed_samples`."""
        return self.sizes.at(consumed_samples) // (self.micro_batch_size * self.data_size)

    def number(self, micro_batch: int) -> int:
        """The number within the global batch, over all data ranks, of this rank's `micro_batch`."""
        return micro_batch * self.data_size + self.data_index


@dataclass(frozen=True)
class DocumentRules:
    """What the end of a document does. It ends after the token `eod`, if there is one, and where its corpus says so.

    The methods take tokens [seq, batch], and `marks` [seq + 1, batch]: which of these tokens, and of those that
    follow the last, are the first of a document in their corpus; None: that is not known.
    """

    eod: int | None = None
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False

    @property
    def any(self) -> bool:
        """Whether the ends of documents do anything."""
        return self.mask_loss or self.reset_positions or self.reset_attention

    def loss_mask(self, tokens: NDArray[np.int64], marks: NDArray[np.bool_] | None = None) -> torch.Tensor | None:
        """fp32 like tokens [seq, batch], 0 where a document ends; None: every token counts."""
        return torch.from_numpy((~self._begins(tokens, marks)[1:]).astype(np.float32)) if self.mask_loss else None

    def positions(self, tokens: NDArray[np.int64], marks: NDArray[np.bool_] | None = None) -> torch.Tensor | None:
        """int64 like tokens [seq, batch], again from 0 in each document; None: 0 .. seq - 1."""
        if not self.reset_positions:
            return None
        at, begins = np.arange(len(tokens))[:, None], self._begins(tokens, marks)[:-1]
        return torch.from_numpy(at - np.maximum.accumulate(np.where(begins, at, 0), axis=0))

    def documents(self, tokens: NDArray[np.int64], marks: NDArray[np.bool_] | None = None) -> torch.Tensor | None:
        """int64 like tokens [seq, batch], from 0, one more in each document; None: one document."""
        return torch.from_numpy(np.cumsum(self._begins(tokens, marks)[:-1], axis=0)) if self.reset_attention else None

    def _begins(self, tokens: NDArray[np.int64], marks: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """Where a document begins after another, [seq + 1, batch]."""
        begins = np.zeros((len(tokens) + 1, *tokens.shape[1:]), np.bool_)
        if self.eod is not None:
            begins[1:] = tokens == self.eod
        if marks is not None:
            begins[1:] |= marks[1:]
        return begins


class Loader:
    """Reads this rank's share of any global batch. The next batch is read ahead by `num_workers` threads.

    What it returns depends on nothing but the arguments: not on the workers, nor on what was asked for before. Samples
    are cut to the `lengths` of the step that they are for; without, and in evaluation, they are whole. An
    error met while reading ahead is raised when the batch is asked for. `close` ends the threads; so does `with`.
    """

    def __init__(
        self,
        samples: SampleSource,
        share: Share,
        *,
        vocab_size: int,
        seed: int,
        rules: DocumentRules = DocumentRules(),
        num_workers: int = 2,
        lengths: SeqLengths | None = None,
    ):
        self.samples, self.share, self.vocab_size, self.seed, self.rules = samples, share, vocab_size, seed, rules
        self.num_workers, self.lengths = num_workers, lengths
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="read-ahead") if num_workers else None
        self._ahead: tuple[tuple[int, int | None], list[Future[list[MicroBatch]]]] | None = None

    def global_batch(self, consumed_samples: int, iteration: int | None = None) -> list[MicroBatch]:
        """This rank's micro-batches of the global batch that begins at sample `consumed_samples`, on the CPU.

        Without `iteration` (evaluation) they carry no root of random draws. `scale` is left at 1: the number of
        unmasked tokens is known only to all ranks together. Raises ValueError for an id outside the vocabulary.
        """
        wanted = (consumed_samples, iteration)
        if self._pool is None:
            return self._read(range(self.share.micro_batches(consumed_samples)), *wanted)
        if self._ahead is None or self._ahead[0] != wanted:
            self._drop_ahead()
            self._ahead = self._read_ahead(wanted)
        futures = self._ahead[1]
        size = self.share.sizes.at(consumed_samples)
        self._ahead = self._read_ahead((consumed_samples + size, None if iteration is None else iteration + 1))
        return [micro_batch for future in futures for micro_batch in future.result()]

    @property
    def is_growing(self) -> bool:
        """Whether samples of some steps are shorter than those of others."""
        return self.lengths is not None and len(self.lengths.lengths) > 1

    def seq_length(self, iteration: int | None) -> int:
        """Tokens of a sample in a step, or in evaluation."""
        return self.samples.seq_length if None in (iteration, self.lengths) else self.lengths.at(iteration)

    def close(self) -> None:
        """Ends the threads. The loader cannot be used afterwards."""
        if self._pool is not None:
            self._drop_ahead()
            self._pool.shutdown(wait=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(
        self, batch: tuple[int, int | None]
    ) -> tuple[tuple[int, int | None], list[Future[list[MicroBatch]]]]:
        """Starts reading. Each worker takes a long run of micro-batches: workers that took turns at every sample
        would wait for each other most of the time."""
        count = self.share.micro_batches(batch[0])
        least = RUN // (self.samples.seq_length * self.share.micro_batch_size)
        each = max(-(-count // self.num_workers), least)
        runs = [range(first, min(first + each, count)) for first in range(0, count, each)]
        return batch, [self._pool.submit(self._read, run, *batch) for run in runs]

    def _drop_ahead(self) -> None:
        for future in self._ahead[1] if self._ahead else ():
            future.cancel()
        self._ahead = None

    def _read(self, micro_batches: range, consumed_samples: int, iteration: int | None) -> list[MicroBatch]:
        share, size = self.share, self.share.micro_batch_size
        places = [share.number(m) for m in micro_batches]
        numbers = [consumed_samples + place * size + i for place in places for i in range(size)]
        try:
            rows = self.samples.rows(numbers)  # [samples, seq + 1]
        except IndexError as past:  # an order that was made for fewer samples
            raise ValueError(str(past)) from past
        rows = rows[:, : self.seq_length(iteration) + 1]
        self._check(rows, numbers)
        tokens = rows.reshape(len(places), size, -1).transpose(0, 2, 1).astype(np.int64, order="C")
        found = []
        for at, place in enumerate(places):
            draw = None if iteration is None else (self.seed, iteration, place)
            found.append(self._micro_batch(tokens[at], numbers[at * size : (at + 1) * size], draw))
        return found

    def _micro_batch(
        self, tokens: NDArray[np.int64], numbers: list[int], draw: tuple[int, int, int] | None
    ) -> MicroBatch:
        """The micro-batch of samples `numbers`, whose `tokens` are [seq + 1, micro-batch]."""
        inputs, labels, rules = torch.from_numpy(tokens[:-1]), torch.from_numpy(tokens[1:]), self.rules
        if not rules.any:
            return MicroBatch(inputs, labels, draw=draw)
        marks = np.stack([self.samples.begins(k)[: len(tokens)] for k in numbers], axis=1)
        return MicroBatch(
            inputs,
            labels,
            loss_mask=rules.loss_mask(tokens[:-1], marks),
            positions=rules.positions(tokens[:-1], marks),
            documents=rules.documents(tokens[:-1], marks),
            draw=draw,
        )

    def _check(self, rows: NDArray[np.integer], numbers: list[int]) -> None:
        """Every id of `rows`, [samples, seq + 1], is one of the vocabulary."""
        if rows.max() < self.vocab_size and (rows.dtype.kind == "u" or rows.min() >= 0):
            return
        row, place = np.argwhere((rows < 0) | (rows >= self.vocab_size))[0].tolist()
        where = self.samples.describe(numbers[row], place)
        raise ValueError(
            f"{where}: sample {numbers[row]} of {self.samples.name} has token id {rows[row, place]} at position "
            f"{place}; the vocabulary (--vocab-size or the tokenizer's) has {self.vocab_size} entries"
        )


def counted_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Tokens of these micro-batches that count in the loss; their sum over the data ranks divides the loss."""
    return sum(micro_batch.counted_tokens for micro_batch in micro_batches)
