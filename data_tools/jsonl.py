"""JSON lines: the texts of a line, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Sequence


def texts(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    """For each key the texts of a line that holds one JSON object: the one string, or the strings of a list, which are
    the sentences of a document. ValueError: what is wrong with the line.

    A blank line counts as a document without text.
    """
    if not line or line.isspace():
        return [[] for _ in keys]
    try:
        record = json.loads(line.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"not one JSON object on one line: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    return [_texts(record, key) for key in keys]


def _texts(record: dict, key: str) -> list[str]:
    if key not in record:
        raise ValueError(f"no key {key!r} (--json-keys); there is {', '.join(map(repr, record)) or 'none'}")
    value = record[key]
    found = value if isinstance(value, list) else [value]
    for text in found:
        if not isinstance(text, str):
            where = "an element" if found is value else "the value"
            raise ValueError(f"{where} of {key!r} is a {type(text).__name__}, not a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the value of {key!r} has half a surrogate pair, which is no character") from error
    return found
