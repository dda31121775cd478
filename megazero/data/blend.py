"""A blend of corpora by weight: which corpus, and which of its samples, stands at position n. Arithmetic, no index.

Two corpora are merged by giving the first floor(n p + 1/2) of the first n positions, p being its share of the two.
A tree of such merges blends any number. As the two lightest are always merged first (Huffman's tree), a corpus hangs
the higher the heavier it is: a sample takes log2(corpora) + 1 steps or less on the average, and after any n positions
no corpus is 2 samples or more away from its share of n. Proof: a merge is off by at most 1/2, and what lies below
inherits that in proportion, so a corpus of weight w is off by at most 1/2 of the sum of w / v over the nodes v above
and at it, the root left out; the weight at least doubles over any two steps up, so the sum is below
1 + 1 + 1/2 + 1/2 + ... = 4.

Then positions are shuffled by key within windows of 1024, so that corpora do not come in a fixed beat.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .samples import Permutation, SampleSource, hash_words

WINDOW = 1024


class MergeTree:
    """Position n >= 0 of a blend -> (corpus, index in that corpus), exactly, for weights that are any fractions >= 0.

    The index in a corpus counts 0, 1, 2, ... A corpus of weight 0 never comes. Raises ValueError for a negative
    weight, and where none is above 0.
    """

    def __init__(self, weights: Sequence[Fraction | int]):
        if not weights or min(weights) < 0 or not any(weights):
            raise ValueError(f"weights {' '.join(map(str, weights))}: none may be below 0, and one must be above")
        unit = math.lcm(*(Fraction(weight).denominator for weight in weights))
        self.weights = [int(weight * unit) for weight in weights]
        self._merges: list[tuple[int, int, int, int]] = []  # twice the left weight, weight, left and right node
        leaves = [(weight, -1 - corpus) for corpus, weight in enumerate(self.weights)]  # nodes below 0 are corpora
        lightest = [leaf for leaf in leaves if leaf[0]]
        heapq.heapify(lightest)
        while len(lightest) > 1:
            (right, right_node), (left, left_node) = heapq.heappop(lightest), heapq.heappop(lightest)
            shared = math.gcd(left, right)
            self._merges.append((2 * left // shared, (left + right) // shared, left_node, right_node))
            heapq.heappush(lightest, (left + right, len(self._merges) - 1))
        self._root = lightest[0][1]

    def place(self, n: int) -> tuple[int, int]:
        """(corpus, index in it) of position n."""
        node, merges = self._root, self._merges
        while node >= 0:
            twice_left, weight, left, right = merges[node]
            before, rest = divmod(n * twice_left + weight, 2 * weight)  # floor(n p + 1/2) go to the left before n
            if rest + twice_left >= 2 * weight:
                node, n = left, before
            else:
                node, n = right, n - before
        return -1 - node, n

    def counts(self, n: int) -> list[int]:
        """How many of the first n positions each corpus has."""
        found, todo = [0] * len(self.weights), [(self._root, n)]
        while todo:
            node, n = todo.pop()
            if node < 0:
                found[-1 - node] = n
            else:
                twice_left, weight, left, right = self._merges[node]
                before = (n * twice_left + weight) // (2 * weight)
                todo += [(left, before), (right, n - before)]
        return found


class BlendOrder(Protocol):
    """Says of every sample k >= 0 of a blend which source it comes from, and which sample of that source it is."""

    def place(self, k: int) -> tuple[int, int]: ...


class KeyedOrder:
    """A merge tree whose positions are shuffled by key within windows of 1024. `place(k)` for any k >= 0."""

    def __init__(self, weights: Sequence[Fraction | int], *, seed: int):
        self.tree, self.seed = MergeTree(weights), seed
        self._window = (0, self._shuffled(0))  # the window that was asked for last; replaced as a whole

    def place(self, k: int) -> tuple[int, int]:
        """(source, sample of it) of sample k."""
        if k < 0:
            raise IndexError(f"sample {k} of a blend")
        window, at = divmod(k, WINDOW)
        last, order = self._window
        if last != window:
            order = self._shuffled(window)
            self._window = window, order
        return self.tree.place(window * WINDOW + order[at])

    def _shuffled(self, window: int) -> list[int]:
        return Permutation(WINDOW, hash_words(self.seed, window)).many(np.arange(WINDOW)).tolist()


class Blend:
    """Samples of several sources, as an order mixes them."""

    def __init__(self, sources: Sequence[SampleSource], order: BlendOrder, *, name: str):
        assert len({source.seq_length for source in sources}) == 1
        self.sources, self.order, self.name, self.seq_length = sources, order, name, sources[0].seq_length

    def tokens(self, k: int) -> NDArray[np.int64]:
        """Sample k, [seq_length + 1]."""
        return self.rows([k])[0].astype(np.int64)

    def rows(self, numbers: Sequence[int]) -> NDArray[np.integer]:
        """Samples `numbers`, [len(numbers), seq_length + 1], in the widest dtype of the sources that they come from."""
        wanted: dict[int, tuple[list[int], list[int]]] = {}  # of each source: rows here, samples there
        for row, k in enumerate(numbers):
            source, index = self.order.place(k)
            rows, indices = wanted.setdefault(source, ([], []))
            rows.append(row)
            indices.append(index)
        parts = {source: self.sources[source].rows(indices) for source, (_, indices) in wanted.items()}
        found = np.empty((len(numbers), self.seq_length + 1), np.result_type(*parts.values()))
        for source, part in parts.items():
            found[wanted[source][0]] = part
        return found

    def begins(self, k: int) -> NDArray[np.bool_]:
        """Which tokens of sample k are the first of a document, [seq_length + 1]."""
        source, index = self.order.place(k)
        return self.sources[source].begins(index)

    def describe(self, k: int, place: int) -> str:
        """Where token `place` of sample k stands, in words."""
        source, index = self.order.place(k)
        return self.sources[source].describe(index, place)
