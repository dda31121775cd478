"""Files in the safetensors format from tensors that are made one by one, each when its turn to be written has come.

Only one of them is in memory. For tensors that are there already `tensor_file.write_file` is the faster way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from .checksum import add_bytes_, digest, new_columns
from .tensor_file import CHUNK_BYTES, DTYPE_NAMES, Written, sync_folder


@dataclass(frozen=True)
class Lazy:
    """A tensor of this dtype and shape, once it is read.

    more  of one that is too large to be read at once: `read` gives its first elements in row-major order, and these
          what follows
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    more: tuple[Callable[[], Tensor], ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_lazily(path: Path, tensors: Sequence[tuple[str, Lazy]], *, metadata: Mapping[str, str]) -> Written:
    """Write a new file and return when it is on the disk.

    Raises FileExistsError where the file is there already, OSError naming the file where it cannot be written, and
    what reading a tensor raises; then nothing of the file is left behind.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, lazy in tensors:
        start, end = end, end + lazy.nbytes
        header[name] = {"dtype": DTYPE_NAMES[lazy.dtype], "shape": list(lazy.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)              # the tensors begin at a multiple of eight bytes
    head = len(text).to_bytes(8, "little") + text
    try:
        with open(path, "xb") as out:
            try:
                sums = _write(out, _pieces(head, tensors))
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
    return Written(len(head) + end, sums)


def _pieces(head: bytes, tensors: Sequence[tuple[str, Lazy]]) -> Iterator[memoryview]:
    """The bytes of the file in order."""
    yield memoryview(head)
    for _, lazy in tensors:
        left = prod(lazy.shape)
        for read in (lazy.read, *lazy.more):
            data = None                          # let go before the next one is read
            made = read()
            assert made.dtype == lazy.dtype and (lazy.more or made.shape == lazy.shape)
            left -= made.numel()
            data = memoryview(made.contiguous().view(-1).view(torch.uint8).numpy())
            del made
            yield data
        assert left == 0


def _write(out: BinaryIO, pieces: Iterator[memoryview]) -> tuple[int, ...]:
    """Write all pieces; the checksum of each chunk of the file."""
    chunks: list[np.ndarray] = []
    at = 0
    for piece in pieces:
        while piece:
            if at % CHUNK_BYTES == 0:
                chunks.append(new_columns())
            part = piece[: CHUNK_BYTES - at % CHUNK_BYTES]
            out.write(part)
            add_bytes_(chunks[-1], np.frombuffer(part, np.uint8), at % CHUNK_BYTES)
            at, piece = at + len(part), piece[len(part) :]
    return tuple(map(digest, chunks))
