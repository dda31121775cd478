"""Megatron's notation for a pipeline layout: "Et*3|(tt|)*29|L" says which layers stand in which stage.

E is the embedding, t a transformer block, L the head with the loss; `|` ends a stage, `*n` repeats the letter or the
parenthesis before it, commas and spaces are for the eye.
"""

from __future__ import annotations

import re

LETTERS = "EtL"
LONGEST = 100_000       # letters and bars after expansion: more is a slip of the pen


def expand_layout(text: str) -> list[str]:
    """The letters of each stage: "E|(t|)*2,L" -> E, t, t, L. A stage may be empty.

    Raises ValueError for a letter that stands for no layer of this model (as m, multi-token prediction), or a
    parenthesis or number out of place.
    """
    tokens = re.findall(r"\d+|[^\s,]", text)
    open_parts: list[str] = [""]          # what is read so far, at each depth of parentheses
    last = ""                             # the letter or parenthesis that a star would repeat
    for at, token in enumerate(tokens):
        starred = at > 0 and tokens[at - 1] == "*"
        if token == "(":
            open_parts.append("")
            last = ""
        elif token == ")" and len(open_parts) > 1:
            last = open_parts.pop()
            open_parts[-1] += last
        elif token in (*LETTERS, "|"):
            last = token
            open_parts[-1] += last
        elif token == "*" and last and tokens[at + 1 : at + 2] and tokens[at + 1].isdecimal():
            continue
        elif token.isdecimal() and starred:
            open_parts[-1] = open_parts[-1].removesuffix(last) + _repeated(last, int(token), text)
            last = ""
        else:
            raise _unreadable(text, token)
    if len(open_parts) > 1:
        raise _unreadable(text, "(")
    return open_parts[0].split("|")


def _repeated(part: str, count: int, text: str) -> str:
    if len(part) * count > LONGEST:
        raise ValueError(f'--pipeline-model-parallel-layout "{text}": *{count} makes it absurdly long')
    return part * count


def _unreadable(text: str, token: str) -> ValueError:
    if token.isalpha():
        why = f"{token} stands for no layer of this model; E is the embedding, t a block, L the head with the loss"
    else:
        why = f"{token!r} stands where it means nothing"
    return ValueError(f'--pipeline-model-parallel-layout "{text}": {why}')
