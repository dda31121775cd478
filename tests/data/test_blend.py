"""Blends: every corpus stays within two samples of its share, gives its samples in order and leaves none out."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.blend import WINDOW, Blend, KeyedOrder, MergeTree

weights = st.one_of(
    st.integers(0, 10**13),
    st.floats(0, 1e12, allow_nan=False).map(Fraction),
    st.decimals(0, 1, places=4).map(Fraction),
)
blends = st.lists(weights, min_size=1, max_size=40).filter(any)


def is_near(tree, n):
    """Whether each corpus has its share of the first n positions to within less than two, in exact arithmetic."""
    total, counts = sum(tree.weights), tree.counts(n)
    assert sum(counts) == n and min(counts) >= 0
    return all(abs(count * total - n * weight) < 2 * total for count, weight in zip(counts, tree.weights))


@settings(deadline=None)
@given(blends, st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_no_corpus_is_two_samples_from_its_share(weights, windows):
    tree = MergeTree(weights)
    for n in (*range(50), *(window * WINDOW for window in windows)):
        assert is_near(tree, n)
    counts = [tree.counts(n) for n in sorted(windows)]
    assert all(a <= b for before, after in zip(counts, counts[1:]) for a, b in zip(before, after))


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 1000), st.integers(0, 2**32), st.sampled_from([0.3, 1.0, 10.0]))
def test_no_corpus_of_a_thousand_is_two_samples_from_its_share(corpora, seed, evenness):
    drawn = np.random.default_rng(seed).pareto(evenness, corpora) * 1000
    tree = MergeTree([Fraction(float(weight)) for weight in drawn])
    before = [0] * corpora
    for window in range(1, 40):
        counts = tree.counts(window * WINDOW)
        assert is_near(tree, window * WINDOW) and all(a <= b for a, b in zip(before, counts))
        before = counts


def test_the_hardest_trees_stay_within_two_samples():
    fibonacci = [1, 1]
    while len(fibonacci) < 90:
        fibonacci.append(sum(fibonacci[-2:]))
    for hard in (fibonacci, [2**i for i in range(200)], [10**30, *range(1, 999)], [1] * 1000, [1, 10**18]):
        tree = MergeTree(hard)
        assert all(is_near(tree, n) for n in (*range(0, 300, 3), 10**6, 10**12 + 7, 10**18))


@settings(max_examples=30, deadline=None)
@given(blends, st.integers(0, 2**64))
def test_index_in_each_corpus_is_gapless_at_every_window_border(weights, seed):
    order = KeyedOrder(weights, seed=seed)
    seen = [[] for _ in weights]
    for window in range(3):
        for k in range(window * WINDOW, (window + 1) * WINDOW):
            corpus, index = order.place(k)
            seen[corpus].append(index)
        assert [len(indices) for indices in seen] == order.tree.counts((window + 1) * WINDOW)
        assert all(sorted(indices) == list(range(len(indices))) for indices in seen)
    assert not any(indices for indices, weight in zip(seen, weights) if not weight)


def test_a_thousand_corpora_are_gapless_at_every_window_border():
    weights = [Fraction(float(weight)) for weight in np.random.default_rng(5).pareto(0.5, 1000)]
    order, seen = KeyedOrder(weights, seed=3), [[] for _ in weights]
    for window in range(4):
        for k in range(window * WINDOW, (window + 1) * WINDOW):
            corpus, index = order.place(k)
            seen[corpus].append(index)
        assert [len(indices) for indices in seen] == order.tree.counts((window + 1) * WINDOW)
        assert all(sorted(indices) == list(range(len(indices))) for indices in seen)


@settings(deadline=None)
@given(blends)
def test_places_and_counts_of_the_tree_agree(weights):
    tree = MergeTree(weights)
    counts = [0] * len(weights)
    for n in range(60):
        assert tree.counts(n) == counts
        corpus, index = tree.place(n)
        assert index == counts[corpus]
        counts[corpus] += 1
    with pytest.raises(IndexError):
        KeyedOrder(weights, seed=1).place(-1)


def test_one_pass_by_size_is_one_pass_through_every_corpus():
    for sizes in ([5, 3, 2], [1000, 1, 17, 250], [10**9, 10**6 + 1, 7]):
        tree, total = MergeTree(sizes), sum(sizes)
        for passes in (1, 2, 3, 1000):
            assert tree.counts(passes * total) == [passes * size for size in sizes]


def test_a_sample_takes_few_steps():
    rng = np.random.default_rng(1)
    for drawn in (np.ones(1000), rng.random(1000) + 0.01, rng.pareto(1, 1000) + 0.01):
        tree = MergeTree([Fraction(float(weight)) for weight in drawn])
        depth, todo = [0] * 1000, [(tree._root, 0)]
        while todo:
            node, steps = todo.pop()
            if node < 0:
                depth[-1 - node] = steps
            else:
                todo += [(tree._merges[node][side], steps + 1) for side in (2, 3)]
        assert sum(d * weight for d, weight in zip(depth, tree.weights)) / sum(tree.weights) <= 11  # log2(1000) + 1


@pytest.mark.parametrize("wrong", [[], [0], [0, 0], [1, -1], [Fraction(-1, 2)]])
def test_weights_without_a_meaning_are_refused(wrong):
    with pytest.raises(ValueError, match="weights"):
        MergeTree(wrong)


def test_order_is_fixed_for_ever():  # a change of these numbers changes the data of every run that is resumed
    order = KeyedOrder([Fraction("0.5"), Fraction("0.3"), Fraction("0.2")], seed=1)
    tree = [order.tree.place(n)[0] for n in range(20)]
    assert tree == [1, 0, 2, 0, 1, 0, 2, 0, 1, 0] * 2
    assert [order.place(k) for k in range(6)] == [(0, 471), (0, 36), (0, 7), (0, 461), (1, 210), (0, 188)]


class Named:
    """Sample k of source n is n, k, k, ...; sources differ in dtype."""

    seq_length = 3

    def __init__(self, number, dtype):
        self.number, self.dtype, self.name = number, dtype, f"source {number}"

    def rows(self, numbers):
        return np.array([[self.number, k, k, k] for k in numbers], self.dtype)

    def begins(self, k):
        return np.array([self.number == 1, False, k % 2 == 0, False])

    def describe(self, k, place):
        return f"place {place} of sample {k} of {self.name}"


def test_samples_come_from_the_source_at_their_place():
    sources = [Named(0, np.uint16), Named(1, np.int32), Named(2, np.uint16)]
    blend = Blend(sources, KeyedOrder([5, 3, 2], seed=4), name="blend")
    numbers = [9, 0, 1, 5000, 3, 3, 70]
    rows = blend.rows(numbers)
    assert rows.dtype == np.int32
    for k, row in zip(numbers, rows):
        source, index = blend.order.place(k)
        assert row.tolist() == [source, index, index, index] == blend.tokens(k).tolist()
        assert blend.begins(k).tolist() == sources[source].begins(index).tolist()
        assert blend.describe(k, 2) == f"place 2 of sample {index} of source {source}"
    assert blend.tokens(0).dtype == np.int64
