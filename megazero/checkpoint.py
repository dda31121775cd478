"""Checkpoints that any layout reads: files of each rank, and an index from which all places are arithmetic.

    root/latest_checkpointed_iteration.txt              a hint for people; the newest complete folder counts
    root/iter_0000100/index.json                        its creation is the commit: without it there is no checkpoint
    root/iter_0000100/0000/rank_000003-1f2e3d4c.safetensors   what rank 3 owns: flat ranges of its tensor shards
    root/iter_0000100/0000/rank_000003-1f2e3d4c-2.safetensors   the rest, where that is too much for one file

A rank owns one slice of every bucket of its pipeline rank. A bucket is the concatenation of the local shards of
its parameters; the index says how buckets are made, and every box of every tensor follows from that.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .checkpoint_index import (
    FORMAT,
    INDEX,
    BucketLayout,
    FilePart,
    Index,
    Range,
    StageLayout,
    TensorEntry,
    check_cover,
    files_of_ranks,
    index_to_text,
    owned_ranges,
    read_index,
    shard_ranks,
)
from .parallel.shard import Box, ShardSpec, flat_to_boxes, is_cut_by_tensor, owned_boxes
from .parallel.topology import Topology
from .tensor_file import BITS, CHUNK_BYTES, DTYPE_NAMES, DTYPES, THREADS, TensorFile, nothing, sync_folder, write_file

TRACKER = "latest_checkpointed_iteration.txt"
RANKS_PER_FOLDER = 256
FILE_BYTES = 16 * 2**30         # as much as a rank's whole state mostly is; objects of a store may have five terabytes
FILE_AT_ONCE_BYTES = 2**28      # a file that is written beside another one has at least so many
OPEN_FILES = 128                # of one reader; a process may have a thousand
JOBS = 1024                     # reads that wait for each other, so that a chunk is summed as it is read
VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def folder_of(root: Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def new_save_id() -> str:
    """A word that no other save has; drawn on one rank and given to all."""
    return secrets.token_hex(4)


@dataclass(frozen=True)
class Writing:
    """How a rank's files are written.

    file_bytes  a new file begins where the next range of a tensor would go beyond; a range is never cut
    at_once     files that are written at a time, since a file takes one write at a time: larger states have so many
    between     is called every 16 MiB, and may raise to give up
    """

    file_bytes: int = FILE_BYTES
    at_once: int = 1
    between: Callable[[], None] = nothing


def write_rank(
    folder: Path, rank: int, slices: Mapping[str, Sequence[Tensor]], *,
    topology: Topology, stage: StageLayout, save_id: str,
) -> FilePart:
    """`write_files` into one file."""
    how = Writing(file_bytes=2**63)
    (part,) = write_files(folder, rank, slices, topology=topology, stage=stage, save_id=save_id, how=how)
    return part


def write_files(
    folder: Path, rank: int, slices: Mapping[str, Sequence[Tensor]], *,
    topology: Topology, stage: StageLayout, save_id: str, how: Writing,
) -> list[FilePart]:
    """Write and sync what `rank` owns: `slices[kind][bucket]` [share] is its slice of each bucket.

    The folder is made if it is not there. An earlier save of the same iteration is not touched. Raises OSError where
    it cannot be written and ValueError where a weight is not a finite number; then none of the files is left behind.
    """
    files = _files_of(rank, slices, topology=topology, stage=stage, how=how)
    metadata = {"format": FORMAT, "rank": str(rank), "save": save_id}
    paths = [
        f"{rank // RANKS_PER_FOLDER:04d}/rank_{rank:06d}-{save_id}{f'-{number}' if number > 1 else ''}.safetensors"
        for number in range(1, len(files) + 1)
    ]
    (folder / paths[0]).parent.mkdir(parents=True, exist_ok=True)
    layout, failed = stage.checksum(), threading.Event()

    def between() -> None:
        if failed.is_set():
            raise _Abandoned
        how.between()

    def write(path: str, tensors: list[tuple[str, Tensor]]) -> FilePart:
        finite = {key for key, _ in tensors if key.startswith("weight/")}
        try:
            written = write_file(folder / path, tensors, metadata=metadata, finite=finite, between=between)
        except BaseException:
            failed.set()
            raise
        return FilePart(rank, path, written, layout, len(files))

    with ThreadPoolExecutor(how.at_once) as pool:
        parts = [pool.submit(write, path, tensors) for path, tensors in zip(paths, files, strict=True)]
    errors = [error for error in (part.exception() for part in parts) if error is not None]
    if errors:
        for path, part in zip(paths, parts, strict=True):
            if part.exception() is None:            # what fails leaves nothing itself, nor touches what was there
                (folder / path).unlink(missing_ok=True)
        raise next(error for error in errors if not isinstance(error, _Abandoned))
    return [part.result() for part in parts]


class _Abandoned(Exception):
    """Another file of this rank could not be written."""


def _files_of(
    rank: int, slices: Mapping[str, Sequence[Tensor]], *, topology: Topology, stage: StageLayout, how: Writing
) -> list[list[tuple[str, Tensor]]]:
    """The tensors of each file of a rank, by their keys."""
    kinds = dict.fromkeys(kind for entry in stage.tensors.values() for kind in entry.dtypes)
    share = sum(data.nbytes for kind in kinds for data in slices[kind]) // how.at_once
    enough = min(max(share, FILE_AT_ONCE_BYTES), how.file_bytes)
    files: list[list[tuple[str, Tensor]]] = [[]]
    held = 0
    for kind in kinds:
        for r in owned_ranges(stage, topology, rank):
            dtype = stage.tensors[r.name].dtypes.get(kind)
            if dtype is not None:
                data = slices[kind][r.bucket]
                assert data.shape == (stage.buckets[r.bucket].share,) and DTYPE_NAMES[data.dtype] == dtype
                data = data[r.at : r.at + r.stop - r.start]
                if files[-1] and (held >= enough or held + data.nbytes > how.file_bytes):
                    files.append([])
                    held = 0
                files[-1].append((r.key(kind), data))
                held += data.nbytes
    return files


def commit(folder: Path, parts: Sequence[FilePart], index: Index) -> None:
    """Publish the save: called on one rank when every rank has reported its files.

    Raises ValueError where the parts are not all there, or do not hold each element of each tensor exactly once.
    Then the folder stays without this save, and an earlier save of the same iteration stays valid.
    """
    check_cover(index)
    checksums = [stage.checksum() for stage in index.stages]
    try:
        files_of_ranks(parts, index.topology.world)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; not committed") from error
    for part in parts:
        if part.layout != checksums[index.topology.coord(part.rank).pipeline]:
            raise ValueError(f"{folder}: rank {part.rank} wrote another layout than the index names; not committed")
        try:
            size = (folder / part.path).stat().st_size
        except FileNotFoundError:
            size = -1
        if size != part.written.bytes:
            raise ValueError(f"{folder / part.path}: not there as written (is the folder shared by all ranks?)")
    _replace(folder / INDEX, index_to_text(index, parts))
    sync_folder(folder.parent)
    _remove_unnamed(folder, {part.path for part in parts})


def finish(root: Path, iteration: int) -> None:
    """Write the tracker: a hint for people and other tools, never needed to load."""
    _replace(Path(root) / TRACKER, f"{iteration}\n")


def iterations(root: Path) -> Iterator[int]:
    """The iterations that have a folder, complete or not."""
    for folder in Path(root).glob("iter_*") if Path(root).is_dir() else ():
        digits = folder.name.removeprefix("iter_")
        if digits.isdecimal() and folder.is_dir() and folder == folder_of(root, int(digits)):
            yield int(digits)


def latest(root: Path, *, say: Callable[[str], None] = print) -> int | None:
    """The newest iteration that has a complete save, or None. Newer folders that are passed over are told to `say`."""
    for iteration in sorted(iterations(root), reverse=True):
        folder = folder_of(root, iteration)
        try:
            read_index(folder)
        except FileNotFoundError:
            say(f"{folder}: has no {INDEX}: a save that was not completed; ignored")
        except (ValueError, OSError) as error:
            say(f"{error}; ignored")
        else:
            return iteration
    return None


@dataclass(frozen=True)
class Wanted:
    """Flat elements [start, stop) of a shard; `out` [stop - start], of any dtype and device, is filled with them."""

    name: str
    kind: str
    spec: ShardSpec
    start: int
    stop: int
    out: Tensor


@dataclass(frozen=True)
class _Job:
    """Elements of a stored range that go to one place as they lie."""

    file: TensorFile
    key: str
    start: int
    out: np.ndarray

    @property
    def place(self) -> tuple[str, int]:
        """By which jobs are done in the order of the bytes."""
        return str(self.file.path), self.file.entries[self.key].offset + self.start * self.out.itemsize

    def cut(self) -> Iterator[_Job]:
        """Parts that threads may share."""
        step = CHUNK_BYTES // self.out.itemsize
        for at in range(0, len(self.out), step):
            yield _Job(self.file, self.key, self.start + at, self.out[at : at + step])

    def run(self, reader: int) -> tuple[TensorFile, int, int]:
        """The bytes of the file that are to be verified now."""
        return self.file, *self.file.read_(self.key, self.start, self.start + len(self.out), self.out, reader)


@dataclass(frozen=True)
class _Place:
    """Where a tensor is stored: a bucket of a pipeline rank, and where the tensor's shard begins in it."""

    stage: int
    bucket: BucketLayout
    at: int


class Reader:
    """Random access to a checkpoint by name, kind and box, in any layout; needs no process group.

    `.tensors` has a TensorEntry by name, `.config`, `.progress` and `.topology` are the writer's. Opens only the
    files that meet what is read, and verifies only the 16 MiB chunks that it touches.
    """

    def __init__(self, folder: Path, *, verify: bool = True):
        self.folder = Path(folder)
        index, self._parts = read_index(self.folder)
        self._verify = verify
        self._open: dict[str, TensorFile] = {}
        self.topology, self.config, self.progress = index.topology, index.config, index.progress
        self.tensors: dict[str, TensorEntry] = {}
        self._places: dict[str, _Place] = {}
        self._shards: dict[tuple[int, str, bool], list[int]] = {}
        for number, stage in enumerate(index.stages):
            for bucket in stage.buckets:
                at = 0
                for name in bucket.names:
                    entry = stage.tensors[name]
                    if name not in self.tensors:
                        self.tensors[name] = entry
                        self._places[name] = _Place(number, bucket, at)
                    at += prod(entry.spec.local_shape(self.topology))

    def read(self, name: str, kind: str, box: Box | None = None) -> Tensor:
        """The elements of `box` (None: all), in the stored dtype, [*box.shape].

        Raises ValueError with one line where the checkpoint has no such tensor, or a file is missing or damaged.
        """
        dtype = self._dtype(name, kind)
        shape = self.tensors[name].spec.shape
        box = box or Box((0,) * len(shape), shape)
        if any(at < 0 or at + n > size for at, n, size in zip(box.start, box.shape, shape, strict=True)):
            raise ValueError(f"{name}: {box} is outside of its shape {shape}")
        out = np.empty(box.shape, BITS[dtype.itemsize])
        jobs: list[_Job] = []
        self._fill_(out, name, kind, box, jobs)
        _run(jobs)
        return torch.from_numpy(out).view(dtype)

    def read_flat(
        self, name: str, kind: str, spec: ShardSpec, *, topology: Topology, rank: int, start: int, stop: int,
    ) -> Tensor:
        """Flat elements [start, stop) of the shard that `rank` of the reader's `topology` holds, padding zero.

        Returns [stop - start] in the stored dtype. Raises ValueError as `read` does, and where the shapes differ.
        """
        out = torch.empty(stop - start, dtype=self._dtype(name, kind))
        self.fill_([Wanted(name, kind, spec, start, stop, out)], topology=topology, rank=rank)
        return out

    def fill_(self, wanted: Iterable[Wanted], *, topology: Topology, rank: int) -> None:
        """As `read_flat`, of many shards at once, straight into the memory of the caller.

        What is stored as it is wanted is read by several threads without a copy, and each byte is summed once. Where
        it raises, what was to be filled holds anything.
        """
        jobs: list[_Job] = []
        for want in wanted:
            dtype, stored = self._dtype(want.name, want.kind), self.tensors[want.name].spec.shape
            if stored != want.spec.shape:
                lacks = f"has shape {list(stored)}, the model wants {list(want.spec.shape)}"
                raise ValueError(f"{self.folder}: {want.name} {lacks}")
            boxes = list(owned_boxes(want.spec, topology, rank, want.start, want.stop))
            direct = want.out.dtype == dtype and want.out.device.type == "cpu" and want.out.is_contiguous()
            out = want.out if direct else torch.empty(want.stop - want.start, dtype=dtype)
            bits = out.detach().view(VIEWS[dtype.itemsize]).numpy()
            if sum(box.numel for box in boxes) < len(bits):
                bits[:] = 0
            at = 0
            for box in boxes:
                self._fill_(bits[at : at + box.numel].reshape(box.shape), want.name, want.kind, box, jobs)
                at += box.numel
            if not direct:
                _run(jobs)
                want.out.copy_(out)
        _run(jobs)

    def _dtype(self, name: str, kind: str) -> torch.dtype:
        if name not in self.tensors:
            raise ValueError(f"{self.folder}: the checkpoint has no tensor {name}")
        if kind not in self.tensors[name].dtypes:
            raise ValueError(f"{self.folder}: the checkpoint has no {kind} of {name}")
        return DTYPES[self.tensors[name].dtypes[kind]]

    def _fill_(self, out: np.ndarray, name: str, kind: str, box: Box, jobs: list[_Job]) -> None:
        """Copy the elements of `box` into `out` [*box.shape], shard by shard and owner by owner; what lies in one
        piece on both sides is left to `jobs`."""
        place, spec = self._places[name], self.tensors[name].spec
        share = place.bucket.share
        for first_rank in self._shard_ranks(place, spec):
            shard = spec.box(self.topology, first_rank)
            hit = shard.meet(box)
            if hit is None:
                continue
            owners = self.topology.ranks_along(place.bucket.axis, first_rank)
            first, last = _span(hit.shift(tuple(-at for at in shard.start)), shard.shape)
            for owner in range((place.at + first) // share, (place.at + last) // share + 1):
                start = max(owner * share - place.at, 0)
                stop = min((owner + 1) * share - place.at, shard.numel)
                stored = Range(name, 0, start, stop, 0).key(kind)
                at = 0
                for local in flat_to_boxes(shard.shape, start, stop):
                    piece = local.shift(shard.start)
                    common = piece.meet(hit)
                    if common is not None:
                        rows, skip = _rows(piece, common)
                        file = self._file(owners[owner], stored)
                        target = out[(*common.slices(box.start), ...)]        # a view, of a scalar too
                        if common == rows and target.flags.c_contiguous:
                            jobs.append(_Job(file, stored, at + skip, target.reshape(-1)))
                        else:
                            bits = file.bits(stored, at + skip, at + skip + rows.numel)
                            target[...] = bits.reshape(rows.shape)[common.slices(rows.start)]
                        if len(jobs) >= JOBS:
                            _run(jobs)
                    at += piece.numel

    def _shard_ranks(self, place: _Place, spec: ShardSpec) -> list[int]:
        key = place.stage, place.bucket.axis, is_cut_by_tensor(spec, self.topology)
        if key not in self._shards:
            self._shards[key] = shard_ranks(self.topology, place.stage, place.bucket.axis, spec)
        return self._shards[key]

    def _file(self, rank: int, key: str) -> TensorFile:
        """The file of `rank` that holds a range."""
        for part in self._parts[rank]:
            if part.path in self._open:
                file = self._open.pop(part.path)
            else:
                file = self._opened(part)
            self._open[part.path] = file            # the last one used is the last to be closed
            if key in file.entries:
                return file
        raise ValueError(f"{self.folder / self._parts[rank][0].path}: has no {key}")

    def _opened(self, part: FilePart) -> TensorFile:
        path = self.folder / part.path
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"{path}: leads out of the checkpoint's folder")
        while len(self._open) >= OPEN_FILES:
            del self._open[next(iter(self._open))]
        try:
            return TensorFile(path, expected=part.written if self._verify else None)
        except FileNotFoundError as error:
            raise ValueError(f"{path}: missing, but the index names it") from error


def _run(jobs: list[_Job]) -> None:
    """Read, then verify what was read, and leave no job."""
    left = deque(part for job in sorted(jobs, key=lambda job: job.place) for part in job.cut())
    jobs.clear()
    done: list[tuple[TensorFile, int, int]] = []

    def take(reader: int) -> _Job | None:
        """From one end or the other, so that the system can read ahead of both."""
        try:
            return left.pop() if reader else left.popleft()
        except IndexError:
            return None

    def read(reader: int) -> None:
        try:
            while (job := take(reader)) is not None:
                done.append(job.run(reader))
        except BaseException:
            left.clear()                    # nobody goes on
            raise

    if sum(job.out.nbytes for job in left) < CHUNK_BYTES:
        read(0)
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, range(THREADS)))
    for file, first, last in done:
        file.verify(first, last)


def _span(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Flat numbers of the first and the last element of `box` in a row-major tensor of `shape`."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
    return first, first + sum((n - 1) * stride for n, stride in zip(box.shape, strides, strict=True))


def _rows(piece: Box, common: Box) -> tuple[Box, int]:
    """The contiguous rows of `piece` that hold `common`, and how many elements of `piece` stand before them."""
    dim = next((dim for dim, n in enumerate(piece.shape) if n > 1), None)
    if dim is None:
        return piece, 0
    start = piece.start[:dim] + common.start[dim : dim + 1] + piece.start[dim + 1 :]
    shape = piece.shape[:dim] + common.shape[dim : dim + 1] + piece.shape[dim + 1 :]
    return Box(start, shape), (common.start[dim] - piece.start[dim]) * prod(piece.shape[dim + 1 :])


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    try:
        with open(draft, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from error
    sync_folder(path.parent)


def _remove_unnamed(folder: Path, named: set[str]) -> None:
    """Remove data files of earlier saves of this iteration, complete or broken off: the index no longer names them."""
    for path in folder.glob("[0-9]*/rank_*.safetensors"):
        if path.relative_to(folder).as_posix() not in named:
            path.unlink(missing_ok=True)
