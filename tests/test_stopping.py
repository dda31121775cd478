"""Runs that are asked to stop: all ranks at one micro-batch, saved, and gone on with as if nothing had been."""

from __future__ import annotations

import functools
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megazero import lookout as lookout_module
from megazero.checkpoint import Reader, folder_of
from megazero.flags import parse
from megazero.lookout import Lookout, Watched
from megazero.parallel.groups import World, open_mesh
from megazero.saver import Saver
from megazero.stopping import Stop
from megazero.trainer import Trainer
from tests.harness import Job, on_ranks
from tests.training import SMALL, Recorder, pieces_of

# ------------------------------------------------------------------------------------------------ where all ranks stop


def test_ranks_that_are_at_different_micro_batches_stop_at_the_same_one() -> None:
    """The furthest decides: nobody runs less, or more."""
    stops, ran = [Stop() for _ in range(4)], [[] for _ in range(4)]

    def run(rank: int) -> None:
        stops[rank].enter(7)
        for micro in range(100):
            for _ in "forward", "backward":
                if stops[rank].admits(micro):
                    ran[rank].append(micro)
            time.sleep(0.001 * (rank + 1))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    furthest = max(stop.freeze() for stop in stops)
    for stop in stops:
        stop.decide(furthest)
    for thread in threads:
        thread.join()
    last = ran[0][-1]
    assert 0 < last < 99 and all(own == [m for m in range(last + 1) for _ in range(2)] for own in ran)


def test_a_rank_that_has_not_begun_the_step_of_the_furthest_finishes_its_own() -> None:
    behind, ahead = Stop(), Stop()
    behind.enter(3)
    ahead.enter(4)
    furthest = max(behind.freeze(), ahead.freeze())
    for stop in behind, ahead:
        stop.decide(furthest)
    assert behind.admits(0) and behind.admits(5)
    behind.enter(4)
    assert not behind.admits(0) and not ahead.admits(0)


# ------------------------------------------------------------------------------------ a step that is begun and given up

LAYOUTS = (
    "--tensor-model-parallel-size 2 --zero-stage 2 --overlap-grad-reduce --overlap-param-gather",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --overlap-grad-reduce",
    "--zero-stage 2 --bucket-size 4000",
)


def stop_within(trainer: Trainer, last: int, iteration: int) -> None:
    """As if all ranks had agreed, in the middle of a step, that this micro-batch is the last one."""
    stop, admits = trainer.machine.engine.stop, trainer.machine.engine.stop.admits

    def admitting(micro: int) -> bool:
        if trainer.machine.mesh.activity.phase != f"iteration {iteration}" or micro <= last:
            return admits(micro)
        stop.ask("a test")
        return False

    stop.admits = admitting


def interrupted_and_straight(world: int) -> list[tuple[Recorder, Recorder, bool]]:
    """Four steps on this rank in each layout, once with the third begun and given up, and made again; whether both
    have the same state in the end."""
    found = []
    for layout in LAYOUTS:
        records, states = [], []
        for broken in True, False:
            config, _ = parse(f"{SMALL} --train-iters 4 --micro-batch-size 1 --hidden-dropout 0.1 {layout}".split())
            plan, record = pretrain_gpt.prepare(config, World(0, world, 0)), Recorder()
            trainer, progress = pretrain_gpt.build(plan, open_mesh(plan.topology), record)
            if broken:
                stop_within(trainer, 1, 3)
                progress = trainer.train(progress, 4, None)
                assert progress.iteration == 2
                trainer.machine.engine.stop = Stop()
            trainer.train(progress, 4, None)
            records.append(record)
            states.append(pieces_of(trainer))
        found.append((*records, all(torch.equal(a[3], b[3]) for a, b in zip(*states, strict=True))))
    return found


def test_a_step_that_is_given_up_leaves_no_trace() -> None:
    """Under each schedule, with gradients that are reduced after each backward and beside it: what follows is made of
    the same bits as in a run that never began it."""
    for rank, layouts in enumerate(on_ranks(2, interrupted_and_straight, 2, timeout=100)):
        for got, want, same in layouts:
            assert same and [step["lm_loss"] for step in got.steps] == [step["lm_loss"] for step in want.steps]
            assert rank or "left after iteration 2, as asked: a test" in got.said


# ---------------------------------------------------------------------------------------------------- signals and files

FLAGS = (
    f"{SMALL} --micro-batch-size 1 --train-iters 6 --save-interval 100 --auto-resume --log-interval 1 "
    "--pipeline-model-parallel-size 2 --async-save"
)


def sleeping_start(folder: str, rank: int) -> None:
    """Every rank sleeps when all is built."""
    def load(*_: Any) -> None:
        Path(folder, f"here{rank}").touch()
        time.sleep(60)

    pretrain_gpt.load = load


def late_start(folder: str, rank: int) -> None:
    """Rank 0 is a little later than the other one when all is built."""
    load = pretrain_gpt.load

    def slowly(*args: Any) -> Any:
        progress = load(*args)
        if rank == 0:
            time.sleep(0.5)
            Path(folder, "here0").touch()
            time.sleep(0.1)
        return progress

    pretrain_gpt.load = slowly


def slow_save(folder: str, rank: int) -> None:
    """A save takes a second."""
    publish = Saver._publish

    def slowly(*args: Any) -> Any:
        Path(folder, "here0").touch()
        time.sleep(1)
        return publish(*args)

    Saver._publish = slowly


def slow_step(folder: str, rank: int) -> None:
    """The third step is long."""
    step = Trainer._step

    def slowly(trainer: Trainer, progress: Any) -> Any:
        if progress.iteration == 2:
            stage = trainer.machine.engine._run_stage
            Path(folder, f"here{rank}").touch()
            trainer.machine.engine._run_stage = lambda *args: time.sleep(0.6) or stage(*args)
        return step(trainer, progress)

    Trainer._step = slowly


def state_of(folder: Path) -> dict:
    reader = Reader(folder)
    return {(name, kind): reader.read(name, kind) for name, e in reader.tensors.items() for kind in e.dtypes}


def losses(path: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(r["iteration"], r["lm_loss"]) for r in records if "split" not in r]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("straight")
    with Job(f"{FLAGS} --save {folder}/run --metrics-jsonl {folder}/m.jsonl".split(), 2, folder) as job:
        assert job.wait() == [0, 0], job.erred()
    return folder


# The moment, what is planted, the file that says it has come, further flags, who gets which signal, iterations saved.
MOMENTS = (
    ("start-up", sleeping_start, "here1", "", signal.SIGTERM, (0, 1), 0),
    ("a step", slow_step, "here1", "", signal.SIGUSR1, (1,), 2),
    ("evaluation", None, "m.jsonl", "--eval-interval 1 --eval-iters 1000000", signal.SIGINT, (0, 1), 1),
    ("a save", slow_save, "here0", "--save-interval 2", signal.SIGTERM, (0, 1), None),
)


@pytest.mark.parametrize(("moment", "plant", "file", "more", "number", "who", "saved"), MOMENTS)
def test_a_signal_at_any_moment_ends_the_run_with_a_save_that_is_gone_on_from(
    moment: str, plant: Any, file: str, more: str, number: Any, who: Any, saved: int | None, straight: Path,
    tmp_path: Path,
) -> None:
    """SIGTERM, SIGUSR1 or SIGINT, to all ranks or to one: all are gone in 20 s with code 0, what was saved is whole,
    and the run that goes on ends in the same bits."""
    flags = f"{FLAGS} --save {tmp_path}/run --metrics-jsonl {tmp_path}/m.jsonl"
    planted = None if plant is None else functools.partial(plant, str(tmp_path))
    with Job(f"{flags} {more}".split(), 2, tmp_path / "first", plant=planted) as job:
        job.wait_for(tmp_path / file, "lm_loss" if file.endswith("l") else "")
        job.signal(number, who)
        assert job.wait(20) == [0, 0], job.said() + job.erred()
    said = job.said()
    assert "as asked: " + number.name in said and job.erred() == "", job.erred()
    done = [int(path.parent.name[5:]) for path in (tmp_path / "run").glob("*/index.json")]
    assert max(done, default=0) == (saved if saved is not None else max(done)) and "saved" in said or not done
    with Job(flags.split(), 2, tmp_path / "second") as job:
        assert job.wait() == [0, 0], job.erred()
    assert f"going on after iteration {max(done)}" in job.said() if done else "starting anew" in job.said()
    assert losses(tmp_path / "m.jsonl") == losses(straight / "m.jsonl")
    got, want = (state_of(folder_of(root / "run", 6)) for root in (tmp_path, straight))
    assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


def test_a_rank_that_leaves_before_the_training_begins_lets_none_begin(tmp_path: Path) -> None:
    """Rank 0, which holds the job's store, is asked to stop a tenth of a second before the first step: it did leave two
    seconds later, from within the training, and the other one failed for having lost it."""
    flags = f"{FLAGS} --train-iters 99999 --save {tmp_path}/run"
    with Job(flags.split(), 2, tmp_path, plant=functools.partial(late_start, str(tmp_path))) as job:
        job.wait_for(tmp_path / "here0")
        job.signal(signal.SIGINT, (0,))
        assert job.wait(20) == [0, 0], job.said() + job.erred()
    assert "left before the first step, as asked: SIGINT" in job.said() and "iteration" not in job.said()
    assert "pretrain_gpt.py: " not in job.erred(), job.erred()


def test_interrupted_twice_a_run_leaves_at_once_and_a_file_stops_it_too(tmp_path: Path) -> None:
    """Whatever the main thread waits for; then --kill-switch-path, which one process sees alone."""
    flags = f"{SMALL} --train-iters 99999 --metrics-jsonl {tmp_path}/m.jsonl --save {tmp_path}/run --save-interval 9999"
    with Job(flags.split(), 1, tmp_path, plant=functools.partial(slow_step, str(tmp_path))) as job:
        job.wait_for(tmp_path / "here0")
        job.signal(signal.SIGINT)
        time.sleep(0.1)
        job.signal(signal.SIGINT)
        assert job.wait(10) == [130] and "interrupted twice" in job.erred() and job.erred().count("\n") == 1
    assert "again to leave at once" in job.said() and not list(tmp_path.glob("run/*/index.json"))
    with Job(f"{flags} --kill-switch-path {tmp_path}/stop".split(), 1, tmp_path / "b") as job:
        job.wait_for(tmp_path / "m.jsonl", '"iteration": 3,')
        (tmp_path / "stop").touch()
        assert job.wait(20) == [0] and f"as asked: --kill-switch-path {tmp_path}/stop" in job.said()
    assert len(list(tmp_path.glob("run/*/index.json"))) == 1


def test_a_rank_waits_for_its_launcher_where_another_one_has_stopped_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends all ranks when a host comes, on each host in its own time: tests/soak_hosts.py has three."""
    monkeypatch.setattr("megazero.lookout.LINGER", 0.01)
    assert not World.from_environment().launched
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    assert World.from_environment().launched
    for launched, reason, own, waits in (
        (True, "SIGTERM", False, True), (True, "SIGTERM", True, False), (False, "SIGTERM", False, False),
        (True, "--kill-switch-path stop", False, False), (True, None, False, False),
    ):  # fmt: skip
        lookout, began = Lookout(World(1, 2, launched=launched), Watched()), time.monotonic()
        lookout.train()
        if own:
            lookout._heard(signal.SIGTERM)
        elif reason is not None:
            lookout.stop.ask(reason)
        lookout.linger()
        assert (time.monotonic() - began >= 0.01) == waits


def test_a_disk_that_is_silent_is_not_taken_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asks both in one thread."""
    said, left = [], threading.Event()

    def exists(path: Path) -> bool:
        left.wait(10)
        return False

    def leave(lookout: Lookout, text: str, code: int) -> None:
        said.append(text)
        left.set()

    monkeypatch.setattr(lookout_module, "TICK", 0.01)
    monkeypatch.setattr(lookout_module, "SILENCE", 0.05)
    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(Lookout, "_leave", leave)
    with Lookout(World(0, 2), Watched(signals=False, kill_switch=Path("/disk/stop"))) as lookout:
        lookout.connect(dist.HashStore())
        assert left.wait(10)
    assert said[0] == "error: rank 0 had no answer of the disk of --kill-switch-path /disk/stop for 0 s"


def test_signals_are_left_to_the_system_on_request_and_after_the_run() -> None:
    """--no-exit-signal-handler."""
    before = signal.getsignal(signal.SIGTERM)
    for flags, kept in ("", False), ("--no-exit-signal-handler", True):
        how = pretrain_gpt.watched(parse(f"{SMALL} {flags}".split())[0])
        assert how == Watched(signals=not kept, hang_seconds=600)
        with Lookout(World(), how):
            assert (signal.getsignal(signal.SIGTERM) is before) == kept
        assert signal.getsignal(signal.SIGTERM) is before
