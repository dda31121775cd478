"""What a checkpoint says of itself: layouts of the writer's ranks, from which the place of every element follows.

`index.json` holds this, without any list of boxes: its size grows with tensors and files only. Arithmetic and JSON;
the tensors' bytes are the business of checkpoint.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path, PurePosixPath

from .parallel.shard import ShardSpec, is_recorded
from .parallel.topology import Topology
from .tensor_file import DTYPES, Written

INDEX = "index.json"
FORMAT = "megazero-2"


@dataclass(frozen=True)
class BucketLayout:
    """A bucket: the shards of `names` one after another, zero-padded, cut into equal slices along `axis`."""

    axis: str
    names: tuple[str, ...]
    share: int                       # elements of one slice


@dataclass(frozen=True)
class TensorEntry:
    """A parameter: where it lies, and the kinds of state that are kept for it, each with its dtype ("F32", ...)."""

    spec: ShardSpec
    dtypes: Mapping[str, str]


@dataclass(frozen=True)
class StageLayout:
    """All that one pipeline rank holds. A tied parameter stands in the layout of the first and of the last."""

    tensors: Mapping[str, TensorEntry]
    buckets: tuple[BucketLayout, ...]

    def checksum(self) -> int:
        """The same number on every rank that has the same view of this layout."""
        return zlib.crc32(json.dumps([_tensors_to_json(self.tensors), _buckets_to_json(self.buckets)]).encode())


@dataclass(frozen=True)
class FilePart:
    """What a rank reports of a file that it wrote and synced."""

    rank: int
    path: str                        # inside the checkpoint's folder
    written: Written
    layout: int                      # checksum of the writer's StageLayout
    of: int = 1                      # files of this rank


@dataclass(frozen=True)
class Index:
    """All of a checkpoint but the tensors' bytes. `config` and `progress` are plain JSON values."""

    topology: Topology
    stages: tuple[StageLayout, ...]  # one per pipeline rank
    config: Mapping[str, object]
    progress: Mapping[str, object]


@dataclass(frozen=True)
class Range:
    """Flat elements [start, stop) of a parameter's shard, which stand from `at` in a rank's slice of a bucket."""

    name: str
    bucket: int
    start: int
    stop: int
    at: int

    def key(self, kind: str) -> str:
        """The name of this range in a rank's file."""
        return f"{kind}/{self.name}[{self.start}:{self.stop}]"


def owned_ranges(stage: StageLayout, topology: Topology, rank: int) -> Iterator[Range]:
    """What `rank` writes: its slice of each bucket without padding, and without what another rank records."""
    for number, bucket in enumerate(stage.buckets):
        slice_start = topology.index(bucket.axis, rank) * bucket.share
        shard_start = 0
        for name in bucket.names:
            spec = stage.tensors[name].spec
            start = max(slice_start - shard_start, 0)
            stop = min(slice_start + bucket.share - shard_start, spec.box(topology, rank).numel)
            if start < stop and is_recorded(spec, topology, rank):
                yield Range(name, number, start, stop, shard_start + start - slice_start)
            shard_start += prod(spec.local_shape(topology))


def check_cover(index: Index) -> None:
    """Raises ValueError unless the slices hold every element of every tensor exactly once.

    Slices of a bucket meet end to end by construction, so it is enough that they are long enough, that every tensor
    stands in one bucket, and that its shards, as they are recorded, are disjoint and fill it.
    """
    topology, last = index.topology, len(index.stages) - 1
    if len(index.stages) != topology.pipeline:
        raise ValueError(f"{len(index.stages)} stage layouts for {topology.pipeline} pipeline ranks")
    holders: dict[str, list[tuple[int, BucketLayout]]] = {}
    for number, stage in enumerate(index.stages):
        for bucket in stage.buckets:
            held = sum(prod(stage.tensors[name].spec.local_shape(topology)) for name in bucket.names)
            if bucket.share < 1 or bucket.share * topology.size(bucket.axis) < held:
                raise ValueError(f"slices of {bucket.share} elements lose a part of {', '.join(bucket.names)}")
            for name in bucket.names:
                holders.setdefault(name, []).append((number, bucket))
    sound: set[tuple[ShardSpec, str]] = set()        # what was found right once: layers are alike
    for number, stage in enumerate(index.stages):
        for name, entry in stage.tensors.items():
            found = holders.get(name, [])
            wanted = sorted({0, last}) if entry.spec.tied else [number]
            if [at for at, _ in found] != wanted or len({bucket for _, bucket in found}) != 1:
                raise ValueError(f"{name}: in buckets of pipeline ranks {[at for at, _ in found]} instead of {wanted}")
            shard = entry.spec, found[0][1].axis
            if shard not in sound:
                ranks = shard_ranks(topology, wanted[0], found[0][1].axis, entry.spec)
                _check_shards(name, entry.spec, topology, ranks)
                sound.add(shard)


def _check_shards(name: str, spec: ShardSpec, topology: Topology, ranks: Sequence[int]) -> None:
    """Shards lie on a grid, so they are disjoint if no two start at one place."""
    boxes = {box for box in (spec.box(topology, rank) for rank in ranks) if box.numel}
    starts = {box.start for box in boxes}
    written = sum(spec.box(topology, rank).numel for rank in ranks)
    if written != spec.numel or len(starts) != len(boxes):
        raise ValueError(f"{name}: {written} elements written of {spec.numel}")


def shard_ranks(topology: Topology, stage: int, axis: str, spec: ShardSpec) -> list[int]:
    """For each recorded shard of a parameter the rank that owns the first slice; `stage` is its first holder."""
    per_stage = topology.world // topology.pipeline
    ranks = range(stage * per_stage, (stage + 1) * per_stage)
    return [rank for rank in ranks if topology.index(axis, rank) == 0 and is_recorded(spec, topology, rank)]


def read_index(folder: Path) -> tuple[Index, dict[int, list[FilePart]]]:
    """The index and the files of each rank.

    Raises FileNotFoundError, or ValueError with one line that says what is wrong.
    """
    path = Path(folder) / INDEX
    try:
        body = json.loads(path.read_bytes())
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r} instead of {FORMAT!r}")
        if body.pop("crc32") != checksum_of(body):
            raise ValueError("wrong checksum")
        tensors = {name: _tensor_from_json(fields) for name, fields in body["tensors"].items()}
        stages = tuple(_stage_from_json(buckets, tensors) for buckets in body["buckets"])
        sizes = {**body["topology"], "degrees": tuple(body["topology"].get("degrees", ()))}
        index = Index(Topology(**sizes), stages, body["config"], body["progress"])
        files = files_of_ranks([_file_from_json(fields) for fields in body["files"]], index.topology.world)
        check_cover(index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a valid index: {error}") from error
    return index, files


def files_of_ranks(parts: Sequence[FilePart], world: int) -> dict[int, list[FilePart]]:
    """The files of each rank. Raises ValueError where any is not there, or there twice."""
    files: dict[int, list[FilePart]] = {}
    for part in sorted(parts, key=lambda part: (part.rank, part.path)):
        files.setdefault(part.rank, []).append(part)
    whole = [
        rank for rank, found in files.items()
        if len({part.path for part in found}) == len(found) and {part.of for part in found} == {len(found)}
    ]
    if whole != list(range(world)):
        raise ValueError(f"files of ranks {sorted(part.rank for part in parts)} instead of all {world}")
    return files


def checksum_of(body: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(body, separators=(",", ":")).encode())


def index_to_text(index: Index, parts: Sequence[FilePart]) -> str:
    """JSON with one line per tensor and per file, and a checksum of its own."""
    tensors = {name: entry for stage in index.stages for name, entry in stage.tensors.items()}
    body = {
        "format": FORMAT,
        "topology": asdict(index.topology),
        "progress": dict(index.progress),
        "config": dict(index.config),
        "buckets": [_buckets_to_json(stage.buckets) for stage in index.stages],
        "tensors": _tensors_to_json(tensors),
        "files": [_file_to_json(part) for part in sorted(parts, key=lambda part: (part.rank, part.path))],
    }
    body["crc32"] = checksum_of(body)
    lines = []
    for key, value in body.items():
        if key == "tensors":
            rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in value.items())
            lines.append(f'"{key}": {{\n{rows}\n}}')
        elif key in ("files", "buckets"):
            rows = ",\n".join(map(json.dumps, value))
            lines.append(f'"{key}": [\n{rows}\n]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _tensors_to_json(tensors: Mapping[str, TensorEntry]) -> dict[str, dict]:
    out = {}
    for name, entry in tensors.items():
        fields = {"shape": list(entry.spec.shape), "cut": list(entry.spec.cut), "dtype": dict(entry.dtypes)}
        if entry.spec.padded is not None:
            fields["padded"] = entry.spec.padded
        if entry.spec.tied:
            fields["tied"] = True
        out[name] = fields
    return out


def _tensor_from_json(fields: Mapping) -> TensorEntry:
    spec = ShardSpec(
        tuple(map(int, fields["shape"])), tuple(fields["cut"]),
        tied=fields.get("tied", False), padded=fields.get("padded"),
    )  # fmt: skip
    if any(name not in DTYPES for name in fields["dtype"].values()):
        raise ValueError(f"unknown dtype among {fields['dtype']}")
    return TensorEntry(spec, fields["dtype"])


def _buckets_to_json(buckets: Sequence[BucketLayout]) -> list[dict]:
    return [{"axis": b.axis, "share": b.share, "names": list(b.names)} for b in buckets]


def _stage_from_json(buckets: Sequence[Mapping], tensors: Mapping[str, TensorEntry]) -> StageLayout:
    layouts = tuple(BucketLayout(b["axis"], tuple(b["names"]), int(b["share"])) for b in buckets)
    return StageLayout({name: tensors[name] for b in layouts for name in b.names}, layouts)


def _file_to_json(part: FilePart) -> dict:
    sums = "".join(f"{number:08x}" for number in part.written.sums)
    fields = {"rank": part.rank, "path": part.path, "bytes": part.written.bytes, "sums": sums}
    return fields if part.of == 1 else fields | {"of": part.of}


def _file_from_json(fields: Mapping) -> FilePart:
    path, text = fields["path"], fields["sums"]
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
        raise ValueError(f"unsafe path {path!r}")
    sums = tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    return FilePart(int(fields["rank"]), path, Written(int(fields["bytes"]), sums), 0, int(fields.get("of", 1)))
