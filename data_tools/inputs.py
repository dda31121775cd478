"""The files that a command line names, and their content: plain, gzip, bzip2 and Zstandard files read alike.

A file is read in blocks of whole lines, each with its place, so that a run can go on from any of them.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

try:
    import zstandard

    ZSTD_ERRORS: tuple[type[Exception], ...] = (zstandard.ZstdError,)
except ImportError:  # an extra: only who reads .zst files needs it
    zstandard, ZSTD_ERRORS = None, ()

BLOCK_BYTES = 1 << 18  # of text that a worker gets at once: small, so that all are busy to the end
COMPRESSED = (".gz", ".bz2", ".zst")
FRAME_BYTES = 1 << 14  # compressed bytes taken at once, for they may grow a thousandfold
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Content(Protocol):
    """Decompressed bytes."""

    def read(self, size: int) -> bytes: ...


@dataclass(frozen=True)
class Position:
    """A place between two documents: files before it, then lines and (decompressed) bytes of the next file before it.

    `disk_bytes` are the bytes on disk before it in all files, as far as the reader can tell.
    """

    file: int = 0
    line: int = 0
    offset: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True)
class Lines:
    """Some whole lines of one file that follow each other; `first` is the number of the first, from 1."""

    path: str
    first: int
    content: bytes

    @property
    def size(self) -> int:
        return len(self.content)


@dataclass(frozen=True)
class Files:
    """Some files, each a document; `size` are their bytes on disk."""

    paths: tuple[str, ...]
    size: int


def expand(patterns: Sequence[str]) -> list[str]:
    """The files that the names and glob patterns stand for, in the order given, each pattern sorted."""
    files = []
    for pattern in patterns:
        if os.path.isdir(pattern):
            inside = os.path.join(pattern, "*")
            raise ValueError(f"--input {pattern} is a directory: name files, or a pattern such as '{inside}'")
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if not os.path.isdir(path)]
        if not found:
            raise ValueError(f"--input {pattern}: there is no such file")
        files += found
    return files


@contextmanager
def opened(path: str) -> Iterator[tuple[Content, BinaryIO]]:
    """The content of a file, decompressed as its name says, and the file on disk. ValueError: what is wrong with it."""
    try:
        with open(path, "rb") as file:
            yield _content(path, file), file
    except (EOFError, zlib.error, *ZSTD_ERRORS) as error:
        raise ValueError(f"{path} is cut or damaged: {error}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _content(path: str, file: BinaryIO) -> Content:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    if path.endswith(".bz2"):
        return bz2.BZ2File(file)
    if path.endswith(".zst"):
        if zstandard is None:
            raise ValueError(f"{path}: .zst files need the package zstandard: pip install zstandard")
        return _Zstandard(file)
    return file


class _Zstandard:
    """The content of all frames of a file. Unlike the library's own reader it notices that the last one is cut."""

    def __init__(self, file: BinaryIO):
        self._file, self._frame = file, None
        self._ahead, self._content = b"", b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer only at the end."""
        parts, count = [self._content], len(self._content)
        while count < size and (part := self._some()):
            parts.append(part)
            count += len(part)
        content = b"".join(parts)
        self._content = content[size:]
        return content[:size]

    def _some(self) -> bytes:
        """What a little of the file decompresses to, at least a byte but at the end."""
        while compressed := self._ahead or self._file.read(FRAME_BYTES):
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            part, self._ahead = self._frame.decompress(compressed), b""
            if self._frame.eof:
                self._ahead, self._frame = self._frame.unused_data, None
            if part:
                return part
        if self._frame is not None:
            raise EOFError("the file ends inside a frame")
        return b""


def whole(path: str) -> bytes:
    """All of a file, without a byte order mark."""
    with opened(path) as (content, _):
        return b"".join(iter(lambda: content.read(BLOCK_BYTES), b"")).removeprefix(BYTE_ORDER_MARK)


def numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Each line of a file without its end, with its number, from 1, and without a byte order mark before the first."""
    with opened(path) as (content, _):
        number = 1
        for block in _whole_lines(content):
            for line in split_lines(block, number):
                yield number, line
                number += 1


def split_lines(block: bytes, first: int) -> list[bytes]:
    """The lines of a block without their ends; `first` is the number of the first, which may have a byte order mark."""
    if first == 1:
        block = block.removeprefix(BYTE_ORDER_MARK)
    return block.removesuffix(b"\n").split(b"\n")


def line_blocks(files: Sequence[str], start: Position) -> Iterator[tuple[Lines, Position]]:
    """All lines from `start` on in blocks, each with the place after it. Only a longer line makes a block grow."""
    before = sum(map(os.path.getsize, files[: start.file]))
    for index in range(start.file, len(files)):
        path = files[index]
        line, offset = (start.line, start.offset) if index == start.file else (0, 0)
        with opened(path) as (content, file):
            _skip(content, offset)
            for block in _whole_lines(content):
                lines = Lines(path, line + 1, block)
                line += block.count(b"\n") + (not block.endswith(b"\n"))
                offset += len(block)
                yield lines, Position(index, line, offset, before + _place(file))
            before += os.path.getsize(path)


def _place(file: BinaryIO) -> int:
    return file.tell() if file.seekable() else 0


def _skip(content: Content, count: int) -> None:
    while count > 0:
        skipped = len(content.read(min(count, BLOCK_BYTES)))
        if not skipped:
            raise EOFError(f"{count} bytes fewer than when the run was interrupted")
        count -= skipped


def _whole_lines(content: Content) -> Iterator[bytes]:
    begun: list[bytes] = []  # of a line whose end is not read yet
    while part := content.read(BLOCK_BYTES):
        end = part.rfind(b"\n") + 1
        if end:
            yield b"".join([*begun, part[:end]])
            begun = []
        if end < len(part):
            begun.append(part[end:])
    if begun:
        yield b"".join(begun)


def file_blocks(files: Sequence[str], start: Position) -> Iterator[tuple[Files, Position]]:
    """All files from `start` on, as many together as make a block, each with the place after it."""
    taken: list[str] = []
    size, disk_bytes = 0, start.disk_bytes
    for index in range(start.file, len(files)):
        taken.append(files[index])
        size += os.path.getsize(files[index])
        if size >= BLOCK_BYTES or index + 1 == len(files):
            disk_bytes += size
            yield Files(tuple(taken), size), Position(index + 1, disk_bytes=disk_bytes)
            taken, size = [], 0
