"""Documents are found in the offsets by a handful of looks; positions, masks and attention begin again with them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.data import write_sparse_corpus
from megazero.data.documents import Documents
from megazero.data.indexed import IndexedReader, IndexedWriter
from megazero.data.samples import Samples, Stream, mix


class OnPaper:
    """The index of a file whose documents have the given lengths; counts how often it is looked at."""

    prefix, dtype = "on paper", np.dtype(np.uint16)

    def __init__(self, lengths):
        self.ends = np.concatenate([[0], np.cumsum(lengths)])
        self.num_tokens, self.looks = int(self.ends[-1]), 0
        self.offsets = 2 * self.ends[:-1]

    @property
    def document_index(self):
        self.looks += 1
        return np.arange(len(self.ends))

    def first_token(self, sequence):
        return int(self.ends[sequence])


def found(lengths, tokens):
    """The document of each token, checked, and the largest number of looks that one took."""
    paper = OnPaper(lengths)
    documents = Documents(paper, 0, len(lengths))
    most = 0
    for token in tokens:
        paper.looks = 0
        document = documents.find(token)
        most = max(most, paper.looks)
        assert paper.ends[document] <= token < paper.ends[document + 1]
    return most


@pytest.mark.parametrize("documents", [1, 2, 63, 64, 65, 1_000, 300_000])
def test_even_lengths_take_at_most_six_looks(documents):
    rng = np.random.default_rng(documents)
    for lengths in (
        np.full(documents, 512),
        rng.integers(300, 700, documents),
        rng.integers(1, 1000, documents),
        rng.poisson(90, documents) + 1,
    ):
        total = int(lengths.sum())
        tokens = [0, total - 1, *rng.integers(0, total, 40).tolist()]
        assert found(lengths, tokens) <= 6
    assert found(np.full(documents, 7), range(0, 7 * documents, 1 + documents // 9)) <= 2


class Billion:
    """The index of 10^9 documents of 11 to 89 tokens, computed where it is looked at."""

    prefix, dtype, num_tokens = "a billion", np.dtype(np.uint16), 50 * 10**9
    looks = 0

    class Offsets:
        def __len__(self):
            return 10**9

        def __getitem__(self, documents):
            noise = np.where(documents == 0, 0, mix(documents.astype(np.uint64)).astype(np.int64) % 40)
            return 2 * (50 * documents + noise)

    offsets = Offsets()

    @property
    def document_index(self):
        self.looks += 1
        return self

    def __getitem__(self, at):
        return np.arange(at.start, at.stop) if isinstance(at, slice) else at

    def first_token(self, sequence):
        return int(self.offsets[np.array([sequence])][0]) // 2 if sequence < 10**9 else self.num_tokens


def test_one_of_a_billion_documents_takes_at_most_six_looks():
    paper = Billion()
    documents = Documents(paper, 0, 10**9)
    for token in (0, 49, 50, 10**9, 12_345_678_901, 5 * 10**10 - 1):
        paper.looks = 0
        document = documents.find(token)
        assert paper.first_token(document) <= token < paper.first_token(document + 1) and paper.looks <= 6


def test_uneven_lengths_take_few_looks_too():
    rng = np.random.default_rng(3)
    for lengths in (
        (rng.pareto(0.6, 100_000) * 20).astype(np.int64) + 1,
        np.sort(rng.integers(1, 2_000, 100_000)),
        np.concatenate([np.ones(99_999, np.int64), [10**9]]),
        np.concatenate([[10**9], np.ones(99_999, np.int64)]),
        np.where(np.arange(100_000) % 1000 == 0, 10**6, 1),
    ):
        total = int(lengths.sum())
        anywhere, early = rng.integers(0, total, 40), rng.integers(0, min(total, 10**5), 40)
        # halving alone would take 17 looks
        assert found(lengths, [0, 1, total - 1, *anywhere.tolist(), *early.tolist()]) <= 24


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=200).filter(any))
def test_every_token_is_found_among_documents_of_any_length(lengths):
    found(lengths, range(sum(lengths)))


@settings(deadline=None)
@given(st.data())
def test_starts_within_are_those_of_documents(data):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=150).filter(any))
    paper = OnPaper(lengths)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, paper.num_tokens)] * 2)))
    if start < stop:
        expected = sorted({end for end in paper.ends[:-1].tolist() if start <= end < stop})
        assert Documents(paper, 0, len(lengths)).starts_within(start, stop).tolist() == expected


def sentences_file(tmp_path, documents):
    with IndexedWriter(tmp_path / "corpus", vocab_size=1000) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedReader(tmp_path / "corpus")


def test_documents_of_several_sentences_and_of_none(tmp_path):
    texts = [[[1, 2], [3]], [], [[4]], [[], [5, 6, 7], [8]], [[]], [[9, 10]], []]
    reader = sentences_file(tmp_path, texts)
    documents = Documents(reader, 0, len(texts))
    assert documents.starts(0, 7).tolist() == [0, 3, 3, 4, 8, 8, 10]
    assert [documents.find(token) for token in range(10)] == [0, 0, 0, 2, 3, 3, 3, 3, 5, 5]
    stream = Stream(reader, 0, len(texts))
    assert len(stream) == 10
    assert stream.begins(1, 12).tolist() == [i % 10 in (0, 3, 4, 8) for i in range(1, 13)]
    part = Stream(reader, 2, 5)  # the circle closes within the part: after 8 comes 4
    assert part.read(3, 6).tolist() == [7, 8, 4, 5, 6, 7]
    assert part.begins(3, 6).tolist() == [False, False, True, True, False, False]


def test_marks_of_samples_are_right_over_many_epochs(tmp_path):
    rng = np.random.default_rng(1)
    texts = [[[number + 1] * int(rng.integers(0, 9)) for _ in range(rng.integers(0, 4))] for number in range(60)]
    reader = sentences_file(tmp_path, texts)
    s = Samples(Stream(reader, 5, 50), 11, seed=3)
    for k in range(4 * len(s)):
        tokens = s.tokens(k)  # the number of its document is each token's id
        assert (s.begins(k)[1:] == (tokens[1:] != tokens[:-1])).all()
        for place in (0, 5, 11):
            assert s.describe(k, place) == f"document {tokens[place] - 1} of {reader.prefix}"


def test_opening_a_billion_documents_does_not_scan_their_offsets(tmp_path):
    write_sparse_corpus(str(tmp_path / "corpus"), documents=10**9, length=50)
    before = resident()
    reader = IndexedReader(tmp_path / "corpus")
    s = Samples(Stream(reader, 0, reader.num_documents), 1024, seed=1)
    assert len(s) == (50 * 10**9 - 1) // 1024
    assert s.rows(list(itertools.chain(range(64), [10**10]))).shape == (65, 1025)
    assert resident() - before < 50 * 2**20


def resident():
    """Bytes of memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
