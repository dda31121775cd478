"""How a run starts: from which checkpoint, whether the folder that it saves to is free for it, and whether all ranks
start alike.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import snapshot
from .checkpoint import folder_of, latest
from .config import Config, DataConfig
from .data.blend import Blend
from .data.samples import SampleSource
from .metrics import check_folder
from .parallel.groups import World
from .resume import differences
from .settings import flag_name
from .trainer import Progress

# Settings in which hosts may differ: places on their disks, and threads.
OF_A_HOST = frozenset(
    """tensorboard_dir metrics_jsonl trace_pipeline profile_dir kill_switch_path wandb_save_dir deepspeed_config
    data_path train_data_path valid_data_path test_data_path valid_set tokenizer_model vocab_file merge_file
    num_workers""".split()
)
PROBED = (0, 1, 999_983)        # the samples by which two hosts' data are told apart


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


def fingerprints(samples: Mapping[str, SampleSource], data: DataConfig) -> dict[str, int]:
    """A number for each part of the data, which is another one where its files are: of some samples, or in Megatron's
    order, which is built when the first one is asked for, how many there are."""
    if data.sample_order == "megatron":
        parts = {part: source.sources if isinstance(source, Blend) else [source] for part, source in samples.items()}
        return {part: sum(map(len, sources)) for part, sources in parts.items()}
    return {part: zlib.crc32(source.rows(PROBED).astype("<i8").tobytes()) for part, source in samples.items()}


def check_same_everywhere(config: Config, seen: Mapping[str, Any], world: World, store: Any) -> None:
    """Ranks with other flags, or on hosts that see other files, must not train together. Raises ValueError on those
    that differ from rank 0, which asks nobody.

    seen   by its name in words, what this rank has found on its host, as JSON can hold it
    store  where the ranks have met
    """
    if world.rank == 0:
        store.set("start", json.dumps({"settings": json.loads(config.to_json()), "seen": seen}))
        return
    first = json.loads(store.get("start"))
    theirs = Config.from_json(json.dumps(first["settings"]))
    other = [
        f"{flag_name(found.name)}: {found.new} here, {found.old} on rank 0"
        for found in differences(theirs, config) if found.name not in OF_A_HOST
    ]
    if other:
        raise ValueError(f"the ranks were started with different flags: {'; '.join(other)}")
    for what, value in json.loads(json.dumps(seen)).items():
        if value != first["seen"][what]:
            raise ValueError(f"the ranks see different files: {what}: {value} here, {first['seen'][what]} on rank 0")
