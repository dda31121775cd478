"""A real run's trace: every rank writes what it did and when, and draw_schedule.py draws it as the schedule says."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megazero.parallel.groups import mesh_on_paper
from megazero.parallel.topology import Topology
from megazero.pipe.engine import PipeEngine
from megazero.pipe.instructions import SHORT, Forward, RecvActivation, ReduceGrads, render
from megazero.pipe.lower import add_communication
from megazero.pipe.p2p import Wires
from megazero.pipe.schedule import SCHEDULES
from megazero.pipe.trace import write_trace
from scripts import draw_schedule
from tests.harness import on_ranks
from tests.training import SMALL

KINDS = {kind.__name__ for kind in SHORT}
RUNS = {"1f1b": 1, "interleaved": 2, "zb-v": 2}
STEPS, TRACED, MICROS = 12, pretrain_gpt.TRACED_STEPS, 4


def front_door(runs: list[str]) -> list[int]:
    """pretrain_gpt.py's main in a world that is already there; the variables are those of torchrun."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    codes, leave = [], pretrain_gpt.disconnect
    pretrain_gpt.disconnect = lambda: None                  # for the world serves several runs
    for flags in runs:
        codes.append(pretrain_gpt.main(flags.split()))
    leave()
    return codes


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two ranks' traces for each of RUNS, with evaluations between the steps."""
    root = tmp_path_factory.mktemp("traces")
    runs = [
        f"{SMALL} --train-iters {STEPS} --eval-interval 5 --eval-iters 1 --split 1,1,1 --log-interval 100 "
        f"--pipeline-model-parallel-size 2 --pipeline-schedule {name} --num-virtual-stages-per-pipeline-rank {chunks} "
        f"--trace-pipeline {root / name}"
        for name, chunks in RUNS.items()
    ]
    assert on_ranks(2, front_door, runs) == [[0] * len(runs)] * 2
    return root


def all_events(folder: Path, rank: int) -> list[dict]:
    return json.loads((folder / f"trace_rank_{rank:04d}.json").read_text())["traceEvents"]


def events_of(folder: Path, rank: int) -> list[dict]:
    """Those of instructions."""
    return [event for event in all_events(folder, rank) if event["args"].get("kind") in KINDS]


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_writes_its_program_with_times(traces: Path, name: str) -> None:
    """The last steps, evaluations left out, in the format that browsers open: complete events, in microseconds."""
    programs = add_communication(SCHEDULES[name](2, MICROS, RUNS[name]), 2 * RUNS[name])
    files = sorted(file.name for file in (traces / name).iterdir())
    assert files == ["trace_rank_0000.json", "trace_rank_0001.json"]
    for rank, program in enumerate(programs):
        events = events_of(traces / name, rank)
        kinds = [type(op).__name__ for op in program]
        assert [event["name"] for event in events] == render(program).split() * TRACED
        assert [event["args"]["kind"] for event in events] == kinds * TRACED
        numbers = [event["args"]["iteration"] for event in events]
        assert numbers == [i for i in range(STEPS - TRACED + 1, STEPS + 1) for _ in program]
        assert {(e["ph"], e["tid"], e["pid"]) for e in events} == {("X", rank, 0)}
        for before, after in zip(events, events[1:], strict=False):
            assert before["dur"] >= 0 and before["ts"] + before["dur"] <= after["ts"] + 1e-3


@pytest.mark.parametrize("name", RUNS)
def test_a_browser_shows_iterations_ranks_and_what_was_waited_for(traces: Path, name: str) -> None:
    """Events nest, ranks have names, times are of the clock of day, and no wait overlaps a step."""
    for rank in range(2):
        events = all_events(traces / name, rank)
        assert [e["args"] for e in events if e["ph"] == "M"] == [{"name": f"rank {rank}"}, {"sort_index": rank}]
        spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["args"].get("kind") == "Iteration"}
        assert list(spans) == [f"iteration {i}" for i in range(STEPS - TRACED + 1, STEPS + 1)]
        assert all(abs(start / 1e6 - time.time()) < 600 for start, _ in spans.values())
        inside = [e for e in events if e["ph"] == "X" and e["args"]["kind"] != "Iteration"]
        for before, after in zip(inside, inside[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.5
            start, end = spans[f"iteration {after['args']['iteration']}"]
            assert start - 0.5 <= after["ts"] and after["ts"] + after["dur"] <= end + 0.5
        waits = [(a, b) for a, b in zip(inside, inside[1:], strict=False) if a["args"]["kind"] == "Wait"]
        assert waits and all(a["name"].startswith("wait recv") for a, _ in waits)
        for wait, step in waits:
            assert (wait["args"]["micro"], wait["args"]["stage"]) == (step["args"]["micro"], step["args"]["stage"])
            assert wait["ts"] + wait["dur"] == pytest.approx(step["ts"], abs=0.5)
    first = [e["name"] for e in all_events(traces / "1f1b", 1) if e["ph"] == "X"][:4]
    assert first[0] == f"iteration {STEPS - TRACED + 1}" and "wait recvA0<0" in first


def test_a_stage_runs_after_the_stage_below_it(traces: Path) -> None:
    """The ranks' clocks are one on one host. Waiting for a tensor is no part of a step: it is idle time."""
    ends = {
        (e["args"]["iteration"], e["args"]["micro"], e["args"]["stage"]): (e["ts"], e["ts"] + e["dur"])
        for rank in range(2) for e in events_of(traces / "interleaved", rank) if e["args"]["kind"] == "Forward"
    }
    assert len(ends) == TRACED * MICROS * 4
    for (iteration, micro, stage), (start, end) in ends.items():
        assert stage == 0 or end >= start >= ends[iteration, micro, stage - 1][1]


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_is_drawn_as_the_schedule_that_ran(
    traces: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    lines, picture = tmp_path / "run.txt", tmp_path / "run.svg"
    for file in (lines, picture):
        assert draw_schedule.main(["--trace", str(traces / name), "--out", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"{name}, iteration {STEPS}: 2 ranks" in said and "(messages " in said and "clocks" not in said
    assert "mean ms by stage: F " in said and " ms with the time of each step; the run " in said
    orders = SCHEDULES[name](2, MICROS, RUNS[name])
    assert lines.read_text().splitlines() == [f"{r}: {render(order)}" for r, order in enumerate(orders)]
    assert "rank 1</text>" in picture.read_text() and picture.read_text().count("<rect") > sum(map(len, orders))


class Ticks:
    """A clock such as a GPU's: its moments are no times of the host's."""

    def __init__(self) -> None:
        self.count = 0

    def now(self) -> str:
        self.count += 1
        return f"tick {self.count}"

    def on_host(self, moments: list[str]) -> list[float]:
        return [100 + float(moment.removeprefix("tick ")) for moment in moments]


def test_a_trace_has_the_times_of_the_device() -> None:
    """Also where a forward begins when its tensors are there. Without a trace nobody asks the device."""
    mesh, programs = mesh_on_paper(Topology(), 0), add_communication(SCHEDULES["1f1b"](1, 2, 1), 1)
    engine = PipeEngine({0: lambda x, batch: batch * 2}, 0, Wires(mesh.pipeline, []), device=mesh.device)
    engine.watch.clock = Ticks()
    batches = [torch.ones((), requires_grad=True) for _ in range(2)]
    engine.run(programs[0], batches)
    assert engine.watch.clock.count == 0
    engine.trace = deque()
    engine.run(programs[0], batches)
    (step,) = engine.trace
    assert [op for op, _, _ in step] == programs[0]
    assert [time for _, *both in step for time in both] == [101.0 + n for n in range(2 * len(programs[0]))]


def test_a_reduction_has_no_micro_batch(tmp_path: Path) -> None:
    steps = [[(RecvActivation(2, 1, 0), 0.25, 0.375), (Forward(2, 1), 0.5, 0.75), (ReduceGrads(1), 0.75, 1.0)]]
    file = write_trace(tmp_path / "new", 3, steps, 7, shift=2.0)
    assert file.name == "trace_rank_0003.json"
    _, first, second = events_of(tmp_path / "new", 3)
    assert first["name"] == "F2" and first["args"] == {"kind": "Forward", "micro": 2, "stage": 1, "iteration": 7}
    assert (first["ts"], first["dur"]) == (2.5e6, 0.25e6)
    wait = all_events(tmp_path / "new", 3)[-3]
    assert (wait["name"], wait["ts"], wait["dur"]) == ("wait recvA2<0", 2.375e6, 0.125e6)
    assert second["args"] == {"kind": "ReduceGrads", "stage": 1, "iteration": 7}
