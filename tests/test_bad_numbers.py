"""Numbers gone bad: where they began is named, nothing bad is saved, and a step that is passed over leaves no trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megazero.flags import parse
from megazero.parallel.collectives import AgreedError
from megazero.parallel.groups import World, open_mesh
from megazero.parallel.replicas import fingerprint, first_difference
from megazero.spikes import LEAST, SpikeRule
from megazero.trainer import Trainer
from tests.harness import on_ranks
from tests.training import SMALL, Recorder, pieces_of

LAYOUT = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"      # and data 2
PLANTED = 3                             # the iteration that something is planted in
NORM = "layers.2.attention_norm.weight"
EXPERT = "layers.0.ffn.experts.up"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-layer-freq 2"


def trainer_of(flags: str, world: int, change: Callable[[Trainer], None] | None) -> tuple[Trainer, Any]:
    config, _ = parse(f"{SMALL} {flags}".split())
    plan = pretrain_gpt.prepare(config, World(0, world, 0))
    trainer, progress = pretrain_gpt.build(plan, open_mesh(plan.topology), Recorder())
    if change is not None:
        change(trainer)
    return trainer, progress


def run(flags: str, world: int, change: Callable[[Trainer], None] | None = None) -> dict[str, Any]:
    """One rank of a run: what was said, the error that ended it, the state at the end."""
    trainer, progress = trainer_of(flags, world, change)
    config, error = parse(f"{SMALL} {flags}".split())[0], ""
    try:
        progress = pretrain_gpt.train(trainer, progress, config.batch.train_iters, config)
    except AgreedError as wrong:
        error = str(wrong)
    record = trainer.metrics
    return {
        "said": record.said, "error": error, "progress": progress, "losses": [s["lm_loss"] for s in record.steps],
        "skipped": [step["skipped"] for step in record.steps], "state": [piece[3] for piece in pieces_of(trainer)],
    }


def is_at(trainer: Trainer, *iterations: int) -> bool:
    return trainer.machine.mesh.activity.phase in [f"iteration {n}" for n in iterations]


def spoil_output(trainer: Trainer, *, once: bool = False, iterations: tuple[int, ...] = (PLANTED,)) -> None:
    """The last rank computes one number wrongly: of four, the second stage's second data rank."""
    left = [1 if once else 100]

    def spoil(layer: Any, inputs: Any, output: Any) -> Any:
        activity = trainer.machine.mesh.activity
        if not is_at(trainer, *iterations) or activity.instruction[0].micro != 1 or not left[0]:
            return output
        left[0] -= 1
        return output * torch.where(torch.arange(output.shape[-1]) == 5, torch.nan, 1.0)

    if trainer.machine.mesh.rank == trainer.machine.mesh.world.size - 1:
        stage = max(trainer.machine.engine.stages)
        dict(trainer.machine.engine.stages[stage].named_layers())["layers.2"].register_forward_hook(spoil)


def spoil_gradient(trainer: Trainer) -> None:
    for bucket in trainer.machine.optimizer.buckets if trainer.machine.mesh.rank == 3 else ():
        for info in bucket.infos:
            if info.name == NORM:
                info.tensor.register_hook(lambda grad: grad + (torch.inf if is_at(trainer, PLANTED) else 0.0))


def spoil_expert(trainer: Trainer) -> None:
    """One number of one expert, on one rank, from step 3 on."""
    step = trainer._step

    def spoiling(progress: Any) -> Any:
        for bucket in trainer.machine.optimizer.buckets if progress.iteration == PLANTED - 1 else ():
            for info in bucket.infos:
                if trainer.machine.mesh.rank == 1 and info.name == EXPERT:
                    info.tensor.data[-1].view(-1)[7] = torch.nan
        return step(progress)

    trainer._step = spoiling


def misread(trainer: Trainer) -> None:
    """One rank's disk fails in step 3."""
    loader = trainer.feeds["train"].loader
    read = loader.global_batch

    def failing(*args: Any) -> Any:
        if is_at(trainer, PLANTED):
            raise OSError("planted: no such disk")
        return read(*args)

    if trainer.machine.mesh.rank == 2:
        loader.global_batch = failing


def six_ways(folder: str) -> list[dict[str, Any]]:
    """One rank of six runs in which something is planted in step 3."""
    flags = f"{LAYOUT} --train-iters 4 --save-interval 1 --keep-last 1"
    return [
        run(f"{flags} --save {folder}/output", 4, spoil_output),
        run(f"{flags} --save {folder}/gradient --zero-stage 2 --overlap-grad-reduce", 4, spoil_gradient),
        run(f"{flags} --save {folder}/once", 4, functools.partial(spoil_output, once=True)),
        run(f"{flags} --save {folder}/late --no-check-for-nan-in-loss-and-grad", 4, spoil_output),
        run(f"{flags} --save {folder}/expert {EXPERTS}", 4, spoil_expert),
        run(f"{flags} --save {folder}/disk", 4, misread),
    ]


def test_the_step_the_rank_and_the_layer_are_named_and_nothing_is_saved(tmp_path: Path) -> None:
    """C131: also with --keep-last 1 the save before is there. All ranks end with one line: where an output went bad, or
    a gradient; and that it was not computed so, where it is not there when the step is run again."""
    for output, gradient, once, late, expert, disk in on_ranks(4, six_ways, str(tmp_path), timeout=100):
        assert output["error"] == (
            "iteration 3: loss nan, gradient norm nan: not finite, first in the output of layers.2 on rank 3, "
            "micro-batch 1: training stops here without saving; the last checkpoint is good"
        )
        assert f"gradient norm inf: not finite, first in the gradient of {NORM} on rank 3: " in gradient["error"]
        assert "not when the step is run again, which points to the hardware" in once["error"]
        assert "iteration 3: loss nan, gradient norm nan: not finite" in late["error"]
        assert f"not finite, first in the parameter {EXPERT} on rank 1: training stops here" in expert["error"]
        assert disk["error"] == "planted: no such disk (rank 2 of 4)" and len(disk["losses"]) == 2
    for name in ("output", "gradient", "once", "late", "expert", "disk"):
        assert [path.parent.name for path in tmp_path.glob(f"{name}/*/index.json")] == ["iter_0000002"]


def test_a_step_with_bad_numbers_is_passed_over_on_request_and_leaves_no_trace() -> None:
    """Weights, moments and what the schedule counts are as if its samples had not been."""
    flags = "--train-iters 5 --lr-decay-style linear --lr-decay-iters 20 --nonfinite-action skip"
    got = run(flags, 1, spoil_output)
    trainer, progress = trainer_of(flags, 1, None)
    progress = trainer.train(progress, PLANTED - 1, None)
    passed = {"skipped": 1, "skipped_samples": 8, "skipped_tokens": 128, "bad": 1}
    progress = replace(progress, iteration=3, consumed_samples=24, consumed_tokens=384, **passed)
    progress = trainer.train(progress, 5, None)
    assert got["error"] == "" and got["skipped"] == [0, 0, 1, 0, 0] and got["progress"] == progress
    assert all(torch.equal(a, piece[3]) for a, piece in zip(got["state"], pieces_of(trainer), strict=True))
    (line,) = [line for line in got["said"] if "skipped" in line]
    assert line.startswith("iteration 3 skipped: loss nan") and line.endswith("; 1 steps were skipped for such numbers")
    always = functools.partial(spoil_output, iterations=(2, 3, 4))
    ended = run(f"{flags} --max-consecutive-skips 3", 1, always)
    assert "iteration 4: " in ended["error"] and "3 steps in a row were skipped" in ended["error"]


# --------------------------------------------------------------------------------------------------------------- spikes


def test_the_rule_of_spikes() -> None:
    """Against the median and the median distance from it, of at least 20 losses; a loss that falls is none."""
    rule, noisy = SpikeRule(threshold=10), [2.0 + 0.1 * (-1) ** k for k in range(40)]
    assert rule.level(noisy[: LEAST - 1]) is None and rule.describes(noisy[: LEAST - 1], 1e9) is None
    assert rule.level(noisy) == pytest.approx(2.0 + 10 * 1.4826 * 0.1, rel=0.06)
    assert rule.describes(noisy, 3.3) is None and rule.describes(noisy, 0.1) is None
    assert "loss 3.900000 is a spike: the last 40 have the median" in rule.describes(noisy, 3.9)
    assert rule.level([2.0] * 40) == pytest.approx(2.2)                     # a hundredth of the median at least
    assert rule.describes([2.0 * 0.9**k for k in range(40)], 2.0 * 0.9**40) is None
    assert len(rule.keep(noisy * 3, 1.0)) == 100 and rule.keep(noisy, 1.0)[-1] == 1.0


def test_the_flags_of_spikes_reach_the_rule() -> None:
    trainer, _ = trainer_of("--train-iters 1 --spike-threshold 7 --spike-window 30", 1, None)
    assert trainer.spikes == SpikeRule(threshold=7, window=30)
    with pytest.raises(ValueError, match="--spike-action skip does not go with --no-check-for-nan-in-loss-and-grad"):
        parse(f"{SMALL} --spike-action skip --no-check-for-nan-in-loss-and-grad".split())


def jump(trainer: Trainer, at: int = 23) -> None:
    """The loss of one step is five times what it was."""
    loss = trainer._loss
    trainer._loss = lambda batches, progress: (
        (lambda value, taught: (value * (5 if progress.iteration == at - 1 else 1), taught))(*loss(batches, progress))
    )


def test_a_loss_that_jumps_is_told_skipped_or_ends_the_run(tmp_path: Path) -> None:
    """By default it is told. A run that skips and is resumed just before the jump skips it as well."""
    flags = "--train-iters 24 --num-layers 1 --global-batch-size 2"
    told = run(flags, 1, jump)
    assert [line.split(": the last")[0] for line in told["said"] if "warning" in line] == [
        f"warning: iteration 23: loss {told['losses'][22]:.6f} is a spike"
    ]
    ended = run(f"{flags} --spike-action stop --save-interval 1 --save {tmp_path}/stop", 1, jump)
    assert ended["error"].startswith("iteration 23: loss") and "--spike-action" in ended["error"]
    assert not (tmp_path / "stop/iter_0000023/index.json").exists()
    skipping = f"{flags} --spike-action skip --save-interval 22 --save {tmp_path}/skip"
    skipped = run(skipping, 1, jump)
    assert sum(skipped["skipped"]) == 1 and skipped["skipped"][22] == 1 and skipped["progress"].bad == 1
    resumed = run(f"{skipping}2 --load {tmp_path}/skip --ckpt-step 22", 1, jump)
    assert resumed["progress"] == skipped["progress"]
    assert all(torch.equal(a, b) for a, b in zip(resumed["state"], skipped["state"], strict=True))


# ------------------------------------------------------------------------------------------------------------- replicas


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fingerprint_sees_any_bit_and_rows_that_change_places(dtype: torch.dtype) -> None:
    x = torch.randn(1000).to(dtype)
    for at in (0, 255, 256, 767, 768, 999):
        y = x.clone()
        y.view(torch.uint8)[at * x.element_size()] ^= 1
        assert (fingerprint(x) != fingerprint(y)).all()
    y = torch.cat((x[256:512], x[:256], x[512:]))
    assert fingerprint(x)[0] == fingerprint(y)[0] and fingerprint(x)[1] != fingerprint(y)[1]
    assert torch.equal(fingerprint(x), fingerprint(x.clone())) and fingerprint(x[:0]).tolist() == [0, 0]


def one_bit(flags: str, name: str, kind: str, rank: int) -> tuple[str | None, str | None, str]:
    """What is found before and after the lowest bit of one element flips on one rank, and the error of a run in which
    that element is off by one: a bit may be rounded away."""
    trainer, progress = trainer_of(f"{flags} --check-replicas 2", 4, None)
    optimizer, mesh = trainer.machine.optimizer, trainer.machine.mesh
    before = first_difference(optimizer, mesh)
    changed = [
        bucket.view(number, bucket.params if kind == "weight" else bucket.slices[kind]).flatten()[-1:]
        for bucket in optimizer.buckets for number, info in enumerate(bucket.infos)
        if mesh.rank == rank and info.name == name
    ]
    for last in changed:
        last.copy_((last.view(torch.int32) ^ 1).view(torch.float32))
    after, error = first_difference(optimizer, mesh), ""
    for last in changed:
        last.add_(1)
    try:
        trainer.train(progress, 3, None)
    except AgreedError as wrong:
        error = str(wrong)
    return before, after, error


def test_replicas_that_are_no_longer_alike_are_named() -> None:
    """A norm, which all four ranks hold, a matrix, which two do, and at stage 0 of ZeRO a moment."""
    layout = "--tensor-model-parallel-size 2"
    matrix = "layers.1.ffn.up.weight"
    for name, kind, rank, found in (
        (NORM, "weight", 2, "rank 2 is not as on rank 0"), (matrix, "weight", 3, "rank 3 is not as on rank 1"),
        (NORM, "exp_avg", 3, "rank 3 is not as on rank 1"),
    ):
        shown = name if kind == "weight" else f"{name} ({kind})"
        for before, after, error in on_ranks(4, one_bit, f"{layout} --zero-stage 0", name, kind, rank):
            assert before is None and after == f"{shown} on {found}"
            assert error.startswith("iteration 2: replicas are no longer alike: ") and "--check-replicas" in error
