"""All saves of a run, one at a time: what this rank owns is copied, written beside the training, and published.

The thread that writes takes part in nothing that ranks do together. The main thread asks at every step, while a save is
under way, whether all ranks have done their part; the answer is read a step later, so that nobody waits for it. What
goes wrong on one rank (a full disk) is told to all, who end with the same one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from .checkpoint import Writing, commit, finish, folder_of, new_save_id, write_files
from .checkpoint_index import INDEX, BucketLayout, FilePart, Index, StageLayout, TensorEntry
from .cores import usable_cores
from .parallel.collectives import AgreedError, Pending, gather_objects, start_all_reduce, together
from .parallel.groups import Mesh, World
from .parallel.zero import ZeroOptimizer
from .retention import Retention, lock_folder, remove_old
from .tensor_file import DTYPE_NAMES
from .trainer import Progress

FILES_AT_ONCE = 2               # two writers fill a memory channel

Slices = Mapping[str, Sequence[Tensor]]


class Settings(Protocol):
    """Whatever says how a run was set up: GPT's Config, or that of a model of one's own."""

    def to_json(self) -> str:
        """An object of JSON."""


@dataclass(frozen=True)
class Saving:
    """How a run saves.

    background  training goes on when the state is copied to host memory
    moments     whether the optimizer's state is saved beside the weights
    """

    background: bool = False
    moments: bool = True
    retention: Retention = field(default_factory=Retention)
    writing: Writing = field(default_factory=Writing)


def stage_layout(optimizer: ZeroOptimizer, *, moments: bool = True) -> StageLayout:
    """How this rank's buckets are made, as the checkpoint's index tells it."""
    tensors = {}
    for bucket in optimizer.buckets:
        kinds = [kind for kind in bucket.slices if moments or kind == "weight"]
        dtypes = dict.fromkeys(kinds, DTYPE_NAMES[bucket.weight.dtype])
        tensors |= {info.name: TensorEntry(info.spec, dtypes) for info in bucket.infos}
    buckets = tuple(BucketLayout(b.axis, tuple(i.name for i in b.infos), b.share) for b in optimizer.buckets)
    return StageLayout(tensors, buckets)


class _Abandoned(Exception):
    """The run ends before its save."""


@dataclass
class _UnderWay:
    """A save that is not finished. `work` is this rank's part: first its files, then, on rank 0, to publish them."""

    iteration: int
    folder: Path
    save_id: str
    stage: StageLayout
    told: dict[str, object]         # what the index says of the progress
    work: Future
    publishing: bool = False


class Saver:
    """Saves under one root. All ranks call its methods together, but for `close`.

    Copies for saving in the background are made in memory that is kept from save to save, pinned where there is a GPU.
    """

    def __init__(
        self, root: Path, optimizer: ZeroOptimizer, mesh: Mesh, *,
        config: Settings, how: Saving | None = None, say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.root, self.optimizer, self.mesh, self.config, self.say = Path(root), optimizer, mesh, config, say
        self.how = how or Saving()
        self._pool = ThreadPoolExecutor(1, "save")
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._under_way: _UnderWay | None = None
        self._vote: Pending | None = None
        self._stopping = False
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Keep other runs from saving to the same folder until `close`. Raises AgreedError where one does."""
        def take() -> None:
            if self.mesh.rank == 0:
                self._lock = lock_folder(self.root)

        together(self.mesh.world, take)

    def save(self, progress: Progress) -> Path:
        """Save the state as it is now; returns the checkpoint's folder, which is complete when `finish` has returned.

        In the background, only a copy is made here; otherwise it is finished on return. A save under way is waited
        for first. Raises AgreedError where any rank cannot write; earlier checkpoints are untouched then.
        """
        self.finish()
        folder = folder_of(self.root, progress.iteration)
        save_id = gather_objects(new_save_id() if self.mesh.rank == 0 else None, self.mesh.world)[0]
        stage = stage_layout(self.optimizer, moments=self.how.moments)
        scale = None if self.optimizer.scale is None else self.optimizer.scale.to_dict()
        told = asdict(progress) | {"updates": self.optimizer.updates, "loss_scale": scale}
        slices, copied = self._slices(), None
        if self.how.background:
            slices, copied = self._copy(slices)
        work = self._pool.submit(self._write, folder, slices, copied, stage=stage, save_id=save_id)
        self._under_way = _UnderWay(progress.iteration, folder, save_id, stage, told, work)
        if not self.how.background:
            self.finish()
        return folder

    def poll(self) -> None:
        """Go on with a save that is under way, without waiting: called at every step.

        Raises AgreedError on all ranks where it failed on any.
        """
        if self._under_way is None:
            return
        vote, self._vote = self._vote, None
        if vote is not None and vote.wait().item() == self.mesh.world.size:
            self._advance()
        if self._under_way is not None:
            done = torch.tensor(float(self._under_way.work.done()), device=self.mesh.device)
            self._vote = start_all_reduce(done, self.mesh.world)

    def finish(self) -> None:
        """Wait for the save that is under way, if any. Raises AgreedError as `poll`."""
        if self._vote is not None:
            self._vote.wait()
            self._vote = None
        while self._under_way is not None:
            self.mesh.activity.enter(f"save of iteration {self._under_way.iteration}")
            wait([self._under_way.work])
            self._advance()

    def close(self) -> None:
        """Give up a save that is under way, whatever the other ranks do, and let other runs save here."""
        self._stopping = True
        self._pool.shutdown()
        self._under_way = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _slices(self) -> Slices:
        """What this rank owns of each kind, per bucket [share]."""
        buckets = self.optimizer.buckets
        kinds = dict.fromkeys(kind for bucket in buckets for kind in bucket.slices)
        return {                                                # nothing of a kind that a bucket does not have
            kind: [bucket.slices.get(kind, bucket.weight[:0]) for bucket in buckets]
            for kind in kinds if self.how.moments or kind == "weight"
        }

    def _copy(self, slices: Slices) -> tuple[Slices, Any]:
        """The slices in host memory, and the event after which they are there, None: they are."""
        on_gpu = self.mesh.device.type == "cuda"
        for kind, parts in slices.items():
            for number, part in enumerate(parts):
                if (kind, number) not in self._buffers:
                    self._buffers[kind, number] = torch.empty(part.shape, dtype=part.dtype, pin_memory=on_gpu)
                self._buffers[kind, number].copy_(part.detach(), non_blocking=True)
        copied = None
        if on_gpu:
            copied = torch.cuda.Event()
            copied.record()
        return {kind: [self._buffers[kind, n] for n in range(len(parts))] for kind, parts in slices.items()}, copied

    def _write(
        self, folder: Path, slices: Slices, copied: Any, *, stage: StageLayout, save_id: str
    ) -> list[FilePart]:
        """The thread's part on every rank: its files."""
        if copied is not None:
            copied.synchronize()
        # Beside the training one core is enough; else a rank has as many as the others of its host leave it.
        cores = 1 if self.how.background else usable_cores() // World.from_environment().local_size
        at_once = min(max(cores, 1), FILES_AT_ONCE)
        how = replace(self.how.writing, at_once=at_once, between=self._check_stopping)
        return write_files(
            folder, self.mesh.rank, slices, topology=self.mesh.topology, stage=stage, save_id=save_id, how=how
        )

    def _check_stopping(self) -> None:
        if self._stopping:
            raise _Abandoned

    def _publish(self, folder: Path, parts: Sequence[FilePart], index: Index, iteration: int) -> list[str]:
        """The thread's part on rank 0 when all files are there. Returns what is to be said of it."""
        commit(folder, parts, index)
        try:
            finish(self.root, iteration)
        except OSError as error:
            return [f"warning: the tracker of {self.root}: {error}"]
        return [f"warning: {line}" for line in remove_old(self.root, iteration, self.how.retention)]

    def _advance(self) -> None:
        """The next part of the save, when all ranks are through with this one."""
        this, world = self._under_way, self.mesh.world
        assert this is not None
        try:
            results = together(world, this.work.result)
        except AgreedError as error:
            self._under_way = None
            self._discard(this)
            raise AgreedError(f"iteration {this.iteration} is not saved: {error}") from error
        if this.publishing:
            self._under_way = None
            for line in results[0]:
                self.say(line)
            self.say(f"saved {this.folder}")
            return
        this.publishing = True
        stages = gather_objects(this.stage, self.mesh.pipeline)
        this.work = Future()
        if self.mesh.rank == 0:
            index = Index(self.mesh.topology, tuple(stages), json.loads(self.config.to_json()), this.told)
            parts = [part for found in results for part in found]
            this.work = self._pool.submit(self._publish, this.folder, parts, index, this.iteration)
        else:
            this.work.set_result([])

    def _discard(self, this: _UnderWay) -> None:
        """Leave no half of a save behind: remove this rank's files, unless the index names them after all."""
        index = this.folder / INDEX
        if not index.exists() or this.save_id not in index.read_text(encoding="utf-8", errors="replace"):
            for path in this.folder.glob(f"*/rank_{self.mesh.rank:06d}-{this.save_id}*"):
                path.unlink(missing_ok=True)
