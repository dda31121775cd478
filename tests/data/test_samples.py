"""Samples as arithmetic: permutations are one to one, epochs are full passes, the stream can be rebuilt."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from megazero.config import DataConfig
from megazero.data.indexed import IndexedReader, IndexedWriter
from megazero.data.samples import (
    MockSamples,
    Permutation,
    Samples,
    Stream,
    hash_words,
    mix,
    open_samples,
    split_documents,
)


class Counting:
    """A reader whose token number t is t."""

    prefix = "counting"

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

    def read(self, start, count):
        assert 0 <= start <= start + count <= self.num_tokens
        return np.arange(start, start + count)


def samples(tokens, seq_length, **options):
    return Samples(Stream(Counting(tokens), 0, tokens), seq_length, **{"seed": 5} | options)


def corpus(folder, documents, vocab_size=100, fingerprint=None):
    with IndexedWriter(folder / "corpus", vocab_size=vocab_size, fingerprint=fingerprint) as writer:
        for document in documents:
            writer.add_document([document])
    return str(folder / "corpus")


# --- the permutation


def test_mix_is_splitmix64():
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # its first output for seed 0
    assert mix(np.array([0x9E3779B97F4A7C15], np.uint64))[0] == 0xE220A8397B1DCDAF


def test_permutation_is_one_to_one_for_every_small_size():
    for size in range(1, 301):
        permutation = Permutation(size, hash_words(size))
        assert sorted(map(permutation, range(size))) == list(range(size))


@pytest.mark.parametrize("size", [4_097, 65_536, 99_991])
def test_permutation_is_one_to_one(size):
    assert np.bincount(list(map(Permutation(size, 3), range(size))), minlength=size).tolist() == [1] * size


@pytest.mark.parametrize("size", [10**6 + 1, 2**31 - 1, 2**31, 2**32 + 15, 10**12])
def test_permutation_of_a_large_set_stays_inside_and_never_repeats(size):
    permutation = Permutation(size, 7)
    numbers = {*range(2_000), *range(size - 2_000, size), *range(size // 2, size // 2 + 2_000)}
    images = {permutation(k) for k in numbers}
    assert len(images) == len(numbers) and min(images) >= 0 and max(images) < size
    assert abs(np.mean([i / size for i in images]) - 0.5) < 0.02
    for outside in (-1, size):
        with pytest.raises(IndexError):
            permutation(outside)


@pytest.mark.parametrize("size", [3, 4, 7, 16])
def test_first_two_of_a_small_set_are_as_if_drawn(size):
    pairs, trials = list(itertools.permutations(range(size), 2)), 60 * size * (size - 1)
    count = Counter((p(0), p(1)) for p in (Permutation(size, hash_words(key)) for key in range(trials)))
    chi2 = sum((count[pair] - 60) ** 2 / 60 for pair in pairs)
    degrees = len(pairs) - 1
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees)  # five standard deviations


def test_order_is_fixed_for_ever():  # a change of these numbers changes the data of every run that is resumed
    assert [Permutation(10, 1234)(k) for k in range(10)] == [5, 7, 1, 3, 2, 4, 6, 8, 0, 9]
    assert [samples(33, 8).position(k) for k in range(12)] == [16, 8, 24, 0, 27, 19, 11, 3, 18, 10, 2, 26]
    assert MockSamples(97, 8, 1).tokens(0).tolist() == [9, 69, 32, 92, 55, 18, 78, 41, 70]


# --- samples of a stream


@pytest.mark.parametrize(("tokens", "expected"), [(33, 4), (32, 3), (9, 1), (8, 1), (1, 1)])
def test_number_of_samples_and_their_bounds_c024(tokens, expected):
    s = samples(tokens, 8)
    assert len(s) == expected == max(1, (tokens - 1) // 8)
    assert all(len(s[i]) == 9 for i in range(expected)) and len(list(s)) == expected
    for outside in (expected, -1):
        with pytest.raises(IndexError):
            s[outside]


@pytest.mark.parametrize("tokens", [33, 36, 40, 41])
def test_samples_rebuild_the_stream_c025(tokens):
    s = samples(tokens, 8, shuffle=False)
    rebuilt = np.concatenate([*(sample[:-1] for sample in s), s[len(s) - 1][-1:]])
    assert rebuilt.tolist() == list(range(len(s) * 8 + 1))
    assert all(s[i][-1] == s[i + 1][0] for i in range(len(s) - 1))


@pytest.mark.parametrize(("tokens", "seq_length"), [(33, 8), (57, 8), (240, 7), (1_000, 3)])
def test_each_epoch_is_a_full_pass_with_its_own_order_c022(tokens, seq_length):
    s, orders = samples(tokens, seq_length), []
    for epoch in range(5):
        begins = [s.position(epoch * len(s) + i) for i in range(len(s))]
        offset = min(begins)
        assert 0 <= offset < seq_length and (epoch > 0 or offset == 0)
        assert sorted(begins) == [offset + i * seq_length for i in range(len(s))]
        # on the circle, the inputs of an epoch are that many different tokens
        inputs = [t for i in range(len(s)) for t in s.tokens(epoch * len(s) + i)[:-1]]
        assert len(set(inputs)) == len(inputs) == len(s) * seq_length
        orders.append([(b - offset) // seq_length for b in begins])
    assert len({tuple(order) for order in orders}) > 2


def test_part_of_the_last_epoch_repeats_nothing_c022():
    documents = [3, 9, 5, 12, 7, 4, 11]
    s = samples(sum(documents), 4)
    total = int(3.4 * len(s))
    for begin in range(0, total, len(s)):
        positions = [s.position(k) for k in range(begin, min(begin + len(s), total))]
        assert len(set(positions)) == len(positions)
    assert [s.position(k) for k in range(len(s))] != [s.position(len(s) + k) for k in range(len(s))]


@pytest.mark.parametrize("tokens", [1, 2, 10])
def test_set_smaller_than_a_sequence_goes_round_c023(tokens):
    s = samples(tokens, 64)
    assert len(s) == 1
    for k in range(6):
        begin = s.position(k)
        assert s.tokens(k).tolist() == [(begin + i) % tokens for i in range(65)]


def test_stream_is_a_part_of_its_file():
    stream = Stream(Counting(100), 40, 50)
    assert stream.read(0, 10).tolist() == list(range(40, 50))
    assert stream.read(7, 5).tolist() == [47, 48, 49, 40, 41] and stream.read(27, 1).tolist() == [47]
    assert stream.read(8, 25).tolist() == [40 + (8 + i) % 10 for i in range(25)]
    for start, stop in ((5, 5), (-1, 4), (90, 101)):
        with pytest.raises(ValueError, match="nothing to read"):
            Stream(Counting(100), start, stop)


def test_numbers_of_samples_are_wider_than_32_bits():
    s = samples(3 * 2**40, 2)
    assert len(s) == (3 * 2**40 - 1) // 2
    for k in (2**31, 2**32 + 1, len(s) - 1, 5 * len(s) + 2**33):
        assert s.tokens(k)[0] == s.position(k) % (3 * 2**40)
    with pytest.raises(IndexError):
        s.tokens(-1)
    with pytest.raises(ValueError, match="--seq-length"):
        samples(10, 0)


# --- made-up samples


def test_mock_samples_are_a_pure_function_and_below_the_vocabulary():
    for vocab_size in (1, 2, 97, 50_257, 200_000):
        a, b = MockSamples(vocab_size, 32, 1), MockSamples(vocab_size, 32, 1)
        rows = np.stack([a.tokens(k) for k in (0, 1, 2, 2**33)])
        assert rows.shape == (4, 33) and rows.dtype == np.int64 and 0 <= rows.min() <= rows.max() < vocab_size
        assert (rows[::-1] == np.stack([b.tokens(k) for k in (2**33, 2, 1, 0)])).all()
    assert (MockSamples(97, 32, 1).tokens(0) != MockSamples(97, 32, 2).tokens(0)).any()
    assert (MockSamples(97, 32, 1).tokens(0) != MockSamples(97, 32, 1).tokens(1)).any()


def test_mock_samples_can_be_learnt_across_seeds():
    follower = {}
    for k in range(200):
        row = MockSamples(97, 64, 1).tokens(k)
        for a, b in zip(row[:-1], row[1:]):
            follower.setdefault(a, Counter())[b] += 1
    other = np.stack([MockSamples(97, 64, 2).tokens(k) for k in range(50)])
    right = [follower[a].most_common(1)[0][0] == b for row in other for a, b in zip(row[:-1], row[1:])]
    assert 0.84 < np.mean(right) < 0.92  # seven in eight
    with pytest.raises(ValueError, match="--vocab-size"):
        MockSamples(0, 8, 1)


# --- splits and opening


@pytest.mark.parametrize(
    ("weights", "documents", "ends"),
    [
        ((969, 30, 1), 1000, [969, 999, 1000]),
        ((98, 2, 0), 7, [7, 7, 7]),
        ((1, 1, 0), 5, [2, 5, 5]),  # 2.5 goes to the even number, as in Megatron
        ((1, 1, 0), 7, [4, 7, 7]),
        ((0.9, 0.1, 0), 10, [9, 10, 10]),
        ((1, 1, 1), 3, [1, 2, 3]),
        ((0, 0, 1), 4, [0, 0, 4]),
        ((1, 0, 0), 0, [0, 0, 0]),
    ],
)
def test_split_is_cut_at_borders_of_documents(weights, documents, ends):
    assert split_documents(weights, documents) == list(zip([0, *ends], ends))


@pytest.mark.parametrize("documents", [1, 2, 39, 40, 1_000, 10**9, 10**12])
def test_split_leaves_no_document_out(documents):
    for weights in ((969, 30, 1), (1, 1, 1), (0.1, 0.2, 0.7), (3, 0, 7)):
        parts = split_documents(weights, documents)
        assert parts[0][0] == 0 and parts[-1][1] == documents
        assert all(a[1] == b[0] and a[0] <= a[1] for a, b in zip(parts, parts[1:]))


def opened(prefix, **options):
    numbers = {"seq_length": 4, "vocab_size": 100, "seed": 1} | options
    split = numbers.pop("split", "969,30,1")
    return open_samples(DataConfig(data_path=(prefix,), split=split), **numbers)


def test_parts_read_their_own_documents(tmp_path):
    prefix = corpus(tmp_path, [[d] * 10 for d in range(10)])
    parts = opened(prefix, split="'8, 1, 1'")
    assert {t for s in parts.train for t in s} == set(range(8))
    assert {t for s in parts.valid for t in s} == {8} and {t for s in parts.test for t in s} == {9}
    assert len({parts.train.seed, parts.valid.seed, parts.test.seed}) == 3
    assert len(parts.train) == 19  # 79 // 4, and 9 // 4 in the others
    assert opened(prefix, split="1").valid is None
    assert opened(corpus(tmp_path, [[1] * 10, []]), split="1,1").valid is None  # a document without tokens


def test_missing_and_unknown_data_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"--data-path .*nowhere\.idx"):
        opened(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="--mock-data"):
        open_samples(DataConfig(), seq_length=4, vocab_size=9, seed=1)


def test_data_of_another_vocabulary_is_refused(tmp_path):
    prefix = corpus(tmp_path, [[1, 2, 3]], vocab_size=131, fingerprint="bytes")
    with pytest.raises(ValueError, match=r"vocabulary of 131.*has 97"):
        opened(prefix, vocab_size=97)
    with pytest.raises(ValueError, match=r"tokenizer bytes.*give other"):
        opened(prefix, vocab_size=131, fingerprint="other")
    for fingerprint in ("bytes", "", None):  # a tokenizer without content cannot be another one
        assert opened(prefix, vocab_size=131, fingerprint=fingerprint).train is not None


def test_mock_parts_differ():
    parts = open_samples(DataConfig(mock_data=True), seq_length=16, vocab_size=97, seed=1)
    rows = [part.tokens(0).tolist() for part in (parts.train, parts.valid, parts.test)]
    assert rows[0] != rows[1] != rows[2] != rows[0]


def test_opening_does_not_look_at_every_document(tmp_path):
    prefix = corpus(tmp_path, [[1, 2, 3]] * 50)
    data = bytearray((tmp_path / "corpus.idx").read_bytes())
    data[34 + 4 * 50 + 8 * 20 : 34 + 4 * 50 + 8 * 21] = bytes(8)  # a wrong offset in the middle of the train part
    (tmp_path / "corpus.idx").write_bytes(data)
    assert len(opened(prefix, split="1").train) == (150 - 1) // 4
    assert IndexedReader(prefix).read(60, 3).tolist() == [1, 2, 3]
