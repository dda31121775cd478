"""Files in the safetensors format: written as a stream, read through a memory map, with checksums.

The format is eight bytes with the length of a header, a JSON header, and the tensors' raw bytes as they lie; any
safetensors library reads it. There is no pickle: reading a file executes nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20           # one checksum for each
MAX_HEADER_BYTES = 100_000_000     # the limit of the safetensors library
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Integers as wide as an element: values are moved as bits, since numpy has no bfloat16.
BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Written:
    """What was written: the size of the file and the crc32 of each of its 16 MiB chunks."""

    bytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a file; `offset` counts bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def write_file(path: Path, tensors: Sequence[tuple[str, Tensor]], *, metadata: Mapping[str, str]) -> Written:
    """Write a new file and return when it is on the disk.

    Tensors go out one after the other without a copy of the whole (from a device: 16 MiB at a time). Raises
    FileExistsError where the file is there already, and OSError naming the file where it cannot be written;
    then nothing of it is left behind.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)              # the tensors begin at a multiple of eight bytes
    try:
        with open(path, "xb", buffering=2**20) as out:
            try:
                chunks = _write_stream(out, _pieces(len(text).to_bytes(8, "little") + text, tensors))
                out.flush()
                os.fsync(out.fileno())
            except BaseException:
                os.unlink(path)
                raise
        sync_folder(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from error
    return Written(8 + len(text) + end, tuple(chunks))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a new file is lost in a crash until its folder is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pieces(head: bytes, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[memoryview]:
    """The bytes of the file in order, a tensor in pieces of at most one chunk."""
    yield memoryview(head)
    for _, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        step = CHUNK_BYTES // flat.element_size()
        for at in range(0, flat.numel(), step):
            yield memoryview(flat[at : at + step].cpu().view(torch.uint8).numpy())


def _write_stream(out: BinaryIO, pieces: Iterator[memoryview]) -> list[int]:
    """Write all pieces; return the checksum of each 16 MiB chunk of the stream."""
    chunks: list[int] = []
    filled = CHUNK_BYTES
    for piece in pieces:
        out.write(piece)
        at = 0
        while at < len(piece):
            if filled == CHUNK_BYTES:
                chunks.append(0)
                filled = 0
            part = piece[at : at + CHUNK_BYTES - filled]
            chunks[-1] = zlib.crc32(part, chunks[-1])
            filled += len(part)
            at += len(part)
    return chunks


class TensorFile:
    """Read access to one file. Bytes are verified, chunk by chunk, where they are first touched."""

    def __init__(self, path: Path, *, expected: Written | None = None):
        """Opens and checks the header. `expected` is what the writer said of the file: without it nothing is verified.

        Raises FileNotFoundError, or ValueError with one line that names the file and what is wrong.
        """
        self.path = path
        self._expected = expected
        self._verified: set[int] = set()
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ValueError(f"{path}: {size} bytes are too few for a tensor file")
            self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if expected is not None and size != expected.bytes:
            raise ValueError(f"{path}: has {size} bytes instead of {expected.bytes}: truncated or replaced")
        self._verify(0, 8)
        data_at = 8 + int.from_bytes(self._bytes[:8], "little")
        if data_at > min(size, 8 + MAX_HEADER_BYTES):
            raise ValueError(f"{path}: not a tensor file: its header would be {data_at - 8} bytes long")
        self._verify(8, data_at)
        self.entries, self.metadata = self._parse(data_at, size)

    def _parse(self, data_at: int, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
        try:
            header = json.loads(bytes(self._bytes[8:data_at]))
            metadata = header.pop("__metadata__", {})
            entries = {}
            for name, fields in header.items():
                start, end = fields["data_offsets"]
                entry = Entry(DTYPES[fields["dtype"]], tuple(fields["shape"]), data_at + start)
                if not 0 <= start <= end <= size - data_at or end - start != entry.numel * entry.dtype.itemsize:
                    raise ValueError(f"{name} has bytes {start} to {end}, shape {entry.shape}")
                entries[name] = entry
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path}: not a tensor file: {error}") from error
        return entries, metadata

    def bits(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Elements [start, stop) of a tensor taken as flat, as integers of the same width: a view, read only."""
        entry = self.entries[name]
        width = entry.dtype.itemsize
        stop = entry.numel if stop is None else stop
        first, last = entry.offset + start * width, entry.offset + stop * width
        self._verify(first, last)
        return np.frombuffer(self._bytes[first:last], BITS[width])

    def _verify(self, first: int, last: int) -> None:
        """Compare the checksums of the chunks that hold bytes [first, last), each once."""
        if self._expected is None:
            return
        for chunk in range(first // CHUNK_BYTES, -(-last // CHUNK_BYTES)):
            if chunk in self._verified:
                continue
            found = zlib.crc32(self._bytes[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])
            if chunk >= len(self._expected.crc32) or found != self._expected.crc32[chunk]:
                raise ValueError(f"{self.path}: damaged: wrong checksum in bytes from {chunk * CHUNK_BYTES}")
            self._verified.add(chunk)
