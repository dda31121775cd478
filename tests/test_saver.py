"""Saving beside the training, what stays of the saves, and what can go wrong with them."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megazero.checkpoint import Reader, folder_of, latest
from megazero.checkpoint_index import INDEX
from megazero.flags import parse
from megazero.parallel.collectives import AgreedError
from megazero.parallel.groups import World, open_mesh
from megazero.retention import Retention, lock_folder, remove_old
from megazero.trainer import Progress, Trainer
from tests.harness import on_ranks, run_script
from tests.training import LLAMA, SMALL, Recorder, train

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
Step = Callable[[Progress], Progress]


def state_of(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a checkpoint, verified."""
    reader = Reader(folder)
    return {(name, kind): reader.read(name, kind) for name, entry in reader.tensors.items() for kind in entry.dtypes}


def assert_same(got: Path, want: Path) -> None:
    ours, theirs = state_of(got), state_of(want)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def saves(root: Path) -> dict[int, bool]:
    """The iterations that have a folder, and whether they are complete."""
    found = {int(path.name.removeprefix("iter_")): (path / INDEX).exists() for path in root.glob("iter_*")}
    return dict(sorted(found.items()))


def make_trainer(flags: str, world: int) -> tuple[Trainer, Progress]:
    """A trainer, and the progress it starts from."""
    config, _ = parse(f"{SMALL} {flags}".split())
    plan = pretrain_gpt.prepare(config, World(0, world, 0))
    return pretrain_gpt.build(plan, open_mesh(plan.topology), Recorder())


def run_rank(flags: str, world: int, change: Callable[[Trainer], Any] | None = None) -> tuple[list[str], Any, str]:
    """One rank of a run to its end: what was said, what `change` made of the trainer, and the error at the end."""
    config, _ = parse(f"{SMALL} {flags}".split())
    trainer, progress = make_trainer(flags, world)
    seen, error = None if change is None else change(trainer), ""
    try:
        pretrain_gpt.train(trainer, progress, config.batch.train_iters, config)
    except AgreedError as wrong:
        error = str(wrong)
    return trainer.metrics.said, seen, error


def run(capsys: pytest.CaptureFixture, code: int, flags: str) -> tuple[str, str]:
    """What the front door says, entered here as one process."""
    assert pretrain_gpt.main(f"{SMALL} {flags}".split()) == code
    return capsys.readouterr()


def after_step(trainer: Trainer, action: Callable[[Progress], None]) -> None:
    """Call `action` after every step, before anything is saved."""
    step: Step = trainer._step

    def changed(progress: Progress) -> Progress:
        progress = step(progress)
        action(progress)
        return progress

    trainer._step = changed


# --------------------------------------------------------------------------------------------- beside the training


def hold_back(trainer: Trainer) -> list[dict[int, bool]]:
    """The first save writes nothing before iteration 4 is done; what there was after each step."""
    go, seen = threading.Event(), []

    def between() -> None:
        assert go.wait(30)

    def look(progress: Progress) -> None:
        seen.append(saves(trainer.saver.root))
        if progress.iteration == 4:
            go.set()

    trainer.saver._check_stopping = between
    after_step(trainer, look)
    return seen


@pytest.mark.parametrize("layout", ["--pipeline-model-parallel-size 2", ""])
def test_a_save_in_the_background_holds_the_state_of_its_own_iteration(layout: str, tmp_path: Path) -> None:
    """Two more steps change everything before a byte of it is written; the next save waits for it."""
    flags = f"{layout} {DROPOUT} --train-iters 6 --save-interval 2"
    on_ranks(2, run_rank, f"{flags} --save {tmp_path}/plain", 2)
    said, seen, _ = on_ranks(2, run_rank, f"{flags} --save {tmp_path}/beside --async-save", 2, hold_back)[0]
    assert not any(done for found in seen[:4] for done in found.values()) and seen[4][2]
    assert saves(tmp_path / "beside") == {2: True, 4: True, 6: True}
    for iteration in (2, 4, 6):
        assert_same(folder_of(tmp_path / "beside", iteration), folder_of(tmp_path / "plain", iteration))
        assert f"saved {folder_of(tmp_path / 'beside', iteration)}" in said


def test_a_resume_from_a_save_in_the_background_is_exact(tmp_path: Path) -> None:
    flags = f"{DROPOUT} --train-iters 6"
    straight = train(f"{flags} --save {tmp_path} --save-interval 2 --async-save", (1, 1, 2))
    resumed = train(f"{flags} --load {tmp_path} --ckpt-step 4", (1, 1, 2))
    assert resumed.losses == straight.losses[4:]


def fail_second(trainer: Trainer, error: BaseException) -> list[int]:
    """The second save, at iteration 16, fails on the last rank during the next step; the steps that were made."""
    calls, made = itertools.count(), []
    save = trainer.saver.save

    def between() -> None:
        raise error

    def counted(progress: Progress) -> Path:
        if next(calls) == 1 and trainer.machine.mesh.rank == trainer.machine.mesh.world.size - 1:
            trainer.saver._check_stopping = between
        return save(progress)

    def look(progress: Progress) -> None:
        made.append(progress.iteration)
        if progress.iteration == 17:
            wait([trainer.saver._under_way.work])

    trainer.saver.save = counted
    after_step(trainer, look)
    return made


FULL = OSError(28, "No space left on device")


def test_a_failure_in_the_background_is_told_at_the_next_step_and_leaves_the_last_good_save(tmp_path: Path) -> None:
    """All ranks end with one line; nothing of the failed save is left."""
    flags = f"--train-iters 40 --save-interval 8 --async-save --save {tmp_path}"
    ended = on_ranks(2, run_rank, flags, 2, functools.partial(fail_second, error=FULL))
    for said, made, error in ended:
        assert error.startswith("iteration 16 is not saved: ") and "No space left on device" in error
        assert "\n" not in error and "rank 1 of 2" in error
        assert made[-1] == 18 and f"saved {folder_of(tmp_path, 8)}" in said
    assert saves(tmp_path) == {8: True, 16: False} and not list(folder_of(tmp_path, 16).rglob("*.safetensors"))
    state_of(folder_of(tmp_path, 8))
    resumed = train(f"--train-iters 9 --load {tmp_path}", (1, 1, 2))
    assert [step["iteration"] for step in resumed.steps] == [9]


def hold_and_fail(trainer: Trainer, agreed: bool, error: OSError | None = None) -> None:
    """A fault of the data, say, on all ranks, or one of rank 0 alone, while the save of the step before is under way:
    that writes nothing until then, and then fails where there is an `error`."""
    gate, check = threading.Event(), trainer.saver._check_stopping

    def between() -> None:
        while not (gate.wait(0.01) or trainer.saver._stopping):
            pass
        check()
        if error is not None:
            raise error

    def fail(progress: Progress) -> None:
        if progress.iteration == 3 and agreed:
            gate.set()
            raise AgreedError("the data is at fault")
        if progress.iteration == 3 and trainer.machine.mesh.rank == 0:
            raise RuntimeError("a fault of its own")

    trainer.saver._check_stopping = between
    after_step(trainer, fail)


def test_a_save_under_way_is_finished_when_all_ranks_stop_together(tmp_path: Path) -> None:
    flags = f"--train-iters 9 --save-interval 2 --async-save --save {tmp_path}"
    ended = on_ranks(2, run_rank, flags, 2, functools.partial(hold_and_fail, agreed=True))
    assert [error for _, _, error in ended] == ["the data is at fault"] * 2
    assert saves(tmp_path) == {2: True}
    state_of(folder_of(tmp_path, 2))


def test_an_error_is_told_beside_that_of_the_save_under_way(tmp_path: Path) -> None:
    """What went wrong first is what has to be mended."""
    flags = f"--train-iters 9 --save-interval 2 --async-save --save {tmp_path}"
    _, _, error = run_rank(flags, 1, functools.partial(hold_and_fail, agreed=True, error=FULL))
    assert error.startswith("the data is at fault; and iteration 2 is not saved: ") and "No space left" in error
    assert saves(tmp_path) == {2: False}


def test_a_save_under_way_is_given_up_when_a_rank_fails_alone(tmp_path: Path) -> None:
    flags = f"--train-iters 9 --save-interval 2 --async-save --save {tmp_path}"
    with pytest.raises(RuntimeError, match="of its own"):
        run_rank(flags, 1, functools.partial(hold_and_fail, agreed=False))
    assert saves(tmp_path) == {2: False} and not list(tmp_path.rglob("*.safetensors"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save")]


# ------------------------------------------------------------------------------------------------------ what stays


def test_the_rule_of_what_stays_is_the_one_that_is_asked_for() -> None:
    complete = list(range(10, 110, 10))
    assert Retention().keeps(complete, 100) >= {100} and not Retention()
    assert Retention(last=3).keeps(complete, 100) == {80, 90, 100}
    assert Retention(interval=40).keeps(complete, 100) == {40, 80, 100}
    assert Retention(last=2, interval=40).keeps(complete, 100) == {40, 80, 90, 100}
    assert Retention(last=1).keeps(complete, 60) == {60, 70, 80, 90, 100}, "what is later is of another run"
    for last, interval, newest in itertools.product((None, 1, 4), (None, 30), complete):
        assert newest in Retention(last, interval).keeps(complete, newest)


def make_folders(root: Path, complete: dict[int, bool]) -> None:
    for iteration, done in complete.items():
        (folder_of(root, iteration) / "0000").mkdir(parents=True)
        (folder_of(root, iteration) / "0000/rank_000000-a.safetensors").write_text("x")
        if done:
            (folder_of(root, iteration) / INDEX).write_text("x")


def test_a_removal_that_is_broken_off_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index goes first; the next removal takes the rest, and what broken-off saves left, but nothing later."""
    make_folders(tmp_path, {1: True, 2: False, 3: True, 4: False})

    def broken(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("megazero.retention.shutil.rmtree", broken)
        told = remove_old(tmp_path, 3, Retention(last=1))
    assert len(told) == 2 and "cannot remove" in told[0] and "Input/output error" in told[0]
    assert saves(tmp_path) == {1: False, 2: False, 3: True, 4: False}
    assert remove_old(tmp_path, 3, Retention()) == [] and len(saves(tmp_path)) == 4
    assert remove_old(tmp_path, 3, Retention(last=1)) == []
    assert saves(tmp_path) == {3: True, 4: False}


@pytest.mark.parametrize("how", ["", "--async-save"])
def test_a_run_keeps_the_saves_that_it_is_asked_to(how: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = f"--train-iters 7 --save-interval 1 {how}"
    make_folders(tmp_path / "a", {0: False})                        # of a run that was killed
    run(capsys, 0, f"{flags} --save {tmp_path}/a --keep-last 2")
    assert saves(tmp_path / "a") == {6: True, 7: True}
    run(capsys, 0, f"{flags} --save {tmp_path}/b --save-retain-interval 3")
    assert saves(tmp_path / "b") == {3: True, 6: True, 7: True}
    run(capsys, 2, f"{flags.replace('interval 1', 'interval 2')} --save {tmp_path}/c --save-retain-interval 3")


def spoil(trainer: Trainer) -> None:
    """One weight of the last rank's slice is no longer a number when the third save is due."""
    def change(progress: Progress) -> None:
        mesh = trainer.machine.mesh
        if progress.iteration == 3 and mesh.rank == mesh.world.size - 1:
            trainer.machine.optimizer.buckets[-1].weight[0] = float("nan")

    after_step(trainer, change)


@pytest.mark.parametrize("how", ["", "--async-save"])
def test_weights_that_are_not_finite_are_not_saved_and_the_good_save_stays(how: str, tmp_path: Path) -> None:
    """C131: with --keep-last 1, on a rank that alone sees them; the run stops with one line."""
    flags = f"--train-iters 6 --save-interval 1 --keep-last 1 --save {tmp_path} {how}"
    for _, _, error in on_ranks(2, run_rank, flags, 2, spoil):
        assert "not finite" in error and "\n" not in error and "weight/" in error
    assert saves(tmp_path) == {2: True, 3: False} and latest(tmp_path, say=lambda line: None) == 2
    assert all(tensor.isfinite().all() for tensor in state_of(folder_of(tmp_path, 2)).values())


# ------------------------------------------------------------------------------------------------------ what is saved


def test_weights_alone_are_saved_and_loaded_as_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = f"--save-interval 2 --load {tmp_path}/w"
    run(capsys, 0, f"--train-iters 2 --save-interval 2 --save {tmp_path}/w --no-save-optim")
    run(capsys, 0, f"--train-iters 2 --save-interval 2 --save {tmp_path}/all")
    weights, whole = state_of(folder_of(tmp_path / "w", 2)), state_of(folder_of(tmp_path / "all", 2))
    assert {kind for _, kind in weights} == {"weight"} and all(torch.equal(weights[k], whole[k]) for k in weights)
    _, err = run(capsys, 2, f"--train-iters 3 {flags} --save {tmp_path}/x")
    assert "holds weights only (--no-save-optim): give --finetune" in err and err.count("\n") == 1
    out, _ = run(capsys, 0, f"--train-iters 3 {flags} --no-load-optim")
    assert "going on after iteration 2" in out
    run(capsys, 0, f"--train-iters 1 {flags} --finetune")


def save_again(flags: str, world: int) -> None:
    """Save what is loaded, without a step."""
    trainer, progress = make_trainer(flags, world)
    trainer.saver.save(progress)
    trainer.saver.close()


def test_what_is_read_from_any_layout_is_what_one_process_has(tmp_path: Path) -> None:
    """C056, C144: weights of tensor 2 x pipeline 2 x data 2, gate and up among them, by name, bit for bit, against
    the same save taken over by one process and by tensor 4."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    flags = f"{LLAMA} --train-iters 1 --save-interval 1 --checkpoint-file-mib 1"
    on_ranks(8, run_rank, f"{flags} {layout} --save {tmp_path}/eight", 8)
    on_ranks(1, save_again, f"{flags} --load {tmp_path}/eight --save {tmp_path}/one", 1)
    on_ranks(4, save_again, f"{flags} --tensor-model-parallel-size 4 --load {tmp_path}/one --save {tmp_path}/four", 4)
    for other in ("one", "four"):
        assert_same(folder_of(tmp_path / other, 1), folder_of(tmp_path / "eight", 1))
    names = {name for name, _ in state_of(folder_of(tmp_path / "one", 1))}
    wanted = {info.name for b in make_trainer(LLAMA, 1)[0].machine.optimizer.buckets for info in b.infos}
    assert names == wanted


# -------------------------------------------------------------------------------------------------- what goes wrong


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB: one save fits, a second does not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("may not mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("how", ["", "--async-save"])
def test_a_full_disk_is_told_and_the_last_good_save_loads(
    how: str, small_disk: Path, capsys: pytest.CaptureFixture
) -> None:
    _, err = run(capsys, 1, f"--train-iters 5 --save-interval 1 --save {small_disk} {how}")
    assert "No space left on device" in err and err.count("\n") == 1
    good = latest(small_disk, say=lambda line: None)
    assert good is not None and saves(small_disk) == {n: n <= good for n in range(1, good + 2)}
    assert not list(folder_of(small_disk, good + 1).rglob("rank_*"))
    state_of(folder_of(small_disk, good))


def test_a_folder_that_is_read_only_is_told_before_training(small_disk: Path, capsys: pytest.CaptureFixture) -> None:
    run(capsys, 0, f"--train-iters 1 --save-interval 1 --save {small_disk}")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    _, err = run(capsys, 2, f"--train-iters 2 --save-interval 1 --save {small_disk} --load {small_disk}")
    assert f"--save {small_disk}" in err and err.count("\n") == 1
    out, _ = run(capsys, 0, f"--train-iters 2 --load {small_disk}")
    assert "going on after iteration 1" in out


@pytest.mark.parametrize("what", ["index.json", "index.json.tmp"])
def test_an_index_that_cannot_be_written_is_told_and_leaves_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The disk is full when all data is written already: at the draft, or when it is put in place."""
    run(capsys, 0, f"--train-iters 1 --save-interval 1 --save {tmp_path}")
    replace, sync = os.replace, os.fsync

    def full_replace(old: Path, new: Path) -> None:
        if what == Path(new).name:
            raise FULL
        replace(old, new)

    def full_sync(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith(what):
            raise FULL
        sync(handle)

    monkeypatch.setattr("megazero.checkpoint.os.replace", full_replace)
    monkeypatch.setattr("megazero.checkpoint.os.fsync", full_sync)
    _, err = run(capsys, 1, f"--train-iters 2 --save-interval 1 --save {tmp_path} --load {tmp_path}")
    assert "cannot write: No space left on device" in err and err.count("\n") == 1
    assert saves(tmp_path) == {1: True, 2: False} and latest(tmp_path, say=lambda line: None) == 1
    assert not [path for path in folder_of(tmp_path, 2).rglob("*") if path.is_file()]


def test_a_second_run_that_would_write_to_the_same_folder_is_refused(tmp_path: Path) -> None:
    """As long as the first one lives, however it ends: the system frees the lock."""
    lock = lock_folder(tmp_path)
    assert lock is not None
    (ended,) = run_script(["pretrain_gpt.py", *f"{SMALL} --train-iters 1 --save {tmp_path} --save-interval 1".split()])
    assert ended.code == 1 and ended.stderr.count("\n") == 1, ended.stderr
    assert f"--save {tmp_path}: another run (process {os.getpid()} on " in ended.stderr
    assert saves(tmp_path) == {}
    lock.close()
    lock_folder(tmp_path).close()


class Executes:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def test_a_pickle_in_place_of_any_file_is_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What a run loads is refused with one line; files that say nothing are as good as missing."""
    root, witness = tmp_path / "run", tmp_path / "executed"
    run(capsys, 0, f"--train-iters 1 --save-interval 1 --save {root}")
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) == 4
    for path in files:
        good = path.read_bytes()
        path.write_bytes(pickle.dumps(Executes(witness)) * 20)
        loads = path.suffix in (".txt", "") and path.name != INDEX
        code = 0 if loads else 1 if path.suffix == ".safetensors" else 2
        out, err = run(capsys, code, f"--train-iters 2 --load {root}")
        assert ("going on after iteration 1" in out) == loads and err.count("\n") == (not loads)
        path.write_bytes(good)
    assert not witness.exists()
    pickle.loads(pickle.dumps(Executes(witness)))
    assert witness.exists(), "it would have been seen"


def test_a_damaged_file_is_loaded_only_where_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(capsys, 0, f"--train-iters 1 --save-interval 1 --save {tmp_path}")
    (path,) = tmp_path.rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-70] ^= 1
    path.write_bytes(data)
    _, err = run(capsys, 1, f"--train-iters 2 --load {tmp_path}")
    assert "damaged: wrong checksum" in err and err.count("\n") == 1
    run(capsys, 0, f"--train-iters 2 --load {tmp_path} --no-verify-checkpoint")
    path.unlink()
    _, err = run(capsys, 1, f"--train-iters 2 --load {tmp_path}")
    assert "missing, but the index names it" in err and err.count("\n") == 1


def test_the_command_line_counts_but_not_for_the_shape(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """C053: another width is refused with both values before ranks meet; another log interval is honoured."""
    run(capsys, 0, f"--train-iters 1 --save-interval 1 --save {tmp_path} --log-interval 9")
    _, err = run(capsys, 2, f"--train-iters 2 --load {tmp_path} --hidden-size 48")
    assert "--hidden-size: 32 in the checkpoint, 48 now" in err and err.count("\n") == 1
    out, _ = run(capsys, 0, f"--train-iters 2 --load {tmp_path} --log-interval 1")
    assert "iteration 2/2" in out


def test_a_finetuning_that_was_interrupted_goes_on_when_the_same_command_is_given_again(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With --auto-resume, --finetune and --no-load-optim are for what --load names, not for saves of the run itself."""
    run(capsys, 0, f"--train-iters 2 --save-interval 1 --save {tmp_path}/from")
    for asked in ("--finetune --override-opt_param-scheduler", "--no-load-optim"):
        flags = f"--train-iters 5 --save-interval 1 --load {tmp_path}/from {asked} --auto-resume"
        begin = 0 if "finetune" in asked else 2
        out, _ = run(capsys, 0, f"{flags} --save {tmp_path}/{begin} --exit-interval 3")
        assert f"loaded {folder_of(tmp_path / 'from', 2)}, going on after iteration {begin}" in out
        out, _ = run(capsys, 0, f"{flags} --save {tmp_path}/{begin} --async-save")
        assert f"loaded {folder_of(tmp_path / str(begin), 3)}, going on after iteration 3" in out
        run(capsys, 0, f"{flags} --save {tmp_path}/{begin}-straight")
        assert_same(folder_of(tmp_path / str(begin), 5), folder_of(tmp_path / f"{begin}-straight", 5))


def test_a_run_begins_from_a_save_that_load_names(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Which may be an earlier one of the run itself: that goes back on purpose, as --ckpt-step does."""
    run(capsys, 0, f"--train-iters 3 --save-interval 1 --save {tmp_path}")
    flags = f"--save-interval 1 --save {tmp_path} --load {folder_of(tmp_path, 1)} --train-iters 2"
    out, _ = run(capsys, 0, flags)
    assert "going on after iteration 1" in out and saves(tmp_path) == {1: True, 2: True, 3: True}


def test_a_run_that_leaves_when_its_time_is_up_has_saved_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """C135: --exit-duration-in-mins, with a save beside the training; the relaunch continues."""
    flags = f"--train-iters 3 --save-interval 100 --save {tmp_path} --async-save --auto-resume --log-interval 1"
    out, _ = run(capsys, 0, f"{flags} --exit-duration-in-mins 0")
    assert "left after iteration 1, as asked" in out and saves(tmp_path) == {1: True}
    out, _ = run(capsys, 0, flags)
    assert "going on after iteration 1" in out and "iteration 3/3" in out and saves(tmp_path) == {1: True, 3: True}


def test_the_shape_of_the_model_may_come_from_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """--use-checkpoint-args: what is left out is the checkpoint's; what is given and differs is refused."""
    model = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    assert model in f"{SMALL} " and pretrain_gpt.main(
        f"{SMALL} {LLAMA} --train-iters 1 --save-interval 1 --save {tmp_path}/a".split()) == 0
    rest = f"{SMALL} ".replace(model, "") + f"--train-iters 2 --load {tmp_path}/a --use-checkpoint-args"
    capsys.readouterr()
    assert pretrain_gpt.main(rest.split()) == 0
    assert "going on after iteration 1" in capsys.readouterr().out
    for words, told in (
        ("--hidden-size 48", "--hidden-size: 32 in the checkpoint, 48 now"),
        ("--normalization LayerNorm", "--normalization: RMSNorm in the checkpoint, LayerNorm now"),
        (f"--load {tmp_path}/none", f"--use-checkpoint-args: --load {tmp_path}/none: there is no complete checkpoint"),
    ):
        assert pretrain_gpt.main(f"{rest} {words}".split()) == 2
        err = capsys.readouterr().err
        assert told in err and err.count("\n") == 1, err
    assert pretrain_gpt.main(rest.replace(f"--load {tmp_path}/a", "").split()) == 2
    assert capsys.readouterr().err == "pretrain_gpt.py: error: --use-checkpoint-args needs --load\n"
