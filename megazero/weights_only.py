"""Checkpoints that are made of something else than a run: weights alone, written by one process, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path

from torch import Tensor

from .checkpoint import commit, folder_of, new_save_id
from .checkpoint_index import FORMAT, BucketLayout, FilePart, Index, Range, StageLayout, TensorEntry
from .config import Config
from .parallel.shard import ShardSpec
from .parallel.topology import Topology
from .tensor_file import DTYPE_NAMES
from .tensor_stream import Lazy, write_lazily
from .trainer import Progress


def write_weights(root: Path, tensors: Mapping[str, Lazy], *, config: Config, iteration: int) -> tuple[Path, int]:
    """Write and commit parameters by name, as one rank would that holds the whole model.

    Returns the checkpoint's folder, and the bytes of its file. Raises OSError where it cannot write, and what reading
    a tensor raises; then there is no checkpoint.
    """
    entries = {
        name: TensorEntry(ShardSpec(lazy.shape, (None,) * len(lazy.shape)), {"weight": DTYPE_NAMES[lazy.dtype]})
        for name, lazy in tensors.items()
    }
    bucket = BucketLayout("data", tuple(entries), sum(entry.spec.numel for entry in entries.values()))
    stage = StageLayout(entries, (bucket,))
    ranges = [(Range(name, 0, 0, prod(lazy.shape), 0).key("weight"), _flat(lazy)) for name, lazy in tensors.items()]
    folder, save_id = folder_of(root, iteration), new_save_id()
    path = f"0000/rank_000000-{save_id}.safetensors"
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    written = write_lazily(folder / path, ranges, metadata={"format": FORMAT, "rank": "0", "save": save_id})
    told = asdict(Progress(iteration)) | {"updates": 0, "loss_scale": None}
    index = Index(Topology(), (stage,), json.loads(config.to_json()), told)
    commit(folder, [FilePart(0, path, written, stage.checksum())], index)
    return folder, written.bytes


def _flat(lazy: Lazy) -> Lazy:
    first, *more = (partial(_read_flat, read) for read in (lazy.read, *lazy.more))
    return Lazy(lazy.dtype, (prod(lazy.shape),), first, tuple(more))


def _read_flat(read: Callable[[], Tensor]) -> Tensor:
    return read().flatten()
