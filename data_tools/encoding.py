"""From blocks of the input to arrays of ids: what a worker of preprocess_data.py does, in this process or another."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import numpy as np
from numpy.typing import NDArray

from megazero.config import DataConfig
from megazero.data.tokenizer import build_tokenizer

from .inputs import Files, Lines, split_lines, whole
from .jsonl import texts
from .sentences import sentences


@dataclass(frozen=True)
class Settings:
    """All that shapes the ids of a document."""

    data: DataConfig
    vocab_size: int | None
    keys: tuple[str, ...]
    append_eod: bool
    split_sentences: bool = False


@dataclass
class Column:
    """The documents of a block under one key: those with text as arrays, those without as a number.

    ids      [tokens], those of all sequences, one after the other
    lengths  [sequences], tokens of each sequence
    counts   [documents], sequences of each document
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    empty: int


@dataclass
class Encoded:
    """What a block became: a column for each key, and what is wrong with the documents that are left out."""

    size: int  # bytes of the block, decompressed
    columns: list[Column]
    bad: list[str]


class Encoder:
    """Encodes blocks. ValueError for settings that cannot be."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.tokenizer = build_tokenizer(settings.data, settings.vocab_size)
        if settings.append_eod and self.tokenizer.eod is None:
            kind = settings.data.tokenizer_type
            raise ValueError(f"--append-eod: the {kind} has no end-of-document token (eos)")
        self._end = [np.array([self.tokenizer.eod], np.int32)] if settings.append_eod else []

    def encode(self, block: Lines | Files) -> Encoded:
        """All documents of a block, in order."""
        documents: dict[str, list[list[str]]] = {}  # where each stands -> for each key its sequences
        bad: dict[str, ValueError] = {}
        size, places = block.size if isinstance(block, Lines) else 0, []
        for where, source in _sources(block):
            places.append(where)
            try:
                content = source
                if isinstance(source, str):
                    content = whole(source)
                    size += len(content)
                documents[where] = self._sequences(content, whole_file=isinstance(block, Files))
            except ValueError as error:
                bad[where] = error
        try:
            columns = self._columns(documents)
        except ValueError:  # some text is none for this tokenizer
            bad |= self._refused(documents)
            columns = self._columns({where: texts for where, texts in documents.items() if where not in bad})
        return Encoded(size, columns, [f"{where}: {bad[where]}" for where in places if where in bad])

    def _refused(self, documents: dict[str, list[list[str]]]) -> dict[str, ValueError]:
        bad = {}
        for where, document in documents.items():
            try:
                self._columns({where: document})
            except ValueError as error:
                bad[where] = error
        return bad

    def _sequences(self, content: bytes, *, whole_file: bool) -> list[list[str]]:
        """For each key the sequences of a document."""
        found = [[_decoded(content)]] if whole_file else texts(content, self.settings.keys)
        if self.settings.split_sentences:
            found = [[part for text in document for part in sentences(text)] for document in found]
        return [[] if all(not text or text.isspace() for text in document) else document for document in found]

    def _columns(self, documents: dict[str, list[list[str]]]) -> list[Column]:
        return [self._column([texts[key] for texts in documents.values()]) for key in range(len(self.settings.keys))]

    def _column(self, documents: list[list[str]]) -> Column:
        every = [text for document in documents for text in document]
        encoded = iter(self.tokenizer.encode_batch(every) if every else [])
        parts: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        lengths, counts, empty = [], [], 0
        for document in documents:
            sequences = [ids for _, ids in zip(document, encoded) if len(ids)]
            if not sequences:
                empty += 1
                continue
            lengths += map(len, sequences)
            lengths[-1] += len(self._end)
            counts.append(len(sequences))
            parts += sequences
            parts += self._end
        return Column(np.concatenate(parts), np.array(lengths, np.int64), np.array(counts, np.int64), empty)


def _sources(block: Lines | Files) -> Iterator[tuple[str, bytes | str]]:
    """Where each document of a block stands, for messages, and its line, or the file that it is."""
    if isinstance(block, Files):
        yield from ((path, path) for path in block.paths)
        return
    lines = enumerate(split_lines(block.content, block.first), start=block.first)
    yield from ((f"{block.path}, line {number}", line) for number, line in lines)


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8: {error}") from error


def use_one_core() -> None:
    """Keeps the tokenizers library from using all cores: there is one worker for each core already."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")


def serve(*descriptors: int) -> None:
    """The whole life of a worker process: encodes what comes in on some lines, until the other end is closed.

    Settings come first, on the first line, which is answered when all is ready; then blocks on any of them, each
    answered on its own line.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent sees to the end
    use_one_core()
    lines = [Connection(descriptor) for descriptor in descriptors]
    try:
        settings = lines[0].recv()
        try:
            encoder = Encoder(settings)
        except ValueError:  # the parent makes one too, and says what is wrong with it
            return
        lines[0].send("ready")
        while True:
            for line in wait(lines):
                line.send(encoder.encode(line.recv()))
    except (EOFError, ConnectionError):
        return
