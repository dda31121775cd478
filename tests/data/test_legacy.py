"""Megatron core's order: its published vectors, its rules read plainly, and nothing left on the disk."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.config import DataConfig
from megazero.data.corpora import open_samples
from megazero.data.indexed import IndexedReader, IndexedWriter
from megazero.data.legacy import (
    CHUNK,
    FEW,
    GreedyOrder,
    MegatronOrder,
    MegatronSamples,
    epochs_for,
    exhaustive_order,
    index_dtype,
    normalized,
    sample_count,
    samples_of_corpora,
    shuffle_dtype,
    weighted_order,
)

LENGTHS = np.array([5, 7, 3, 6], np.int32)

# Made with core's own helper: samples asked for, document index, sample index, shuffle index (seed 1234, s = 4).
VECTORS = {
    "one epoch": (
        5,
        [0, 1, 2, 3],
        [(0, 0), (0, 4), (1, 3), (2, 0), (3, 1), (3, 5)],
        [2, 1, 3, 0, 4],
    ),
    "last epoch apart": (
        6,
        [0, 1, 2, 3, 1, 2, 3, 0],
        [(0, 0), (0, 4), (1, 3), (2, 0), (3, 1), (3, 5), (4, 3), (5, 0), (6, 1), (6, 5), (7, 3)],
        [0, 2, 4, 3, 1, 5, 9, 8, 7, 6],
    ),
    "two epochs together": (
        10,
        [2, 1, 2, 0, 0, 1, 3, 3],
        [(0, 0), (1, 1), (1, 5), (2, 2), (3, 3), (4, 2), (5, 1), (5, 5), (6, 2), (7, 0), (7, 4)],
        [8, 5, 6, 0, 4, 3, 2, 9, 7, 1],
    ),
}


@pytest.mark.parametrize("case", VECTORS)
def test_order_of_documents_and_samples_is_that_of_core(case):
    samples, documents, rows, shuffle = VECTORS[case]
    order = MegatronOrder(LENGTHS, 0, 4, samples=samples, seed=1234)
    assert order.documents.tolist() == documents and order.documents.dtype == np.int32
    assert [order.row(j) for j in range(len(shuffle) + 1)] == rows
    assert order.shuffle.tolist() == shuffle and order.shuffle.dtype == np.uint32


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.7, 0.3), "0 1 0 0 1 0 0 1 0 0 0 1 0 0 1 0 0 1 0 0"),
        ((0.5, 0.3, 0.2), "0 1 2 0 1 0 2 0 1 0 0 1 2 0 1 0 2 0 1 0"),
        ((1, 2, 3, 4), "3 2 1 0 3 2 3 1 2 3 0 3 2 1 3 2 3 1 2 3"),
    ],
)
def test_order_of_a_blend_is_that_of_core(weights, expected):
    order = weighted_order(20, weights)
    assert " ".join(str(order.place(k)[0]) for k in range(20)) == expected
    for corpus in range(len(weights)):
        own = [index for found, index in map(order.place, range(20)) if found == corpus]
        assert own == list(range(expected.split().count(str(corpus))))


def test_order_of_an_exhaustive_blend_is_that_of_core():
    order = exhaustive_order([5, 3, 2])
    assert [order.place(k)[0] for k in range(10)] == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0] and len(order) == 10
    with pytest.raises(IndexError, match="sample 10 of 10"):
        order.place(10)


def greedily(shares, count, sizes=None):
    """Core's loop, word by word."""
    counts, chosen = [0] * len(shares), []
    for i in range(count):
        best, largest = None, -math.inf
        for d, share in enumerate(shares):
            if sizes is None or counts[d] < sizes[d]:
                error = share * max(float(i), 1.0) - float(counts[d])
                if error > largest:
                    best, largest = d, error
        chosen.append((best, counts[best]))
        counts[best] += 1
    return chosen


@pytest.mark.parametrize("corpora", [1, 2, 3, FEW, FEW + 1, 60])
def test_blends_by_loops_and_by_arrays_are_one_order(corpora):
    rng = np.random.default_rng(corpora)
    for weights in (rng.random(corpora) + 0.01, rng.integers(1, 9, corpora), np.ones(corpora)):
        shares = normalized(normalized(weights.tolist()))
        order = weighted_order(700, weights.tolist())
        assert [order.place(k) for k in range(700)] == greedily(shares, 700)
    sizes = rng.integers(1, 12, corpora).tolist()
    order = exhaustive_order(sizes)
    assert [order.place(k) for k in range(sum(sizes))] == greedily(normalized(sizes), sum(sizes), sizes)


def test_a_long_blend_goes_on_over_its_chunks():
    shares = normalized([3, 5, 11])
    order = GreedyOrder(shares, 3 * CHUNK)
    late = order.place(2 * CHUNK + 77)  # asked for first, as by a resumed run
    plain = greedily(shares, 2 * CHUNK + 78)
    assert late == plain[-1] and [order.place(k) for k in range(CHUNK - 9, CHUNK + 9)] == plain[CHUNK - 9 : CHUNK + 9]


def test_widths_are_chosen_from_the_largest_number_c006():
    assert index_dtype(2**31 - 1) == np.int32 and index_dtype(2**31) == np.int64
    assert shuffle_dtype(2**32 - 3) == np.uint32 and shuffle_dtype(2**32 - 2) == np.int64
    assert sample_count(3, 2**30, 1) == 3 * 2**30 - 1 > 2**31
    assert sample_count(3, 2**30, 2) == (3 * 2**30 - 1) // 2
    assert epochs_for(2**31, 3, 1)[0] == (2**31 + 1) // 3 and epochs_for(2**33, 1, 2**20)[0] == 2**53 + 1


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any), st.integers(1, 9), st.integers(0, 60),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_samples_are_the_tokens_of_the_documents_in_order(lengths, seq_length, samples, seed):
    lengths = np.array(lengths, np.int32)
    order = MegatronOrder(lengths, 0, seq_length, samples=samples, seed=seed)
    epochs, apart = epochs_for(samples, int(lengths.sum()), seq_length)
    assert len(order.shuffle) >= samples and sorted(order.shuffle) == list(range(len(order.shuffle)))
    assert sorted(order.documents) == sorted(list(range(len(lengths))) * epochs)
    if apart:
        assert sorted(order.documents[-len(lengths) :]) == list(range(len(lengths)))
    stream = [(d, i) for d in order.documents.tolist() for i in range(lengths[d])]
    for k, j in enumerate(order.shuffle.tolist()):
        tokens = [(d, offset + i) for d, offset, count in order.pieces(k) for i in range(count)]
        assert tokens == stream[j * seq_length : j * seq_length + seq_length + 1]


# --- read from files


def written(folder, name, documents, vocab_size=1000):
    with IndexedWriter(folder / name, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return str(folder / name)


def texts(seed, documents=30, sentences=1):
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, 1000, rng.integers(1, 40)) for _ in range(sentences)] for _ in range(documents)]


def opened(folder, words, counts=None, split="8,1,1", **options):
    data = DataConfig(data_path=tuple(words), split=split, sample_order="megatron", **options)
    counts = {"train": 50, "valid": 4, "test": 2} | (counts or {})
    return open_samples(data, seq_length=16, vocab_size=1000, seed=1234, counts=counts)


def test_a_corpus_is_split_by_sequences_and_read_in_cores_order(tmp_path):
    prefix = written(tmp_path, "a", texts(1, sentences=3))
    reader = IndexedReader(prefix)
    parts = opened(tmp_path, [prefix])
    assert list(parts) == ["train", "valid", "test"]
    for name, (first, last), count in (("train", (0, 72), 50), ("valid", (72, 81), 4), ("test", (81, 90), 2)):
        samples = parts[name]
        order = MegatronOrder(reader.lengths[first:last], first, 16, samples=count, seed=1234)
        stream = np.concatenate([reader.sequence(d) for d in order.documents.tolist()])
        assert len(samples) == len(order.shuffle) >= count
        for k, j in enumerate(order.shuffle.tolist()):
            assert samples.tokens(k).tolist() == stream[16 * j : 16 * j + 17].tolist()
            begins = np.concatenate([[0], order.ends])
            assert samples.begins(k).tolist() == [t in begins for t in range(16 * j, 16 * j + 17)]
        assert samples.rows([3, 0]).tolist() == [samples.tokens(3).tolist(), samples.tokens(0).tolist()]
    assert "sequence" in parts["train"].describe(0, 16) and prefix in parts["train"].describe(0, 0)
    with pytest.raises(IndexError, match=r"sample \d+ of \d+ that --sample-order megatron made"):
        parts["train"].tokens(len(parts["train"]))


def test_a_blend_asks_each_corpus_for_cores_number_of_samples(tmp_path):
    a, b = written(tmp_path, "a", texts(1)), written(tmp_path, "b", texts(2, 20))
    blend = opened(tmp_path, ["0.7", a, "0.3", b])["train"]
    assert samples_of_corpora(50, [0.7, 0.3]) == [math.ceil(35 * 1.005), math.ceil(15 * 1.005)] == [36, 16]
    alone = [
        MegatronSamples(IndexedReader(prefix), (0, last), 16, samples=count, seed=1234)
        for prefix, last, count in ((a, 24, 36), (b, 16, 16))
    ]
    for k, (source, index) in enumerate(greedily(normalized(normalized([0.7, 0.3])), 50)):
        assert blend.tokens(k).tolist() == alone[source].tokens(index).tolist()
        assert blend.begins(k).tolist() == alone[source].begins(index).tolist()
    # a weight before a single corpus makes it a blend in core, which asks for more samples of it
    assert opened(tmp_path, ["1", a])["train"].sources[0].samples == 51 and opened(tmp_path, [a])["train"].samples == 50


def test_corpora_without_weights_are_read_once(tmp_path):
    a, b = written(tmp_path, "a", texts(1)), written(tmp_path, "b", texts(2, 20))
    parts = opened(tmp_path, [a, b], counts={"train": 10}, split="1")
    sizes = [len(source) for source in parts["train"].sources]
    rows = parts["train"].rows(list(range(sum(sizes))))
    assert len({tuple(row) for row in rows.tolist()}) == sum(sizes)
    with pytest.raises(ValueError, match=r"reads corpora without weights once: .* has \d+ samples, the run takes 9999"):
        opened(tmp_path, [a, b], counts={"train": 9999})


def test_named_sets_and_own_paths_are_ordered_as_core_would(tmp_path):
    a, b = written(tmp_path, "a", texts(1)), written(tmp_path, "b", texts(2, 20))
    data = DataConfig(train_data_path=(a,), valid_set=(f"web={b}",), sample_order="megatron")
    parts = open_samples(data, seq_length=16, vocab_size=1000, seed=5, counts={"train": 30, "web": 7})
    assert list(parts) == ["train", "web"]
    whole = MegatronSamples(IndexedReader(b), (0, 20), 16, samples=7, seed=5)
    assert parts["web"].rows(list(range(7))).tolist() == whole.rows(list(range(7))).tolist()


def test_nothing_is_cached_c017_c019(tmp_path):
    prefix = written(tmp_path, "a", texts(1))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    first = opened(tmp_path, [prefix])["train"].rows(list(range(50)))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    written(tmp_path, "a", [[ids + 1 - 2 * (ids == 999)] for (ids,) in texts(1)])  # other tokens, equal lengths
    second = opened(tmp_path, [prefix])["train"].rows(list(range(50)))
    assert second.tolist() == (first + 1 - 2 * (first == 999)).tolist()


def test_a_tiny_corpus_is_repeated_c023(tmp_path):
    prefix = written(tmp_path, "a", [[np.arange(10)]])
    samples = opened(tmp_path, [prefix], split="1", counts={"train": 24})["train"]
    assert all(samples.tokens(k).tolist() == [(samples.tokens(k)[0] + i) % 10 for i in range(17)] for k in range(24))


def test_what_cannot_be_ordered_is_refused(tmp_path):
    prefix = written(tmp_path, "a", [[[]], [[1, 2, 3]]])
    reader = IndexedReader(prefix)
    with pytest.raises(ValueError, match="has no tokens"):
        MegatronSamples(reader, (0, 1), 16, samples=3, seed=1)
    assert len(MegatronSamples(reader, (0, 2), 16, samples=None, seed=1)) == 0
    with pytest.raises(ValueError, match="--seed 4294967296"):
        MegatronSamples(reader, (0, 2), 16, samples=3, seed=2**32)


def test_many_threads_build_one_order(tmp_path):
    samples = opened(tmp_path, [written(tmp_path, "a", texts(1))])["train"]
    found = []
    threads = [threading.Thread(target=lambda: found.append(id(samples.order))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
