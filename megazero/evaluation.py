"""Scores a model on stretches of tokens: each label once, in any layout, however they fill the batches.

A window is what the model sees at once; a label's loss is given all tokens before it in its window. Windows go through
the pipeline in rounds, a micro-batch to each data rank in turn; places of a round that no window fills are masked, so
that every rank takes part in every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .data.batch import MicroBatch
from .data.loader import DocumentRules
from .data.samples import Stream
from .forward import ForwardModel, Weights
from .parallel.collectives import AgreedError, all_reduce, broadcast, together
from .parallel.groups import Group, Mesh
from .parallel.loss import Vocabulary, vocab_parallel_cross_entropy
from .pipe.stage import LayerSpec

ROUNDS = 4          # micro-batches of a round per pipeline rank: the pipeline is empty for a fifth of its time


@dataclass(frozen=True)
class Window:
    """Tokens to score, [n + 1]: inputs are all but the last, labels all but the first.

    begins   which of them are the first of a document, [n + 1]; None: that is not known
    context  so many of the first labels are not scored
    """

    tokens: NDArray[np.int64]
    begins: NDArray[np.bool_] | None = None
    context: int = 0


class Windows(Protocol):
    """Windows by number. `longest` is the most labels that any has from number k on."""

    def __len__(self) -> int: ...

    def __getitem__(self, k: int) -> Window: ...

    def longest(self, k: int) -> int: ...

    def describe(self, k: int) -> str:
        """Where window k comes from, in words."""
        ...


class StreamWindows:
    """Streams of a corpus one after another, each in windows of `seq_length` labels and a shorter last one.

    Neighbours share a token, the last label of one and the first input of the next, so that every token of a stream
    but its first is scored once.
    """

    def __init__(self, streams: Sequence[Stream], seq_length: int) -> None:
        self.streams, self.seq_length = streams, seq_length
        counts = [-(-(len(stream) - 1) // seq_length) for stream in streams]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, k: int) -> Window:
        stream, position, count = self._place(k)
        return Window(stream.read(position, count), stream.begins(position, count))

    def longest(self, k: int) -> int:
        return self.seq_length

    def describe(self, k: int) -> str:
        stream, position, _ = self._place(k)
        return f"document {stream.document(position)} of {stream.reader.prefix} or soon after it"

    def _place(self, k: int) -> tuple[Stream, int, int]:
        number = int(np.searchsorted(self._ends, k, side="right"))
        stream = self.streams[number]
        position = (k - (int(self._ends[number - 1]) if number else 0)) * self.seq_length
        return stream, position, min(self.seq_length + 1, len(stream) - position)


class TextWindows:
    """Texts, each for itself, in consecutive windows of at most `seq_length` labels; the longest come first.

    `words` holds how many tokens of the end of each text are its last word. Where it is given only these are scored,
    with as many tokens before them as a window can hold.
    """

    def __init__(self, texts: Sequence[NDArray[np.int64]], seq_length: int, words: Sequence[int] | None = None) -> None:
        self.texts = texts
        if words is None:
            places = [
                (number, start, min(start + seq_length + 1, len(text)), 0)
                for number, text in enumerate(texts) for start in range(0, len(text) - 1, seq_length)
            ]
        else:
            starts = [max(0, len(text) - seq_length - 1) for text in texts]
            places = [
                (number, start, len(text), len(text) - start - 1 - word)
                for number, (text, start, word) in enumerate(zip(texts, starts, words, strict=True))
            ]
        self._places = sorted(places, key=lambda place: place[1] - place[2])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, k: int) -> Window:
        number, start, stop, context = self._places[k]
        return Window(self.texts[number][start:stop], None, context)

    def longest(self, k: int) -> int:
        _, start, stop, _ = self._places[k]
        return stop - start - 1

    def describe(self, k: int) -> str:
        return f"text {self._places[k][0] + 1}"


@dataclass(frozen=True)
class Score:
    """Of all scored labels: the summed loss and their number; windows, and those whose scored labels are all right,
    that is, the likeliest of their vocabulary."""

    loss_sum: float
    tokens: int
    windows: int
    right: int

    @property
    def lm_loss(self) -> float:
        """Mean over tokens, in nats."""
        return self.loss_sum / self.tokens

    @property
    def ppl(self) -> float:
        """Perplexity; infinite where a float cannot hold it."""
        return math.exp(self.lm_loss) if self.lm_loss < 700 else math.inf

    @property
    def accuracy(self) -> float:
        """The share of windows that are right."""
        return self.right / self.windows


@dataclass(frozen=True)
class EvaluationSetup:
    """How a model is run.

    vocab        real entries of its vocabulary
    rules        what the end of a document does
    micro_batch  windows of one forward pass
    """

    vocab: int
    rules: DocumentRules
    micro_batch: int


class Evaluator:
    """This rank's part of a model that is scored. All ranks call its methods together, with equal arguments."""

    def __init__(self, layers: Sequence[LayerSpec], mesh: Mesh, setup: EvaluationSetup, weights: Weights) -> None:
        """Raises AgreedError where a rank cannot read the weights."""
        self.mesh, self.setup = mesh, setup

        def output(logits: Tensor, batch: MicroBatch) -> Tensor:
            return per_token(logits, batch.labels, setup.vocab, mesh.tensor)

        self.model = ForwardModel(layers, mesh, output=output)
        self.model.load(weights)

    def score(self, windows: Windows, done: Callable[[int], None] = lambda count: None) -> Score:
        """The score of all windows, each once; `done` is told after each round how many it had.

        Raises AgreedError where the tokens of any cannot be read or lie outside of the vocabulary.
        """
        mesh = self.mesh
        each = self.setup.micro_batch * mesh.data.size
        total = torch.zeros(4, dtype=torch.float64, device=mesh.device)
        for first, count in rounds_of(len(windows), each, ROUNDS * mesh.pipeline.size):
            batches: list[MicroBatch] = []
            together(mesh.world, partial(self._read_, batches, windows, first, count))
            total += self._round([batch.to(mesh.device) for batch in batches])
            done(min(each * count, len(windows) - first))
        last = mesh.pipeline.size - 1
        loss_sum, tokens, scored, right = broadcast(all_reduce(total, mesh.data), mesh.pipeline, last).tolist()
        if not tokens:
            raise AgreedError("there is no token to score")
        if not math.isfinite(loss_sum):
            raise AgreedError(f"the loss is {loss_sum}: the weights, or what is computed from them, are not finite")
        return Score(loss_sum, int(tokens), int(scored), int(right))

    def _read_(self, batches: list[MicroBatch], windows: Windows, first: int, count: int) -> None:
        """Append this data rank's `count` micro-batches of the round that begins with window `first`."""
        size, data = self.setup.micro_batch, self.mesh.data
        seq = windows.longest(first)
        for micro in range(count):
            start = first + (micro * data.size + data.index) * size
            batches.append(self._micro_batch(windows, range(start, min(start + size, len(windows))), seq))

    def _micro_batch(self, windows: Windows, numbers: range, seq: int) -> MicroBatch:
        """Windows `numbers`, padded to the full micro-batch and to `seq` labels. ValueError for an id that is none."""
        shape, rules = (self.setup.micro_batch, seq + 1), self.setup.rules
        tokens, begins, mask = np.zeros(shape, np.int64), np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        used = np.zeros(shape, np.bool_)
        for row, k in enumerate(numbers):
            window = windows[k]
            stop = len(window.tokens)
            wrong = window.tokens[(window.tokens < 0) | (window.tokens >= self.setup.vocab)]
            if len(wrong):
                raise ValueError(
                    f"{windows.describe(k)}: token id {wrong[0]}, but the vocabulary has {self.setup.vocab} entries"
                )
            tokens[row, :stop], used[row, : stop - 1] = window.tokens, True
            mask[row, 1 + window.context : stop] = 1
            if window.begins is not None:
                begins[row, :stop] = window.begins
        ids, marks = np.ascontiguousarray(tokens.T), begins.T
        scored, rule = torch.from_numpy(np.ascontiguousarray(mask.T[1:])), rules.loss_mask(ids[:-1], marks)
        return MicroBatch(
            torch.from_numpy(ids[:-1]),
            torch.from_numpy(ids[1:]),
            loss_mask=scored if rule is None else scored * rule,
            positions=rules.positions(ids[:-1], marks),
            documents=rules.documents(ids[:-1], marks),
            used=torch.from_numpy(np.ascontiguousarray(used.T[:-1])),
        )

    def _round(self, batches: Sequence[MicroBatch]) -> Tensor:
        """What the labels of a round add on the last stage: loss, labels, windows, right windows, fp64 [4]."""
        outputs = self.model.run(batches, batches[0].tokens.shape)
        total = torch.zeros(4, dtype=torch.float64, device=self.mesh.device)
        for (loss, hit), batch in zip(outputs, batches, strict=False):       # no outputs on other stages
            scored = batch.loss_mask > 0
            real = scored.any(0)
            total[0] += torch.where(scored, loss, 0).double().sum()
            total[1] += scored.sum()
            total[2] += real.sum()
            total[3] += ((hit > 0) | ~scored).all(0).logical_and(real).sum()
        return total


def rounds_of(windows: int, each: int, most: int) -> Iterator[tuple[int, int]]:
    """(first window, micro-batches of each data rank) of each round; a micro-batch of all data ranks takes `each`
    windows, a round has at most `most` of them, and the last no more than it needs."""
    first = 0
    while first < windows:
        count = min(most, -(-(windows - first) // each))
        yield first, count
        first += each * count


def per_token(logits: Tensor, labels: Tensor, vocab: int, group: Group) -> Tensor:
    """[seq, batch, padded vocab / tensor], labels [seq, batch] -> [2, seq, batch], fp32 or fp64: the loss of each label
    without smoothing, and 1 where it is the likeliest of the `vocab` real entries (of equals the lowest id), else 0."""
    losses = vocab_parallel_cross_entropy(logits, labels, Vocabulary(vocab, group))
    first = group.index * logits.shape[-1]
    real = max(0, min(logits.shape[-1], vocab - first))
    top, ids = torch.full_like(losses, -torch.inf), torch.full_like(labels, vocab)
    if real:
        values, at = logits[..., :real].max(-1)
        top, ids = values.to(losses.dtype), at + first
    best = all_reduce(top.clone(), group, "max")
    ids = all_reduce(torch.where(top == best, ids, vocab), group, "min")
    return torch.stack((losses, (ids == labels).to(losses.dtype)))
