"""Distillation: a student learns from a frozen teacher in any layout as on one rank, and stops where it is told to."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
from megazero.checkpoint import Reader
from megazero.data.batch import KD_LOSS
from megazero.flags import UsageError, parse
from megazero.moe.students import TAUGHT, TaughtStage
from megazero.parallel.groups import World, open_mesh
from megazero.parallel.params import collect
from megazero.trainer import Progress, Trainer
from tests.harness import on_ranks
from tests.test_parity import LIMITS
from tests.training import LLAMA, SMALL, Outcome, Recorder, distance, train

# Deeper and wider than the student, and it would drop half of everything if it were ever in training mode.
TEACHER = (
    "--fp64 --num-layers 6 --hidden-size 48 --num-attention-heads 8 --init-method-std 0.3 --train-iters 2 "
    "--attention-dropout 0.5 --hidden-dropout 0.5"
)
KD = "--fp64 --kd --kd-alpha-ce 0.9 --kd-beta-ce 0.7 --kd-temp 2"
PYRAMID = "--expert-interval 1 --mlp-type residual --moe-loss-coeff 0.01"
UNTIED = "--untie-embeddings-and-output-weights"
FULL = "--recompute-granularity full --recompute-method"
DEEP = "--num-layers 8"         # with a stage each there are more stages than the teacher has layers


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a teacher that two stages and two data ranks saved."""
    folder = tmp_path_factory.mktemp("teacher")
    train(f"{TEACHER} --save {folder} --save-interval 2", (1, 2, 2))
    return folder


def in_plain_torch(trainer: Trainer, batch, how) -> tuple[float, float]:
    """Both parts of the loss of a micro-batch by torch's own functions, and their gradients into the flat ones."""
    (stage,) = trainer.machine.engine.stages.values()
    bare = replace(batch, labels=None, draw=None)
    student, its = (part(None, bare)[..., :97].double() for part in (stage.student, stage.teacher))
    assert student.requires_grad and not its.requires_grad
    nll = F.cross_entropy(
        student.flatten(0, 1), batch.labels.flatten(), reduction="none", label_smoothing=0.1 * 97 / 96
    )
    apart = F.kl_div(
        (student / how.kd_temp).log_softmax(-1), (its / how.kd_temp).softmax(-1), reduction="none"
    ).sum(-1).flatten()
    counts = batch.loss_mask.flatten().double() * batch.scale
    lm, kd = (nll * counts).sum(), how.kd_beta_ce * how.kd_temp**2 * (apart * counts).sum()
    (how.kd_alpha_ce * lm + kd).backward()
    return lm.item(), kd.item()


def test_a_step_is_that_of_plain_torch(teacher: Path) -> None:
    """alpha LM + beta T^2 KL(teacher || student) per token, both under the loss mask: losses and every gradient."""
    config, _ = parse(f"{SMALL} {KD} --load-teacher {teacher} --label-smoothing 0.1 --bucket-size 1000".split())
    plan = pretrain_gpt.prepare(config, World())
    trainer, progress = pretrain_gpt.build(plan, open_mesh(plan.topology), Recorder())
    machine, optimizer = trainer.machine, trainer.machine.optimizer
    batches, _ = trainer.feeds["train"].global_batch(0, 1)
    generator = torch.Generator().manual_seed(3)
    masks = [torch.randint(0, 2, b.tokens.shape, generator=generator).float() for b in batches]
    scale = 1 / sum(mask.sum().item() for mask in masks)
    batches = [replace(b, loss_mask=mask, scale=scale) for b, mask in zip(batches, masks, strict=True)]
    wanted = [in_plain_torch(trainer, batch, config.distill) for batch in batches]
    gradients = [grad.clone() for grad in optimizer.reducer.owned()]
    optimizer.reducer.clear()
    lm = machine.loss(batches, machine.train_program(len(batches)), key=TAUGHT)
    kd = machine.reports()[KD_LOSS]
    assert lm.item() == pytest.approx(sum(w[0] for w in wanted), rel=1e-13)
    assert kd.item() == pytest.approx(sum(w[1] for w in wanted), rel=1e-13) and kd > 0.1
    for grad, want in zip(optimizer.reducer.owned(), gradients, strict=True):
        assert (grad - want).norm() <= 1e-12 * want.norm()


LAYOUTS = [
    ((2, 1, 1), ""),
    ((4, 1, 1), ""),
    ((1, 2, 1), ""),
    ((1, 2, 1), "--pipeline-schedule zb-h1"),
    ((2, 2, 1), f"--num-virtual-stages-per-pipeline-rank 2 {FULL} uniform"),
    ((1, 2, 2), "--pipeline-schedule zb-v --zero-stage 2 --overlap-param-gather"),
    ((1, 3, 1), f"--pipeline-schedule gpipe {UNTIED}"),
    ((1, 2, 1), f"{DEEP} --num-virtual-stages-per-pipeline-rank 4"),
    ((2, 1, 2), f"{LLAMA} --num-query-groups 2 {FULL} block --zero-stage 0"),
]


one_rank_of = functools.cache(train)


def one_rank(teacher: Path, model: str) -> Outcome:
    return one_rank_of(f"{KD} --load-teacher {teacher} {model}")


@pytest.mark.parametrize(("layout", "flags"), LAYOUTS, ids=[f"{a}{b}{c} {f}" for (a, b, c), f in LAYOUTS])
def test_any_layout_distils_as_one_rank_does(layout: tuple[int, int, int], flags: str, teacher: Path) -> None:
    """Losses, divergences, norms, weights and moments; the teacher was saved by another layout than any of these."""
    model = next((m for m in (f"{LLAMA} --num-query-groups 2", UNTIED, DEEP) if m in flags), "")
    got, want = train(f"{KD} --load-teacher {teacher} {flags}", layout), one_rank(teacher, model)
    for name, value in distance(got, want).items():
        assert value <= LIMITS[name], f"{name} differ by {value:.1e}"
    for ours, its in zip(got.steps, want.steps, strict=True):
        assert ours["kd_loss"] == pytest.approx(its["kd_loss"], rel=1e-10)


@pytest.fixture(scope="session")
def pyramid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with residual layers of 2 to 8 experts, saved from four ranks that share them; in training mode it
    would sample its choices, keep any of them and drop half of everything."""
    folder = tmp_path_factory.mktemp("pyramid")
    sampling = "--moe-noisy-gate-policy RSample --moe-train-capacity-factor 0.5 --moe-eval-capacity-factor 1.5"
    layout = f"--expert-model-parallel-size 4 --save {folder} --save-interval 2"
    train(f"{TEACHER} --num-experts 2 2 4 4 8 8 {PYRAMID} {sampling} {layout}", (2, 1, 2))
    return folder


MOS = f"--num-experts 2 4 4 8 {PYRAMID} {KD.replace('--kd ', '--mos ')}"
SHARING = [
    ((1, 1, 2), MOS, "--expert-model-parallel-size 2 --zero-stage 0"),
    ((2, 1, 2), MOS, f"--expert-model-parallel-size 4 --zero-stage 2 {FULL} uniform"),
    ((2, 2, 1), MOS, "--expert-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    ((4, 1, 1), MOS, ""),
    ((1, 2, 1), KD, "--pipeline-schedule zb-h1"),
]


@pytest.mark.parametrize(("layout", "model", "flags"), SHARING, ids=[f"{a}{b}{c} {f}" for (a, b, c), _, f in SHARING])
def test_experts_teach_and_learn_in_any_layout(
    layout: tuple[int, int, int], model: str, flags: str, pyramid: Path
) -> None:
    """Mixture-of-Students from a PR-MoE teacher, and a dense student of it: as on one rank."""
    taught = f"{model} --load-teacher {pyramid} --num-experts-teacher 2 2 4 4 8 8"
    got, want = train(f"{taught} {flags}", layout), one_rank_of(taught)
    for name, value in distance(got, want).items():
        assert value <= LIMITS[name], f"{name} differ by {value:.1e}"
    for ours, its in zip(got.steps, want.steps, strict=True):
        assert ours["kd_loss"] == pytest.approx(its["kd_loss"], rel=1e-10)
        assert ours.get("aux_loss", 0.0) == pytest.approx(its.get("aux_loss", 0.0), rel=1e-10)


def teacher_on_rank(trainer: Trainer) -> tuple[list[bool], list[str], dict[str, int]]:
    """Whether each shard of this rank's teacher is still, bit by bit, what its checkpoint holds; what of it has a
    gradient or a state; bytes of the optimizer."""
    mesh, machine = trainer.machine.mesh, trainer.machine
    stages = [stage.teacher for stage in machine.engine.stages.values()]
    infos = collect([named for stage in stages for named in stage.named_layers()])
    reader, same = Reader(Path(machine.distillation.config.load_teacher) / "iter_0000002"), []
    for info in infos:
        box = info.spec.box(mesh.topology, mesh.rank)
        same.append(torch.equal(info.tensor[box.slices(box.start)], reader.read(info.name, "weight", box)))
    held = {id(info.tensor) for bucket in machine.optimizer.buckets for info in bucket.infos}
    wrong = [i.name for i in infos if i.tensor.grad is not None or i.tensor.requires_grad or id(i.tensor) in held]
    assert not any(module.training for stage in stages for module in stage.modules())
    return same, wrong, machine.optimizer.bytes()


def bytes_on_rank(trainer: Trainer) -> dict[str, int]:
    return trainer.machine.optimizer.bytes()


def saved_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*/*/*.safetensors"))


def test_a_teacher_is_frozen_and_costs_no_state(pyramid: Path, tmp_path: Path) -> None:
    """C117: deeper, wider and with other experts than its student, after five steps every bit of it is as it was, and
    the optimizer and the save are those of a student alone. Then the student's save may teach in its turn."""
    layout, saving = (2, 1, 2), "--expert-model-parallel-size 2 --save-interval 5 --save"
    student = f"--fp64 --num-experts 2 4 4 8 {PYRAMID}"
    alone = train(f"{student} {saving} {tmp_path / 'alone'}", layout, look=bytes_on_rank)
    taught = train(f"{MOS} --load-teacher {pyramid} {saving} {tmp_path / 'taught'}", layout, look=teacher_on_rank)
    for (same, wrong, held), wanted in zip(taught.seen, alone.seen, strict=True):
        assert same and all(same) and not wrong and held == wanted
    assert taught.state.keys() == alone.state.keys()
    assert saved_bytes(tmp_path / "taught") == saved_bytes(tmp_path / "alone") > 0
    assert "kd_loss" in train(f"{KD} --load-teacher {tmp_path / 'taught'} --num-layers 2 --train-iters 1").steps[0]


def stop_on_rank(argv: Sequence[str], world: int) -> tuple[Recorder, bool, bool]:
    """A run's record; whether the teacher was there at its start, and whether anything of it is left at its end."""
    config, _ = parse(argv)
    plan, record = pretrain_gpt.prepare(config, World(0, world, 0)), Recorder()
    trainer, progress = pretrain_gpt.build(plan, open_mesh(plan.topology), record)
    stages = trainer.machine.engine.stages
    taught = all(isinstance(stage, TaughtStage) for stage in stages.values())
    traces = [weakref.ref(p.untyped_storage()) for s in stages.values() for p in s.teacher.parameters()]
    began = bool(traces) and taught and all(trace() is not None for trace in traces)
    del stages
    trainer.train(progress, plan.iterations, config.checkpoint.save_interval)
    return record, began, any(trace() is not None for trace in traces)


def figures(run: Outcome | Recorder, first: int = 0) -> list[tuple[float | None, ...]]:
    """What was told of the steps after iteration `first`, in every digit."""
    keys = ("iteration", "lm_loss", "kd_loss", "grad_norm", "learning_rate")
    return [tuple(step.get(key) for key in keys) for step in run.steps if step["iteration"] > first]


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1)])
def test_distillation_ends_where_it_is_told_to(layout: tuple[int, int, int], teacher: Path, tmp_path: Path) -> None:
    """C120: stopped after three of six steps, the teacher's memory is free, and steps 4 to 6 are bit by bit those of a
    plain run that goes on from the third; a resume after the fifth needs no teacher any more."""
    plain = "--train-iters 6 --lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-5 --hidden-dropout 0.1"
    taught = f"{plain} --kd --load-teacher {teacher} --kd-stop-iteration 3"
    argv = f"{SMALL} {taught} --save {tmp_path} --save-interval 1 --pipeline-model-parallel-size {layout[1]}".split()
    for record, began, left in on_ranks(layout[1], stop_on_rank, argv, layout[1]):
        assert began and not left
        assert ["kd_loss" in step for step in record.steps] == [True] * 3 + [False] * 3
        assert sum("distillation ended after iteration 3" in line for line in record.said) == 1
    straight = train(f"{plain} --load {tmp_path} --ckpt-step 6", layout)
    for flags, first in ((plain, 3), (taught.replace(str(teacher), "/nowhere"), 5)):
        resumed = train(f"{flags} --load {tmp_path} --ckpt-step {first}", layout)
        assert figures(resumed) == figures(record, first)
        assert all(torch.equal(resumed.state[key], straight.state[key]) for key in straight.state)


def test_a_resumed_distillation_goes_on(teacher: Path, tmp_path: Path) -> None:
    """Resumed after the second of four distilled steps: in the same layout with every digit, moments and rates too, in
    another one to the last digits. It ends by tokens here: 4 steps of 8 samples of 16."""
    flags = f"{KD} --load-teacher {teacher} --kd-stop-tokens 512 --train-iters 6 --lr-decay-style cosine --min-lr 1e-5"
    straight = train(f"{flags} --save {tmp_path} --save-interval 2", (2, 1, 1))
    assert ["kd_loss" in step for step in straight.steps] == [True] * 4 + [False] * 2
    resumed = train(f"{flags} --load {tmp_path} --ckpt-step 2", (2, 1, 1))
    assert figures(resumed) == figures(straight, 2)
    assert all(torch.equal(resumed.state[key], straight.state[key]) for key in straight.state)
    elsewhere = train(f"{flags} --load {tmp_path} --ckpt-step 2", (1, 2, 2))
    found = distance(elsewhere, Outcome(straight.steps[2:], straight.state))
    assert all(found[name] <= LIMITS[name] for name in LIMITS), found
    assert "kd_loss" in elsewhere.steps[1] and "kd_loss" not in elsewhere.steps[2]


def evaluated_on_rank(trainer: Trainer) -> tuple[bool, dict]:
    """Whether there is a teacher, and what the engine was told in an evaluation."""
    trainer.evaluate("valid", Progress())
    return trainer.machine.distillation is not None, trainer.machine.engine.reports


def test_a_teacher_without_weight_changes_nothing(teacher: Path) -> None:
    """beta 0 is plain training to the last bit, in evaluations during the distillation too: they have no teacher."""
    flags = "--fp64 --hidden-dropout 0.1 --eval-interval 2 --eval-iters 1"
    plain = train(flags, (1, 2, 1))
    taught = train(f"{flags} --kd --kd-beta-ce 0 --load-teacher {teacher}", (1, 2, 1), look=evaluated_on_rank)
    assert taught.losses == plain.losses and taught.evaluations[: len(plain.evaluations)] == plain.evaluations
    assert all(torch.equal(taught.state[key], plain.state[key]) for key in plain.state)
    assert [step["kd_loss"] for step in taught.steps] == [0.0] * 5 and taught.seen == [(True, {})] * 2


def test_a_teacher_draws_nothing_and_the_student_does(teacher: Path) -> None:
    """With dropout of the student alone the divergence of one step depends on the iteration's draws in no layout, and
    its masks are those without a teacher."""
    flags = f"{KD} --load-teacher {teacher} --attention-dropout 0.1 --hidden-dropout 0.1"
    one, two = train(flags), train(flags, (1, 2, 2))
    assert max(distance(two, one).values()) <= 1e-10
    assert one.losses[0] == train("--fp64 --attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 1").losses[0]


@pytest.mark.parametrize("precision", ["--fp16 --initial-loss-scale 1024", "--bf16 --fp32-residual-connection"])
def test_a_teacher_is_read_into_any_precision(precision: str, teacher: Path) -> None:
    """The figures of fp64 to the digits of 16 bits, whatever the loss scale. 2e-2 is the house's limit for bf16."""
    exact = one_rank(teacher, "")
    rounded = train(f"{KD.replace('--fp64', precision)} --load-teacher {teacher}", (1, 2, 1))
    for ours, its in zip(rounded.steps, exact.steps, strict=True):
        assert ours["kd_loss"] == pytest.approx(its["kd_loss"], rel=2e-2)
        assert ours["lm_loss"] == pytest.approx(its["lm_loss"], rel=2e-2)


WRONG = [
    ("--kd", "--kd needs --load-teacher"),
    ("--mos", "--mos needs --load-teacher"),
    ("--kd --load-teacher /nowhere", "--load-teacher /nowhere: there is no complete checkpoint in it"),
    ("TEACHER --num-layers-teacher 5", "the teacher has 6, not --num-layers-teacher 5"),
    ("TEACHER --hidden-size-teacher 32", "the teacher has 48, not --hidden-size-teacher 32"),
    ("TEACHER --num-attention-heads-teacher 4", "the teacher has 8, not --num-attention-heads-teacher 4"),
    ("TEACHER --num-experts-teacher 4 8", "the teacher has 1 experts, not --num-experts-teacher 4 8"),
    ("PYRAMID --num-experts-teacher 2 4 8", "the teacher has 2 2 4 4 8 8 experts, not --num-experts-teacher 2 4 8"),
    (
        "PYRAMID --num-experts 3 --moe-router-topk 2 --expert-model-parallel-size 3",
        "--expert-model-parallel-size 3 has no common divisor with 2 experts of the teacher",
    ),
    ("TEACHER --vocab-size 101", "the teacher knows 97 tokens, and the student 101 (--vocab-size)"),
    ("TEACHER --seq-length 32", "the teacher knows 16 positions, and --seq-length is 32"),
    ("TEACHER --kd-temp 0", "--kd-temp 0.0: must be above 0"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_what_cannot_teach_is_refused_in_one_line(flags: str, message: str, teacher: Path, pyramid: Path) -> None:
    """The teacher is verified against its checkpoint and the student before any rank waits for another."""
    size = 3 if "parallel-size 3" in flags else 1
    flags = flags.replace("TEACHER", f"--kd --load-teacher {teacher}")
    flags = flags.replace("PYRAMID", f"--mos --load-teacher {pyramid} --global-batch-size 12")
    with pytest.raises(ValueError) as wrong:
        config, _ = parse(f"{SMALL} {flags}".split())
        pretrain_gpt.prepare(config, World(0, size, 0))
    assert message in str(wrong.value) and "\n" not in str(wrong.value)
    if str(teacher.parent) in flags and not isinstance(wrong.value, UsageError):
        assert str(wrong.value).startswith("--load-teacher ")


def test_a_teacher_with_sinks_is_refused_where_the_fused_attention_is_asked_for_by_name(tmp_path: Path) -> None:
    train(f"--softmax-type learnable --train-iters 1 --save {tmp_path} --save-interval 1")
    config, _ = parse(f"{SMALL} --mos --load-teacher {tmp_path} --attention-backend flash".split())
    with pytest.raises(ValueError) as wrong:
        pretrain_gpt.prepare(config, World())
    assert str(wrong.value) == (
        f"--load-teacher {tmp_path}: --attention-backend flash has no --softmax-type learnable: auto and unfused have"
    )


def test_a_teacher_of_the_shape_that_the_flags_say_is_taken(teacher: Path) -> None:
    shape = "--num-layers-teacher 6 --hidden-size-teacher 48 --num-attention-heads-teacher 8 --num-experts-teacher 1"
    assert "kd_loss" in train(f"--mos --load-teacher {teacher} {shape} --train-iters 1").steps[0]


def test_flags_of_a_teacher_without_distillation_are_told(teacher: Path) -> None:
    """A script that has dropped --mos alone goes on with plain training, and says so."""
    flags = f"--load-teacher {teacher} --kd-beta-ce 2"
    _, notices = parse(f"{SMALL} {flags}".split())
    assert "--load-teacher, --kd-beta-ce (there is no teacher without --mos or --kd)" in notices[0]
    assert "kd_loss" not in train(f"{flags} --train-iters 1").steps[0]
