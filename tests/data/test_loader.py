"""The loader: one order of samples in every layout, masks at the ends of documents, threads that change nothing."""

import threading
import time

import numpy as np
import pytest
import torch

from megazero.data.indexed import IndexedWriter
from megazero.data.loader import DocumentRules, Loader, Share, counted_tokens
from megazero.data.samples import IndexedReader, MockSamples, Samples, Stream

EOD = 9


class Numbered:
    """Sample k is the number k, repeated; remembers what was read."""

    name, seq_length = "numbered", 4

    def __init__(self):
        self.read = []

    def tokens(self, k):
        self.read.append(k)
        return np.full(5, k)


class Listed:
    """Samples that are written down."""

    name = "listed"

    def __init__(self, *rows):
        self.rows, self.seq_length = rows, len(rows[0]) - 1

    def tokens(self, k):
        return np.array(self.rows[k % len(self.rows)])


def loader(samples, share, **options):
    return Loader(samples, share, **{"vocab_size": 10**6, "seed": 3, "num_workers": 0} | options)


def numbers(batch):
    """The samples in the micro-batches of a `Numbered`."""
    return [k for micro_batch in batch for k in micro_batch.tokens[0].tolist()]


def test_micro_batch_holds_the_samples_of_its_global_number():
    for index in range(3):
        batch = loader(Numbered(), Share(2, 4, index, 3)).global_batch(100, 7)
        assert [micro_batch.draw for micro_batch in batch] == [(3, 7, m * 3 + index) for m in range(4)]
        assert numbers(batch) == [100 + (m * 3 + index) * 2 + i for m in range(4) for i in range(2)]


@pytest.mark.parametrize(("micro_batch_size", "data_size"), [(1, 1), (8, 1), (2, 2), (1, 8), (4, 2), (2, 1)])
def test_global_batch_is_the_same_set_in_every_layout(micro_batch_size, data_size):
    micro_batches = 8 // micro_batch_size // data_size
    shares = [Share(micro_batch_size, micro_batches, index, data_size) for index in range(data_size)]
    assert {share.global_batch_size for share in shares} == {8}
    for step in range(3):
        read = [k for share in shares for k in numbers(loader(Numbered(), share).global_batch(8 * step, step))]
        assert sorted(read) == list(range(8 * step, 8 * step + 8))


def test_data_size_may_change_on_the_way_c043():
    read = []
    for step in range(10):
        data_size = 2 if step < 5 else 1
        for index in range(data_size):
            read += numbers(loader(Numbered(), Share(2, 4 // data_size, index, data_size)).global_batch(8 * step, step))
    assert sorted(read) == list(range(80))


def test_labels_are_the_next_tokens_sequence_first():
    (batch,) = loader(Listed([1, 2, 3, 4], [5, 6, 7, 8]), Share(2, 1)).global_batch(0, 1)
    assert batch.tokens.tolist() == [[1, 5], [2, 6], [3, 7]] and batch.labels.tolist() == [[2, 6], [3, 7], [4, 8]]
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert batch.loss_mask is None and batch.positions is None and batch.documents is None and batch.scale == 1.0
    assert counted_tokens([batch, batch]) == 12


def test_evaluation_draws_nothing():
    assert all(micro_batch.draw is None for micro_batch in loader(Numbered(), Share(1, 2)).global_batch(0))


# --- the ends of documents

ROWS = {  # inputs and, from the rules, positions, documents and loss mask; the last token is only a label
    "none": ([1, 2, 3, 4, 9], [0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 1, 1]),
    "inside": ([1, 9, 3, 4, 5], [0, 1, 0, 1], [0, 0, 1, 1], [1, 0, 1, 1]),
    "first": ([9, 2, 3, 4, 5], [0, 0, 1, 2], [0, 1, 1, 1], [0, 1, 1, 1]),
    "last": ([1, 2, 3, 9, 5], [0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 1, 0]),
    "two in a row": ([1, 9, 9, 4, 5], [0, 1, 0, 0], [0, 0, 1, 2], [1, 0, 0, 1]),
    "only": ([9, 9, 9, 9, 9], [0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("case", ROWS)
def test_positions_documents_and_mask_begin_again_after_eod_c036(case):
    row, positions, documents, mask = ROWS[case]
    rules = DocumentRules(EOD, mask_loss=True, reset_positions=True, reset_attention=True)
    other = ROWS["none"]
    (batch,) = loader(Listed(row, other[0]), Share(2, 1), rules=rules).global_batch(0, 1)
    assert batch.positions[:, 0].tolist() == positions and batch.positions[:, 1].tolist() == other[1]
    assert batch.documents[:, 0].tolist() == documents and batch.documents[:, 1].tolist() == other[2]
    assert batch.loss_mask[:, 0].tolist() == mask and batch.loss_mask[:, 1].tolist() == other[3]
    assert batch.loss_mask.dtype == torch.float32
    assert batch.positions.dtype == batch.documents.dtype == torch.int64
    assert counted_tokens([batch]) == sum(mask) + 4


@pytest.mark.parametrize("rule", ["mask_loss", "reset_positions", "reset_attention"])
def test_each_rule_stands_alone_and_needs_an_eod_c034(rule):
    (batch,) = loader(Listed(ROWS["inside"][0]), Share(1, 1), rules=DocumentRules(EOD, **{rule: True})).global_batch(0)
    made = {"mask_loss": batch.loss_mask, "reset_positions": batch.positions, "reset_attention": batch.documents}
    assert [name for name, tensor in made.items() if tensor is not None] == [rule]
    with pytest.raises(ValueError, match=r"--(eod-mask|reset).*eos"):
        DocumentRules(None, **{rule: True})
    DocumentRules(None)


def test_counted_tokens_do_not_depend_on_the_cut_c093():
    samples = MockSamples(12, 16, 1)
    rules = DocumentRules(EOD, mask_loss=True)
    counts = [
        sum(counted_tokens(loader(samples, Share(mbs, m, i, d), rules=rules).global_batch(0)) for i in range(d))
        for mbs, m, d in ((1, 8, 1), (4, 2, 1), (2, 2, 2), (8, 1, 1))
    ]
    assert len(set(counts)) == 1 and 0 < counts[0] < 8 * 16


# --- threads


@pytest.fixture
def corpus(tmp_path):
    generator = np.random.default_rng(1)
    with IndexedWriter(tmp_path / "corpus", vocab_size=97) as writer:
        for _ in range(40):
            writer.add_document([[*generator.integers(0, 97, generator.integers(5, 60)), EOD]])
    reader = IndexedReader(tmp_path / "corpus")
    return Samples(Stream(reader, 0, reader.num_tokens), 16, seed=1)


def test_workers_change_nothing_c028(corpus):
    rules = DocumentRules(EOD, mask_loss=True, reset_positions=True, reset_attention=True)
    runs = []
    for num_workers in (0, 1, 2, 5):
        with loader(corpus, Share(2, 2, 1, 2), rules=rules, num_workers=num_workers) as reading:
            runs.append([micro for step in range(20) for micro in reading.global_batch(8 * step, step)])  # many epochs
    for run in runs[1:]:
        assert len(run) == len(runs[0])
        for a, b in zip(runs[0], run):
            assert a.draw == b.draw
            for field in ("tokens", "labels", "loss_mask", "positions", "documents"):
                assert torch.equal(getattr(a, field), getattr(b, field))


def test_any_batch_may_be_asked_for_at_any_time(corpus):
    with loader(corpus, Share(2, 2), num_workers=2) as reading:
        for consumed in (0, 4, 8, 4, 400, 0, 4):  # a step back, a leap, a new start
            alone = loader(corpus, Share(2, 2)).global_batch(consumed, 1)
            batch = reading.global_batch(consumed, 1)
            assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(alone, batch))


def test_next_batch_is_read_ahead_and_only_that():
    samples = Numbered()
    with loader(samples, Share(1, 3), num_workers=1) as reading:
        reading.global_batch(0, 1)
        deadline = time.monotonic() + 10
        while len(samples.read) < 6 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert samples.read == [0, 1, 2, 3, 4, 5]
        reading.global_batch(3, 2)
    assert samples.read[:6] == [0, 1, 2, 3, 4, 5] and samples.read.count(3) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_in_a_worker_reaches_the_caller_when_its_batch_is_wanted(num_workers):
    class Broken(Numbered):
        def tokens(self, k):
            if k >= 4:
                raise ValueError(f"sample {k} is broken")
            return super().tokens(k)

    with loader(Broken(), Share(2, 2), num_workers=num_workers) as reading:
        assert numbers(reading.global_batch(0, 1)) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="sample 4 is broken"):
            reading.global_batch(4, 2)


def test_close_ends_the_threads():
    before = threading.active_count()
    reading = loader(Numbered(), Share(1, 8), num_workers=4)
    reading.global_batch(0, 1)
    assert threading.active_count() > before
    reading.close()
    assert threading.active_count() == before
    loader(Numbered(), Share(1, 1)).close()


@pytest.mark.parametrize("bad", [97, -1, 70_000])
def test_id_outside_the_vocabulary_is_refused_with_sample_and_value(bad):
    samples = Listed([1, 2, 3], [4, 5, bad])
    with pytest.raises(ValueError, match=rf"sample 5 of listed has token id {bad} at position 2;.*97 entries"):
        loader(samples, Share(2, 1), vocab_size=97).global_batch(4, 1)


def test_shorter_file_under_a_running_loader_is_an_error(corpus):
    with open(corpus.stream.reader.prefix + ".bin", "r+b") as file:
        file.truncate(10)
    with loader(corpus, Share(8, 2), vocab_size=97, num_workers=2) as reading:
        with pytest.raises(ValueError, match="shorter"):
            reading.global_batch(0, 1)
