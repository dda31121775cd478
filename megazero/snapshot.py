"""Saving and loading a run's state, all ranks together: the optimizer's slices through the checkpoint format.

What can go wrong on one rank (a full disk, a missing file) is told to all before anyone goes on, so that every
rank ends with the same one line.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from .checkpoint import Reader, commit, finish, folder_of, latest, new_save_id, write_rank
from .checkpoint_index import INDEX, BucketLayout, Index, StageLayout, TensorEntry
from .parallel.collectives import AgreedError, gather_objects, together
from .parallel.groups import Mesh
from .parallel.zero import ZeroOptimizer
from .tensor_file import DTYPE_NAMES
from .trainer import Progress


class Settings(Protocol):
    """Whatever says how a run was set up: GPT's Config, or that of a model of one's own."""

    def to_json(self) -> str:
        """An object of JSON."""


def stage_layout(optimizer: ZeroOptimizer) -> StageLayout:
    """How this rank's buckets are made, as the checkpoint's index tells it."""
    dtype = DTYPE_NAMES[optimizer.buckets[0].weight.dtype]
    tensors = {
        info.name: TensorEntry(info.spec, dict.fromkeys(bucket.slices, dtype))
        for bucket in optimizer.buckets for info in bucket.infos
    }
    buckets = tuple(BucketLayout(b.axis, tuple(i.name for i in b.infos), b.share) for b in optimizer.buckets)
    return StageLayout(tensors, buckets)


def save(root: Path, optimizer: ZeroOptimizer, mesh: Mesh, *, config: Settings, progress: Progress) -> Path:
    """Save all state under `root`; returns the checkpoint's folder, which is complete on return.

    Raises AgreedError where any of them cannot write; earlier checkpoints are untouched then.
    """
    folder = folder_of(root, progress.iteration)
    save_id = gather_objects(new_save_id() if mesh.rank == 0 else None, mesh.world)[0]
    stage = stage_layout(optimizer)
    kinds = dict.fromkeys(kind for bucket in optimizer.buckets for kind in bucket.slices)
    nothing = optimizer.buckets[0].weight[:0]               # of a kind that a bucket does not have
    slices = {kind: [bucket.slices.get(kind, nothing) for bucket in optimizer.buckets] for kind in kinds}
    try:
        parts = together(
            mesh.world,
            lambda: write_rank(folder, mesh.rank, slices, topology=mesh.topology, stage=stage, save_id=save_id),
        )
    except AgreedError:
        for path in folder.glob(f"*/rank_{mesh.rank:06d}-{save_id}.*"):      # leave no half of a save behind
            path.unlink(missing_ok=True)
        raise
    stages = gather_objects(stage, mesh.pipeline)

    def publish() -> None:
        if mesh.rank == 0:
            scale = None if optimizer.scale is None else optimizer.scale.to_dict()
            told = asdict(progress) | {"updates": optimizer.updates, "loss_scale": scale}
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


def load(folder: Path, optimizer: ZeroOptimizer, mesh: Mesh, *, moments: bool) -> Progress:
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
    updates, scale = told.pop("updates"), told.pop("loss_scale", None)
    if moments:
        optimizer.updates = updates
        if optimizer.zero.scaler is not None:
            optimizer.scale = optimizer.zero.scaler.resume(scale)
    return Progress(**told)

