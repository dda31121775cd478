"""Hosts that die whole and come back, in jobs with `--nnodes MIN:MAX`, which go on with the hosts that there are. In
minutes: scripts/soak.sh runs it, as root.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import STORE, Host, launch_words, two_hosts, why_no_hosts
from tests.test_two_hosts import losses_in, wait_until
from tests.training import SMALL, train

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

STEPS = 60
FLAGS = (
    f"--fp64 --micro-batch-size 1 --global-batch-size 24 --hidden-size 128 --seq-length 64 --train-iters {STEPS} "
    "--save-interval 5 --log-interval 1"
)
LOOKS = (0.1, 4.0)                      # seconds between looks of each host's launcher: one is slower than a stop
PATIENCE = 180.0                        # seconds for whatever is waited for
CLOSE = 1e-10                           # of losses in fp64, whatever the order of sums


@functools.cache
def undisturbed() -> list[float]:
    return train(FLAGS, (1, 1, 2), timeout=600).losses


class Job:
    """A job whose hosts come and go; each torchrun is told the same.

    how  of launch_words: where they meet
    """

    def __init__(self, hosts: list[Host], folder: Path, nnodes: str, processes: int, *, flags: str, **how: int) -> None:
        self.hosts, self.nnodes, self.processes, self.how = hosts, nnodes, processes, how
        self.lines, self.folder = folder / "lines.jsonl", folder
        words = f"{SMALL} {FLAGS} {flags} --auto-resume --save {folder}/save --metrics-jsonl {self.lines}"
        self.words = ["pretrain_gpt.py", *words.split()]
        self.running: list[tuple[int, subprocess.Popen]] = []       # each torchrun and its host
        self.logs: list[Path] = []

    def start(self, number: int) -> None:
        """One more torchrun, on host `number`."""
        self.logs.append(self.folder / f"log{len(self.logs)}")
        words = launch_words(self.hosts, number, self.nnodes, self.processes, **self.how)
        words += ["--monitor-interval", str(LOOKS[number]), *self.words]
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.running.append((number, self.hosts[number].start(words, self.logs[-1], **variables)))

    def die(self, number: int) -> None:
        """A host loses its cable, and then all that runs there."""
        self.hosts[number].die()
        for _, process in [pair for pair in self.running if pair[0] == number]:
            process.wait()
        self.running = [pair for pair in self.running if pair[0] != number]

    def wait(self, done: Callable[[], bool]) -> float:
        """Until something is so, or the job has failed; the seconds that took."""
        began = time.monotonic()
        wait_until(lambda: done() or any(process.poll() for _, process in self.running), PATIENCE, self.logs)
        assert done(), "\n".join(f"--- {log}\n{log.read_text()[-6000:]}" for log in self.logs)
        return time.monotonic() - began

    def told(self) -> list[int]:
        """The iterations of all steps, also of those that were made twice."""
        lines = self.lines.read_text().splitlines() if self.lines.exists() else []
        return [json.loads(line)["iteration"] for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_for_steps(self, more: int) -> float:
        reached = len(self.told())
        return self.wait(lambda: len(self.told()) >= reached + more)

    def starts(self, data: int) -> int:
        """How often training began with so many data ranks."""
        return sum(len(re.findall(rf"ranks: .* x data {data}\b", log.read_text())) for log in self.logs)

    def ends(self) -> None:
        """Without a fault, and with the losses of a run that nobody disturbs."""
        self.wait(lambda: all(process.poll() is not None for _, process in self.running))
        assert [process.returncode for _, process in self.running] == [0] * len(self.running)
        found = losses_in(self.lines)
        assert sorted(found) == list(range(1, STEPS + 1))
        assert max(abs(found[at] / loss - 1) for at, loss in enumerate(undisturbed(), 1)) < CLOSE


@pytest.mark.parametrize("dying", [0, 1])
def test_a_host_dies_whole_and_the_job_goes_on_and_grows_again_when_it_is_back(dying, tmp_path, capsys):
    """Without a sign to the other, as when its power is cut: the host of rank 0 and of the ranks' store, with that of
    the rendezvous apart, or the other host. Tensor ranks stay in a host, the data size goes from 2 to 1 and back, the
    global batch stays."""
    undisturbed()
    with two_hosts() as hosts:
        if dying == 0:
            hosts[1].run(["-c", STORE], tmp_path / "store")
        where = {"store": 1 - dying, "apart": dying == 0}
        job = Job(hosts, tmp_path, "1:2", 2, flags="--tensor-model-parallel-size 2", **where)
        for number in (1 - dying, dying):
            job.start(number)
        job.wait_for_steps(7)
        job.die(dying)
        alone = job.wait_for_steps(1)
        assert (job.starts(2), job.starts(1)) == (1, 1)
        job.wait_for_steps(2)
        hosts[dying].plug("up")
        job.start(dying)
        grown = job.wait(lambda: job.starts(2) == 2) + job.wait_for_steps(1)
        job.ends()
        assert (job.starts(2), job.starts(1)) == (2, 1)
    with capsys.disabled():
        print(f"\n{alone:.1f} s from a host's death to the next step; {grown:.1f} s from its return to one on both")


def test_a_host_that_comes_stops_those_that_train_and_no_step_is_lost(tmp_path, capsys):
    """Two launchers, each of which stops its own rank in its own time, and a third: data sizes 2 and 3."""
    undisturbed()
    with two_hosts() as hosts:
        job = Job(hosts, tmp_path, "1:3", 1, flags="")
        for number in (0, 1):
            job.start(number)
        job.wait_for_steps(7)
        job.start(1)
        grown = job.wait(lambda: job.starts(3) == 1) + job.wait_for_steps(1)
        job.ends()
    assert job.told() == list(range(1, STEPS + 1))
    with capsys.disabled():
        print(f"\n{grown:.1f} s from the third launcher's start to a step of all three")
