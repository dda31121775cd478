"""The launch scripts of the published MoE models: sizes, hyperparameters, a tiny override. Only the tiny ones train."""

from __future__ import annotations

import json
import os
import subprocess
from math import gcd
from pathlib import Path

import pytest

import pretrain_gpt
from megazero.config import check_world
from megazero.data.tokenizer import build_tokenizer
from megazero.flags import parse
from megazero.moe.pyramid import count_parameters, moe_plans

ROOT = Path(__file__).parent.parent
VOCAB = 50304       # GPT-2's 50257, padded

# script -> parameters, MoE layers, global batch, micro-batch, peak and least rate
PUBLISHED = {
    "350m_128": (13_149_534_208, (128,) * 12, 256, 4, 2e-4, 2e-6),
    "1.3b_128": (52_471_525_376, (128,) * 12, 512, 8, 1.2e-4, 1e-6),
    "350m_pr": (4_116_793_368, (32,) * 10 + (64,) * 2, 256, 4, 3e-4, 1e-6),
    "1.3b_pr": (31_391_649_816, (64,) * 10 + (128,) * 2, 512, 8, 1.2e-4, 1e-6),
    "350m_pr_mos": (3_541_736_468, (32,) * 8 + (64,) * 2, 256, 4, 3e-4, 1e-6),
    "1.3b_pr_mos": (26_944_026_644, (64,) * 8 + (128,) * 2, 512, 8, 1.2e-4, 1e-6),
}


def flags(name, *more, **environment):
    """The flags that the script would train with."""
    words = ["bash", f"scripts/pretrain_moe_{name}.sh", *more]
    plain = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    found = subprocess.run(
        words, cwd=ROOT, env=plain | {"DRY_RUN": "1"} | environment, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and found.stderr == "", found.stderr
    first, *rest = found.stdout.splitlines()
    assert first == "pretrain_gpt.py"
    return rest


def config(name, *more, **environment):
    found, notices = parse(flags(name, *more, TEACHER="none", **environment))
    assert notices == []
    return found


def test_every_script_is_in_the_table():
    assert {f"pretrain_moe_{name}.sh" for name in PUBLISHED} == {
        path.name for path in (ROOT / "scripts").glob("pretrain_moe_*.sh")
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_script_trains_the_published_model_as_it_was_published(name):
    parameters, experts, batch, micro_batch, lr, min_lr = PUBLISHED[name]
    c = config(name)
    model, moe, schedule = c.model, c.moe, c.schedule
    assert count_parameters(model, moe, vocab=VOCAB).total == parameters
    assert tuple(plan.experts for plan in moe_plans(c)) == experts
    assert [plan.layer % 2 for plan in moe_plans(c)] == [1] * len(experts)
    assert moe.mlp_type == ("residual" if "pr" in name else "standard")
    assert (moe.topk, moe.balancing) == (1, {"deepspeed": 0.01})
    capacity = moe.capacity(training=True)
    assert (capacity.factor, capacity.minimum, capacity.order) == (1.0, 4, "random")
    assert (c.batch.global_batch_size, c.batch.micro_batch_size) == (batch, micro_batch)
    assert (schedule.lr, schedule.min_lr, schedule.lr_decay_style) == (lr, min_lr, "cosine")
    assert c.batch.train_tokens == schedule.lr_decay_tokens == 300 * 10**9
    assert (schedule.lr_warmup_tokens, schedule.weight_decay) == (375 * 10**6, 0.1)
    assert (c.optimizer.adam_beta1, c.optimizer.adam_beta2, c.optimizer.clip_grad) == (0.9, 0.95, 1.0)
    assert (model.seq_length, model.init_method_std, c.data.split) == (2048, 0.014, "98,2,0")
    scale = c.precision
    assert scale.fp16 and (scale.initial_scale_power, scale.loss_scale_window, scale.hysteresis) == (11, 500, 2)
    assert c.recompute.recompute_granularity == "full"


@pytest.mark.parametrize("name", PUBLISHED)
def test_experts_are_cut_over_the_ranks_there_are(name):
    """The published PR-MoE runs have layers of 32 experts on 64 ranks, which only a common divisor can serve."""
    for nodes, gpus in ((8, 8), (1, 1), (32, 8), (12, 8)):
        c = config(name, NODES=str(nodes), GPUS_PER_NODE=str(gpus), GLOBAL_BATCH="768", MICRO_BATCH="1")
        check_world(c, nodes * gpus)
        assert all(plan.degree == gcd(plan.experts, nodes * gpus) for plan in moe_plans(c))
    c = config(name, NODES="8", GPUS_PER_NODE="8", PIPELINE="2", TENSOR="2", GLOBAL_BATCH="512", EXPERT="16")
    check_world(c, 64)
    assert {plan.degree for plan in moe_plans(c)} == {16}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tiny_model_is_of_the_same_kind(name):
    c = config(name, "--seed", "7", TINY="1")
    assert c.run.seed == 7 and c.data.mock_data and not c.precision.fp16
    assert build_tokenizer(c.data, c.model.vocab_size).vocab_size == 97
    assert count_parameters(c.model, c.moe, vocab=97).total < 300_000
    experts = [plan.experts for plan in moe_plans(c)]
    assert experts == ([4, 4, 4] if "pr" not in name else [2, 4] if "mos" in name else [2, 2, 4])
    assert c.moe.mlp_type == config(name).moe.mlp_type


@pytest.mark.parametrize("name", ["350m_pr_mos", "1.3b_pr_mos"])
def test_a_student_names_its_teacher_and_when_to_leave_it(name):
    words = " ".join(flags(name))
    teacher = flags(name.removesuffix("_mos"))
    shape = teacher[teacher.index("--num-experts") + 1 : teacher.index("--expert-interval")]
    assert f"--mos --load-teacher runs/moe_{name.removesuffix('_mos')}/checkpoints --num-layers-teacher 24" in words
    assert f"--num-experts-teacher {' '.join(shape)} --kd-beta-ce 1 --kd-temp 1 --kd-stop-iteration" in words
    assert teacher[teacher.index("--save") + 1] == f"runs/moe_{name.removesuffix('_mos')}/checkpoints"
    assert "--mos" not in flags(name, TEACHER="none")
    distill = parse(flags(name))[0].distill
    assert (distill.num_experts_teacher, distill.num_layers_teacher) == (tuple(map(int, shape)), 24)
    assert "--kd-stop-iteration 2" in " ".join(flags(name, TINY="1", TEACHER="here"))


def test_a_tiny_student_learns_from_a_tiny_teacher(tmp_path, capsys):
    """What both scripts start: two distilled steps, then two without the teacher."""
    for name in ("350m_pr", "350m_pr_mos"):
        out, teacher = f"{tmp_path}/{name}", f"{tmp_path}/350m_pr/checkpoints"
        assert pretrain_gpt.main(flags(name, TINY="1", OUT=out, TEACHER=teacher)) == 0
    steps = [json.loads(line) for line in (tmp_path / "350m_pr_mos" / "metrics.jsonl").read_text().splitlines()]
    assert ["kd_loss" in step for step in steps if "lm_loss" in step] == [True, True, False, False]
    lines = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()]
    ended = lines.index("distillation ended after iteration 2, and the teacher is freed")
    assert lines[ended - 1] == "iteration 2/4" and lines[ended + 1] == "iteration 3/4"
