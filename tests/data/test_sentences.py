"""Sentences: where they end, and that nothing of a text is lost."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.sentences import sentences


@pytest.mark.parametrize(
    "parts",
    [
        ["One. ", "Two! ", "Three? ", "Four"],
        ["She said \u201cNo.\u201d ", "He left."],
        ["(It is so.) ", "Is it?!\n", "\u00c9t\u00e9."],
        ["Dr. Who met J. R. Smith at 3.14 p. m. on St. Mary's, e.g. here, etc. and so on. ", "Then Mr. Bean."],
        ["It grew by 3. ", "4 is next."],
        ["Wait... what is it... ", "It is late\u2026 ", "So."],
        ["\u4eca\u65e5\u306f\u3002", "\u660e\u65e5\uff01", "\u306f\u3044"],
        ["A headline\n\n", "and its text, with no full stop\n \n\n", "more"],
        ["one line\nand the next"],
        ["\n\n", "after two empty lines"],
        ["visit www.example.com now. ", "Yes."],
    ],
)
def test_sentences_end_where_they_should(parts):
    assert sentences("".join(parts)) == parts


@settings(max_examples=50)
@given(st.text(st.sampled_from("aB.!? \n\u3002\"'1"), max_size=60) | st.text(max_size=60))
def test_the_sentences_together_are_the_text(text):
    found = sentences(text)
    assert "".join(found) == text and all(found)


@pytest.mark.parametrize("text", ["." * 200_000, ".'" * 100_000, "\n " * 100_000, "a. " * 100_000, "e." * 100_000])
def test_no_text_takes_long(text):
    start = time.process_time()
    assert "".join(sentences(text)) == text
    assert time.process_time() - start < 2
