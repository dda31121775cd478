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

from .batch import MicroBatch
from .samples import SampleSource


@dataclass(frozen=True)
class Share:
    """The part of each global batch that one data rank reads: `micro_batches` of `micro_batch_size` samples each."""

    micro_batch_size: int
    micro_batches: int
    data_index: int = 0
    data_size: int = 1

    def __post_init__(self) -> None:
        assert self.micro_batch_size > 0 and self.micro_batches > 0 and 0 <= self.data_index < self.data_size, self

    @property
    def global_batch_size(self) -> int:
        """Samples in a global batch, of all data ranks."""
        return self.micro_batch_size * self.micro_batches * self.data_size

    def first_sample(self, micro_batch: int) -> int:
        """The number within the global batch of the first sample of this rank's `micro_batch`."""
        return (micro_batch * self.data_size + self.data_index) * self.micro_batch_size


@dataclass(frozen=True)
class DocumentRules:
    """What the end-of-document token `eod` does beyond being a token.

    Raises ValueError where something is asked of it and the tokenizer has none.
    """

    eod: int | None = None
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False

    def __post_init__(self) -> None:
        asked = {
            "--eod-mask-loss": self.mask_loss,
            "--reset-position-ids": self.reset_positions,
            "--reset-attention-mask": self.reset_attention,
        }
        if self.eod is None and any(asked.values()):
            flags = " and ".join(flag for flag, on in asked.items() if on)
            raise ValueError(
                f"{flags}: the tokenizer has no end-of-document token (eos), so documents cannot be told apart"
            )

    def loss_mask(self, tokens: NDArray[np.int64]) -> torch.Tensor | None:
        """fp32 like tokens [seq, batch], 0 where the input is eod; None: every token counts."""
        return torch.from_numpy((tokens != self.eod).astype(np.float32)) if self.mask_loss else None

    def positions(self, tokens: NDArray[np.int64]) -> torch.Tensor | None:
        """int64 like tokens [seq, batch], again from 0 after each eod; None: 0 .. seq - 1."""
        if not self.reset_positions:
            return None
        at = np.arange(len(tokens))[:, None]
        return torch.from_numpy(at - np.maximum.accumulate(np.where(self._begins(tokens), at, 0), axis=0))

    def documents(self, tokens: NDArray[np.int64]) -> torch.Tensor | None:
        """int64 like tokens [seq, batch], from 0, one more after each eod, which ends its document; None: one."""
        return torch.from_numpy(np.cumsum(self._begins(tokens), axis=0)) if self.reset_attention else None

    def _begins(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where a document begins after another, [seq, batch]."""
        ends = tokens == self.eod
        return np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])


class Loader:
    """Reads this rank's share of any global batch. The next batch is read ahead by `num_workers` threads.

    What it returns depends on nothing but the arguments: not on the workers, nor on what was asked for before. An
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
    ):
        self.samples, self.share, self.vocab_size, self.seed, self.rules = samples, share, vocab_size, seed, rules
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="read-ahead") if num_workers else None
        self._ahead: tuple[tuple[int, int | None], list[Future[MicroBatch]]] | None = None

    def global_batch(self, consumed_samples: int, iteration: int | None = None) -> list[MicroBatch]:
        """This rank's micro-batches of the global batch that begins at sample `consumed_samples`, on the CPU.

        Without `iteration` (evaluation) they carry no root of random draws. `scale` is left at 1: the number of
        unmasked tokens is known only to all ranks together. Raises ValueError for an id outside the vocabulary.
        """
        wanted, numbers = (consumed_samples, iteration), range(self.share.micro_batches)
        if self._pool is None:
            return [self._micro_batch(m, *wanted) for m in numbers]
        if self._ahead is None or self._ahead[0] != wanted:
            self._drop_ahead()
            self._ahead = self._read_ahead(wanted)
        futures = self._ahead[1]
        following = (consumed_samples + self.share.global_batch_size, None if iteration is None else iteration + 1)
        self._ahead = self._read_ahead(following)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads. The loader cannot be used afterwards."""
        if self._pool is not None:
            self._drop_ahead()
            self._pool.shutdown(wait=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self, batch: tuple[int, int | None]) -> tuple[tuple[int, int | None], list[Future[MicroBatch]]]:
        return batch, [self._pool.submit(self._micro_batch, m, *batch) for m in range(self.share.micro_batches)]

    def _drop_ahead(self) -> None:
        for future in self._ahead[1] if self._ahead else ():
            future.cancel()
        self._ahead = None

    def _micro_batch(self, micro_batch: int, consumed_samples: int, iteration: int | None) -> MicroBatch:
        share = self.share
        first = consumed_samples + share.first_sample(micro_batch)
        rows = np.stack([self.samples.tokens(first + i) for i in range(share.micro_batch_size)])
        self._check(rows, first)
        columns = np.ascontiguousarray(rows.T)  # [seq + 1, micro-batch]
        tokens = columns[:-1]
        draw = None if iteration is None else (self.seed, iteration, micro_batch * share.data_size + share.data_index)
        return MicroBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(columns[1:].copy()),
            loss_mask=self.rules.loss_mask(tokens),
            positions=self.rules.positions(tokens),
            documents=self.rules.documents(tokens),
            draw=draw,
        )

    def _check(self, rows: NDArray[np.int64], first: int) -> None:
        """Every id of the batch, [micro-batch, seq + 1], is one of the vocabulary."""
        if 0 <= rows.min() <= rows.max() < self.vocab_size:
            return
        row, column = np.argwhere((rows < 0) | (rows >= self.vocab_size))[0]
        raise ValueError(
            f"sample {first + row} of {self.samples.name} has token id {rows[row, column]} at position {column}; "
            f"the vocabulary (--vocab-size or the tokenizer's) has {self.vocab_size} entries"
        )


def counted_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Tokens of these micro-batches that count in the loss; their sum over the data ranks divides the loss."""
    return sum(micro_batch.counted_tokens for micro_batch in micro_batches)
