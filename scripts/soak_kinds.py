"""What can happen to a training job, a function for each kind: it does it, waits for the answer where there must be
one, and notes what is not as it must be.

Most kinds end the job: that the next start goes on after the newest good save is looked after in soak_job.py.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megazero.checkpoint import TRACKER, folder_of
from megazero.checkpoint_index import INDEX, read_index
from scripts.soak_job import LEAVE, SAVE_INTERVAL, START, STOP, Fault, Job, Soak

HOW = (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# What the ranks say that are left when one has been killed.
LEFT_ALONE = (
    r"pretrain_gpt\.py: (error: rank \d+ of \d+ has lost another one|error: rank \d+ is gone|leaves, for rank \d+ has|"
    r"leaves: the job's store is gone|rank \d+ of \d+ leaves, for rank)"
)
# What a run says of a save that a fault has damaged.
DAMAGES = {
    "flipped-byte": r"damaged: wrong checksum|not a tensor file|has no \w+/",
    "truncated-file": r"truncated or replaced|are too few",
    "missing-file": r"missing, but the index names it",
}
EMPTY = 200             # bytes at most of the file of a rank that owns nothing, which nobody reads
# Flags that do not go with what the saves hold, and what a run says of both values.
WRONG_FLAGS = (
    ("--hidden-size 96", "--hidden-size: 64 in the checkpoint, 96 now"),
    ("--vocab-size 1000", "--vocab-size: 2048 in the checkpoint, 1000 now"),
    ("--lr 3e-3", "--lr: 0.001 in the checkpoint, 0.003 now"),
)


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    share    how many there are of it among a thousand
    between  whether it is for a job that does not run; else for one that does
    saves    how many sound saves there must be
    many     whether it is for jobs of several ranks only
    """

    name: str
    share: int
    inject: Callable[[Soak, Fault], None]
    between: bool = False
    saves: int = 1
    many: bool = False

    def fits(self, soak: Soak) -> bool:
        """Whether it can happen now."""
        if soak.job is None:
            return len(soak.sound) >= self.saves
        return not self.between and (soak.job.ranks > 1 or not self.many)


def expect(fault: Fault, holds: bool, otherwise: str) -> None:
    """Something that must be so."""
    if not holds:
        fault.wrong.append(otherwise)


def expect_words(fault: Fault, job: Job, pattern: str) -> None:
    """A clear line, and no traceback."""
    said = job.said()
    if re.search(pattern, said) is None or "Traceback" in said:
        fault.wrong.append(f"said: {said[-1500:]}")


# ------------------------------------------------------------------------------------------------------ killed, silent


def kill_rank(soak: Soak, fault: Fault, *, moment: str) -> None:
    """The others leave by themselves. Before they have met they are ended as a launcher does it."""
    job = soak.come_to(fault, moment)
    victim, trained = soak.draw.randrange(job.ranks), job.trains()
    fault.told = f"rank {victim} of {job.ranks}"
    job.send(signal.SIGKILL, [victim])
    if not trained:
        job.send(signal.SIGTERM)
    codes = soak.leaves(fault, LEAVE)
    expect(fault, codes[victim] == -signal.SIGKILL and (not trained or all(codes)), f"exit codes {codes}")
    if trained and job.ranks > 1:
        expect_words(fault, job, LEFT_ALONE)


def kill_all(soak: Soak, fault: Fault) -> None:
    """Nobody is left who could say anything."""
    job = soak.come_to(fault, soak.draw.choice(("step", "save", "evaluation")))
    job.send(signal.SIGKILL)
    fault.told = f"{job.ranks} ranks"
    soak.clock.wait(job.is_over, STOP)
    soak.over(fault)


def stop_rank(soak: Soak, fault: Fault) -> None:
    """A rank that is suspended keeps its connections, so that only its silence tells. Woken, it leaves too."""
    job = soak.come_to(fault, "step", many=True)
    victim = soak.draw.randrange(job.ranks)
    others = [rank for rank in range(job.ranks) if rank != victim]
    fault.told = f"rank {victim} of {job.ranks}"
    job.send(signal.SIGSTOP, [victim])
    soak.leaves(fault, LEAVE, others)
    if soak.job is not None:
        job.send(signal.SIGCONT, [victim])
        seconds = fault.seconds
        codes = soak.leaves(fault, LEAVE)
        fault.seconds = max(fault.seconds, seconds)
        expect(fault, all(codes), f"exit codes {codes}")
        named = f"rank {victim} is gone: no sign of life"
        expect_words(fault, job, named if victim else r"rank \d+ had no answer of the job's store")


def pause_rank(soak: Soak, fault: Fault) -> None:
    """A rank that is suspended for a short time harms nobody."""
    job = soak.train()
    victim, seconds = soak.draw.randrange(job.ranks), soak.draw.uniform(0.5, 3)
    fault.told = f"rank {victim} of {job.ranks} for {seconds:.1f} s"
    job.send(signal.SIGSTOP, [victim])
    soak.clock.sleep(seconds)
    reached = job.last()["iteration"]
    job.send(signal.SIGCONT, [victim])
    goes_on(soak, fault, reached)


def goes_on(soak: Soak, fault: Fault, reached: int) -> None:
    """The job is not disturbed."""
    fault.survived = soak.clock.wait(lambda: soak.job.is_over() or soak.job.last()["iteration"] > reached + 1, LEAVE)
    if soak.job.is_over() or not fault.survived:
        fault.survived = False
        fault.wrong.append(f"the job does not go on: {soak.job.said()[-1500:]}")
        soak.over(fault)


# --------------------------------------------------------------------------------------------------- asked to stop


def ask_to_stop(soak: Soak, fault: Fault, *, moment: str) -> None:
    """A signal to all ranks or to one: code 0, and what is saved is where the run left. While Python still starts a
    signal ends it as the system does."""
    job = soak.come_to(fault, moment)
    trained = job.trains()
    how = soak.draw.choice(HOW if moment != "start" else HOW[:-1])
    who = soak.draw.choice((None, [soak.draw.randrange(job.ranks)])) if trained else None
    fault.told = f"{how.name} to {'all' if who is None else f'rank {who[0]}'} of {job.ranks}"
    job.send(how, who)
    codes = soak.leaves(fault, STOP)
    allowed = (0,) if trained else (0, -how)
    expect(fault, all(code in allowed for code in codes), f"exit codes {codes}: {job.said()[-1500:]}")
    expect_saved(soak, fault, job, trained)


def expect_saved(soak: Soak, fault: Fault, job: Job, trained: bool) -> None:
    """The run says where it has left, and that is what was saved."""
    left = re.search(r"left after iteration (\d+), as asked", job.said())
    if left is not None or trained:
        expect(fault, left is not None and int(left[1]) == soak.good, f"saved {soak.good}: {job.said()[-1500:]}")
    expect(fault, "Traceback" not in job.said(), f"said: {job.said()[-1500:]}")


def interrupt_twice(soak: Soak, fault: Fault) -> None:
    """All ranks leave at once, without saving."""
    job = soak.come_to(fault, soak.draw.choice(("step", "save", "evaluation")))
    job.send(signal.SIGINT)
    soak.clock.sleep(soak.draw.uniform(0.01, 0.1))
    job.send(signal.SIGINT)
    codes = soak.leaves(fault, STOP)
    fault.told = f"{job.ranks} ranks"
    expect(fault, all(code in (0, 128 + signal.SIGINT) for code in codes), f"exit codes {codes}")
    expect(fault, "Traceback" not in job.said(), f"said: {job.said()[-1500:]}")


def touch_switch(soak: Soak, fault: Fault) -> None:
    """--kill-switch-path."""
    job = soak.come_to(fault, "step")
    soak.switch.touch()
    codes = soak.leaves(fault, STOP)
    soak.switch.unlink()
    expect(fault, not any(codes), f"exit codes {codes}: {job.said()[-1500:]}")
    expect_saved(soak, fault, job, True)


# ------------------------------------------------------------------------------------------------- folders and disks


def can_mount(folder: Path) -> bool:
    """Whether this user may make small disks."""
    folder.mkdir(parents=True)
    try:
        with small_disk(folder, "size=64k"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        folder.rmdir()


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A disk in memory in place of a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)


@contextmanager
def no_permission(folder: Path) -> Iterator[None]:
    """A folder that its owner may not write to."""
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(mode)


def next_save(job: Job) -> int:
    """The iteration of the save after the next."""
    return (job.last()["iteration"] // SAVE_INTERVAL + 2) * SAVE_INTERVAL


def fill_disk(soak: Soak, fault: Fault, *, mounts: bool) -> None:
    """The folder of a coming save lies on a disk that is too small; without root one rank's files may not grow."""
    job = soak.come_to(fault, "step", many=not mounts)
    if mounts:
        folder = folder_of(soak.saves, next_save(job))
        folder.mkdir(exist_ok=True)                         # of a save that was broken off
        size = soak.draw.randrange(16, 2000)
        fault.told = f"a disk of {size} KiB for {folder.name}, {job.ranks} ranks"
        with small_disk(folder, f"size={size}k"):
            fail_to_save(soak, fault, r"iteration \d+ is not saved: .*No space left on device")
    else:
        victim = soak.draw.randrange(1, job.ranks)          # the first one writes what the run tells, too
        fault.told = f"RLIMIT_FSIZE of rank {victim} of {job.ranks}"
        resource.prlimit(job.processes[victim].pid, resource.RLIMIT_FSIZE, (64, 64))
        fail_to_save(soak, fault, r"iteration \d+ is not saved: .*File too large")


def forbid_writing(soak: Soak, fault: Fault, *, mounts: bool) -> None:
    """The folder of a coming save cannot be written to; without root that of all saves."""
    job = soak.come_to(fault, "step")
    fault.told = f"{job.ranks} ranks"
    if mounts:
        folder = folder_of(soak.saves, next_save(job))
        folder.mkdir(exist_ok=True)
        with small_disk(folder, "size=64k,ro"):
            fail_to_save(soak, fault, r"iteration \d+ is not saved: .*Read-only file system")
    else:
        with no_permission(soak.saves):
            fail_to_save(soak, fault, r"iteration \d+ is not saved: .*Permission denied")


def fail_to_save(soak: Soak, fault: Fault, pattern: str) -> None:
    """The save fails on all ranks with one line, and the run ends."""
    job = soak.job
    codes = soak.leaves(fault, LEAVE)
    expect(fault, all(codes), f"exit codes {codes}")
    expect_words(fault, job, pattern)


# ---------------------------------------------------------------------------------------------------------- saves


def damage(soak: Soak, fault: Fault, *, how: str) -> None:
    """The newest save is not what was written: the run says so and which file, and ends. Then an older save is named,
    or the damaged one removed, and it goes on."""
    newest = soak.good
    parts = [part for parts in read_index(folder_of(soak.saves, newest))[1].values() for part in parts]
    named = sorted(part.path for part in parts if part.written.bytes > EMPTY)   # others may be left of earlier saves
    file = folder_of(soak.saves, newest) / soak.draw.choice(named)
    spoil(file, how, soak.draw)
    soak.damaged.add(newest)
    soak.examine()
    goes_back = soak.draw.choice((True, False))
    fault.told = f"{newest}, then {f'--ckpt-step {soak.good}' if goes_back else 'removed'}"
    refuse(soak, fault, "", rf"{re.escape(file.name)}.*({DAMAGES[how]})")
    if goes_back:
        job = soak.train(f"--ckpt-step {soak.good}")
        soak.clock.wait(lambda: newest in job.saved() or later(job, newest), START)
    if not goes_back or newest not in job.saved():
        shutil.rmtree(folder_of(soak.saves, newest), ignore_errors=True)


def later(job: Job, iteration: int) -> bool:
    """Whether the run has saved after some iteration, or is over."""
    return job.is_over() or max(job.saved(), default=0) > iteration


def spoil(file: Path, how: str, draw: random.Random) -> None:
    """Damage a file."""
    size = file.stat().st_size
    if how == "missing-file":
        file.unlink()
    elif how == "truncated-file":
        os.truncate(file, draw.randrange(size - 2))         # an index that lacks its last newline is whole
    else:
        with open(file, "r+b") as out:
            at = draw.randrange(size)
            out.seek(at)
            byte = out.read(1)[0]
            out.seek(at)
            out.write(bytes([byte ^ 1 << draw.randrange(8)]))


def break_index(soak: Soak, fault: Fault, *, how: str) -> None:
    """The newest folder has no index, or one that is not whole: no checkpoint, so the one before counts."""
    newest = soak.good
    index = folder_of(soak.saves, newest) / INDEX
    if how == "no-index":
        index.unlink()
    else:
        spoil(index, soak.draw.choice(("truncated-file", "flipped-byte")), soak.draw)
        soak.damaged.add(newest)
    soak.examine()
    soak.passed_over.add(newest)
    fault.told = f"{newest}"
    soak.pending.append(fault)


def leave_half_a_save(soak: Soak, fault: Fault) -> None:
    """As a save that was broken off long ago: data, a half written index, no index."""
    folder = folder_of(soak.saves, soak.good + SAVE_INTERVAL - soak.good % SAVE_INTERVAL)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder_of(soak.saves, soak.good), folder)
    (folder / INDEX).rename(folder / f"{INDEX}.tmp")
    os.truncate(next(folder.glob("*/rank_*.safetensors")), 1000)
    soak.passed_over.add(int(folder.name.removeprefix("iter_")))
    fault.told = folder.name
    soak.pending.append(fault)


def spoil_tracker(soak: Soak, fault: Fault, *, text: str | None) -> None:
    """It is a hint for people: nothing depends on it."""
    tracker = soak.saves / TRACKER
    if text is None:
        tracker.unlink(missing_ok=True)
    else:
        tracker.write_text(soak.draw.choice((text, "", str(soak.good + 1000))))
    soak.pending.append(fault)


# ------------------------------------------------------------------------------------------------------ other starts


def refuse(soak: Soak, fault: Fault, more: str, pattern: str) -> None:
    """The run that starts now ends by itself on all ranks, with a line that says why, and nothing is lost."""
    job, began = soak.begin(more), soak.clock.look()
    soak.clock.wait(lambda: job.is_over() or job.trains(), START)
    codes, fault.seconds = soak.over(fault), soak.clock.seconds - began
    expect(fault, all(code > 0 for code in codes), f"exit codes {codes}")
    expect_words(fault, job, pattern)


def give_wrong_flag(soak: Soak, fault: Fault) -> None:
    """A flag that makes another model or schedule than that of the saves: refused, both values named."""
    fault.told, words = soak.draw.choice(WRONG_FLAGS)
    refuse(soak, fault, fault.told, re.escape(words))


def explode(soak: Soak, fault: Fault) -> None:
    """A learning rate with which no number stays finite: the run ends before it saves any."""
    rate = "1e200" if "--fp64" in soak.part.words else "1e30"
    fault.told = f"--lr {rate}"
    before = soak.good
    words = f"{soak.words(metrics=False)} --lr {rate} --min-lr {rate} --override-opt_param-scheduler"
    job = soak.job = Job(soak.folder, f"{words} --save-interval 1000000", soak.layout, soak.start)
    codes = soak.leaves(fault, START)
    expect(fault, all(code > 0 for code in codes) and soak.good == before, f"exit codes {codes}, saved {soak.good}")
    expect_words(fault, job, r"error: iteration \d+: .*not finite.*without saving")


def start_second(soak: Soak, fault: Fault) -> None:
    """Another run into the same folder is refused, and the first one does not notice."""
    job = soak.train()
    before = soak.job.last()["iteration"]
    folder = soak.folder / "second"
    folder.mkdir(exist_ok=True)
    began = soak.clock.look()
    second = Job(folder, f"{soak.words(metrics=False)} --save-interval {SAVE_INTERVAL}", (1, ""), soak.start)
    in_time = soak.clock.wait(second.is_over, START)
    fault.seconds = soak.clock.seconds - began
    codes = second.end()
    expect(fault, in_time and codes[0] > 0, f"exit code {codes[0]} of the second run")
    expect_words(fault, second, r"another run \(process \d+ on .*\) is writing there")
    goes_on(soak, fault, max(before, job.last()["iteration"]))


def change_layout(soak: Soak, fault: Fault) -> None:
    """The job goes on in another layout than that which has saved."""
    layout = soak.draw.choice([one for one in soak.part.layouts if one != soak.layout])
    fault.told = f"{layout[0]} ranks {layout[1]}"
    soak.pending.append(fault)
    soak.train(layout=layout)


def kinds(*, mounts: bool, layouts: int) -> Sequence[Kind]:
    """All kinds, for a user who may mount disks or not, and a job of so many layouts."""
    at = [("step", "step"), ("save", "save"), ("eval", "evaluation")]
    return (
        Kind("kill-start", 40, partial(kill_rank, moment="start"), between=True),
        *(Kind(f"kill-{name}", {"step": 50, "save": 160, "eval": 40}[name], partial(kill_rank, moment=moment))
          for name, moment in at),
        Kind("kill-all", 60, kill_all),
        Kind("silent", 30, stop_rank, many=True),
        Kind("pause", 30, pause_rank),
        Kind("signal-start", 35, partial(ask_to_stop, moment="start"), between=True),
        *(Kind(f"signal-{name}", 35, partial(ask_to_stop, moment=moment)) for name, moment in at),
        Kind("interrupt-twice", 20, interrupt_twice),
        Kind("kill-switch", 30, touch_switch),
        Kind("full-disk", 50, partial(fill_disk, mounts=mounts), many=not mounts),
        Kind("read-only", 30, partial(forbid_writing, mounts=mounts)),
        *(Kind(how, 25, partial(damage, how=how), between=True, saves=2) for how in DAMAGES),
        Kind("no-index", 30, partial(break_index, how="no-index"), between=True, saves=2),
        Kind("broken-index", 30, partial(break_index, how="broken-index"), between=True, saves=2),
        Kind("half-a-save", 30, leave_half_a_save, between=True),
        Kind("no-tracker", 20, partial(spoil_tracker, text=None), between=True),
        Kind("bad-tracker", 20, partial(spoil_tracker, text="nonsense\n"), between=True),
        Kind("wrong-flag", 25, give_wrong_flag, between=True),
        Kind("not-finite", 20, explode, between=True),
        Kind("second-run", 30, start_second),
        *([Kind("layout", 100, change_layout, between=True)] if layouts > 1 else []),
    )
