"""Files in the safetensors format: written and read in place, by two threads where that helps, with checksums.

The format is eight bytes with the length of a header, a JSON header, and the tensors' raw bytes as they lie; any
safetensors library reads it. There is no pickle: reading a file executes nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .checksum import BLOCK_BYTES, add_bytes_, digest, new_columns

CHUNK_BYTES = 16 * 2**20           # one checksum for each
THREADS = 2                        # of one process, that read: one alone does not fill a memory channel
ALIGN = 64                         # bytes: where the first tensor begins in a file
MAX_HEADER_BYTES = 100_000_000     # the limit of the safetensors library
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Integers as wide as an element: values are moved as bits, since numpy has no bfloat16.
BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
# Bits of infinity; all above them, but for the sign, are not numbers.
INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F80 << 16, torch.float64: 0x7FF0 << 48}


@dataclass(frozen=True)
class Written:
    """What was written: the size of the file and the checksum of each of its 16 MiB chunks."""

    bytes: int
    sums: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a file; `offset` counts bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def nothing() -> None:
    """What is done between chunks where nothing is asked."""


def write_file(
    path: Path, tensors: Sequence[tuple[str, Tensor]], *, metadata: Mapping[str, str],
    finite: Collection[str] = (), between: Callable[[], None] = nothing,
) -> Written:
    """Write a new file and return when it is on the disk.

    Tensors go out as they lie, without a copy (from a device: 16 MiB at a time). `between` is called before each
    chunk and may raise. Raises FileExistsError where the file is there already, OSError naming the file where it
    cannot be written, and ValueError where a tensor named in `finite` holds anything but finite numbers; then
    nothing of the file is left behind.
    """
    text, pieces, size = _plan(tensors, metadata, finite)
    pieces.insert(0, (0, torch.frombuffer(text, dtype=torch.uint8), ""))
    # A file takes one write at a time: only copies from a device gain from a second thread.
    threads = THREADS if any(tensor.device.type != "cpu" for _, tensor in tensors) else 1

    def write_chunk(chunk: int) -> int:
        between()
        return _write_chunk(out, chunk, pieces)

    try:
        out = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            with ThreadPoolExecutor(threads) as pool:
                sums = tuple(pool.map(write_chunk, range(-(-size // CHUNK_BYTES))))
            os.fsync(out)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(out)
        sync_folder(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from error
    return Written(size, sums)


def _plan(
    tensors: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str], finite: Collection[str]
) -> tuple[bytearray, list[tuple[int, Tensor, str]], int]:
    """The file's beginning; (first byte, flat tensor, its name where it must be finite) of each tensor; all bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    text = len(text).to_bytes(8, "little") + text
    pieces, at = [], len(text)
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        pieces.append((at, flat, name if name in finite else ""))
        at += flat.numel() * flat.element_size()
    return bytearray(text), pieces, at


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a new file is lost in a crash until its folder is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_chunk(out: int, chunk: int, pieces: Sequence[tuple[int, Tensor, str]]) -> int:
    """Write the part of the pieces that falls into a chunk; its checksum."""
    columns = new_columns()
    low, high = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
    for at, flat, name in pieces:
        width = flat.element_size()
        first, last = max(at, low), min(at + flat.numel() * width, high)
        if first >= last:
            continue
        start = (first - at) // width           # of the elements that meet the chunk, cut ones too
        data = flat[start : -(-(last - at) // width)].cpu().view(torch.uint8).numpy()
        values, base = data.view(BITS[width]), at + start * width
        infinity = INFINITY.get(flat.dtype) if name else None
        for block_first, block_last in _blocks(first, last):
            block = data[block_first - base : block_last - base]
            _pwrite(out, block, block_first)
            add_bytes_(columns, block, block_first - low)
            if infinity is not None:
                whole = values[(block_first - base) // width : -(-(block_last - base) // width)]
                if not _is_finite(whole, infinity):
                    raise ValueError(f"{name}: holds values that are not finite numbers: nothing is saved")
    return digest(columns)


def _is_finite(values: np.ndarray, infinity: int) -> bool:
    """Whether all elements are numbers, told from their bits: quick while they are in the cache."""
    unsigned = values.view(f"u{values.itemsize}")
    return int(values.max()) < infinity and int(unsigned.max()) < infinity + (1 << 8 * values.itemsize - 1)


def _chunks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Bytes [first, last) of a file, cut where chunks are cut."""
    while first < last:
        end = min((first // CHUNK_BYTES + 1) * CHUNK_BYTES, last)
        yield first, end
        first = end


def _blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Bytes [first, last) of one chunk in blocks of whole rows of sums."""
    chunk = first // CHUNK_BYTES * CHUNK_BYTES
    while first < last:
        end = min(chunk + ((first - chunk) // BLOCK_BYTES + 1) * BLOCK_BYTES, last)
        yield first, end
        first = end


def _pwrite(out: int, data: np.ndarray, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(out, rest, at)
        rest, at = rest[written:], at + written


@dataclass
class _Summed:
    """What is known of a chunk: the sums of the byte ranges that were read."""

    columns: np.ndarray = field(default_factory=new_columns)
    ranges: list[tuple[int, int]] = field(default_factory=list)


class TensorFile:
    """Read access to one file. Bytes are verified chunk by chunk, each once, where they are first touched.

    `bits` is a view of a memory map, `read_` fills memory of the caller's; several threads may call it.
    """

    def __init__(self, path: Path, *, expected: Written | None = None):
        """Opens and checks the header. `expected` is what the writer said of the file: without it nothing is verified.

        Raises FileNotFoundError, or ValueError with one line that names the file and what is wrong.
        """
        self.path = path
        self._expected = expected
        self._verified: set[int] = set()
        self._summed: dict[int, _Summed] = {}
        self._lock = threading.Lock()
        self._files = [open(path, "rb", buffering=0)]
        handle = self._files[0].fileno()
        size = os.fstat(handle).st_size
        if size < 8:
            raise ValueError(f"{path}: {size} bytes are too few for a tensor file")
        self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        self._bytes = memoryview(self._map)
        if expected is not None and size != expected.bytes:
            raise ValueError(f"{path}: has {size} bytes instead of {expected.bytes}: truncated or replaced")
        data_at = 8 + int.from_bytes(self._bytes[:8], "little")
        if data_at > min(size, 8 + MAX_HEADER_BYTES):
            raise ValueError(f"{path}: not a tensor file: its header would be {data_at - 8} bytes long")
        self._data_at = data_at
        for low, high in _chunks(0, data_at):
            columns = self._claim(low, high)
            if columns is not None:
                add_bytes_(columns, np.frombuffer(self._bytes[low:high], np.uint8), 0)
                self._add(columns, low)
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
        """Elements [start, stop) of a tensor as flat integers of the same width: a verified view, read only."""
        first, last = self._place(name, start, stop)
        self.verify(first, last)
        return np.frombuffer(self._bytes[first:last], BITS[self.entries[name].dtype.itemsize])

    def read_(self, name: str, start: int, stop: int, out: np.ndarray, reader: int = 0) -> tuple[int, int]:
        """Read elements [start, stop) into `out` [stop - start], contiguous, of a width as stored.

        They count only when `verify` has passed the bytes returned. Reading the neighbours first, by any thread,
        makes that cheap: each byte is summed when it is read. Threads that read in different places are `reader` 0,
        1, ...: the system reads ahead for each.
        """
        first, last = self._place(name, start, stop)
        target = out.view(np.uint8)
        assert len(target) == last - first
        source = self._descriptor(reader)
        for low, high in _chunks(first, last):
            columns = self._claim(low, high)
            for at, end in _blocks(low, high):
                block = target[at - first : end - first]
                self._pread(source, block, at)
                if columns is not None:
                    add_bytes_(columns, block, at % CHUNK_BYTES)
            if columns is not None:
                self._add(columns, low)
        return first, last

    def verify(self, first: int, last: int) -> None:
        """Compare the checksums of the chunks that hold bytes [first, last) and of the header's, each once.

        Raises ValueError where one differs.
        """
        if self._expected is None:
            return
        header = range(-(-self._data_at // CHUNK_BYTES))
        for chunk in {*header, *range(first // CHUNK_BYTES, -(-last // CHUNK_BYTES))} - self._verified:
            low, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self._expected.bytes)
            known = self._summed.setdefault(chunk, _Summed())
            at = low
            for start, stop in [*sorted(known.ranges), (end, end)]:
                for block_first, block_last in _blocks(at, start):
                    add_bytes_(known.columns, np.frombuffer(self._bytes[block_first:block_last], np.uint8),
                               block_first - low)
                at = stop
            del self._summed[chunk]
            if chunk >= len(self._expected.sums) or digest(known.columns) != self._expected.sums[chunk]:
                raise ValueError(f"{self.path}: damaged: wrong checksum in bytes from {low}")
            self._verified.add(chunk)

    def _place(self, name: str, start: int, stop: int | None) -> tuple[int, int]:
        """The bytes of the file that hold elements [start, stop)."""
        entry = self.entries[name]
        stop = entry.numel if stop is None else stop
        return entry.offset + start * entry.dtype.itemsize, entry.offset + stop * entry.dtype.itemsize

    def _descriptor(self, reader: int) -> int:
        with self._lock:
            while len(self._files) <= reader:
                self._files.append(open(self.path, "rb", buffering=0))
        return self._files[reader].fileno()

    def _pread(self, source: int, block: np.ndarray, at: int) -> None:
        rest = memoryview(block)
        while rest:
            got = os.preadv(source, [rest], at)
            if not got:
                raise ValueError(f"{self.path}: ends at byte {at} while it is read")
            rest, at = rest[got:], at + got

    def _claim(self, first: int, last: int) -> np.ndarray | None:
        """Sums for a part of a chunk that the caller is about to read; None where they are known already."""
        chunk = first // CHUNK_BYTES
        if self._expected is None or chunk in self._verified:
            return None
        with self._lock:
            known = self._summed.setdefault(chunk, _Summed())
            if any(start < last and first < stop for start, stop in known.ranges):
                return None
            known.ranges.append((first, last))
        return new_columns()

    def _add(self, columns: np.ndarray, first: int) -> None:
        """Add the sums of a part that was claimed."""
        with self._lock:
            self._summed[first // CHUNK_BYTES].columns += columns
