"""Two hosts. Tensor inside each and data across: one host's processes die, and the job ends as if they had not. And a
pipeline over both, whose neighbours share memory on each."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import launch_words, two_hosts, why_no_hosts
from tests.test_data_runs import ON_FILES, write
from tests.training import train

ITERATIONS = 12
FLAGS = f"--fp64 --micro-batch-size 1 --train-iters {ITERATIONS}"


def losses_in(lines: Path) -> dict[int, float]:
    """By iteration, the last one told; a line that a kill has torn is none."""
    told = lines.read_text().splitlines() if lines.exists() else []
    whole = [json.loads(line) for line in told if line.startswith("{") and line.endswith("}")]
    return {line["iteration"]: line["lm_loss"] for line in whole if "split" not in line}


def wait_until(done: Callable[[], bool], seconds: float, logs: list[Path]) -> None:
    end = time.monotonic() + seconds
    while not done():
        said = "" if time.monotonic() < end else "\n".join(f"--- {log}\n{log.read_text()[-4000:]}" for log in logs)
        assert not said, said
        time.sleep(0.02)


@pytest.mark.timeout(180)
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_a_host_whose_processes_die_restarts_the_job_and_the_losses_are_those_of_an_undisturbed_run(tmp_path, capsys):
    """Each host has the corpus on a disk of its own, under another path. tests/soak_hosts.py lets hosts die whole."""
    disks = [tmp_path / name for name in ("first", "second")]
    for disk in disks:
        disk.mkdir()
    corpus = write(disks[0], "web", 1)
    for file in disks[0].iterdir():
        shutil.copy(file, disks[1])
    undisturbed = train(f"{FLAGS} --data-path {corpus}", base=ON_FILES)     # any layout has its losses
    logs, lines, save = [tmp_path / "log0", tmp_path / "log1"], tmp_path / "lines.jsonl", tmp_path / "save"
    flags = f"{ON_FILES} {FLAGS} --tensor-model-parallel-size 2 --save {save} --auto-resume --save-interval 3"
    with two_hosts() as hosts:
        running = [
            hosts[number].fork([
                *launch_words(hosts, number, "2", 2), "pretrain_gpt.py", *flags.split(), "--data-path", f"{disk}/web",
                "--metrics-jsonl", str(lines),
            ], logs[number])
            for number, disk in enumerate(disks)
        ]  # fmt: skip
        wait_until(lambda: len(losses_in(lines)) > 4, 60, logs)
        hosts[1].kill(spare=running[1].pid)
        killed, reached = time.monotonic(), lines.stat().st_size
        wait_until(lambda: lines.stat().st_size > reached, 60, logs)
        seconds = time.monotonic() - killed
        wait_until(lambda: all(process.exitcode is not None for process in running), 60, logs)
        assert [process.exitcode for process in running] == [0, 0], logs[0].read_text() + logs[1].read_text()
    found = losses_in(lines)
    assert [found[at] for at in range(1, ITERATIONS + 1)] == pytest.approx(undisturbed.losses, rel=1e-12)
    assert "going on after iteration" in logs[0].read_text()
    with capsys.disabled():
        print(f"\n{seconds:.1f} s from the death of a host's processes to the next step", end=" ")


@pytest.mark.timeout(120)
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_a_pipeline_over_two_hosts_has_the_losses_of_one_process(tmp_path):
    """Four stages, two on each host: within one neighbours share memory, between them messages go over the cable."""
    corpus, lines = write(tmp_path, "web", 1), tmp_path / "lines.jsonl"
    flags = f"{ON_FILES} --fp64 --micro-batch-size 1 --train-iters 3 --data-path {corpus}"
    alone = train(flags, base="")
    split = f"--pipeline-model-parallel-size 4 --metrics-jsonl {lines}"
    logs = [tmp_path / "log0", tmp_path / "log1"]
    with two_hosts() as hosts:
        running = [
            hosts[n].fork([*launch_words(hosts, n, "2", 2), "pretrain_gpt.py", *f"{flags} {split}".split()], logs[n])
            for n in range(2)
        ]
        wait_until(lambda: all(process.exitcode is not None for process in running), 60, logs)
    assert [process.exitcode for process in running] == [0, 0], logs[0].read_text() + logs[1].read_text()
    assert list(losses_in(lines).values()) == pytest.approx(alone.losses, rel=1e-12)
