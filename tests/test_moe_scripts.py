"""The launch scripts of the published MoE models: sizes, hyperparameters, a tiny override. Only the tiny ones train."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
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
        words, cwd=ROOT, env=plain | {"DRY_RUN": "command"} | environment, capture_output=True, text=True, timeout=60
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


def test_the_other_tiny_models_train_as_they_are(tmp_path):
    """In plain processes of their scripts, one as two processes with two expert ranks; then the last student."""
    for name, gpus in (("350m_128", "1"), ("1.3b_128", "2"), ("1.3b_pr", "1"), ("1.3b_pr_mos", "1")):
        out, teacher = tmp_path / name, f"{tmp_path}/1.3b_pr/checkpoints"
        if gpus == "1":
            assert pretrain_gpt.main(flags(name, TINY="1", OUT=str(out), TEACHER=teacher)) == 0
        else:
            where = {"MEGAZERO_PYTHON": sys.executable, "GPUS_PER_NODE": gpus, "MASTER_PORT": str(_free_port())}
            found = subprocess.run(
                ["bash", f"scripts/pretrain_moe_{name}.sh"], cwd=ROOT, capture_output=True, text=True, timeout=120,
                env=os.environ | where | {"TINY": "1", "OUT": str(out)},
            )
            assert found.returncode == 0 and "experts: layers 1 3 5: 4 over 2 ranks" in found.stdout, found.stderr
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = [step["lm_loss"] for step in steps if "split" not in step]
        assert len(losses) == 4 and all(3 < loss < 6 for loss in losses)
        assert (out / "checkpoints" / "iter_0000004" / "index.json").is_file()


def test_the_layout_of_a_published_model_shows_what_each_layer_gives_a_rank(capsys):
    """32 experts on 64 ranks: one on each, twice as often; no vocabulary file is needed."""
    words = ("--vocab-size", "50257", "--print-layout", "--world-size", "64")
    assert pretrain_gpt.main(flags("350m_pr", *words)) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("layers "))
    rows = [re.split(r"  +", line) for line in lines[start + 1 : lines.index("", start)]]
    expert = 2 * 1024 * 4096 + 4096 + 1024
    shown = {row[0]: (int(row[2].replace(",", "")), *row[3:]) for row in rows}
    block = shown["layers.0,2,4,6,8,10,12,14,16,18,20,22"][0]
    assert shown["layers.1,3,5,7,9,11,13,15,17,19"] == (block + expert + 32 * 1024 + 2 * 1025, "32 over 32 ranks")
    assert shown["layers.21,23"] == (block + expert + 64 * 1024 + 2 * 1025, "64 over 64 ranks")
    whole = sum(int(row[1].replace(",", "")) * len(row[0].split(",")) for row in rows)
    assert whole == PUBLISHED["350m_pr"][0] - 47 * 1024, "the table pads 50257 words to 50304"


def test_the_quickstart_asks_for_what_it_says(tmp_path):
    """Its three runs, started by a Python that only writes down what it is asked."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    asked = tmp_path / "asked"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "$@" >> {asked}\n')
    python.chmod(0o755)
    found = subprocess.run(
        ["bash", "scripts/quickstart_moe.sh"], cwd=tmp_path, env=os.environ | {"MEGAZERO_PYTHON": str(python)},
        capture_output=True, text=True, timeout=60,
    )
    assert found.returncode == 0 and "runs/quickstart_moe/run-1/student/checkpoints" in found.stdout, found.stderr
    runs = [line.partition(" pretrain_gpt.py ")[2].split() for line in asked.read_text().splitlines()]
    first, again, student = (parse(words)[0] for words in runs if words)
    for c in (first, again, student):
        check_world(c, 4)
        assert c.moe.mlp_type == "residual"
    assert first.experts == again.experts == (1, 2, 1, 4) and student.experts == (1, 4, 1)
    assert [[plan.degree for plan in moe_plans(c)] for c in (first, again, student)] == [[2, 2], [2, 4], [2]]
    assert again.checkpoint.load == student.distill.load_teacher == first.checkpoint.save
    assert (student.parallel.pipeline_model_parallel_size, first.parallel.tensor_model_parallel_size) == (2, 2)
    assert 0 < student.distill.kd_stop_iteration < student.batch.train_iters


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
