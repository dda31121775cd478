"""Which checkpoint a run starts from, and whether the folder that it saves to is free for it."""

from __future__ import annotations

from pathlib import Path

from . import snapshot
from .checkpoint import folder_of, latest
from .config import Config
from .metrics import check_folder
from .trainer import Progress


def check_save(config: Config, checkpoint: Path | None, start: Progress) -> None:
    """Raises ValueError where --save could not be made or written to, or holds what this run would mix itself with:
    checkpoints later than the one it starts from, unless --ckpt-step or --load goes back to one by name. Makes
    nothing."""
    if config.checkpoint.save is None or config.batch.skip_train:
        return
    root = Path(config.checkpoint.save)
    check_folder("--save", root)
    newest = latest(root, say=lambda line: None)
    by_name = config.checkpoint.ckpt_step is not None or str(checkpoint) == config.checkpoint.load
    goes_back = by_name and checkpoint is not None and checkpoint.parent == root
    if newest is not None and newest > start.iteration and not goes_back:
        raise ValueError(
            f"--save {root}: holds iteration {newest} of another run, and this one starts after iteration "
            f"{start.iteration}: give another folder, go on from there (--load, --auto-resume), or remove what is later"
        )


def checkpoint_to_load(config: Config, *, speaks: bool) -> Path | None:
    """The folder to start from; None: start anew. Raises ValueError where --load names nothing."""
    wanted, say = config.checkpoint, print if speaks else lambda line: None
    found = None
    if wanted.auto_resume:
        found = snapshot.find(Path(wanted.save), wanted.ckpt_step, say=say)
    if found is None and wanted.load is not None:
        found = snapshot.find(Path(wanted.load), wanted.ckpt_step, say=say)
        if found is None:
            where = Path(wanted.load) if wanted.ckpt_step is None else folder_of(Path(wanted.load), wanted.ckpt_step)
            first = "; for a run's first start give --auto-resume instead" if wanted.load == wanted.save else ""
            raise ValueError(f"--load {wanted.load}: there is no complete checkpoint in {where}{first}")
    return found
