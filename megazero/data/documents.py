"""Where the documents of a token file begin, found by a handful of looks at its offsets, whatever its size.

Lengths of documents are alike enough that a document's number can be guessed from a token's place; each look at the
offsets makes the guess better (interpolation search). The offsets are never read as a whole.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

NEIGHBOURS = 64  # documents seen by one look: their offsets fill an eighth of a page
LOOKS_BEFORE_HALVING = 4  # after so many guesses every second look halves what is left, so uneven lengths cost little


class TokenFile(Protocol):
    """What is needed of an IndexedReader."""

    prefix: str
    num_tokens: int
    dtype: np.dtype
    offsets: NDArray[np.int64]
    document_index: NDArray[np.int64]

    def read(self, start: int, count: int) -> NDArray[np.int64]: ...

    def read_rows(self, starts: list[int], count: int) -> NDArray[np.integer]: ...

    def first_token(self, sequence: int) -> int: ...


class Documents:
    """Documents first to last - 1 of a token file; `start` and `stop` are the first token and the one after the last.

    Tokens are counted from the beginning of the file.
    """

    def __init__(self, reader: TokenFile, first: int, last: int):
        self.reader, self.first, self.last = reader, first, last
        self.start, self.stop = (reader.first_token(int(reader.document_index[document])) for document in (first, last))

    def starts(self, first: int, last: int) -> NDArray[np.int64]:
        """The first tokens of documents first to last - 1, [last - first]; of an empty one that of the next."""
        sequences, offsets = np.asarray(self.reader.document_index[first:last]), self.reader.offsets
        tokens = np.full(len(sequences), self.reader.num_tokens)
        inside = sequences < len(offsets)
        tokens[inside] = offsets[sequences[inside]] // self.reader.dtype.itemsize
        return tokens

    def find(self, token: int) -> int:
        """The number of the document that holds `token`, start <= token < stop."""
        low, high, at_low, at_high = self.first, self.last, self.start, self.stop
        looks = 0
        while True:  # document `low` begins at or before the token, document `high` after it
            guess = low + (token - at_low) * (high - low) // (at_high - at_low)
            if looks >= LOOKS_BEFORE_HALVING and looks % 2:
                guess = (low + high) // 2
            first, last = max(low, guess - NEIGHBOURS // 2), min(high, guess + NEIGHBOURS // 2)
            seen = self.starts(first, last)
            looks += 1
            before = int(np.searchsorted(seen, token, side="right"))
            if before == 0:
                high, at_high = first, int(seen[0])
            elif before == len(seen) and last < high:
                low, at_low = last - 1, int(seen[-1])
            else:
                return first + before - 1

    def starts_within(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens start <= t < stop at which a document begins, ascending; start and stop lie in the documents."""
        document = self.find(start)
        found = [self.starts(document, document + 1)]
        document += 1
        while document < self.last and found[-1][-1] < stop:
            found.append(self.starts(document, min(document + NEIGHBOURS, self.last)))
            document += NEIGHBOURS
        tokens = np.unique(np.concatenate(found))
        return tokens[(tokens >= start) & (tokens < stop)]
