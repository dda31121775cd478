"""Launch lines in the manner of Megatron-DeepSpeed, with a ds_config.json: each trains, or is told why not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

import pretrain_gpt
from tests.test_ds_config import CURRICULUM, FP16, LINE, Files

OFFLOAD = {"device": "none", "pin_memory": True, "buffer_count": 4, "pipeline_read": False}
ZERO3 = {
    "stage": 3, "stage3_max_live_parameters": 3e9, "stage3_param_persistence_threshold": 1e5, "overlap_comm": True,
}  # fmt: skip

# A name, ranks, sections of the file, flags, and what is told or that it trains.
TRAINS = "iteration 3/3"
LINES: list[tuple[str, int, Sequence[dict[str, Any]], str, str]] = [
    ("gpt fp16", 1, [FP16, {"prescale_gradients": True, "gradient_clipping": 1.0, "wall_clock_breakdown": False}],
     "--fp16 --zero-stage 0 --checkpoint-activations --no-pipeline-parallel", TRAINS),
    ("gpt bf16 zero 2", 1, [{"bf16": {"enabled": True}, "zero_optimization": {
        "stage": 2, "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": 9e7}}], "--bf16", TRAINS),
    ("curriculum", 1, [CURRICULUM, {"data_types": {"grad_accum_dtype": "fp32"}}],
     "--train-tokens 100 --lr-decay-tokens 80 --lr-warmup-tokens 20",
     "iteration 3/3 | consumed samples 12 | consumed tokens 156"),
    ("curriculum and ramp", 1, [CURRICULUM, {"train_batch_size": 4}],
     "--rampup-batch-size 2 2 4 --global-batch-size 4", "consumed samples 8 | consumed tokens 110"),
    ("offload none", 1, [{"zero_optimization": {"stage": 1, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD},
                          "aio": {"block_size": 1048576, "queue_depth": 16}}], "", TRAINS),
    ("scheduler", 1, [{"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1}},
      "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 3}}}],
     "--lr-decay-style linear", TRAINS),
    ("one cycle", 1, [{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}}],
     "--lr-decay-style linear", TRAINS),
    ("experts", 1, [{"moe": {"num_experts": 4, "k": 1, "capacity_factor": 1.25}}], "--expert-interval 1", TRAINS),
    ("pyramid", 1, [FP16], "--fp16 --num-experts 2 4 --expert-interval 1 --mlp-type residual --topk 1", TRAINS),
    ("accumulation", 1, [{"train_batch_size": 16, "gradient_accumulation_steps": 8}], "", TRAINS),
    ("micro-batch of the file", 1, [{"gradient_accumulation_steps": 2}], "--global-batch-size 4", TRAINS),
    ("monitors off", 1, [{"flops_profiler": {"enabled": False}, "comms_logger": {"enabled": False}, "wandb": {
        "enabled": False}, "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}}],
     "", TRAINS),
    ("batches", 2, [{"train_batch_size": 64, "gradient_accumulation_steps": 8}], "", "data size 2 = 32"),
    ("zero 3", 1, [{"zero_optimization": ZERO3}], "--zero-stage 3", "cutting parameters over the data ranks is not"),
    ("offload", 1, [{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}], "",
     'zero_optimization.offload_optimizer.device "cpu": not available yet: states and parameters off the device'),
    ("data efficiency", 1, [{"data_efficiency": {"enabled": True, "seed": 1234}}], "", "data_efficiency: not"),
    ("compression", 1, [{"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}],
     "", "compression_training: not available yet: compression"),
    ("host activations", 1, [{"activation_checkpointing": {"cpu_checkpointing": True}}], "", "activations on the host"),
    ("two precisions", 1, [FP16, {"bf16": {"enabled": True}}], "", "ds.json: fp16.enabled and bf16.enabled"),
    ("another micro-batch", 1, [{}], "--micro-batch-size 4", "but --micro-batch-size 4 is given"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "sections", "flags", "told"), LINES, ids=[line[0] for line in LINES])
def test_a_launch_line_trains_or_is_refused(name, ranks, sections, flags, told, tmp_path, capsys, monkeypatch):
    for word, value in (("WORLD_SIZE", ranks), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(word, str(value))
    line = f"{LINE} --log-interval 1 --deepspeed-activation-checkpointing {Files(tmp_path)(*sections)} {flags}"
    trains = "consumed samples" in told or told == TRAINS
    if "scheduler" in json.dumps(sections):
        line = line.replace("--lr-decay-style cosine", "")
    assert pretrain_gpt.main(line.split()) == (0 if trains else 2), capsys.readouterr().err
    out, err = capsys.readouterr()
    assert told in (out if trains else err)
    assert trains or err.count("\n") == 1 and not out


def test_every_rank_says_that_the_sizes_do_not_fit_before_any_meets_another(tmp_path, capsys, monkeypatch) -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    monkeypatch.setattr(pretrain_gpt, "connect", lambda *_, **__: pytest.fail("it went on to meet the other"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "0", "1":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert pretrain_gpt.main(f"{LINE} {Files(tmp_path)(sizes)}".split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith("data size 2 = 32\n")
