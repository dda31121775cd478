"""The loader: one order of samples in every layout, masks at the ends of documents, threads that change nothing."""

import threading
import time

import numpy as np
import pytest
import torch

from megazero.batch_sizes import constant, ramp, staircase
from megazero.data.blend import Blend, KeyedOrder
from megazero.data.indexed import IndexedReader, IndexedWriter
from megazero.data.legacy import MegatronSamples
from megazero.data.loader import DocumentRules, Loader, Share, counted_tokens
from megazero.data.samples import MockSamples, Samples, Stream

EOD = 9


class Numbered:
    """Sample k is the number k, repeated; remembers what was read."""

    name, seq_length = "numbered", 4

    def __init__(self):
        self.read = []

    def rows(self, numbers):
        self.read += numbers
        return np.array([[k] * 5 for k in numbers])


class Listed:
    """Samples that are written down; `starts` are the places of each at which a document begins."""

    name = "listed"

    def __init__(self, *rows, starts=()):
        self.all, self.starts, self.seq_length = rows, starts or [()] * len(rows), len(rows[0]) - 1

    def rows(self, numbers):
        return np.array([self.all[k % len(self.all)] for k in numbers])

    def begins(self, k):
        return np.isin(np.arange(self.seq_length + 1), self.starts[k % len(self.all)])

    def describe(self, k, place):
        return f"place {place} of row {k % len(self.all)}"


def share(micro_batch_size, micro_batches, data_index=0, data_size=1):
    """A share of global batches of one size."""
    return Share(micro_batch_size, constant(micro_batch_size * micro_batches * data_size), data_index, data_size)


def loader(samples, share, **options):
    return Loader(samples, share, **{"vocab_size": 10**6, "seed": 3, "num_workers": 0} | options)


def numbers(batch):
    """The samples in the micro-batches of a `Numbered`."""
    return [k for micro_batch in batch for k in micro_batch.tokens[0].tolist()]


def test_micro_batch_holds_the_samples_of_its_global_number():
    for index in range(3):
        batch = loader(Numbered(), share(2, 4, index, 3)).global_batch(100, 7)
        assert [micro_batch.draw for micro_batch in batch] == [(3, 7, m * 3 + index) for m in range(4)]
        assert numbers(batch) == [100 + (m * 3 + index) * 2 + i for m in range(4) for i in range(2)]


@pytest.mark.parametrize(("micro_batch_size", "data_size"), [(1, 1), (8, 1), (2, 2), (1, 8), (4, 2), (2, 1)])
def test_global_batch_is_the_same_set_in_every_layout(micro_batch_size, data_size):
    micro_batches = 8 // micro_batch_size // data_size
    shares = [share(micro_batch_size, micro_batches, index, data_size) for index in range(data_size)]
    for step in range(3):
        read = [k for own in shares for k in numbers(loader(Numbered(), own).global_batch(8 * step, step))]
        assert sorted(read) == list(range(8 * step, 8 * step + 8))


def test_data_size_may_change_on_the_way_c043():
    read = []
    for step in range(10):
        data_size = 2 if step < 5 else 1
        for index in range(data_size):
            read += numbers(loader(Numbered(), share(2, 4 // data_size, index, data_size)).global_batch(8 * step, step))
    assert sorted(read) == list(range(80))


def test_labels_are_the_next_tokens_sequence_first():
    (batch,) = loader(Listed([1, 2, 3, 4], [5, 6, 7, 8]), share(2, 1)).global_batch(0, 1)
    assert batch.tokens.tolist() == [[1, 5], [2, 6], [3, 7]] and batch.labels.tolist() == [[2, 6], [3, 7], [4, 8]]
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert batch.loss_mask is None and batch.positions is None and batch.documents is None and batch.scale == 1.0
    assert counted_tokens([batch, batch]) == 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_growing_batch_takes_every_sample_once_in_every_layout(num_workers):
    for sizes in (ramp(8, 8, 60, 40), staircase(["0:16 100:8 200:32"], 1), constant(24)):
        for size, data_size in ((1, 1), (2, 4), (8, 1), (4, 2)):
            reading = [loader(Numbered(), Share(size, sizes, i, data_size), num_workers=num_workers)
                       for i in range(data_size)]  # fmt: skip
            consumed = 0
            for iteration in range(1, 12):
                batches = [own.global_batch(consumed, iteration) for own in reading]
                expected = list(range(consumed, consumed + sizes.at(consumed)))
                assert sorted(k for batch in batches for k in numbers(batch)) == expected
                micro_batches = sorted(m.draw[2] for batch in batches for m in batch)
                assert micro_batches == list(range(len(expected) // size))
                consumed += len(expected)
            for own in reading:
                own.close()


def test_samples_past_an_order_that_was_made_for_fewer_are_one_line(corpus):
    samples = MegatronSamples(corpus.stream.reader, (0, 40), 16, samples=3, seed=1, name="few")
    with pytest.raises(ValueError, match="sample .* that --sample-order megatron made of few"):
        loader(samples, share(1, 1)).global_batch(len(samples), 1)


def test_evaluation_draws_nothing():
    assert all(micro_batch.draw is None for micro_batch in loader(Numbered(), share(1, 2)).global_batch(0))


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
    (batch,) = loader(Listed(row, other[0]), share(2, 1), rules=rules).global_batch(0, 1)
    assert batch.positions[:, 0].tolist() == positions and batch.positions[:, 1].tolist() == other[1]
    assert batch.documents[:, 0].tolist() == documents and batch.documents[:, 1].tolist() == other[2]
    assert batch.loss_mask[:, 0].tolist() == mask and batch.loss_mask[:, 1].tolist() == other[3]
    assert batch.loss_mask.dtype == torch.float32
    assert batch.positions.dtype == batch.documents.dtype == torch.int64
    assert counted_tokens([batch]) == sum(mask) + 4


@pytest.mark.parametrize("rule", ["mask_loss", "reset_positions", "reset_attention"])
def test_each_rule_stands_alone(rule):
    (batch,) = loader(Listed(ROWS["inside"][0]), share(1, 1), rules=DocumentRules(EOD, **{rule: True})).global_batch(0)
    made = {"mask_loss": batch.loss_mask, "reset_positions": batch.positions, "reset_attention": batch.documents}
    assert [name for name, tensor in made.items() if tensor is not None] == [rule]


BORDERS = {  # places at which the corpus says that a document begins: as in ROWS, without a token that tells
    "none": ((0,), [0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 1, 1]),
    "inside": ((2,), [0, 1, 0, 1], [0, 0, 1, 1], [1, 0, 1, 1]),
    "first": ((1,), [0, 0, 1, 2], [0, 1, 1, 1], [0, 1, 1, 1]),
    "last": ((4,), [0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 1, 0]),
    "two in a row": ((2, 3), [0, 1, 0, 0], [0, 0, 1, 2], [1, 0, 0, 1]),
    "only": ((0, 1, 2, 3, 4), [0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("eod", [None, EOD])
@pytest.mark.parametrize("case", BORDERS)
def test_documents_without_an_end_token_are_told_apart_too_c034_c036(case, eod):
    starts, positions, documents, mask = BORDERS[case]
    rules = DocumentRules(eod, mask_loss=True, reset_positions=True, reset_attention=True)
    samples = Listed([1, 2, 3, 4, 5], [6, 7, 8, 6, 7], starts=[starts, (0,)])
    (batch,) = loader(samples, share(2, 1), rules=rules).global_batch(0, 1)
    assert batch.positions[:, 0].tolist() == positions and batch.positions[:, 1].tolist() == [0, 1, 2, 3]
    assert batch.documents[:, 0].tolist() == documents and batch.documents[:, 1].tolist() == [0, 0, 0, 0]
    assert batch.loss_mask[:, 0].tolist() == mask and batch.loss_mask[:, 1].tolist() == [1, 1, 1, 1]


def test_end_tokens_and_borders_that_coincide_count_once_c036():
    rules = DocumentRules(EOD, mask_loss=True, reset_positions=True, reset_attention=True)
    row, positions, documents, mask = ROWS["inside"]
    (batch,) = loader(Listed(row, starts=[(2,)]), share(1, 1), rules=rules).global_batch(0, 1)
    assert (batch.positions[:, 0].tolist(), batch.documents[:, 0].tolist()) == (positions, documents)
    assert batch.loss_mask[:, 0].tolist() == mask


def test_files_with_and_without_end_tokens_give_the_same_masks_c036(tmp_path):
    rng, files = np.random.default_rng(1), []
    texts = [rng.integers(0, 9, rng.integers(1, 12)).tolist() for _ in range(50)]
    for number, end in enumerate((EOD, 8)):  # 8 is a token like any other: only the offsets tell
        with IndexedWriter(tmp_path / str(number), vocab_size=10) as writer:
            for text in texts:
                writer.add_document([[*text, end]])
        reader = IndexedReader(tmp_path / str(number))
        files.append(Samples(Stream(reader, 0, reader.num_documents), 16, seed=1))
    told, searched = (
        loader(samples, share(4, 5), rules=DocumentRules(eod, True, True, True)).global_batch(0, 1)
        for samples, eod in zip(files, (EOD, None))
    )
    for a, b in zip(told, searched):
        assert torch.equal(a.positions, b.positions) and torch.equal(a.documents, b.documents)
        assert torch.equal(a.loss_mask, b.loss_mask)


def test_counted_tokens_do_not_depend_on_the_cut_c093():
    samples = MockSamples(12, 16, 1)
    rules = DocumentRules(EOD, mask_loss=True)
    counts = [
        sum(counted_tokens(loader(samples, share(mbs, m, i, d), rules=rules).global_batch(0)) for i in range(d))
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
    return Samples(Stream(reader, 0, reader.num_documents), 16, seed=1)


@pytest.mark.parametrize("kind", ["keyed", "blend", "megatron"])
@pytest.mark.parametrize("mbs", [1, 64])
def test_workers_change_nothing_c028(corpus, kind, mbs):
    samples = {
        "keyed": corpus,
        "blend": Blend([corpus, corpus], KeyedOrder([1, 2], seed=1), name="twice"),
        "megatron": MegatronSamples(corpus.stream.reader, (0, 40), 16, samples=20_000, seed=1),
    }[kind]
    rules = DocumentRules(EOD, mask_loss=True, reset_positions=True, reset_attention=True)
    runs = []
    for num_workers in (0, 1, 2, 5):
        own = share(mbs, 5, 1, 2)
        with loader(samples, own, rules=rules, num_workers=num_workers) as reading:
            size = own.sizes.last
            runs.append([micro for step in range(6) for micro in reading.global_batch(size * step, step)])  # epochs
    for run in runs[1:]:
        assert len(run) == len(runs[0])
        for a, b in zip(runs[0], run):
            assert a.draw == b.draw
            for field in ("tokens", "labels", "loss_mask", "positions", "documents"):
                assert torch.equal(getattr(a, field), getattr(b, field))


def test_any_batch_may_be_asked_for_at_any_time(corpus):
    with loader(corpus, share(2, 2), num_workers=2) as reading:
        for consumed in (0, 4, 8, 4, 400, 0, 4):  # a step back, a leap, a new start
            alone = loader(corpus, share(2, 2)).global_batch(consumed, 1)
            batch = reading.global_batch(consumed, 1)
            assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(alone, batch))


def test_next_batch_is_read_ahead_and_only_that():
    samples = Numbered()
    with loader(samples, share(1, 3), num_workers=1) as reading:
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
        def rows(self, numbers):
            if max(numbers) >= 4:
                raise ValueError("sample 4 is broken")
            return super().rows(numbers)

    with loader(Broken(), share(2, 2), num_workers=num_workers) as reading:
        assert numbers(reading.global_batch(0, 1)) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="sample 4 is broken"):
            reading.global_batch(4, 2)


def test_close_ends_the_threads():
    before = threading.active_count()
    reading = loader(Numbered(), share(1, 8), num_workers=4)
    reading.global_batch(0, 1)
    assert threading.active_count() > before
    reading.close()
    assert threading.active_count() == before
    loader(Numbered(), share(1, 1)).close()


@pytest.mark.parametrize("bad", [97, -1, 70_000])
def test_id_outside_the_vocabulary_is_refused_with_sample_and_value(bad):
    samples = Listed([1, 2, 3], [4, 5, bad])
    with pytest.raises(ValueError, match=rf"place 2 of row 1: sample 5 of listed has token id {bad} at.*97 entries"):
        loader(samples, share(2, 1), vocab_size=97).global_batch(4, 1)


def test_shorter_file_under_a_running_loader_is_an_error(corpus):
    with open(corpus.stream.reader.prefix + ".bin", "r+b") as file:
        file.truncate(10)
    with loader(corpus, share(8, 2), vocab_size=97, num_workers=2) as reading:
        with pytest.raises(ValueError, match="shorter"):
            reading.global_batch(0, 1)
