"""Token files: PREFIX.bin holds the tokens back to back, PREFIX.idx says where sequences and documents begin.

The bytes are those of Megatron's indexed datasets, so corpora move freely between the two. A third file,
PREFIX.json, is written beside them and tells which vocabulary the tokens belong to; files without it are read too.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
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


class IndexedReader:
    """A token file, read only. `len` is the number of sequences; nothing is read as a whole, whatever the size.

    lengths         int32 [sequences], tokens of each
    offsets         int64 [sequences], bytes before each in the .bin file
    document_index  int64 [documents + 1], the first sequence of each document, and at last the number of sequences
    tokens          [num_tokens], the whole .bin file as one memory map

    `read` may be called from many threads. Raises ValueError for a missing or damaged file.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = os.fspath(prefix)
        for suffix in (".idx", ".bin"):
            if not os.path.isfile(self.prefix + suffix):
                hint = " (give the prefix alone)" if self.prefix.endswith((".bin", ".idx")) else ""
                raise ValueError(f"--data-path {self.prefix}: there is no file {self.prefix}{suffix}{hint}")
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


class IndexedWriter:
    """Writes a token file document by document, in flat memory however large it grows.

    Everything goes to temporary files beside the final ones. `finish` gives them their names, the index last, so that
    an interrupted run leaves nothing that looks complete. As a context manager it finishes after a clean block and
    discards after an error. Raises ValueError for an id outside the vocabulary: nothing is ever stored wrapped.
    """

    def __init__(self, prefix: str | os.PathLike, *, vocab_size: int, fingerprint: str | None = None):
        self.prefix = os.fspath(prefix)
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        self.dtype = token_dtype(vocab_size)
        self.num_documents = self.num_sequences = self.num_tokens = 0
        os.makedirs(os.path.dirname(self.prefix) or ".", exist_ok=True)
        self._open: dict[str, BinaryIO] = {}
        for part in ("bin", "lengths", "documents", "idx", "json"):
            self._open[part] = open(f"{self.prefix}.{part}.{os.getpid()}.partial", "w+b")

    def add_document(self, sequences: Sequence[ArrayLike]) -> None:
        """Appends one document, given as the list of its sequences (most often one), each a list or array of ids."""
        arrays = [self._checked(np.asarray(ids)) for ids in sequences]
        for ids in arrays:
            self._open["bin"].write(ids.tobytes())
            self._open["lengths"].write(struct.pack("<i", len(ids)))
            self.num_tokens += len(ids)
        self.num_sequences += len(arrays)
        self.num_documents += 1
        self._open["documents"].write(struct.pack("<q", self.num_sequences))

    def _checked(self, ids: NDArray) -> NDArray:
        """`ids` in the dtype of the file, after a look at each value."""
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
            raise ValueError(f"document {self.num_documents}: ids are a list of integers, not {ids.dtype} {ids.shape}")
        if len(ids) > MAX_LENGTH:
            raise ValueError(
                f"document {self.num_documents}: a sequence of {len(ids)} tokens, at most are {MAX_LENGTH}"
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise ValueError(f"document {self.num_documents}: id {bad} is not below the vocabulary, {self.vocab_size}")
        return ids.astype(self.dtype)

    def finish(self) -> Sidecar:
        """Writes the index and gives all files their final names. Returns what PREFIX.json says."""
        size = self.num_tokens * self.dtype.itemsize
        counts = (self.num_documents, self.num_sequences, self.num_tokens, size)
        sidecar = Sidecar(self.vocab_size, self.fingerprint, *counts, self.dtype.name)
        try:
            self._write_index(self._open["idx"])
            self._open["json"].write(json.dumps(asdict(sidecar), indent=1).encode() + b"\n")
            for part in ("json", "bin", "idx"):
                self._open[part].flush()
                os.fsync(self._open[part].fileno())
            self._publish()
        finally:
            self.discard()
        return sidecar

    def _publish(self) -> None:
        final = {part: Path(f"{self.prefix}.{part}") for part in ("json", "bin", "idx")}
        final["idx"].unlink(missing_ok=True)  # an old index must not meet new data
        try:
            for part, path in final.items():
                os.replace(self._open[part].name, path)
        except BaseException:  # also a signal between two renames: better no data than half of it
            for path in final.values():
                path.unlink(missing_ok=True)
            raise

    def _write_index(self, file: BinaryIO) -> None:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.num_sequences, self.num_documents + 1))
        for lengths in self._chunks("lengths", "<i4"):
            file.write(lengths.tobytes())
        end = 0
        for lengths in self._chunks("lengths", "<i4"):
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            file.write(np.concatenate([[end], ends[:-1]]).astype("<i8").tobytes())
            end = int(ends[-1])
        file.write(struct.pack("<q", 0))
        for documents in self._chunks("documents", "<i8"):
            file.write(documents.tobytes())

    def _chunks(self, part: str, dtype: str) -> Iterator[NDArray]:
        file = self._open[part]
        file.seek(0)
        while chunk := file.read(CHUNK * np.dtype(dtype).itemsize):
            yield np.frombuffer(chunk, dtype)

    def discard(self) -> None:
        """Removes whatever is not finished."""
        for file in self._open.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()
