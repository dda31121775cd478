"""Jobs in which one rank fails, dies, is silent or hangs: the true error is shown once, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
from torch.distributed import HashStore

import megazero.lookout
from megazero.hang import describe, table
from megazero.lookout import Lookout, Watched
from megazero.parallel.activity import Activity
from megazero.parallel.groups import World
from megazero.pipe.engine import PipeEngine
from megazero.pipe.instructions import Backward
from megazero.trainer import Feed, Trainer
from tests.harness import Job
from tests.training import SMALL

FLAGS = f"{SMALL} --micro-batch-size 1 --train-iters 100000 --log-interval 1"
PLANTED = "planted"
PIPELINE = "--pipeline-model-parallel-size 2"


def in_step(rank: int, *, on: int, action: Callable[[], Any]) -> None:
    """One rank does something before its third step."""
    step = Trainer._step

    def changed(trainer: Trainer, progress: Any) -> Any:
        if rank == on and progress.iteration == 2:
            action()
        return step(trainer, progress)

    Trainer._step = changed


def fail() -> None:
    raise RuntimeError(f"{PLANTED} fault")


def misread() -> None:
    raise OSError(f"{PLANTED} file: no such thing")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def skip_a_send(rank: int) -> None:
    """The second pipeline rank leaves out the last gradient of the third step."""
    send, calls = PipeEngine._send, []

    def without(engine: PipeEngine, *args: Any) -> None:
        calls.append(1)
        if rank == 0 or len(calls) != 3 * 8:
            send(engine, *args)

    PipeEngine._send = without


def skip_a_collective(rank: int) -> None:
    """The second data rank takes no part in the third agreement on a batch."""
    read, calls = Feed.global_batch, []

    def alone(feed: Feed, *args: Any, **how: Any) -> Any:
        calls.append(1)
        return (feed._micro_batches(*args), 128) if rank == 1 and len(calls) == 3 else read(feed, *args, **how)

    Feed.global_batch = alone


def soon(rank: int, plant: Callable[[int], None] | None = None) -> None:
    """Lookouts wait a fifth as long as they do, and for silence three seconds, not thirty."""
    megazero.lookout.TICK, megazero.lookout.GRACE = 0.2, 1.0
    megazero.lookout.SILENCE, megazero.lookout.BEAT = 3.0, 0.5
    if plant is not None:
        plant(rank)


@pytest.mark.parametrize(
    ("action", "shown", "tracebacks"),
    [
        (fail, "pretrain_gpt.py: error: rank 1 of 2 failed:\nTraceback", 1),
        (misread, "pretrain_gpt.py: error: planted file: no such thing (rank 1 of 2)\n", 0),
        (die, "pretrain_gpt.py: error: rank 0 of 2 has lost another one: ", 0),
    ],
)
def test_the_first_error_is_shown_once_with_its_rank_and_the_others_leave(
    action: Callable, shown: str, tracebacks: int, tmp_path: Path
) -> None:
    """Above anything else, while the connection that broke is one line of whoever noticed it."""
    plant = partial(soon, plant=partial(in_step, on=1, action=action))
    with Job(f"{FLAGS} {PIPELINE}".split(), 2, tmp_path, plant=plant) as job:
        codes = job.wait(60)
    assert codes == [1, -signal.SIGKILL if action is die else 1]
    err = job.erred()
    assert err.startswith(shown) and err.count("Traceback") == tracebacks, err
    assert err.count("planted") == (action is not die), err
    assert ("rank 0 of 2 leaves, for rank 1 has failed\n" in err) == (action is not die), err


def test_a_rank_stays_a_little_behind_the_one_that_failed(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """So torchrun, which looks ten times a second, does not name the lowest of those that left together; its SIGTERM to
    the others is no wish to stop then."""
    lookout, seen = Lookout(World(0, 2, 0), Watched()), []
    lookout._store = HashStore()
    lookout._store.set("failed", "1")
    lookout._starting = False
    monkeypatch.setattr("megazero.lookout.time.sleep", lambda seconds: (seen.append(seconds), lookout._heard(SIGTERM)))
    monkeypatch.setattr("megazero.lookout.os._exit", sys.exit)
    with pytest.raises(SystemExit) as left:
        lookout._shows(RuntimeError("Connection closed by peer"))
    assert left.value.code == 1 and seen == [megazero.lookout.BEHIND] and seen[0] > 0.1
    assert capfd.readouterr() == ("", "pretrain_gpt.py: rank 0 of 2 leaves, for rank 1 has failed\n")
    assert lookout.stop.reason is None
    lookout._store = HashStore()
    with pytest.raises(SystemExit):
        lookout._shows(RuntimeError("Connection closed by peer"))
    with pytest.raises(SystemExit):
        lookout._shows(RuntimeError("its own"))
    assert seen == [megazero.lookout.BEHIND] * 2 + [0.0]        # who was killed is seen first too; the failing one goes


def test_a_rank_that_falls_silent_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """Stopped, it keeps its connections, so nothing breaks; the one that holds the store answers no question either.
    Two jobs, side by side."""
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(Job(
                f"{FLAGS} {PIPELINE} --metrics-jsonl {tmp_path}/{silent}.jsonl".split(), 2, tmp_path / str(silent),
                plant=soon,
            ))
            for silent in (0, 1)
        ]  # fmt: skip
        for silent, job in enumerate(jobs):
            job.wait_for(tmp_path / f"{silent}.jsonl", "lm_loss")
            job.signal(signal.SIGSTOP, [silent])
        for silent, job in enumerate(jobs):
            job.processes[1 - silent].join(60)
            assert job.processes[1 - silent].exitcode == 1
    assert jobs[0].erred() == "pretrain_gpt.py: error: rank 1 had no answer of the job's store for 3 s\n"
    assert jobs[1].erred().startswith("pretrain_gpt.py: error: rank 1 is gone: no sign of life for 3 s\n")
    assert "Traceback" not in jobs[1].erred()


HANGS = (
    (skip_a_send, PIPELINE, (
        "rank 0: iteration 3; instruction ", ": Backward(micro=7, stage=0); waits in a receive from rank 1; ",
        "rank 1: iteration 3; waits in broadcast over pipeline (ranks 0, 1); collectives begun so far: pipeline ",
    )),
    (skip_a_collective, "", (
        "rank 0: iteration 3; waits in all-reduce over world (ranks 0, 1); collectives begun so far: data ",
        "rank 1: iteration 3; waits in all-reduce over data (ranks 0, 1); collectives begun so far: data ",
    )),
)


def test_a_job_that_hangs_says_which_rank_waits_for_whom_and_where(tmp_path: Path) -> None:
    """Where one rank leaves out a message or a collective: with instruction and peer, then Python's stacks; within the
    time that is set, and a non-zero code. Two jobs, side by side."""
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(Job(
                f"{FLAGS} {layout} --hang-timeout-minutes 0.1".split(), 2, tmp_path / str(number),
                plant=partial(soon, plant=plant),
            ))
            for number, (plant, layout, _) in enumerate(HANGS)
        ]
        assert [job.wait(60) for job in jobs] == [[1, 1], [1, 1]]
    for job, (_, _, waits) in zip(jobs, HANGS, strict=True):
        err = job.erred()
        assert err.startswith("pretrain_gpt.py: error: the job hangs: nothing moves for 0.1 minutes"), err
        for words in waits:
            assert words in err, err
        for rank in 0, 1:
            assert f"rank {rank} is here:\n  thread MainThread:\n" in err and "in _step" in err, err
        assert err.count("error: ") == 1, err                   # who leaves first is nobody's second error


def test_what_a_rank_does_is_one_line_and_ranks_that_do_the_same_share_it() -> None:
    activity = Activity()
    assert describe(activity) == "start-up; waits for nobody; collectives begun so far: none"
    activity.enter("iteration 7")
    activity.run(Backward(2, 1), 4, 9)
    activity.begin("tensor")
    with activity.waits("all-gather", "tensor", (0, 1)):
        text = describe(activity)
    assert text == (
        "iteration 7; instruction 5 of 9: Backward(micro=2, stage=1); waits in all-gather over tensor (ranks 0, 1); "
        "collectives begun so far: tensor 1"
    )
    assert "waits for nobody" in describe(activity) and activity.beats == 4
    assert table({0: "a", 2: "a", 1: "b"}, 4) == "  ranks 0, 2: a\n  rank 1: b\n  rank 3: does not answer"
