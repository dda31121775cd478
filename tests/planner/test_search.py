"""The planner weighs every layout, prints command lines that run, and names what makes a model fit."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.config import ModelConfig, check_world
from megazero.config_moe import MoEConfig
from megazero.flags import parse
from megazero.planner.devices import DEVICES
from megazero.planner.layout import Layout
from megazero.planner.search import best_layouts, candidates, ladder, scales
from megazero.planner.step import predict

A100 = DEVICES["a100-80gb"]
GPT_175B = ModelConfig(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048)
BILLION = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50257 "
    "--global-batch-size 512 --bf16"
)


@pytest.fixture(scope="module")
def plan():
    path = Path(__file__).parent.parent.parent / "scripts" / "plan.py"
    spec = importlib.util.spec_from_file_location("plan_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_search_ends_in_seconds_with_layouts_that_fit_and_differ():
    start = Layout(GPT_175B, 51200, data=512, micro_batches=2)
    began = time.process_time()
    best = best_layouts(start, A100)
    assert time.process_time() - began < 20
    assert len(best) == 10 and all(one.fits for one in best)
    assert [one.seconds for one in best] == sorted(one.seconds for one in best)
    assert len({(one.layout.tensor, one.layout.pipeline) for one in best}) > 2
    assert all(one.layout.world == 512 and one.layout.batch == 1024 for one in best)
    weigh = scales(A100)
    for one in best:
        seconds, held = weigh(one.layout)
        assert seconds == pytest.approx(one.seconds, rel=0.1)
        assert held == pytest.approx(one.fullest.total, rel=0.1)


def test_candidates_cover_every_axis():
    model = ModelConfig(num_layers=8, hidden_size=64, num_attention_heads=8, seq_length=32)
    moe = MoEConfig(num_experts=(4,), moe_family="megatron-deepspeed")
    found = list(candidates(Layout(model, 97, moe, fused=False), A100, world=16, batch=32))
    for name, values in {
        "tensor": {1, 2, 4, 8}, "pipeline": {1, 2, 4, 8}, "data": {1, 2, 4, 8, 16}, "expert": {1, 2, 4},
        "chunks": {1, 2, 3, 4}, "micro_batch": {1, 2, 4, 8, 16, 32}, "recompute": {None, "selective", "full"},
        "schedule": {"1f1b", "interleaved", "zb-h1", "zb-v"},
    }.items():
        assert {vars(layout)[name] for layout in found} == values
    assert len(set(found)) == len(found) and all(layout.batch == 32 and layout.world == 16 for layout in found)


def test_every_step_down_saves_until_it_fits():
    """96 layers of 12,288 at tensor 4, pipeline 4, data 2."""
    start = Layout(GPT_175B, 51200, tensor=4, pipeline=4, data=2, micro_batch=4, micro_batches=4)
    assert not predict(start, A100).fits
    rungs = ladder(start, A100)
    assert all(rung.after < rung.before for rung in rungs) and rungs[-1].after <= A100.usable < rungs[-2].after
    assert [rung.words.split(",")[0] for rung in rungs] == [
        "--zero-stage 2", "recompute full", "--micro-batch-size 2", "--micro-batch-size 1",
        "--tensor-model-parallel-size 8", "--pipeline-model-parallel-size 8",
    ]
    assert all(rung.layout.batch == start.batch for rung in rungs)
    tiny = replace(A100, memory=3e9)
    assert ladder(start, tiny)[-1].words == "--seq-length 128"


def test_one_layout_is_told_with_its_command(plan, capsys):
    words = f"--gpus 64 {BILLION} --micro-batch-size 8 --tensor-model-parallel-size 2"
    assert plan.main([*words.split(), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["data"] == 32 and 0.2 < told["MFU"] < 0.7 and told["fits"]
    config, _ = parse([*told["command"].split()[1:], "--print-layout"])
    assert config.parallel.tensor_model_parallel_size == 2 and config.batch.micro_batch_size == 8


def test_the_best_are_printed_with_commands_that_the_front_door_takes(plan, capsys):
    words = f"--gpus 64 --gpu h100-80gb {BILLION} --num-experts 8 --moe-router-topk 2 --search --micro-batch-size 2"
    assert plan.main(words.split()) == 0
    out = capsys.readouterr().out
    commands = re.findall(r"^\d+: pretrain_gpt\.py (.*)$", out, re.MULTILINE)
    assert len(commands) == 10 and "64 x h100-80gb, batch 512" in out
    for command in commands:
        config, _ = parse([*command.split(), "--print-layout"])
        check_world(config, 64)
        assert config.batch.micro_batch_size == 2


def test_links_are_overridden_and_a_slow_network_costs(plan, capsys):
    seconds = []
    for more in ("", "--network-gb-per-s 1", "--gpu-tflops 3120"):
        assert plan.main(f"--gpus 64 {BILLION} --micro-batch-size 8 --as-json {more}".split()) == 0
        seconds.append(json.loads(capsys.readouterr().out)[0]["seconds"])
    assert seconds[1] > seconds[0] > seconds[2]


def test_what_does_not_fit_is_led_down_the_ladder(plan, capsys):
    words = (
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200 --bf16 "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --gpus 32 --global-batch-size 32"
    )
    assert plan.main(words.split()) == 1
    out = capsys.readouterr().out
    assert "it does not fit into" in out and re.search(r"--zero-stage 2: saves \d+\.\d GB, \d+\.\d GB are left", out)
    for wrong, message in (
        ("--gpus 33", "world size 33"), ("--gpus 32 --hiden-size 3", "unknown flag --hiden-size"),
        ("--gpus 0", "--gpus 0: must be at least 1"), ("--gpus 32 --best 0", "--best 0: must be at least 1"),
        ("--gpus 32 --gpu-tflops nan", "--gpu-tflops nan: must be above 0"),
        ("--gpus 32 --gpus-per 4", "unknown flag --gpus-per"), ("--gpus 32 --world-size 8", "give --gpus"),
    ):
        assert plan.main(words.replace("--gpus 32", wrong).split()) == 2
        assert message in (told := capsys.readouterr().err) and told.count("\n") == 1
