"""Turns JSON lines into token files: PREFIX_text_document.bin, .idx and .json, "text" being the key of the texts.

One line is one document. Documents without text are left out and counted; a bad line ends the run (or is counted, with
--skip-bad-lines). What is written does not depend on --workers, and appears only when all of it is there. The last
line of the output is a JSON summary, one for each key.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from data_tools.jsonl import expand, numbered_lines, texts  # noqa: E402
from megazero.config import DataConfig  # noqa: E402
from megazero.data.indexed import IndexedWriter  # noqa: E402
from megazero.data.tokenizer import Tokenizer, build_tokenizer  # noqa: E402

BATCH_LINES, BATCH_BYTES = 256, 1 << 20  # what a worker gets at once, whichever is reached first
SHOWN_BAD_LINES = 10


@dataclass(frozen=True)
class Settings:
    """All that a worker needs to know, small and hashable."""

    data: DataConfig
    vocab_size: int | None
    keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Batch:
    """Some lines of one file that follow each other."""

    path: str
    first: int  # number of the first line
    lines: list[bytes]


@dataclass
class Encoded:
    """What a batch became: for each key its documents as one array of ids and their lengths."""

    size: int  # bytes of the lines
    bad: list[str] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="JSONL files or glob patterns")
    add("--output-prefix", required=True, help="begin of the names of the files that are written")
    add("--json-keys", nargs="+", default=["text"], help="keys of the texts, a pair of files for each; default: text")
    add("--tokenizer-type", required=True, help="as for pretrain_gpt.py")
    add("--tokenizer-model", help="model file of SentencePiece and Hugging Face tokenizers")
    add("--vocab-file", help="vocab.json of a GPT-2 tokenizer")
    add("--merge-file", help="merges.txt of a GPT-2 tokenizer")
    add("--vocab-size", type=int, help="number of ids of a NullTokenizer")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end-of-document token")
    add("--workers", type=int, default=1, help="processes that tokenize; default: 1, this one")
    add("--log-interval", type=int, default=1000, help="documents between updates of the progress bar; default: 1000")
    add("--skip-bad-lines", action="store_true", help="count lines that are no document instead of ending there")
    return parser.parse_args(argv)


def batches(files: Iterable[str]) -> Iterator[Batch]:
    for path in files:
        lines: list[bytes] = []
        size = 0
        for number, line in numbered_lines(path):
            lines.append(line)
            size += len(line)
            if len(lines) == BATCH_LINES or size >= BATCH_BYTES:
                yield Batch(path, number + 1 - len(lines), lines)
                lines, size = [], 0
        if lines:
            yield Batch(path, number + 1 - len(lines), lines)


@lru_cache(maxsize=1)
def tokenizer_of(settings: Settings) -> Tokenizer:
    """The tokenizer, built once in each process."""
    return build_tokenizer(settings.data, settings.vocab_size)


def encode(settings: Settings, batch: Batch) -> Encoded:
    tokenizer = tokenizer_of(settings)
    end = [tokenizer.eod] if settings.append_eod and tokenizer.eod is not None else []
    result = Encoded(size=sum(map(len, batch.lines)))
    ids: list[list[NDArray[np.int32]]] = [[] for _ in settings.keys]
    result.empty = [0] * len(settings.keys)
    for number, line in enumerate(batch.lines, start=batch.first):
        try:
            found = [tokenizer.encode(text) if text.strip() else [] for text in texts(line, settings.keys)]
        except ValueError as error:
            result.bad.append(f"{batch.path}, line {number}: {error}")
            continue
        for key, document in enumerate(found):
            if document:
                ids[key].append(np.array(document + end, np.int32))
            else:
                result.empty[key] += 1
    result.lengths = [[len(document) for document in documents] for documents in ids]
    result.ids = [np.concatenate([*documents, np.empty(0, np.int32)]) for documents in ids]
    return result


def follow_parent() -> None:
    """A worker leaves the end of the run to its parent, and ends itself when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def encode_all(settings: Settings, source: Iterator[Batch], workers: int) -> Iterator[Encoded]:
    """The encoded batches in order. No more than a few wait at any time, however large the input."""
    if workers <= 1:
        yield from (encode(settings, batch) for batch in source)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=follow_parent)
    try:
        waiting = deque()
        for batch in source:
            waiting.append(pool.submit(encode, settings, batch))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """A bar over the bytes of the input, moved every `interval` documents."""

    def __init__(self, bar: tqdm, interval: int):
        self._bar, self._interval, self._size, self._shown = bar, interval, 0, 0

    def add(self, size: int, documents: int) -> None:
        """`size` more bytes are done, `documents` documents so far."""
        self._size += size
        if documents >= self._shown + self._interval:
            self._bar.set_postfix(documents=documents, refresh=False)
            self._bar.update(self._size)
            self._size, self._shown = 0, documents


def append(writer: IndexedWriter, ids: NDArray[np.int32], lengths: list[int]) -> None:
    """Adds the documents that lie one after the other in `ids`."""
    end = 0
    for length in lengths:
        writer.add_document([ids[end : end + length]])
        end += length


def write(args: argparse.Namespace, settings: Settings, files: list[str]) -> list[dict[str, object]]:
    """Encodes and writes everything; one summary for each key."""
    tokenizer = tokenizer_of(settings)
    if settings.append_eod and tokenizer.eod is None:
        raise ValueError(f"--append-eod: the {args.tokenizer_type} has no end-of-document token (eos)")
    empty, bad = [0] * len(settings.keys), 0
    vocabulary = {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
    total = sum(map(os.path.getsize, files))
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(f"{args.output_prefix}_{key}_document", **vocabulary))
            for key in settings.keys
        ]
        bar = stack.enter_context(tqdm(total=total, unit="B", unit_scale=True, miniters=1, disable=None))
        progress = Progress(bar, args.log_interval)
        for result in encode_all(settings, batches(files), args.workers):
            if result.bad and not args.skip_bad_lines:
                raise ValueError(result.bad[0])
            for line in result.bad[: max(0, SHOWN_BAD_LINES - bad)]:
                print(f"left out: {line}", file=sys.stderr)
            bad += len(result.bad)
            for key, writer in enumerate(writers):
                append(writer, result.ids[key], result.lengths[key])
                empty[key] += result.empty[key]
            progress.add(result.size, writers[0].num_documents)
        for key, writer in zip(settings.keys, writers):
            if writer.num_documents == 0:
                raise ValueError(f"--input {' '.join(args.input)}: no document has text under {key!r}")
    return [
        {
            "prefix": writer.prefix,
            "documents": writer.num_documents,
            "empty": without,
            "bad_lines": bad,
            "tokens": writer.num_tokens,
            "bytes": writer.num_tokens * writer.dtype.itemsize,
            "dtype": writer.dtype.name,
            "vocab_size": writer.vocab_size,
        }
        for writer, without in zip(writers, empty)
    ]


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Writes the files that the arguments ask for; one summary for each key."""
    data = DataConfig(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
    )
    settings = Settings(data, args.vocab_size, tuple(args.json_keys), args.append_eod)
    return write(args, settings, expand(args.input))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is not finished is removed
    try:
        for summary in run(args):
            print(json.dumps(summary))
    except (ValueError, OSError) as error:
        sys.exit(f"preprocess_data.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit("preprocess_data.py: interrupted, nothing is written")
    except BrokenProcessPool as error:
        sys.exit(f"preprocess_data.py: error: a worker died (killed, or out of memory?): {error}")


if __name__ == "__main__":
    main()
