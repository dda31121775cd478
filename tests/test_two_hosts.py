"""Two hosts, tensor inside each and data across: one host's processes die, and the job ends as if they had not."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import Host, two_hosts, why_no_hosts
from tests.test_data_runs import ON_FILES, write
from tests.training import train

ITERATIONS = 30
FLAGS = f"--fp64 --micro-batch-size 1 --train-iters {ITERATIONS}"


def launch(hosts: list[Host], number: int, argv: list[str], log: Path):
    """torchrun of two ranks on host `number` of two, which meet on the first."""
    return hosts[number].start(
        ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", f"{hosts[0].address}:29511", "--rdzv-id", "job", "--rdzv-conf", f"is_host={1 - number}",
         "--local-addr", hosts[number].address, "--max-restarts", "3", "--monitor-interval", "0.1", "pretrain_gpt.py",
         *argv], log,
    )  # fmt: skip


def losses_in(lines: Path) -> dict[int, float]:
    """By iteration, the last one told."""
    told = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {line["iteration"]: line["lm_loss"] for line in told if "split" not in line}


def wait_until(done: Callable[[], bool], seconds: float, logs: list[Path]) -> None:
    end = time.monotonic() + seconds
    while not done():
        said = "" if time.monotonic() < end else "\n".join(f"--- {log}\n{log.read_text()[-4000:]}" for log in logs)
        assert not said, said
        time.sleep(0.05)


@pytest.mark.timeout(180)
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_a_host_whose_processes_die_restarts_the_job_and_the_losses_are_those_of_an_undisturbed_run(tmp_path, capsys):
    """Each host has the corpus on a disk of its own, under another path."""
    disks = [tmp_path / name for name in ("first", "second")]
    for disk in disks:
        disk.mkdir()
    corpus = write(disks[0], "web", 1)
    for file in disks[0].iterdir():
        shutil.copy(file, disks[1])
    undisturbed = train(f"{FLAGS} --data-path {corpus}", (2, 1, 2), base=ON_FILES)
    logs, lines, save = [tmp_path / "log0", tmp_path / "log1"], tmp_path / "lines.jsonl", tmp_path / "save"
    with two_hosts() as hosts:
        running = [
            launch(hosts, number, [
                *ON_FILES.split(), *FLAGS.split(), "--tensor-model-parallel-size", "2",
                "--data-path", str(disk / "web"), "--save", str(save), "--auto-resume", "--save-interval", "5",
                "--metrics-jsonl", str(lines),
            ], logs[number])
            for number, disk in enumerate(disks)
        ]  # fmt: skip
        wait_until(lambda: len(losses_in(lines)) > 7, 60, logs)
        hosts[1].kill(launcher=False)
        killed, reached = time.monotonic(), lines.stat().st_size
        wait_until(lambda: lines.stat().st_size > reached, 60, logs)
        seconds = time.monotonic() - killed
        wait_until(lambda: all(process.poll() is not None for process in running), 60, logs)
        assert [process.returncode for process in running] == [0, 0], logs[0].read_text() + logs[1].read_text()
    found = losses_in(lines)
    assert [found[iteration] for iteration in range(1, ITERATIONS + 1)] == undisturbed.losses
    assert "going on after iteration" in logs[0].read_text()
    with capsys.disabled():
        print(f"\n{seconds:.1f} s from the death of a host's processes to the next step", end=" ")
