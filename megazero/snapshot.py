"""Saving and loading a run's state, all ranks together: the optimizer's slices through the checkpoint format.

What can go wrong on one rank (a full disk, a missing file) is told to all before anyone goes on, so that every
rank ends with the same one line.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from .checkpoint import Reader, commit, finish, folder_of, latest, new_save_id, write_rank
from .checkpoint_index import INDEX, BucketLayout, Index, StageLayout, TensorEntry
from .config import Config
from .parallel.buckets import KINDS
from .parallel.collectives import gather_objects, together
from .parallel.groups import Mesh
from .parallel.zero import ZeroAdamW
from .tensor_file import DTYPE_NAMES
from .trainer import Progress


def stage_layout(optimizer: ZeroAdamW) -> StageLayout:
    """How this rank's buckets are made, as the checkpoint's index tells it."""
    dtype = DTYPE_NAMES[optimizer.buckets[0].weight.dtype]
    infos = [info for bucket in optimizer.buckets for info in bucket.infos]
    tensors = {info.name: TensorEntry(info.spec, dict.fromkeys(KINDS, dtype)) for info in infos}
    buckets = tuple(BucketLayout(b.axis, tuple(i.name for i in b.infos), b.share) for b in optimizer.buckets)
    return StageLayout(tensors, buckets)


def save(root: Path, optimizer: ZeroAdamW, mesh: Mesh, *, config: Config, progress: Progress) -> Path:
    """Save all state under `root`; returns the checkpoint's folder, which is complete on return.

    Raises AgreedError where any of them cannot write; earlier checkpoints are untouched then.
    """
    folder = folder_of(root, progress.iteration)
    save_id = gather_objects(new_save_id() if mesh.rank == 0 else None, mesh.world)[0]
    stage = stage_layout(optimizer)
    slices = {kind: [bucket.state(kind) for bucket in optimizer.buckets] for kind in KINDS}
    parts = together(
        mesh.world,
        lambda: write_rank(folder, mesh.rank, slices, topology=mesh.topology, stage=stage, save_id=save_id),
    )
    stages = gather_objects(stage, mesh.pipeline)

    def publish() -> None:
        if mesh.rank == 0:
            told = asdict(progress) | {"updates": optimizer.updates}
            commit(folder, parts, Index(mesh.topology, tuple(stages), json.loads(config.to_json()), told))
            finish(root, progress.iteration)

    together(mesh.world, publish)
    return folder


def find(root: Path, step: int | None, *, speaks: bool) -> Path | None:
    """The folder of the checkpoint to load: of iteration `step`, or the newest complete one; None: there is none.

    A rank that speaks prints which newer folders it passes over.
    """
    if step is None:
        step = latest(root, say=print if speaks else lambda line: None)
    return folder_of(root, step) if step is not None and (folder_of(root, step) / INDEX).is_file() else None


def load(folder: Path, optimizer: ZeroAdamW, mesh: Mesh, *, moments: bool) -> Progress:
    """Fill the optimizer, whatever layout wrote the checkpoint; returns its progress.

    Without `moments` only the weights are taken. Raises AgreedError where any of them cannot read.
    """
    def fill() -> dict:
        reader = Reader(folder)
        wanted = {info.name for bucket in optimizer.buckets for info in bucket.infos}
        if mesh.pipeline.size == 1 and (extra := sorted(set(reader.tensors) - wanted)):
            raise ValueError(f"{folder}: holds {extra[0]} and {len(extra) - 1} more tensors that this model lacks")
        for piece in optimizer.owned():
            if moments or piece.kind == "weight":
                values = reader.read_flat(
                    piece.info.name, piece.kind, piece.info.spec, topology=mesh.topology, rank=mesh.rank,
                    start=piece.start, stop=piece.stop,
                )
                piece.data.copy_(values)
        return dict(reader.progress)

    told = together(mesh.world, fill)[0]
    optimizer.publish()
    updates = told.pop("updates")
    if moments:
        optimizer.updates = updates
    return Progress(**told)

