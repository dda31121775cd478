"""What a run finds out about its steps: times, traffic, slow ranks, memory, costs of layers, and where that is told."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pretrain_gpt
from megazero.config import LoggingConfig
from megazero.config_watching import WatchingConfig
from megazero.flags import parse
from megazero.flops import model_flops
from megazero.lookout import Lookout
from megazero.memory import Memory
from megazero.metrics import TAGS
from megazero.parallel.groups import Group, World, mesh_on_paper
from megazero.parallel.topology import Topology
from megazero.parallel.watch import OTHER, StepTimes, Traffic, Watch
from megazero.trainer import Trainer
from megazero.watching import WATCHED, StepWatch, Told, bus_factor, time_lines, traffic_of, traffic_table
from tests.harness import on_ranks
from tests.training import SMALL

STEPS, SLOW_RANK, SLOW_SECONDS = 5, 3, 0.05
EVERYTHING = (
    "--train-iters 5 --log-interval 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --fp16 "
    "--initial-loss-scale 1024 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
    "--timing-log-level 2 --timing-log-option minmax --log-comms --log-memory --log-memory-to-tensorboard "
    "--straggler-interval 5 "
    "--flops-profiler 2 --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-throughput "
    "--log-validation-ppl-to-tensorboard --log-optimizer-states-to-tensorboard --log-params-norm "
    "--log-num-zeros-in-grad --peak-tflops 0.5 "
    "--eval-interval 2 --eval-iters 1 --save-interval 3"
)


# ------------------------------------------------------------------------------------------------- on a clock of ours


class Ticks:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def between(self, start: float, end: float) -> float:
        return end - start


class Work:
    """A work that takes a while to be waited for."""

    def __init__(self, clock: Ticks, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def wait(self) -> None:
        self.clock.time += self.seconds


def test_each_moment_of_a_step_belongs_to_one_phase_or_to_one_wait():
    clock = Ticks()
    watch = Watch(clock)
    watch.start()
    clock.time += 1                                             # other
    watch.enter("forward")
    clock.time += 2
    call = watch.call("tensor", "all-reduce", 100)
    clock.time += 4                                             # it blocks
    call.over()
    clock.time += 8                                             # forward again
    first, second = watch.call("data", "all-gather", 30).underway([Work(clock, 24.0), Work(clock, 8.0)])
    watch.enter("backward")
    clock.time += 16                                            # beside the gather
    first.wait()
    second.wait()
    clock.time += 64
    times = watch.stop().read()
    assert times.phases == {OTHER: 1, "forward": 10, "backward": 80}
    assert times.traffic == {
        ("tensor", "all-reduce"): Traffic(1, 100, 4.0, 4.0), ("data", "all-gather"): Traffic(1, 30, 32.0, 48.0),
    }  # fmt: skip
    assert times.own + sum(times.waited().values()) == clock.time
    times.add_(times)
    assert times.over(2).phases == {OTHER: 1, "forward": 10, "backward": 80}
    assert times.over(2).traffic["data", "all-gather"] == Traffic(1, 30, 32.0, 48.0)


def test_what_is_not_watched_leaves_no_trace_even_if_it_ends_in_a_watched_step():
    clock = Ticks()
    watch, work = Watch(clock), Work(clock, 1.0)
    assert watch.call("data", "all-gather", 8).underway([work]) == [work] and watch.stop() is None
    watch.start()
    (early,) = watch.call("data", "all-gather", 8).underway([work])
    assert watch.stop().read().traffic["data", "all-gather"] == Traffic(1, 8, 0.0, 0.0)
    early.wait()                                                # between two watched steps
    watch.start()
    (late,) = watch.call("data", "send", 8).underway([work])
    watch.stop()
    watch.start()
    late.wait()                                                 # in the next one
    assert watch.stop().read().traffic == {("data", "send"): Traffic(0, 0, 1.0, 0.0)}


def test_only_the_steps_before_a_telling_are_watched():
    mesh = mesh_on_paper(Topology(), 0)
    watching = StepWatch(mesh, LoggingConfig(log_interval=20), WatchingConfig(timing_log_level=1))
    watching.last, seen, told = 43, [], []
    for iteration in range(1, 44):
        watching.begin(iteration)
        recording = watching.end()
        seen += [iteration] if recording is not None else []
        told += [iteration] if watching.figures(iteration, recording)[0] else []
    assert seen == [16, 17, 18, 19, 20, 36, 37, 38, 39, 40, 41, 42, 43] and WATCHED == 5
    assert told == [20, 40, 43]
    quiet = StepWatch(mesh, LoggingConfig(log_interval=1), WatchingConfig())
    quiet.begin(100)
    assert quiet.end() is None                                  # one rank has no peers to be slower than


def test_a_profile_of_steps_that_are_not_run_is_told():
    watching = StepWatch(mesh_on_paper(Topology(), 0), LoggingConfig(), WatchingConfig(flops_profiler=5))
    assert watching.starts(4, 6) == [] and watching.last == 6
    for done, last in ((0, 5), (5, 9), (0, 3)):
        (line,) = watching.starts(done, last)
        assert line.endswith(f"takes that step and the next, and steps {done + 1} to {last} are run")


def test_a_collective_has_one_name_for_the_watch_and_for_the_lookout():
    group = Group("tensor", (4, 5), 0)
    group.watch.start()
    with group.begin("all-gather", 8):
        assert group.activity.waiting == ("all-gather", "tensor", (4, 5)) and group.activity.begun == {"tensor": 1}
    message = group.begin_message("send", 5, 16).runs_on([Work(Ticks(), 1.0)])
    assert group.activity.waiting is None
    message.wait()
    traffic = group.watch.stop().read().traffic
    assert {key: (t.calls, t.bytes) for key, t in traffic.items()} == {
        ("tensor", "all-gather"): (1, 8), ("tensor", "send"): (1, 16),
    }  # fmt: skip
    assert group.activity.begun == {"tensor": 1}                # messages are no collectives


def test_ranks_meet_before_a_watched_step_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    met: list[str] = []
    monkeypatch.setattr("megazero.watching.all_reduce", lambda x, group: met.append(group.axis))
    for meets in (False, True):
        asked = WatchingConfig(timing_log_level=1, barrier_with_level_1_timing=meets)
        watching = StepWatch(mesh_on_paper(Topology(), 0), LoggingConfig(log_interval=10), asked)
        watching.last = 10
        for iteration in (5, 6, 7):                             # of which two are watched
            watching.begin(iteration)
            watching.end()
        assert met == ["world", "world"] * meets


# ------------------------------------------------------------------------------------------------------- what is told


def told(stage: int, host: str = "a", **phases: float) -> Told:
    return Told(host, stage, StepTimes(phases, {("tensor", "all-gather"): Traffic(2, 8 * 2**20, 0.25, 0.5)}), {})


def slow_ranks(watching: StepWatch, *ranks: Told) -> list[str]:
    return list(watching.slow_ranks(ranks))


def test_a_slow_rank_is_named_with_its_host_and_phase():
    watching = StepWatch(mesh_on_paper(Topology(), 0), LoggingConfig(), WatchingConfig())
    usual = [told(0, forward=0.1, backward=0.2) for _ in range(3)]
    assert slow_ranks(watching, *usual, told(1, forward=9.0)) == []         # another stage may need longer
    (line,) = slow_ranks(watching, *usual, told(0, "node7", forward=0.1, backward=0.35))
    assert line == (
        "rank 3 on node7 is slow: of a step it needs 450.0 ms for itself, 1.50 times the median of the other ranks of "
        "its stage: 150.0 ms more, 150.0 ms of it in backward"
    )
    assert slow_ranks(watching, *usual, told(0, forward=0.1, backward=0.25)) == []      # within the usual
    assert slow_ranks(watching, *[told(0, data=1e-4), told(0, data=5e-4)]) == []        # too little to matter


def test_a_rank_that_is_alone_in_its_stage_is_measured_by_its_own_best():
    watching = StepWatch(mesh_on_paper(Topology(), 0), LoggingConfig(), WatchingConfig())
    assert slow_ranks(watching, told(0, forward=0.1), told(1, forward=0.3)) == []
    (line,) = slow_ranks(watching, told(0, forward=0.15), told(1, forward=0.3))
    assert line.startswith("rank 0 on a is slow") and "1.50 times its own best so far: 50.0 ms more" in line


def test_times_are_told_of_the_longest_of_both_ends_or_of_every_rank():
    ranks = [told(0, data=0.001, forward=0.1), told(0, data=0.002, forward=0.2)]
    assert time_lines(ranks, "max", groups=False) == [
        "ms of a step, longest of the ranks | data 2.00 | forward 200.00 | communication 250.00"
    ]
    assert time_lines(ranks, "minmax", groups=True) == [
        "ms of a step, shortest to longest of the ranks | data 1.00 to 2.00 | forward 100.00 to 200.00 | "
        "wait for tensor 250.00 to 250.00"
    ]
    assert time_lines(ranks, "all", groups=False)[1] == (
        "ms of a step on rank 1 | data 2.00 | forward 200.00 | communication 250.00"
    )


def test_bandwidth_is_that_of_the_bus():
    """Of all-reduce 2 (n - 1) / n of its bytes pass each wire, of gathers, scatters and exchanges (n - 1) / n."""
    assert [bus_factor(kind, 4) for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")] == [
        1.5, 0.75, 0.75, 0.75, 1.0
    ]  # fmt: skip
    (row,) = traffic_of([told(0), told(0)], lambda axis: 4)
    assert row["bus_bytes_per_second"] == 0.75 * 8 * 2**20 / 0.5 and row["calls"] == 2
    assert traffic_table([row])[1].split() == "tensor 4 all-gather 2 8.000 250.00 500.00 0.0126".split()


NEEDED = 2**26          # bytes


def memory_found():
    meter = Memory(torch.device("cpu"), lambda: {"parameters": 3, "gradients": 5, "master": 7, "moments": 11})
    meter.begin()
    with mmap.mmap(-1, NEEDED) as needed:       # pages that nobody had before, whatever malloc has kept
        needed.write(b"1" * NEEDED)
        return meter.read()


def test_memory_adds_up():
    """In a process of its own, where no memory lies that was used and freed before."""
    (found,) = on_ranks(1, memory_found)
    assert found["optimizer"] == 18 and found["parameters"] == 3 and found["gradients"] == 5
    assert found["activations"] + found["rest"] + 26 == pytest.approx(found["peak"], abs=1)
    assert NEEDED <= found["activations"] < 3 * NEEDED


# -------------------------------------------------------------------------------------------------------- a whole run


class Seen(NamedTuple):
    """Of a rank: what it printed, of each step the sum of its times over its seconds, its traffic."""

    stdout: str
    shares: list[float]
    traffic: list[dict]


def watched_run(flags: str, world: int) -> Seen:
    """The front door's run on this rank of a world that has met. Rank SLOW_RANK sleeps in each forward."""
    rank = dist.get_rank() if world > 1 else 0
    config, notices = parse(f"{SMALL} {flags}".split())
    here, out, build, seen = World(rank, world, 0), io.StringIO(), pretrain_gpt.build, []
    plan = pretrain_gpt.prepare(config, here)

    def changed(*parts: Any) -> tuple[Trainer, Any]:
        trainer, progress = build(*parts)
        figures, stages = trainer.watching.figures, trainer.machine.engine.stages
        trainer.watching.figures = lambda i, recording: (seen.append(recording.read()), figures(i, recording))[1]
        for number, stage in stages.items() if rank == SLOW_RANK else ():
            stages[number] = lambda x, batch, stage=stage: (time.sleep(SLOW_SECONDS), stage(x, batch))[1]
        return trainer, progress

    pretrain_gpt.build = changed
    try:
        with contextlib.redirect_stdout(out):
            pretrain_gpt.run(plan, here, notices, Lookout(here, pretrain_gpt.watched(config)))
    finally:
        pretrain_gpt.build = build
    times = [one.own + sum(one.waited().values()) for one in seen]
    return Seen(out.getvalue(), times, [one.traffic for one in seen])


class Run(NamedTuple):
    ranks: list[Seen]
    lines: list[dict]           # of --metrics-jsonl
    tags: dict[str, list]       # TensorBoard's points by tag
    files: list[Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """TP 2, PP 2, experts and fp16, with all that can be told; rank 3 is slow."""
    folder = tmp_path_factory.mktemp("run")
    places = f"--tensorboard-dir {folder}/tb --metrics-jsonl {folder}/m.jsonl --save {folder}/save"
    ranks = on_ranks(4, watched_run, f"{EVERYTHING} {places}", 4, timeout=100)
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    board = EventAccumulator(str(folder / "tb")).Reload()
    tags = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    return Run(ranks, lines, tags, list((folder / "tb").iterdir()))


def steps_of(run: Run) -> list[dict]:
    return [line for line in run.lines if "split" not in line]


def test_rank_0_alone_prints_a_line_per_step_with_all_figures(run: Run):
    """C128"""
    assert [seen.stdout for seen in run.ranks[1:]] == ["", "", ""]
    lines = [line for line in run.ranks[0].stdout.splitlines() if line.startswith("iteration")]
    assert len(lines) == STEPS
    for number, line in enumerate(lines, 1):
        assert line.startswith(f"iteration {number}/{STEPS} | ")
        for figure in (
            r"lm loss \d", r"grad norm \d", r"learning rate \d", r"loss scale 1024", r"\d tokens/s", r"MFU \d",
            r"fullest expert over mean \d", r"params norm \d", r"zeros in grad \d",
        ):  # fmt: skip
            assert re.search(figure, line), (figure, line)


def test_one_event_file_has_every_tag(run: Run):
    """C128: of TensorBoard's own reader."""
    assert len(run.files) == 1
    absent = {"kd_loss", "seq_aux_loss", "global_aux_loss", "seq_length", "hardware_tflops", "memory"}
    wanted = {tag for name, tag in TAGS.items() if name not in absent}
    timers = {"data", "forward", "backward", "optimizer", "other", "checkpoint", "evaluation"}
    timers |= {f"wait for {axis}" for axis in ("tensor", "pipeline", "tied_data", "world")}
    wanted |= {f"timers/{name}" for name in timers} | {f"fullest expert over mean/layer {i}" for i in range(4)}
    wanted |= {f"memory/{name}" for name in ("parameters", "gradients", "optimizer", "activations", "rest", "peak")}
    assert wanted <= set(run.tags), wanted - set(run.tags)
    assert [step for step, _ in run.tags["lm loss"]] == [1, 2, 3, 4, 5]
    assert run.tags["lm loss"] == [(s["iteration"], pytest.approx(s["lm_loss"])) for s in steps_of(run)]
    assert [value for _, value in run.tags["batch-size"]] == [8.0] * 4
    assert [step for step, _ in run.tags["timers/checkpoint"]] == [3, 5]


def test_logged_norm_and_tokens_are_of_the_whole_model_and_batch(run: Run):
    """C133: tokens per step x steps = consumed; the norm of a pipeline of 2 is that of one rank."""
    steps = steps_of(run)
    assert sum(s["tokens_per_second"] * s["seconds"] for s in steps) == pytest.approx(steps[-1]["consumed_tokens"])
    assert steps[-1]["consumed_tokens"] == STEPS * 8 * 16
    lone = EVERYTHING.replace("model-parallel-size 2", "model-parallel-size 1").replace("--save-interval 3", "")
    alone = watched_run(lone + " --train-iters 2", 1)
    norms = [float(found) for found in re.findall(r"grad norm (\S+)", alone.stdout)]
    assert len(norms) == 2
    assert norms == pytest.approx([s["grad_norm"] for s in steps[:2]], rel=5e-3)        # fp16 rounds in another order
    seconds = [float(found) for found in re.findall(r"([\d.]+) s/iteration", alone.stdout)]
    assert alone.shares == pytest.approx(seconds, rel=0.01, abs=0.01)


def test_the_phases_and_waits_of_every_rank_make_up_its_step(run: Run):
    seconds = [step["seconds"] for step in steps_of(run)]
    assert run.ranks[0].shares == pytest.approx(seconds, rel=0.01, abs=0.01)
    for seen in run.ranks:
        assert len(seen.shares) == STEPS
    timers = steps_of(run)[-1]["timers"]
    assert timers["forward"] >= 4 * SLOW_SECONDS                # of the slow rank, which sleeps in each micro-batch


def test_the_slow_rank_is_named(run: Run):
    """Its peer is rank 2; ranks 0 and 1 are of another stage, and may find each other slow on a busy machine."""
    named = [line for line in run.ranks[0].stdout.splitlines() if " is slow: " in line]
    assert not [line for line in named if line.startswith("rank 2 ")]
    (line,) = [line for line in named if line.startswith(f"rank {SLOW_RANK} ")]
    assert re.match(rf"rank {SLOW_RANK} on \S+ is slow: .* the other ranks of its stage: .* ms of it in forward$", line)


def test_traffic_is_what_the_layout_must_send(run: Run):
    """Four micro-batches of [16 / 2, 2, 32] in fp16 go up the pipeline, and their gradients down."""
    for seen in (run.ranks[0], run.ranks[1]):
        assert seen.traffic[-1]["pipeline", "send"].calls == 4
        assert seen.traffic[-1]["pipeline", "send"].bytes == 4 * (16 // 2) * 2 * 32 * 2
        assert seen.traffic[-1]["pipeline", "receive"].bytes == 4 * (16 // 2) * 2 * 32 * 2
    rows = {(row["group"], row["collective"]): row for row in steps_of(run)[-1]["comms"]}
    assert rows["pipeline", "send"]["calls"] == 4 and rows["tensor", "all-gather"]["ranks"] == 2
    assert all(row["bus_bytes_per_second"] > 0 for row in rows.values() if row["bytes"])
    printed = [line.split() for line in run.ranks[0].stdout.splitlines() if line.startswith("pipeline ")]
    assert ["pipeline", "2", "send", "4"] in [words[:4] for words in printed]


def test_times_and_memory_have_lines(run: Run):
    text = run.ranks[0].stdout
    assert re.search(r"ms of a step, shortest to longest of the ranks \| data .* \| wait for tensor \d", text)
    assert re.search(r"MiB of the fullest rank \| parameters 0\.\d+ .* \| activations .* \| peak \d\d\d\.\d", text)


def test_the_layers_operations_are_those_of_arithmetic():
    """One rank, a dense model: forward as counted by hand, whose attention does not skip what the mask hides, and twice
    that backward."""
    flags = "--flops-profiler 1 --train-iters 2 --log-interval 2 --straggler-interval 0 --timing-log-level 1"
    text = watched_run(flags, 1).stdout
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if re.match(r"\s*[\w ]+ +\d", line)}
    assert rows["Block"][0] == "4" and rows["Block"][1] == f"{4 * (12 * 32**2 + 13 * 32):,}"
    assert rows["Head"][:2] == ["1", f"{97 * 32:,}"] and rows["Block"][5] == "16"
    config = parse(f"{SMALL} {flags}".split())[0].model
    masked = 2 * 2 * 16 * 32 / 2 * 4                            # of a token, in four layers
    wanted = (model_flops(config, vocab=97, batch=8) / 3 + 8 * 16 * masked) / 1e9
    found = re.search(r"all ranks: ([\d.]+) GFLOP forward, ([\d.]+) backward", text)
    assert [float(part) for part in found.groups()] == pytest.approx([wanted, 2 * wanted], abs=6e-4)
