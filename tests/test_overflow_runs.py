"""Runs that meet an overflow: all ranks skip together, nothing changes but the scale, and what comes after is exact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megazero.checkpoint_index import read_index
from megazero.flags import parse
from megazero.parallel.groups import World, open_mesh
from megazero.trainer import Trainer
from tests.harness import on_ranks
from tests.training import SMALL, Recorder, train

SCALED = "--fp16 --initial-loss-scale 4096 --hysteresis 1"
DECAYING = "--lr-decay-style linear --lr-decay-iters 20 --min-lr 0"
PLANTED = 3                                 # the step whose gradient gets an infinity
NORM = ".attention_norm.weight"             # whole on all tensor ranks, whose gradients are partial sums


def memory(trainer: Trainer) -> list[Tensor]:
    """A copy of all that a step changes on this rank: fp16 parameters, masters and moments."""
    optimizer = trainer.machine.optimizer
    optimizer.wait()
    return [x.clone() for bucket in optimizer.buckets for x in (bucket.params, *bucket.slices.values())]


def five_steps(argv: Sequence[str], world: int, plant: bool) -> dict[str, Any]:
    """Five steps on this rank. With `plant` rank 6 of 8 (the second stage, the second data rank, the first tensor rank)
    finds an infinity in the last gradient of step PLANTED; without, that step's samples are passed over unseen."""
    config, _ = parse(argv)
    plan, record = pretrain_gpt.prepare(config, World(0, world, 0)), Recorder()
    trainer, progress = pretrain_gpt.build(plan, open_mesh(plan.topology), record)
    optimizer, unchanged, skipped = trainer.machine.optimizer, None, []
    names = {info.name: info.tensor for bucket in optimizer.buckets for info in bucket.infos if NORM in info.name}
    name = min(names)
    if plant and trainer.machine.mesh.rank == world - 2:
        names[name].register_hook(lambda grad: grad + (torch.inf if progress.iteration == PLANTED - 1 else 0.0))
    for iteration in range(1, 6):
        before = memory(trainer)
        if iteration == PLANTED and not plant:
            optimizer.scale = optimizer.zero.scaler.after(optimizer.scale, overflow=True)
            progress = replace(
                progress, iteration=iteration, consumed_samples=8 * iteration, consumed_tokens=128 * iteration,
                skipped=1, skipped_samples=8, skipped_tokens=128,
            )
        else:
            progress = trainer.train(progress, iteration, None)
        if iteration == PLANTED:
            unchanged = all(torch.equal(a, b) for a, b in zip(before, memory(trainer), strict=True))
        skipped.append(progress.skipped)
    timeless = [{k: v for k, v in step.items() if k not in ("seconds", "tokens_per_second")} for step in record.steps]
    return {
        "unchanged": unchanged, "skipped": skipped, "steps": timeless, "said": record.said, "memory": memory(trainer),
        "updates": optimizer.updates, "progress": progress,
    }


def with_and_without(runs: Sequence[Sequence[str]], world: int) -> list[tuple[dict, dict]]:
    return [(five_steps(argv, world, True), five_steps(argv, world, False)) for argv in runs]


def test_an_infinity_on_one_rank_is_skipped_by_all_and_leaves_no_trace():
    """Tensor 2 x pipeline 2 x data 2, fp16 with fp32 masters, at ZeRO 1 and, overlapped, at 2. After the skipped step
    every bit is as in a run that never saw it: losses, norms, weights, moments; the schedule stood still for it."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    stages = "--zero-stage 1", "--zero-stage 2 --overlap-grad-reduce --overlap-param-gather --bucket-size 4000"
    runs = [f"{SMALL} {SCALED} {DECAYING} {layout} {stage}".split() for stage in stages]
    for of_rank in on_ranks(8, with_and_without, runs, 8, timeout=120):
        for got, want in of_rank:
            assert got["unchanged"] and got["skipped"] == [0, 0, 1, 1, 1] and got["updates"] == 4
            assert got["progress"] == want["progress"] and got["progress"].consumed_samples == 40
            assert [step["loss_scale"] for step in got["steps"]] == [4096, 4096, 4096, 2048, 2048]
            assert [step["consumed_samples"] for step in got["steps"]] == [8, 16, 24, 32, 40]
            assert [step["skipped"] for step in got["steps"]] == [0, 0, 1, 0, 0]
            rates = [step["learning_rate"] for step in got["steps"]]
            assert rates[2] == rates[3] and len(set(rates)) == 4
            assert got["steps"][:2] + got["steps"][3:] == want["steps"]
            assert all(torch.equal(a, b) for a, b in zip(got["memory"], want["memory"], strict=True))
            line = f"iteration 3 skipped: the gradient of layers.2{NORM} overflows; the loss scale is 2048 now, 1 step"
            assert [told for told in got["said"] if "skipped" in told][0].startswith(line)


def two_offenders(argv: Sequence[str], world: int, names: Sequence[str]) -> str:
    """The parameter that is named where those of `names` that this rank holds have a gradient of infinity."""
    plan = pretrain_gpt.prepare(parse(argv)[0], World(0, world, 0))
    optimizer = pretrain_gpt.build(plan, open_mesh(plan.topology), Recorder())[0].machine.optimizer
    for info in (info for bucket in optimizer.buckets for info in bucket.infos):
        gradient = optimizer.reducer.gradient(info.tensor)
        if info.name in names:
            gradient.fill_(torch.inf)
    return optimizer.offender()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved --num-virtual-stages-per-pipeline-rank 2"])
def test_the_first_offender_is_that_of_the_model_not_of_buckets_or_ranks(schedule):
    """Buckets begin at the end of the model, matrices lie apart from vectors, and a rank may hold both ends."""
    argv = f"{SMALL} --bucket-size 4000 --pipeline-model-parallel-size 2 --pipeline-schedule {schedule}".split()
    for names in (
        ("layers.1.ffn.up.weight", "layers.1.attention.qkv.bias", "layers.3.ffn.down.weight"),
        ("layers.2.ffn.up.weight", "layers.1.ffn.down.bias"),
        ("final_norm.norm.weight", "layers.3.attention.out.bias"),
        ("layers.0.attention_norm.weight", "embedding.word.weight"),
    ):
        assert on_ranks(2, two_offenders, argv, 2, names) == [first_of(names)] * 2


def first_of(names: Sequence[str]) -> str:
    order = ["embedding", *(f"layers.{i}.{part}" for i in range(4) for part in ("attention", "ffn")), "final_norm"]
    return min(names, key=lambda name: next(at for at, prefix in enumerate(order) if name.startswith(prefix)))


def jsonl(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def test_c090_a_run_from_2_to_the_32_skips_some_steps_and_then_trains(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Scale, count and first offender are told, and are in the checkpoint: a run that was stopped between two skips
    goes on with the same scales to the same losses."""
    flags = f"{SMALL} --fp16 {DECAYING} --train-iters 18 --log-interval 1"
    straight = f"{flags} --metrics-jsonl {tmp_path}/straight.jsonl"
    assert pretrain_gpt.main(straight.split()) == 0
    out = capsys.readouterr().out
    want = jsonl(tmp_path / "straight.jsonl")
    skipped = [step["skipped"] for step in want]
    first = skipped.index(0)
    assert 8 < first < 17 and not any(skipped[first:])
    scales = [step["loss_scale"] for step in want]
    assert scales == [2.0**32, *(2.0 ** (32 - k) for k in range(first - 1)), *[scales[first]] * (18 - first)]
    assert len({step["learning_rate"] for step in want[: first + 1]}) == 1
    assert out.count("overflows; the loss scale is") == first and "| loss scale 4.29497e+09 | skipped |" in out
    assert f"the loss scale is {scales[first]:g} now, {first} steps were skipped in all" in out

    parts = f"{flags} --save {tmp_path}/run --save-interval 5 --metrics-jsonl {tmp_path}/parts.jsonl"
    assert pretrain_gpt.main(f"{parts} --exit-interval 5".split()) == 0
    progress = read_index(tmp_path / "run" / "iter_0000005")[0].progress
    assert progress["skipped"] == 5 and progress["updates"] == 0
    state = progress["loss_scale"]
    assert (state["scale"], state["skipped"], state["consecutive"]) == (scales[5], 5, 5)
    assert pretrain_gpt.main(f"{parts} --auto-resume".split()) == 0
    assert jsonl(tmp_path / "parts.jsonl") == want


def test_c090_a_model_of_infinities_stops_and_names_a_parameter(capsys: pytest.CaptureFixture):
    argv = f"{SMALL} --fp16 --init-method-std 1e6 --max-consecutive-skips 3".split()
    assert pretrain_gpt.main(argv) == 1
    out, err = capsys.readouterr()
    assert err == (
        "pretrain_gpt.py: error: iteration 3: 3 steps in a row were skipped for overflow, the last one first in the "
        "gradient of embedding.position, and the loss scale is 1.07374e+09 by now: so many end the run "
        "(--max-consecutive-skips)\n"
    )
    assert out.count("overflows") == 2


def test_weights_keep_their_bits_while_a_run_skips():
    """C090, in two layouts: after steps that were all skipped the weights are the initial ones."""
    start = train("--fp16 --lr 0 --weight-decay 0", iterations=1).state
    for layout in ((1, 1, 1), (2, 1, 2)):
        end = train("--fp16", layout, iterations=4)
        assert [step["skipped"] for step in end.steps] == [1] * 4
        assert all(torch.equal(tensor, start[key]) for key, tensor in end.state.items() if key[1] == "weight")
        assert not any(tensor.any() for key, tensor in end.state.items() if key[1] != "weight")
