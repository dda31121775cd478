"""Token files: PREFIX.bin holds the tokens back to back, PREFIX.idx says where sequences and documents begin.

The bytes are those of Megatron's indexed datasets, so corpora move freely between the two. A third file,
PREFIX.json, is written beside them and tells which vocabulary the tokens belong to; files without it are read too.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, length of the document index
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # codes of integers; 6 and 7 are floats
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
CHUNK = 1 << 20  # elements copied at once where a whole index would be too much memory
MAX_LENGTH = 2**31 - 1  # lengths of sequences are stored in int32


@dataclass(frozen=True)
class Sidecar:
    """What PREFIX.json says of a token file. `fingerprint` is that of the tokenizer, or None where it is unknown."""

    vocab_size: int
    fingerprint: str | None
    documents: int
    sequences: int
    tokens: int
    bytes: int
    dtype: str


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 if and only if every id of the vocabulary fits, else int32."""
    if not 1 <= vocab_size <= 2**31:
        raise ValueError(f"a vocabulary of {vocab_size} entries: ids from 1 to 2^31 entries can be stored")
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


def check_ids(
    ids: NDArray[np.integer],
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    *,
    vocab_size: int,
    first_document: int,
) -> None:
    """A look at each value before it is cast; for the arguments see IndexedWriter.add_documents.

    ValueError with the number of the document, counted from `first_document`: an id outside the vocabulary, or a
    sequence too long to be stored.
    """
    sequence = wrong = None
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        token = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        sequence = int(np.searchsorted(np.cumsum(lengths), token, "right"))
        wrong = f"id {ids[token]} is not below the vocabulary, {vocab_size}"
    elif len(lengths) and lengths.max() > MAX_LENGTH:
        sequence = int(lengths.argmax())
        wrong = f"a sequence of {lengths.max()} tokens, at most are {MAX_LENGTH}"
    if sequence is not None:
        document = first_document + int(np.searchsorted(np.cumsum(counts), sequence, "right"))
        raise ValueError(f"document {document}: {wrong}")


class IndexedReader:
    """A token file, read only. `len` is the number of sequences; nothing is read as a whole, whatever the size.

    lengths         int32 [sequences], tokens of each
    offsets         int64 [sequences], bytes before each in the .bin file
    document_index  int64 [documents + 1], the first sequence of each document, and at last the number of sequences
    tokens          [num_tokens], the whole .bin file as one memory map

    `read` may be called from many threads. `flag` is what named the prefix, for messages. Raises ValueError for a
    missing or damaged file.
    """

    def __init__(self, prefix: str | os.PathLike, *, flag: str = "--data-path"):
        self.prefix, self.flag = os.fspath(prefix), flag
        for suffix in (".idx", ".bin"):
            if not os.path.isfile(self.prefix + suffix):
                hint = " (give the prefix alone)" if self.prefix.endswith((".bin", ".idx")) else ""
                raise ValueError(f"{flag} {self.prefix}: there is no file {self.prefix}{suffix}{hint}")
        self._read_index(self.prefix + ".idx")
        self._file = open(self.prefix + ".bin", "rb", buffering=0)
        self._check_data(os.fstat(self._file.fileno()).st_size)
        self.sidecar = self._read_sidecar(self.prefix + ".json")
        self.tokens = np.memmap(self._file, self.dtype, "r") if self.num_tokens else np.empty(0, self.dtype)

    def _read_index(self, path: str) -> None:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path} is not an index of tokens: it does not begin with {MAGIC!r}")
        _, version, code, sequences, documents = HEADER.unpack(header)
        if version != VERSION or code not in DTYPES:
            raise ValueError(f"{path}: version {version} and dtype code {code}; known are 1 and {sorted(DTYPES)}")
        self.dtype = np.dtype(DTYPES[code])
        ends = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * documents], dtype=object).tolist()
        if size not in (ends[-1], ends[-1] + sequences):  # the optional last part is one mode byte for each sequence
            raise ValueError(f"{path} has {size} bytes; its header asks for {ends[-1]}: it is cut or damaged")
        raw = np.asarray(np.memmap(path, np.uint8, "r"))
        self.lengths = raw[ends[0] : ends[1]].view("<i4")
        self.offsets = raw[ends[1] : ends[2]].view("<i8")
        self.document_index = raw[ends[2] : ends[3]].view("<i8")
        if documents < 1 or self.document_index[0] != 0 or self.document_index[-1] != sequences:
            raise ValueError(f"{path}: the document index does not lead from 0 to {sequences}, the number of sequences")

    def _check_data(self, size: int) -> None:
        """The end of the last sequence is the size of the file, so the offsets need not be scanned."""
        end = int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self) else 0
        if size != end:
            names = f"{self.prefix}.bin has {size} bytes, {self.prefix}.idx says {end}"
            raise ValueError(f"{names}: one of them is cut, or they do not belong together")
        if size % self.dtype.itemsize or (len(self) and self.offsets[0] != 0):
            raise ValueError(f"{self.prefix}.idx: tokens of {self.dtype.itemsize} bytes do not lie back to back from 0")
        self.num_tokens = size // self.dtype.itemsize

    def _read_sidecar(self, path: str) -> Sidecar | None:
        if not os.path.isfile(path):
            return None
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            sidecar = Sidecar(**{field.name: content[field.name] for field in fields(Sidecar)})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not describe a token file ({error!r}); is it foreign?") from error
        mine = (self.num_documents, len(self), self.num_tokens, self.dtype.name)
        told = (sidecar.documents, sidecar.sequences, sidecar.tokens, sidecar.dtype)
        if mine != told:
            names = f"{path} says documents, sequences, tokens, dtype = {told}, {self.prefix}.idx says {mine}"
            raise ValueError(f"{names}; remove the first if it is old")
        return sidecar

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    def first_token(self, sequence: int) -> int:
        """Tokens before this sequence; `sequence` may be the number of sequences."""
        return int(self.offsets[sequence]) // self.dtype.itemsize if sequence < len(self) else self.num_tokens

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens start to start + count of the file, [count]. By pread, so that waiting for a disk blocks no thread."""
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.num_tokens} in {self.prefix}.bin")
        position, left, parts = start * self.dtype.itemsize, count * self.dtype.itemsize, []
        while left:
            part = os.pread(self._file.fileno(), left, position)
            if not part:
                raise ValueError(f"{self.prefix}.bin has become shorter while it was in use: no byte at {position}")
            parts.append(part)
            position, left = position + len(part), left - len(part)
        return np.frombuffer(b"".join(parts), self.dtype).astype(np.int64)

    def read_rows(self, starts: Sequence[int], count: int) -> NDArray[np.integer]:
        """`count` tokens from each of `starts` on, [len(starts), count], in the dtype of the file."""
        if len(starts) and not (0 <= min(starts) and max(starts) + count <= self.num_tokens):
            raise IndexError(f"tokens {min(starts)} to {max(starts) + count} of {self.num_tokens} in {self.prefix}.bin")
        file, width = self._file.fileno(), self.dtype.itemsize
        data = b"".join([os.pread(file, count * width, start * width) for start in starts])
        if len(data) != len(starts) * count * width:  # the file is shorter, or the read was cut: `read` finds out
            data = b"".join([self.read(start, count).astype(self.dtype).tobytes() for start in starts])
        return np.frombuffer(data, self.dtype).reshape(len(starts), count)

    def sequence(self, index: int) -> NDArray[np.int64]:
        """The tokens of one sequence, [length]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.prefix}.idx")
        return self.read(self.first_token(index), int(self.lengths[index]))

    def document(self, index: int) -> NDArray[np.int64]:
        """The tokens of one document, [length]: its sequences one after the other."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents} in {self.prefix}.idx")
        start, stop = (self.first_token(int(self.document_index[index + i])) for i in (0, 1))
        return self.read(start, stop - start)


@dataclass(frozen=True)
class Mark:
    """How far a token file has been written."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0


class IndexedWriter:
    """Writes a token file document by document, in flat memory however large it grows.

    Everything goes to files in the folder `partial` (PREFIX.PROCESS.partial unless given). `finish` gives them their
    final names, the index last, so that an interrupted run leaves nothing that looks complete. As a context manager it
    finishes after a clean block and discards after an error.

    A writer that was closed goes on where a `mark` was taken, if it is given the same folder and `resume`.

    Raises ValueError for an id outside the vocabulary: nothing is ever stored wrapped. OSError names the file.
    """

    def __init__(
        self,
        prefix: str | os.PathLike,
        *,
        vocab_size: int,
        fingerprint: str | None = None,
        partial: str | os.PathLike | None = None,
        resume: Mark | None = None,
    ):
        self.prefix = os.fspath(prefix)
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        self.dtype = token_dtype(vocab_size)
        start = resume or Mark()
        self.num_documents, self.num_sequences, self.num_tokens = start.documents, start.sequences, start.tokens
        os.makedirs(os.path.dirname(self.prefix) or ".", exist_ok=True)
        self._folder = Path(partial or f"{self.prefix}.{os.getpid()}.partial")
        self._folder.mkdir(exist_ok=True)
        sizes = {"bin": start.tokens * self.dtype.itemsize, "lengths": 4 * start.sequences, "ends": 8 * start.documents}
        self._open: dict[str, BinaryIO] = {}
        try:
            for part, size in (sizes | {"idx": 0, "json": 0}).items():
                self._open[part] = open(self._folder / part, "r+b" if resume and part in sizes else "w+b")
                if self._open[part].seek(0, os.SEEK_END) < size:
                    raise ValueError(f"{self._folder / part} has less than {size} bytes: it cannot be gone on with")
                self._open[part].truncate(size)
                self._open[part].seek(size)
        except BaseException:
            self.close()
            raise

    def add_document(self, sequences: Sequence[ArrayLike]) -> None:
        """Appends one document, given as the list of its sequences (most often one), each a list or array of ids."""
        arrays = [np.asarray(ids) for ids in sequences]
        for ids in arrays:
            if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
                what = f"{ids.dtype} {ids.shape}"
                raise ValueError(f"document {self.num_documents}: ids are a list of integers, not {what}")
        ids = np.concatenate([part for part in arrays if len(part)] or [np.empty(0, self.dtype)])
        self.add_documents(ids, [len(part) for part in arrays], [len(arrays)])

    def add_documents(self, ids: NDArray[np.integer], lengths: ArrayLike, counts: ArrayLike) -> None:
        """Appends many documents at once.

        ids      [tokens], those of all sequences, one after the other
        lengths  [sequences], tokens of each sequence
        counts   [documents], sequences of each document
        """
        lengths, counts = np.asarray(lengths, np.int64), np.asarray(counts, np.int64)
        if int(lengths.sum()) != len(ids) or int(counts.sum()) != len(lengths):
            raise ValueError(
                f"{len(ids)} ids in {len(lengths)} sequences of {int(lengths.sum())} tokens, "
                f"{len(counts)} documents of {int(counts.sum())} sequences"
            )
        check_ids(ids, lengths, counts, vocab_size=self.vocab_size, first_document=self.num_documents)
        self._write("bin", ids.astype(self.dtype).tobytes())
        self._write("lengths", lengths.astype("<i4").tobytes())
        self._write("ends", (self.num_sequences + np.cumsum(counts)).astype("<i8").tobytes())
        self.num_tokens += len(ids)
        self.num_sequences += len(lengths)
        self.num_documents += len(counts)

    def _write(self, part: str, data: bytes) -> None:
        with self._named(part):
            self._open[part].write(data)

    @contextmanager
    def _named(self, part: str) -> Iterator[None]:
        """A full disk is told with the name of the file."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._folder / part)) from error

    def _sync(self, *parts: str) -> None:
        for part in parts:
            with self._named(part):
                self._open[part].flush()
                os.fsync(self._open[part].fileno())

    def mark(self) -> Mark:
        """Brings all that was added to the disk, and tells how much it is."""
        self._sync("bin", "lengths", "ends")
        return Mark(self.num_documents, self.num_sequences, self.num_tokens)

    def finish(self) -> Sidecar:
        """Writes the index and gives all files their final names. Returns what PREFIX.json says."""
        try:
            sidecar = self.prepare()
            self.publish()
        finally:
            self.discard()
        return sidecar

    def prepare(self) -> Sidecar:
        """Writes all that is missing but for the names, so that `publish` has only to rename."""
        size = self.num_tokens * self.dtype.itemsize
        counts = (self.num_documents, self.num_sequences, self.num_tokens, size)
        sidecar = Sidecar(self.vocab_size, self.fingerprint, *counts, self.dtype.name)
        self._write_index()
        self._write("json", json.dumps(asdict(sidecar), indent=1).encode() + b"\n")
        self._sync("json", "bin", "idx")
        return sidecar

    def publish(self) -> None:
        """Gives the files their final names, the index last."""
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)  # an old index must not meet new data
        try:
            for part in ("json", "bin", "idx"):
                os.replace(self._folder / part, f"{self.prefix}.{part}")
        except BaseException:  # also a signal between two renames: better no data than half of it
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Removes the files under their final names, the index first."""
        for part in ("idx", "bin", "json"):
            Path(f"{self.prefix}.{part}").unlink(missing_ok=True)

    def _write_index(self) -> None:
        header = HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.num_sequences, self.num_documents + 1)
        self._write("idx", header)
        for lengths in self._chunks("lengths", "<i4"):
            self._write("idx", lengths.tobytes())
        end = 0
        for lengths in self._chunks("lengths", "<i4"):
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            self._write("idx", np.concatenate([[end], ends[:-1]]).astype("<i8").tobytes())
            end = int(ends[-1])
        self._write("idx", struct.pack("<q", 0))
        for ends in self._chunks("ends", "<i8"):
            self._write("idx", ends.tobytes())

    def _chunks(self, part: str, dtype: str) -> Iterator[NDArray]:
        file = self._open[part]
        file.seek(0)
        while chunk := file.read(CHUNK * np.dtype(dtype).itemsize):
            yield np.frombuffer(chunk, dtype)

    def close(self) -> None:
        """Lets go of the files and leaves them as they are."""
        for file in self._open.values():
            with suppress(OSError):  # of a full disk, which has been told before
                file.close()

    def discard(self) -> None:
        """Removes whatever is not finished."""
        self.close()
        for part in self._open:
            (self._folder / part).unlink(missing_ok=True)
        with suppress(OSError):  # what is not ours stays
            self._folder.rmdir()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()
