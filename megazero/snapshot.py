"""Saving and loading a run's state, all ranks together: the optimizer's slices through the checkpoint format.

What can go wrong on one rank (a full disk, a missing file) is told to all before anyone goes on, so that every
rank ends with the same one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from .checkpoint import Reader, Wanted, folder_of, latest
from .checkpoint_index import INDEX, Index, read_index
from .config import Config
from .config_checkpoint import CheckpointConfig
from .parallel.collectives import together
from .parallel.groups import Mesh
from .parallel.zero import ZeroOptimizer
from .saver import Saver, Settings
from .trainer import Progress


def save(root: Path, optimizer: ZeroOptimizer, mesh: Mesh, *, config: Settings, progress: Progress) -> Path:
    """Save all state under `root`; returns the checkpoint's folder, which is complete on return.

    Raises AgreedError where any of them cannot write; earlier checkpoints are untouched then.
    """
    saver = Saver(root, optimizer, mesh, config=config)
    try:
        return saver.save(progress)
    finally:
        saver.close()


def holds_moments(index: Index) -> bool:
    """Whether a checkpoint can be gone on from: it holds the optimizer's state, and not the weights alone."""
    return any(set(entry.dtypes) != {"weight"} for stage in index.stages for entry in stage.tensors.values())


def check_moments(folder: Path, index: Index) -> None:
    """ValueError where a checkpoint holds weights only."""
    if not holds_moments(index):
        raise ValueError(
            f"{folder}: holds weights only (--no-save-optim): give --finetune to start anew from them, or "
            "--no-load-optim to go on with an optimizer that has seen nothing"
        )


def find(root: Path, step: int | None, *, say: Callable[[str], None]) -> Path | None:
    """The folder of the checkpoint to load: of iteration `step`, or the newest complete one, or `root` where that is a
    checkpoint itself; None: there is none. `say` is told which newer folders are passed over.
    """
    if step is None and (root / INDEX).is_file():
        return root
    if step is None:
        step = latest(root, say=say)
    return folder_of(root, step) if step is not None and (folder_of(root, step) / INDEX).is_file() else None


def shape_in_checkpoint(given: Mapping[str, object]) -> dict[str, object]:
    """The settings of the model and its experts in the checkpoint that --load names, for --use-checkpoint-args."""
    root = given.get("load")
    if root is None:
        raise ValueError("--use-checkpoint-args needs --load")
    found = find(Path(str(root)), given.get("ckpt_step"), say=lambda line: None)
    if found is None:
        raise ValueError(f"--use-checkpoint-args: --load {root}: there is no complete checkpoint")
    saved = Config.from_json(json.dumps(read_index(found)[0].config))
    return vars(saved.model) | vars(saved.moe)


def start_of(asked: CheckpointConfig, folder: Path | None, reached: Mapping[str, object]) -> Progress:
    """Where a run starts: as far as the checkpoint in `folder` has `reached`, or at zero. A run that goes on from its
    own saves has counted from 0 before (--reset-iteration)."""
    if folder is None or asked.finetune:
        return Progress()
    progress = Progress(**{name: reached[name] for name in vars(Progress()) if name in reached})
    progress = replace(progress, losses=tuple(progress.losses))
    return progress.recounted() if asked.reset_iteration and not is_own(asked, folder) else progress


def is_own(asked: CheckpointConfig, folder: Path) -> bool:
    """Whether --auto-resume has found a save of the run itself."""
    return asked.auto_resume and folder.parent == Path(asked.save)


def fill(folder: Path, optimizer: ZeroOptimizer, mesh: Mesh, *, moments: bool, verify: bool = True) -> dict:
    """Fill what this rank owns; what the checkpoint tells of its progress. The first half of `load`."""
    def read() -> dict:
        reader = Reader(folder, verify=verify)
        wanted = {info.name for bucket in optimizer.buckets for info in bucket.infos}
        if mesh.pipeline.size == 1 and (extra := sorted(set(reader.tensors) - wanted)):
            raise ValueError(f"{folder}: holds {extra[0]} and {len(extra) - 1} more tensors that this model lacks")
        mine = [piece for piece in optimizer.owned() if moments or piece.kind == "weight"]
        reader.fill_(
            [Wanted(p.info.name, p.kind, p.info.spec, p.start, p.stop, p.data) for p in mine],
            topology=mesh.topology, rank=mesh.rank,
        )
        return dict(reader.progress)

    return together(mesh.world, read)[0]


def load(folder: Path, optimizer: ZeroOptimizer, mesh: Mesh, *, moments: bool, verify: bool = True) -> Progress:
    """Fill the optimizer, whatever layout wrote the checkpoint; returns its progress.

    Without `moments` only the weights are taken. Raises AgreedError where any of them cannot read.
    """
    told = fill(folder, optimizer, mesh, moments=moments, verify=verify)
    optimizer.publish()
    updates, scale = told.pop("updates"), told.pop("loss_scale", None)
    if moments:
        optimizer.updates = updates
        if optimizer.zero.scaler is not None:
            optimizer.scale = optimizer.zero.scaler.resume(scale)
    return Progress(**told)

