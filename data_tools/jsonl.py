"""JSON lines: the files that a command line names, their numbered lines, and the texts of a line."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence


def expand(patterns: Sequence[str]) -> list[str]:
    """The files that the names and glob patterns stand for, in the order given, each pattern sorted."""
    files = []
    for pattern in patterns:
        found = (
            [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        )
        if not found:
            raise ValueError(f"--input {pattern}: there is no such file")
        files += found
    return files


def numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Each line of a file with its number, from 1, without a byte order mark before the first."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def texts(line: bytes, keys: Sequence[str]) -> list[str]:
    """The text under each key of a line that holds one JSON object. ValueError: what is wrong with the line.

    A blank line counts as a document without text.
    """
    if not line.strip():
        return [""] * len(keys)
    try:
        record = json.loads(line.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    except ValueError as error:  # also bytes that are not UTF-8
        raise ValueError(f"not one JSON object on one line: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    return [_text(record, key) for key in keys]


def _text(record: dict, key: str) -> str:
    if key not in record:
        raise ValueError(f"no key {key!r} (--json-keys); there is {', '.join(map(repr, record)) or 'none'}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"the value of {key!r} is a {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the value of {key!r} has half a surrogate pair, which is no character") from error
    return text
