"""Checkpoints that any layout reads: one file per rank, and an index from which all places are arithmetic.

    root/latest_checkpointed_iteration.txt              a hint for people; the newest complete folder counts
    root/iter_0000100/index.json                        its creation is the commit: without it there is no checkpoint
    root/iter_0000100/0000/rank_000003-1f2e3d4c.safetensors   what rank 3 owns: flat ranges of its tensor shards

A rank owns one slice of every bucket of its pipeline rank. A bucket is the concatenation of the local shards of
its parameters; the index says how buckets are made, and every box of every tensor follows from that.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    index_to_text,
    owned_ranges,
    read_index,
    shard_ranks,
)
from .parallel.shard import Box, ShardSpec, flat_to_boxes, is_cut_by_tensor, owned_boxes
from .parallel.topology import Topology
from .tensor_file import BITS, DTYPE_NAMES, DTYPES, TensorFile, sync_folder, write_file

TRACKER = "latest_checkpointed_iteration.txt"
RANKS_PER_FOLDER = 256


def folder_of(root: Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def new_save_id() -> str:
    """A word that no other save has; drawn on one rank and given to all."""
    return secrets.token_hex(4)


def write_rank(
    folder: Path, rank: int, slices: Mapping[str, Sequence[Tensor]], *,
    topology: Topology, stage: StageLayout, save_id: str,
) -> FilePart:
    """Write and sync what `rank` owns: `slices[kind][bucket]` [share] is its slice of each bucket.

    The folder is made if it is not there. An earlier save of the same iteration is not touched.
    """
    path = f"{rank // RANKS_PER_FOLDER:04d}/rank_{rank:06d}-{save_id}.safetensors"
    kinds = dict.fromkeys(kind for entry in stage.tensors.values() for kind in entry.dtypes)
    tensors = []
    for kind in kinds:
        for r in owned_ranges(stage, topology, rank):
            dtype = stage.tensors[r.name].dtypes.get(kind)
            if dtype is not None:
                data = slices[kind][r.bucket]
                assert data.shape == (stage.buckets[r.bucket].share,) and DTYPE_NAMES[data.dtype] == dtype
                tensors.append((r.key(kind), data[r.at : r.at + r.stop - r.start]))
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    written = write_file(folder / path, tensors, metadata={"format": FORMAT, "rank": str(rank), "save": save_id})
    return FilePart(rank, path, written, stage.checksum())


def commit(folder: Path, parts: Sequence[FilePart], index: Index) -> None:
    """Publish the save: called on one rank when every rank has reported its file.

    Raises ValueError where the parts are not all there, or do not hold each element of each tensor exactly once.
    Then the folder stays without this save, and an earlier save of the same iteration stays valid.
    """
    check_cover(index)
    checksums = [stage.checksum() for stage in index.stages]
    ranks = sorted(part.rank for part in parts)
    if ranks != list(range(index.topology.world)):
        raise ValueError(f"{folder}: files of ranks {ranks} instead of all {index.topology.world}; not committed")
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


def latest(root: Path, *, say: Callable[[str], None] = print) -> int | None:
    """The newest iteration that has a complete save, or None. Newer folders that are passed over are told to `say`."""
    for iteration in sorted(_iterations(Path(root)), reverse=True):
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
        self._open: dict[int, TensorFile] = {}
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
        self._fill_(out, name, kind, box)
        return torch.from_numpy(out).view(dtype)

    def read_flat(
        self, name: str, kind: str, spec: ShardSpec, *, topology: Topology, rank: int, start: int, stop: int,
    ) -> Tensor:
        """Flat elements [start, stop) of the shard that `rank` of the reader's `topology` holds, padding zero.

        Returns [stop - start] in the stored dtype. Raises ValueError as `read` does, and where the shapes differ.
        """
        dtype = self._dtype(name, kind)
        stored = self.tensors[name].spec.shape
        if stored != spec.shape:
            raise ValueError(f"{self.folder}: {name} has shape {list(stored)}, the model wants {list(spec.shape)}")
        out = np.zeros(stop - start, BITS[dtype.itemsize])
        at = 0
        for box in owned_boxes(spec, topology, rank, start, stop):
            self._fill_(out[at : at + box.numel].reshape(box.shape), name, kind, box)
            at += box.numel
        return torch.from_numpy(out).view(dtype)

    def _dtype(self, name: str, kind: str) -> torch.dtype:
        if name not in self.tensors:
            raise ValueError(f"{self.folder}: the checkpoint has no tensor {name}")
        if kind not in self.tensors[name].dtypes:
            raise ValueError(f"{self.folder}: the checkpoint has no {kind} of {name}")
        return DTYPES[self.tensors[name].dtypes[kind]]

    def _fill_(self, out: np.ndarray, name: str, kind: str, box: Box) -> None:
        """Copy the elements of `box` into `out` [*box.shape], shard by shard and owner by owner."""
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
                        bits = self._file(owners[owner], stored).bits(stored, at + skip, at + skip + rows.numel)
                        out[common.slices(box.start)] = bits.reshape(rows.shape)[common.slices(rows.start)]
                    at += piece.numel

    def _shard_ranks(self, place: _Place, spec: ShardSpec) -> list[int]:
        key = place.stage, place.bucket.axis, is_cut_by_tensor(spec, self.topology)
        if key not in self._shards:
            self._shards[key] = shard_ranks(self.topology, place.stage, place.bucket.axis, spec)
        return self._shards[key]

    def _file(self, rank: int, key: str) -> TensorFile:
        if rank not in self._open:
            part = self._parts[rank]
            path = self.folder / part.path
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise ValueError(f"{path}: leads out of the checkpoint's folder")
            try:
                self._open[rank] = TensorFile(path, expected=part.written if self._verify else None)
            except FileNotFoundError as error:
                raise ValueError(f"{path}: missing, but the index names it") from error
        if key not in self._open[rank].entries:
            raise ValueError(f"{self._open[rank].path}: has no {key}")
        return self._open[rank]


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


def _iterations(root: Path) -> Iterator[int]:
    for folder in root.glob("iter_*") if root.is_dir() else ():
        digits = folder.name.removeprefix("iter_")
        if digits.isdecimal() and folder.is_dir():
            yield int(digits)


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(draft, path)
    sync_folder(path.parent)


def _remove_unnamed(folder: Path, named: set[str]) -> None:
    """Remove data files of earlier saves of this iteration, complete or broken off: the index no longer names them."""
    for path in folder.glob("[0-9]*/rank_*.safetensors"):
        if path.relative_to(folder).as_posix() not in named:
            path.unlink(missing_ok=True)
