"""Turns text into token files: PREFIX_text_document.bin, .idx and .json, "text" being the key of the texts.

One line of JSON is one document, or one file with --format text. Documents without text are left out and counted; a bad
line ends the run (or is counted, with --skip-bad-lines). What is written does not depend on --workers, and appears only
when all of it is there. An interrupted run leaves its finished shards in PREFIX.partial; --resume goes on after them.
The last line of the output is a JSON summary, one for each key.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from data_tools.command import command, make_folder_of  # noqa: E402
from data_tools.encoding import Encoded, Encoder, Settings  # noqa: E402
from data_tools.inputs import (  # noqa: E402
    BLOCK_BYTES,
    COMPRESSED,
    Files,
    Lines,
    Position,
    expand,
    file_blocks,
    line_blocks,
)
from data_tools.journal import Journal, Progress  # noqa: E402
from data_tools.progress import ProgressBar  # noqa: E402
from data_tools.workers import Workers  # noqa: E402
from megazero.config import DataConfig  # noqa: E402
from megazero.cores import usable_cores  # noqa: E402
from megazero.data.indexed import IndexedWriter, Mark  # noqa: E402
from megazero.data.tokenizer import TYPES  # noqa: E402

SHOWN_BAD_LINES = 10
GROWTH = 8  # of compressed files, guessed, to find out how many workers have something to do


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("input").add_argument
    add("--input", nargs="+", required=True, help="files or glob patterns; .gz, .bz2 and .zst are decompressed")
    add("--format", choices=("jsonl", "text"), default="jsonl", help="a document is a line, or a file; default: jsonl")
    add("--json-keys", nargs="+", default=["text"], help="keys of the texts, a pair of files for each; default: text")
    add("--split-sentences", action="store_true", help="a sequence for each sentence; see data_tools/sentences.py")
    add("--skip-bad-lines", action="store_true", help="count lines that are no document instead of ending there")
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer-type", required=True, help=f"one of {', '.join(TYPES)}")
    add("--tokenizer-model", help="model file of SentencePiece and Hugging Face tokenizers")
    add("--vocab-file", help="vocab.json of a GPT-2 tokenizer")
    add("--merge-file", help="merges.txt of a GPT-2 tokenizer")
    add("--vocab-size", type=int, help="number of ids of a NullTokenizer")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end-of-document token")
    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", required=True, help="begin of the names of the files that are written")
    add(
        "--resume",
        action="store_true",
        help="go on after the last finished shard of an interrupted run, if there is one",
    )
    add("--shard-megabytes", type=float, default=64, help="input between two such places; default: 64")
    add = parser.add_argument_group("running").add_argument
    add("--workers", type=int, help="processes that tokenize; default: as many as there are cores")
    add("--log-interval", type=int, default=1000, help="documents between updates of the progress bar; default: 1000")
    add = parser.add_argument_group("accepted from Megatron's command lines, without effect").add_argument
    add("--dataset-impl", choices=("mmap",), help="the only kind of file there is")
    add("--partitions", type=int, help="workers share any input")
    add("--keep-sequential-samples", action="store_true", help="the order of the input is always kept")
    add("--keep-newlines", action="store_true", help="sentences always keep them")
    add("--lang", help="one rule for sentences serves all languages")
    args = parser.parse_args(argv)
    for name, least in (("workers", 1), ("log_interval", 1), ("shard_megabytes", 0)):
        value = vars(args)[name]
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: at least {least}")
    return args


def useful_workers(wanted: int, files: list[str]) -> int:
    """No more workers than there are blocks to encode."""
    size = sum(
        os.path.getsize(path) * (GROWTH if path.endswith(COMPRESSED) else 1)
        if os.path.isfile(path)
        else wanted * BLOCK_BYTES  # of a pipe nothing is known
        for path in files
    )
    return max(1, min(wanted, size // BLOCK_BYTES))


def identity(args: argparse.Namespace, files: list[str], fingerprint: str) -> dict[str, object]:
    """What shapes the output, for --resume to compare."""
    described = hashlib.sha256()
    for path in files:
        state = os.stat(path)
        described.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return {
        "the input (names, sizes and times of change)": described.hexdigest(),
        "--format": args.format,
        "--json-keys": args.json_keys,
        "--split-sentences": args.split_sentences,
        "the tokenizer": f"{args.tokenizer_type} {fingerprint} {args.vocab_size or ''}",
        "--append-eod": args.append_eod,
    }


class Output:
    """The files that are written, one set for each key, and the counts of what went into them."""

    def __init__(self, args: argparse.Namespace, encoder: Encoder, journal: Journal, done: Progress | None):
        self._args, self._journal, keys = args, journal, args.json_keys
        done = done or Progress(Position(), (Mark(),) * len(keys), (0,) * len(keys))
        self.position, self.bad_lines, self.input_bytes = done.position, done.bad_lines, done.input_bytes
        self.empty, self._shard = list(done.empty), 0
        self.writers: list[IndexedWriter] = []
        level = "sentence" if args.split_sentences else "document"
        tokenizer = encoder.tokenizer
        for number, (key, mark) in enumerate(zip(keys, done.marks)):
            writer = IndexedWriter(
                f"{args.output_prefix}_{key}_{level}",
                vocab_size=tokenizer.vocab_size,
                fingerprint=tokenizer.fingerprint,
                partial=journal.folder / str(number),
                resume=mark if journal.kept else None,
            )
            self.writers.append(writer)

    @property
    def documents(self) -> int:
        """Lines so far, with text or without."""
        return self.writers[0].num_documents + self.empty[0] + self.bad_lines

    def add(self, encoded: Encoded, position: Position) -> None:
        """Writes what a block became; `position` is the place after it. ValueError: a bad line."""
        if encoded.bad and not self._args.skip_bad_lines:
            raise ValueError(encoded.bad[0])
        for line in encoded.bad[: max(0, SHOWN_BAD_LINES - self.bad_lines)]:
            print(f"left out: {line}", file=sys.stderr)
        for number, (writer, column) in enumerate(zip(self.writers, encoded.columns)):
            writer.add_documents(column.ids, column.lengths, column.counts)
            self.empty[number] += column.empty
        self.bad_lines += len(encoded.bad)
        self.input_bytes += encoded.size
        self.position = position
        self._shard += encoded.size
        if self._shard >= self._args.shard_megabytes * 1e6:
            marks = tuple(writer.mark() for writer in self.writers)
            self._journal.save(Progress(position, marks, tuple(self.empty), self.bad_lines, self.input_bytes))
            self._shard = 0

    def finish(self) -> None:
        """Gives all files their final names. ValueError: there is nothing in them."""
        for key, writer in zip(self._args.json_keys, self.writers):
            if writer.num_documents == 0:
                raise ValueError(f"--input {' '.join(self._args.input)}: no document has text under {key!r}")
        for writer in self.writers:
            writer.prepare()
        try:
            for writer in self.writers:
                writer.publish()
        except BaseException:
            for writer in self.writers:
                writer.withdraw()
            raise

    def summaries(self, seconds: float) -> list[dict[str, object]]:
        """What came of it, for each key. `skipped` are the documents left out: empty ones and bad lines."""
        return [
            {
                "prefix": writer.prefix,
                "documents": writer.num_documents,
                "empty": empty,
                "bad_lines": self.bad_lines,
                "skipped": empty + self.bad_lines,
                "sequences": writer.num_sequences,
                "tokens": writer.num_tokens,
                "bytes": writer.num_tokens * writer.dtype.itemsize,
                "input_bytes": self.input_bytes,
                "dtype": writer.dtype.name,
                "vocab_size": writer.vocab_size,
                "seconds": round(seconds, 3),
            }
            for writer, empty in zip(self.writers, self.empty)
        ]

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers:
            writer.close()


def write(args: argparse.Namespace, files: list[str], encoder: Encoder, workers: Workers) -> list[dict[str, object]]:
    """Encodes and writes everything; one summary for each key."""
    start = time.monotonic()
    make_folder_of("--output-prefix", args.output_prefix)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(args.output_prefix, identity(args, files, encoder.tokenizer.fingerprint)))
        done = begin(args, journal)
        output = stack.enter_context(Output(args, encoder, journal, done))
        documents, size = output.documents, output.input_bytes
        total = sum(map(os.path.getsize, files))
        bar = ProgressBar(total, done_bytes=output.position.disk_bytes, interval=args.log_interval)
        stack.enter_context(bar)
        blocks: Iterator[tuple[Lines | Files, Position]]
        blocks = (file_blocks if args.format == "text" else line_blocks)(files, output.position)
        for encoded, position in workers.encode(encoder, blocks):
            output.add(encoded, position)
            bar.update(position.disk_bytes, output.documents - documents, output.input_bytes - size)
        bar.update(total, output.documents - documents, output.input_bytes - size, last=True)
        output.finish()
        return output.summaries(time.monotonic() - start)


def begin(args: argparse.Namespace, journal: Journal) -> Progress | None:
    """What is done already, with --resume."""
    done = journal.load() if args.resume else None
    if done is None:
        if args.resume:
            print(f"--resume: no shard is finished in {journal.folder}, starting anew", file=sys.stderr)
        journal.clear()
    else:
        documents = done.marks[0].documents + done.empty[0] + done.bad_lines
        print(f"--resume: going on after {documents:,} documents", file=sys.stderr)
    return done


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Writes the files that the arguments ask for; one summary for each key."""
    files = expand(args.input)
    if args.format == "text" and args.json_keys != ["text"]:
        raise ValueError(f"--format text has no --json-keys {' '.join(args.json_keys)}")
    if len(set(args.json_keys)) < len(args.json_keys):
        raise ValueError(f"--json-keys {' '.join(args.json_keys)}: each may be given once")
    data = DataConfig(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
    )
    settings = Settings(data, args.vocab_size, tuple(args.json_keys), args.append_eod, args.split_sentences)
    with Workers(useful_workers(args.workers or usable_cores(), files), settings) as workers:
        encoder = Encoder(settings)
        workers.wait()
        return write(args, files, encoder, workers)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    folder = Path(f"{args.output_prefix}.partial")

    def left() -> str:
        return f" (finished shards are kept in {folder}: --resume goes on after them)" if folder.exists() else ""

    command("preprocess_data.py", lambda: run(args), left=left)


if __name__ == "__main__":
    main()
