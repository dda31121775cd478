"""A training job that goes on through faults: its starts, what each of them says, and what must hold of its saves."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from scripts.ranks import examine, fork_ranks, is_saving, start_ranks

SAVE_INTERVAL, EVAL_INTERVAL, RATE = 5, 7, 1e-3
FAR = 1_000_000         # steps: a run that is disturbed does not come to its end
MODEL = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 2048 --micro-batch-size 1 "
    f"--global-batch-size 4 --lr {RATE} --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 100 --lr-decay-iters "
    "20000 --clip-grad 1 --mock-data --tokenizer-type NullTokenizer --num-workers 0 --log-interval 1 --auto-resume "
    f"--eval-interval {EVAL_INTERVAL} --eval-iters 3"
)
SAVING = f"--save-interval {SAVE_INTERVAL} --keep-last 3"
START = 120.0           # seconds in which a run comes to its first step, or says why not
LEAVE = 60.0            # seconds in which all ranks are gone when one has failed
STOP = 20.0             # seconds in which all are gone that were asked to stop
WANDER = 1.0            # seconds: a fault comes at most so long after a run could be disturbed
GAP = 2.0               # seconds: a longer pause between two looks is one in which this process was suspended
TAIL = 4000             # bytes at the end of a file that hold its last line

Layout = tuple[int, str]                                                # ranks, flags
Start = Callable[[Sequence[str], int, TextIO], Sequence[Any]]           # flags, ranks, log -> processes as Popen's


class Clock:
    """Seconds in which this process ran. Those in which it was suspended, with all that it started, do not count, and
    `gaps` tells how often that was."""

    def __init__(self) -> None:
        self.seconds, self.gaps, self._looked = 0.0, 0, time.monotonic()

    def look(self) -> float:
        """The seconds until now; called more often than every GAP."""
        gap, self._looked = time.monotonic() - self._looked, time.monotonic()
        self.gaps += gap > GAP
        self.seconds += min(gap, GAP)
        return self.seconds

    def wait(self, done: Callable[[], bool], limit: float, *, nap: float = 0.01) -> bool:
        """Wait until something is so; whether it was within `limit` seconds."""
        end = self.look() + limit
        while not done():
            if self.look() > end:
                return False
            time.sleep(nap)
        self.look()
        return True

    def sleep(self, seconds: float) -> None:
        """Let so much time go by."""
        self.wait(lambda: False, seconds, nap=min(0.05, seconds / 4))


@dataclass
class Fault:
    """What was done to the job, and what became of it.

    told       who and where, in words
    in_moment  whether it came where it was meant to; None: it was not meant for any moment
    seconds    until it was answered; None: there was nothing to answer
    wrong      all that is not as it must be
    lost       of those, saves that were lost or spoiled
    survived   whether the job has gone on from its newest good save, or was not stopped at all
    """

    kind: str
    told: str = ""
    in_moment: bool | None = None
    seconds: float | None = None
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    survived: bool = False


@dataclass(frozen=True)
class Part:
    """What all starts of a job have in common, and among which layouts each of them draws."""

    name: str
    words: str
    layouts: tuple[Layout, ...]
    exact: bool                 # whether every bit is that of an undisturbed run; else up to rounding in fp64


class Job:
    """One start of the run: its ranks, and what they say."""

    def __init__(self, folder: Path, words: str, layout: Layout, start: Start) -> None:
        self.layout, self.ranks = layout, layout[0]
        self.log, self.metrics = folder / "log.txt", folder / "metrics.jsonl"
        self._begins = self.metrics.stat().st_size if self.metrics.exists() else 0
        with open(self.log, "w", encoding="utf-8") as out:
            self.processes = start(f"{words} {layout[1]}".split(), self.ranks, out)

    def said(self) -> str:
        """What rank 0 has said, and all errors."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def saved(self) -> list[int]:
        """The iterations of all saves that this start has told of."""
        return [int(number) for number in re.findall(r"saved \S*iter_(\d+)\n", self.said())]

    def last(self) -> dict[str, Any] | None:
        """The last step or evaluation that this start has told of."""
        if not self.metrics.exists():
            return None
        with open(self.metrics, "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(self._begins, end - TAIL))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
        return json.loads(lines[-1]) if lines else None

    def trains(self) -> bool:
        """Whether a step was made."""
        return self.last() is not None

    def evaluates(self) -> bool:
        """Whether an evaluation is under way: the step before it was told of, its result was not."""
        last = self.last()
        return last is not None and "split" not in last and last["iteration"] % EVAL_INTERVAL == 0

    def send(self, number: signal.Signals, who: Sequence[int] | None = None) -> None:
        """A signal to some ranks, or to all."""
        for rank in range(self.ranks) if who is None else who:
            if self.processes[rank].poll() is None:
                self.processes[rank].send_signal(number)

    def is_over(self, who: Sequence[int] | None = None) -> bool:
        """Whether some ranks are gone, or all."""
        return all(self.processes[rank].poll() is not None for rank in (range(self.ranks) if who is None else who))

    def end(self) -> list[int]:
        """Kill what is left; the exit codes."""
        for process in self.processes:
            process.kill()
        return [process.wait() for process in self.processes]


class Soak:
    """The job of one part of the soak, from start to start.

    good     the newest sound save, as far as is known
    damaged  saves that a fault has spoiled, as it should
    pending  faults after which the job has not gone on yet
    """

    def __init__(self, folder: Path, part: Part, draw: random.Random, start: Start = fork_ranks) -> None:
        self.folder, self.part, self.draw, self.start, self.clock = folder, part, draw, start, Clock()
        self.saves, self.switch = folder / "saves", folder / "stop"
        self.job: Job | None = None
        self.layout = part.layouts[0]
        self.good, self.damaged, self.passed_over = 0, set[int](), set[int]()
        self.pending: list[Fault] = []
        self.sound: list[int] = []
        folder.mkdir(parents=True)

    # -------------------------------------------------------------------------------------------------------- starting

    def begin(
        self, more: str = "", *, layout: Layout | None = None, many: bool = False, start: Start | None = None
    ) -> Job:
        """Start the run, in a layout of the part's; `many`: in one of several ranks."""
        asynchronous = self.draw.choice(("", "--async-save"))
        self.layout = layout or self.draw.choice([one for one in self.part.layouts if one[0] > 1 or not many])
        words = f"{self.words()} {SAVING} {asynchronous} --kill-switch-path {self.switch} --exit-duration-in-mins 60"
        self.job = Job(self.folder, f"{words} {more}", self.layout, start or self.start)
        return self.job

    def words(self, end: int = FAR, *, folder: Path | None = None, metrics: bool = True) -> str:
        """The flags of all starts, in this job's folder or another."""
        folder = folder or self.folder
        told = f"--metrics-jsonl {folder}/metrics.jsonl" if metrics else ""
        return f"{MODEL} {self.part.words} --train-iters {end} --save {folder}/saves {told}"

    def train(self, more: str = "", *, layout: Layout | None = None, many: bool = False) -> Job:
        """The job, having made a step; started, if it does not run. It must go on after the newest good save, and
        then it has survived what happened before.

        Raises ValueError where it does not come to a step.
        """
        if self.job is not None:
            return self.job
        job = self.begin(more, layout=layout, many=many)
        self.clock.wait(lambda: job.trains() or job.is_over(), START)
        said = job.said()
        if not job.trains():
            job.end()
            raise ValueError(f"the job does not come to a step after {[fault.kind for fault in self.pending]}:\n{said}")
        began = re.search(r"going on after iteration (\d+)", said)
        wrong = []
        if (int(began[1]) if began else 0) != self.good:
            wrong.append(f"lost: went on after {began and began[1]} instead of {self.good}")
        if "--ckpt-step" not in more:
            silent = [n for n in self.passed_over if f"iter_{n:07d}" not in said]
            wrong += [f"passed over iteration {n} without a word" for n in silent]
        self.passed_over.clear()
        for fault in self.pending:
            fault.survived = not wrong
            fault.wrong += wrong
            fault.lost += len(wrong)
        self.pending.clear()
        return job

    def come_to(self, fault: Fault, moment: str, *, many: bool = False) -> Job:
        """The job at some moment of this kind: start, step, save or evaluation."""
        if moment == "start":
            job = self.begin(start=start_ranks)             # Python starts, too
            if self.draw.random() < 0.5:
                self.clock.sleep(self.draw.uniform(0, 3))
            else:                                               # the ranks have met
                self.clock.wait(lambda: job.said() or job.is_over(), START, nap=0.001)
                self.clock.sleep(self.draw.uniform(0, 0.3))
            fault.in_moment = not job.trains()
            return job
        job = self.train(many=many)
        self.clock.sleep(self.draw.uniform(0, WANDER))
        if moment == "save":
            self.clock.wait(lambda: job.saved() or job.is_over(), START)    # until then half a save may be older
        conditions = {"step": job.trains, "save": lambda: is_saving(self.saves), "evaluation": job.evaluates}
        self.clock.wait(lambda: conditions[moment]() or job.is_over(), START, nap=0.001)
        time.sleep(self.draw.uniform(0, 0.015))
        fault.in_moment = conditions[moment]()
        return job

    # ---------------------------------------------------------------------------------------------------------- ending

    def leaves(self, fault: Fault, limit: float, who: Sequence[int] | None = None) -> list[int]:
        """All ranks must be gone within so many seconds, or some of them; what is left then is killed. The exit codes;
        the saves must be there and sound."""
        job = self.job
        began = self.clock.look()
        in_time = self.clock.wait(lambda: job.is_over(who), limit)
        fault.seconds = self.clock.seconds - began
        if not in_time:
            alive = [rank for rank in range(job.ranks) if not job.is_over([rank])]
            fault.wrong.append(f"ranks {alive} still there after {limit:.0f} s")
        return self.over(fault) if who is None or not in_time else []

    def over(self, fault: Fault) -> list[int]:
        """The job has come to an end, or does so now: the exit codes. No save may be lost or spoiled."""
        job, self.job = self.job, None
        codes = job.end()
        wrong = self.examine(job.saved())
        fault.wrong += wrong
        fault.lost += len(wrong)
        self.pending.append(fault)
        return codes

    def examine(self, told: Sequence[int] = ()) -> list[str]:
        """What is wrong with the saves, among which must be those that were told of and still are the newest."""
        self.sound, spoiled = examine(self.saves)
        newest, expected = max(self.sound, default=0), max([self.good, *told])
        self.good = newest
        self.damaged &= set(spoiled)
        return [f"spoiled: {spoiled[n]}" for n in spoiled if n not in self.damaged] + (
            [f"lost: iteration {expected} was saved, the newest sound save is {newest}"] if newest < expected else []
        )

    def quit(self) -> None:
        """End the job as a user would, between faults."""
        fault = Fault("between faults")
        self.job.send(signal.SIGTERM)
        codes = self.leaves(fault, STOP)
        if any(codes) or fault.wrong:
            raise ValueError(f"asked to stop, the job ended with {codes}: {fault.wrong}")

    def make_saves(self, count: int) -> None:
        """Let the job run until it has saved so often, and end it."""
        job = self.train()
        self.clock.wait(lambda: len(job.saved()) >= count or job.is_over(), START)
        self.quit()

    def close(self) -> None:
        """Leave no process behind."""
        if self.job is not None:
            self.job.end()
            self.job = None
