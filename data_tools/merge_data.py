"""Makes one token file of several, document by document in the order given, or shuffled with a seed.

Corpora of different tokenizers are not mixed: vocabulary and fingerprint in their .json files must agree. Those without
such a file, from other tools, are checked id by id. The files appear under their names only when all is written.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from data_tools.command import command, make_folder_of  # noqa: E402
from data_tools.progress import ProgressBar  # noqa: E402
from data_tools.shuffle import Buckets, Piece  # noqa: E402
from megazero.data.documents import Documents  # noqa: E402
from megazero.data.indexed import IndexedReader, IndexedWriter, Sidecar, check_ids  # noqa: E402

BYTES_PER_TOKEN = 32  # of memory while a piece of a corpus is dealt or written, all copies together
DOCUMENTS_AT_ONCE = 1 << 16
MOST_BITS = 12  # of files to deal into


@dataclass(frozen=True)
class Corpus:
    """What is known of a token file before it is read."""

    prefix: str
    documents: int
    tokens: int
    sidecar: Sidecar | None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="prefixes, patterns of .idx files, or folders with all their corpora")
    add("--output-prefix", required=True, help="begin of the names of the files that are written")
    add("--shuffle", action="store_true", help="put the documents in random order")
    add("--seed", type=int, default=1234, help="of the order; default: 1234")
    add(
        "--memory-megabytes",
        type=float,
        default=1024,
        help="for the shuffle; the order is always the same; default: 1024",
    )
    add("--vocab-size", type=int, help="of the tokenizer, where no corpus has a .json file that tells")
    args = parser.parse_args(argv)
    if args.memory_megabytes < 1:
        parser.error(f"--memory-megabytes {args.memory_megabytes}: at least 1")
    return args


def expand(words: list[str]) -> list[str]:
    """The prefixes that the words of --input stand for, in the order given, folders and patterns sorted."""
    prefixes = []
    for word in words:
        found = [word.removesuffix(".bin").removesuffix(".idx")]
        if not os.path.exists(found[0] + ".idx"):
            pattern = os.path.join(glob.escape(word), "*.idx") if os.path.isdir(word) else word
            matches = glob.glob(pattern, recursive=True)
            found = sorted(path.removesuffix(".idx") for path in matches if path.endswith(".idx"))
        if not found:
            raise ValueError(f"--input {word}: there is no {word}.idx, and no .idx file is meant by it")
        prefixes += found
    return prefixes


def describe(prefix: str) -> Corpus:
    reader = IndexedReader(prefix, flag="--input")
    return Corpus(prefix, reader.num_documents, reader.num_tokens, reader.sidecar)


def vocabulary(corpora: list[Corpus], vocab_size: int | None) -> tuple[int, str | None]:
    """Size and fingerprint of the one vocabulary that all corpora have. ValueError: they have not.

    The fingerprint is None if one of them does not tell it.
    """
    known = [(corpus.prefix, corpus.sidecar) for corpus in corpora if corpus.sidecar is not None]
    if not known and vocab_size is None:
        raise ValueError(f"no corpus tells its vocabulary ({corpora[0].prefix}.json is missing): give --vocab-size")
    if not known:
        return vocab_size or 0, None
    first, told = known[0]
    for prefix, other in known[1:]:
        if (other.vocab_size, other.fingerprint) != (told.vocab_size, told.fingerprint):
            raise ValueError(
                f"{first} was made with a vocabulary of {told.vocab_size} (tokenizer {told.fingerprint or 'unknown'}), "
                f"{prefix} with one of {other.vocab_size} (tokenizer {other.fingerprint or 'unknown'})"
            )
    if vocab_size not in (None, told.vocab_size):
        raise ValueError(f"--vocab-size {vocab_size}: {first} was made with a vocabulary of {told.vocab_size}")
    return told.vocab_size, told.fingerprint if len(known) == len(corpora) else None


def pieces(prefix: str, *, tokens: int, vocab_size: int) -> Iterator[Piece]:
    """The documents of a corpus from begin to end, at most so many tokens at a time, but at least one document.

    ValueError: an id is outside the vocabulary.
    """
    reader = IndexedReader(prefix, flag="--input")
    documents, first = Documents(reader, 0, reader.num_documents), 0
    while first < reader.num_documents:
        last = min(first + DOCUMENTS_AT_ONCE, reader.num_documents)
        starts = documents.starts(first, last + 1)
        fit = max(1, int(np.searchsorted(starts, starts[0] + tokens, "right")) - 1)
        sequences = np.array(reader.document_index[first : first + fit + 1])
        ids = reader.read(int(starts[0]), int(starts[fit] - starts[0]))
        piece = Piece(ids, np.array(reader.lengths[sequences[0] : sequences[-1]], np.int64), np.diff(sequences))
        try:
            check_ids(*piece, vocab_size=vocab_size, first_document=first)
        except ValueError as error:
            raise ValueError(f"{prefix}, {error}") from error
        yield piece
        first += fit


def write(args: argparse.Namespace, corpora: list[Corpus], writer: IndexedWriter) -> None:
    """Puts all documents into the writer."""
    memory, width = int(args.memory_megabytes * 1e6), writer.dtype.itemsize
    total, tokens = width * sum(corpus.tokens for corpus in corpora), memory // BYTES_PER_TOKEN
    folder = Path(args.output_prefix).parent
    with (
        ProgressBar(total * (1 + args.shuffle)) as bar,
        tempfile.TemporaryDirectory(prefix=f"{Path(args.output_prefix).name}.shuffle.", dir=folder) as dealt,
    ):
        bits = min(MOST_BITS, max(0, (4 * total // memory)).bit_length())
        buckets = Buckets(Path(dealt), bits=bits, dtype=writer.dtype, seed=args.seed)
        documents = done = 0
        for corpus in corpora:
            for piece in pieces(corpus.prefix, tokens=tokens, vocab_size=writer.vocab_size):
                if args.shuffle:
                    buckets.add(piece)
                else:
                    writer.add_documents(*piece)
                documents, done = documents + len(piece.counts), done + piece.ids.size * width
                bar.update(done, documents, done)
        if args.shuffle:
            for piece in buckets.sorted(tokens):
                writer.add_documents(*piece)
                done += piece.ids.size * width
                bar.update(done, documents + writer.num_documents, done)


def run(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Writes the files that the arguments ask for, and yields the summary."""
    corpora = [describe(prefix) for prefix in expand(args.input)]
    if any(os.path.realpath(corpus.prefix) == os.path.realpath(args.output_prefix) for corpus in corpora):
        raise ValueError(f"--output-prefix {args.output_prefix} is one of the --input corpora")
    vocab_size, fingerprint = vocabulary(corpora, args.vocab_size)
    make_folder_of("--output-prefix", args.output_prefix)
    with IndexedWriter(args.output_prefix, vocab_size=vocab_size, fingerprint=fingerprint) as writer:
        write(args, corpora, writer)
    yield {
        "prefix": writer.prefix,
        "corpora": len(corpora),
        "documents": writer.num_documents,
        "sequences": writer.num_sequences,
        "tokens": writer.num_tokens,
        "bytes": writer.num_tokens * writer.dtype.itemsize,
        "dtype": writer.dtype.name,
        "vocab_size": vocab_size,
        "shuffled": args.shuffle,
    }


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    command("merge_data.py", lambda: run(args))


if __name__ == "__main__":
    main()
