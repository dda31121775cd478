"""Samples as arithmetic: permutations are one to one, epochs are full passes, the stream can be rebuilt."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from megazero.data.samples import MockSamples, Permutation, Samples, Stream, hash_words, mix


class Counting:
    """A file whose token number t is t, and a document of its own."""

    prefix, dtype = "counting", np.dtype(np.int64)

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens
        self.document_index = range(num_tokens + 1)

    def first_token(self, sequence):
        return sequence

    def read(self, start, count):
        assert 0 <= start <= start + count <= self.num_tokens
        return np.arange(start, start + count)

    def read_rows(self, starts, count):
        return np.stack([self.read(start, count) for start in starts])


def samples(tokens, seq_length, **options):
    return Samples(Stream(Counting(tokens), 0, tokens), seq_length, **{"seed": 5} | options)


# --- the permutation


def test_mix_is_splitmix64():
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # its first output for seed 0
    assert mix(np.array([0x9E3779B97F4A7C15], np.uint64))[0] == 0xE220A8397B1DCDAF


def test_permutation_is_one_to_one_for_every_size_to_3000():
    for size in range(1, 3001):
        images = Permutation(size, hash_words(size)).many(np.arange(size))
        assert (np.bincount(images, minlength=size) == 1).all() and len(images) == size


@pytest.mark.parametrize("size", [65_536, 99_991, 10**6 + 3])
def test_permutation_is_one_to_one(size):
    assert (np.bincount(Permutation(size, 3).many(np.arange(size)), minlength=size) == 1).all()


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1000, 10**6 + 1, 2**31, 2**32 + 15, 10**12])
def test_many_numbers_go_where_each_goes(size):
    permutation = Permutation(size, hash_words(size, 1))
    numbers = [k for k in (*range(100), *range(size // 2, size // 2 + 50), size - 1) if k < size]
    assert permutation.many(np.array(numbers)).tolist() == [permutation(k) for k in numbers]
    assert permutation.many(np.array([], np.int64)).tolist() == []
    for outside in (-1, size):
        with pytest.raises(IndexError):
            permutation(outside)
        with pytest.raises(IndexError):
            permutation.many(np.array([0, outside]))


@pytest.mark.parametrize("size", [10**7 + 1, 2**31 - 1, 2**31, 2**32 + 15, 10**12])
def test_permutation_of_a_large_set_stays_inside_and_never_repeats(size):
    starts = (0, size // 3, size // 2, size - 20_000)
    images = Permutation(size, 7).many(np.concatenate([np.arange(start, start + 20_000) for start in starts]))
    assert len(np.unique(images)) == len(images) and images.min() >= 0 and images.max() < size
    assert abs((images / size).mean() - 0.5) < 0.01


@pytest.mark.parametrize("size", [3000, 65_536, 10**6 + 3, 10**9 + 7, 10**12])
def test_pairs_of_neighbours_are_spread_evenly(size):
    parts = 16
    images = Permutation(size, 11).many(np.arange(min(size, 100_000))) * parts // size
    pairs = np.bincount(images[:-1] * parts + images[1:], minlength=parts * parts)
    expected = (len(images) - 1) / parts**2
    chi2 = ((pairs - expected) ** 2 / expected).sum()
    degrees = parts**2 - 1
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees)  # five standard deviations


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
    with pytest.raises(ValueError, match="no tokens"):
        Stream(Counting(100), 5, 5)


def test_numbers_of_samples_are_wider_than_32_bits():
    s = samples(3 * 2**40, 2)
    assert len(s) == (3 * 2**40 - 1) // 2
    for k in (2**31, 2**32 + 1, len(s) - 1, 5 * len(s) + 2**33):
        assert s.tokens(k)[0] == s.position(k) % (3 * 2**40)
    with pytest.raises(IndexError):
        s.tokens(-1)
    with pytest.raises(ValueError, match="--seq-length"):
        samples(10, 0)


@pytest.mark.parametrize("tokens", [1, 9, 33, 500, 10_000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_are_the_samples_one_by_one(tokens, shuffle):
    s = samples(tokens, 8, shuffle=shuffle)
    numbers = [*range(30), 7, 1000, len(s) - 1, len(s), 3 * len(s) + 1, 2**33]
    assert s.positions(numbers) == [s.position(k) for k in numbers]
    for some in (numbers, numbers[:5]):
        rows = s.rows(some)
        assert rows.shape == (len(some), 9) and rows.tolist() == [s.tokens(k).tolist() for k in some]
    with pytest.raises(IndexError):
        s.rows([-1] * 20)


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
