"""ds_config.json as flags: every key sets its flag, is accepted for a reason or refused by name; file and flags must
agree; what is wrong is told in one line. test_ds_lines.py has whole launch lines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megazero.config import Config, check_world
from megazero.ds_config import translated
from megazero.ds_keys import (
    ACCEPTED_KEYS,
    KNOWN,
    REFUSED_KEYS,
    SECTIONS,
    SETS,
    SWITCHED,
    WITHOUT_DEFAULT,
    WORKED_OUT,
)
from megazero.flags import UsageError, all_settings, parse

# A launch line as Megatron-DeepSpeed's examples have it, without sizes of batches, of a model that trains at once.
LINE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--vocab-size 97 --mock-data --tokenizer-type NullTokenizer --num-workers 0 --train-iters 3 --lr 1e-3 "
    "--lr-decay-style cosine"
)
BATCHES = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10}
CURRICULUM = {
    "curriculum_learning": {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 16,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 1},
    }
}  # fmt: skip
FP16 = {
    "fp16": {
        "enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
        "initial_scale_power": 11,
    }
}  # fmt: skip


class Files:
    """Writes configuration files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *sections: dict[str, Any] | str) -> str:
        """The flags for a file with these sections over BATCHES, or with this very text."""
        path = self.folder / "ds.json"
        parts = BATCHES.copy()
        for part in sections:
            parts |= part if isinstance(part, dict) else {}
        path.write_text(sections[0] if isinstance(sections[0], str) else json.dumps(parts))
        return f"--deepspeed --deepspeed_config={path}"


@pytest.fixture
def file(tmp_path: Path) -> Files:
    return Files(tmp_path)


def parsed(flags: str) -> tuple[Config, list[str]]:
    return parse(f"{LINE} {flags}".split())


def refused(flags: str) -> str:
    with pytest.raises(UsageError) as wrong:
        parsed(flags)
    assert "\n" not in str(wrong.value)
    return str(wrong.value)


# ------------------------------------------------------------------------------------------------------ every key


def nested(key: str, value: Any, **beside: Any) -> dict[str, Any]:
    """The sections of one dotted key, on where they must be, with `beside` in the outermost."""
    first, *rest = key.split(".")
    inner: Any = value
    for name in reversed(rest):
        inner = {name: inner}
    if rest and first in SWITCHED and rest != ["enabled"]:
        inner = {"enabled": True} | inner
    return {first: inner | beside if isinstance(inner, dict) else inner}


# What stands beside a key so that it counts, and its value where it is not one that follows from its type.
BESIDE: dict[str, dict[str, Any]] = {
    "zero_optimization.stage": {"value": 2},
    "optimizer.params.lr": {"value": 0.001},
    "scheduler.params.cycle_max_mom": {"value": 0.85, "type": "OneCycle"},
    "optimizer.params.min_coeff": {"value": 0.02},
    "optimizer.params.max_coeff": {"value": 3.0},
    "scheduler.type": {"value": "WarmupDecayLR"},
    "moe.noisy_gate_policy": {"value": "Jitter"},
    "moe.num_experts": {"value": [4]},
    "moe.ep_size": {"value": 2, "num_experts": 4},
    "moe.enable_expert_tensor_parallelism": {"value": True, "num_experts": 4},
    "moe.use_rts": {"value": False, "num_experts": 4},
    "gradient_accumulation_steps": {"value": 2},
    "wandb.team": {"value": "us"},
    "fp16.loss_scale": {"value": 128.0},
    "scheduler.params.warmup_type": {"value": "linear", "type": "WarmupLR"},
    "scheduler.params.cycle_momentum": {"value": False, "type": "OneCycle"},
    "curriculum_learning.schedule_type": {
        "value": "fixed_linear", "min_difficulty": 8, "schedule_config": {"total_curriculum_step": 5},
    },
}  # fmt: skip
BY_TYPE: dict[type, Any] = {int: 3, float: 0.25, bool: True, list: [3]}
USERS = {"lr_range": "LRRangeTest", "cycle": "OneCycle", "decay": "OneCycle", "total": "WarmupDecayLR"}
USERS |= {"cos": "WarmupCosineLR", "warmup_min_ratio": "WarmupCosineLR", "warmup": "WarmupLR"}


def sample_of(key: str) -> tuple[Any, dict[str, Any]]:
    """A value that a key of SETS may have and is no default, and sections that it goes with."""
    beside = dict(BESIDE.get(key, {}))
    value = beside.pop("value", BY_TYPE.get(SETS[key][1]))
    name = key.rpartition(".")[2]
    if key.startswith("scheduler.params.") and not beside:
        beside = {"type": next(kind for start, kind in USERS.items() if name.startswith(start))}
    if key.startswith("curriculum_learning.") and not beside:
        plain = {"total_curriculum_step": 7, "difficulty_step": 1}
        plain = {"difficulty": [2, 9], "max_step": [5]} if name in ("difficulty", "max_step") else plain
        kind = "fixed_discrete" if "difficulty" in plain else "fixed_root" if name == "root_degree" else "fixed_linear"
        beside = {"enabled": True, "schedule_type": kind, "schedule_config": plain}
        if kind != "fixed_discrete" and name != "min_difficulty":
            beside["min_difficulty"] = 3
        if "schedule_config" in key:
            value = [4, 8] if name == "difficulty" else value
            beside["schedule_config"] = plain | {name: value}
    return value, beside


@pytest.mark.parametrize("key", SETS)
def test_every_honoured_key_sets_its_flag_and_no_other_value(key, file):
    flag, kind = SETS[key]
    value, beside = sample_of(key)
    section = nested(key, value)
    if beside:
        first, *_, name = key.split(".")
        section[first] = {**section[first], **beside}
        if key.startswith("scheduler.params."):
            cycle = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.5} if section[first]["type"] == "OneCycle" else {}
            section[first]["params"] = cycle | {name: value}
    batch = {"train_batch_size": 12} if key == "gradient_accumulation_steps" else {}
    more = "--num-layers 3" if key == "pipeline.stages" else ""
    flags, words = file(section, batch), flag.replace("-", "_")
    schedule = "--lr-decay-style linear" if "scheduler" in key else ""
    config, _ = parsed(f"{flags} {more} {schedule}")
    name = {"expert_model_parallel_size": words}.get(words, words)
    setting = all_settings()[name]
    found = vars(vars(config)[setting.section])[name]
    assert found == (tuple(value) if kind is list else value) and type(found) is setting.kind or setting.many
    assert found != setting.default


@pytest.mark.parametrize("key", ACCEPTED_KEYS)
def test_every_accepted_key_is_told_once_with_its_reason(key, file):
    _, notices = parsed(file(nested(key, 5)))
    assert len(notices) == 3 and f"{key} ({ACCEPTED_KEYS[key]})" in notices[-1]     # others: defaults, and clipping
    assert key not in " ".join(parsed(file(nested(key, False)))[1])


@pytest.mark.parametrize("key", [*REFUSED_KEYS, *SECTIONS])
def test_every_missing_capability_is_refused_by_name_unless_it_is_off(key, file):
    capability, harmless = REFUSED_KEYS.get(key, (SECTIONS.get(key), None))
    on: Any = {"enabled": True, "x": 1} if key in SECTIONS else {"device": "cpu"} if harmless == "none" else True
    off: Any = {"enabled": False, "x": {"y": 1}} if key in SECTIONS else {"device": "none", "pin_memory": True}
    if key in REFUSED_KEYS and harmless != "none":
        off, on = (False, True) if harmless is None else (harmless, not harmless if harmless is True else 7)
    told = refused(file(nested(key, on)))
    assert f"ds.json: {key}" in told and told.endswith(f"not available yet: {capability}")
    parsed(file(nested(key, off)))


def test_every_key_is_of_one_kind():
    kinds = [set(SETS), set(WORKED_OUT), set(ACCEPTED_KEYS), set(REFUSED_KEYS), set(SECTIONS)]
    assert sum(map(len, kinds)) == len(KNOWN)
    flags = {flag for flag, _ in SETS.values()} | {flag for flags in WORKED_OUT.values() for flag in flags}
    names = {setting.replace("_", "-") for setting in all_settings()}
    assert flags <= names and set(WITHOUT_DEFAULT) <= names


@pytest.mark.parametrize(
    ("section", "field", "want"),
    [
        ({"communication_data_type": "bf16", "bf16": {"enabled": True}}, "precision.grad_reduce_in_bf16", True),
        ({"communication_data_type": "fp32"}, "precision.grad_reduce_in_bf16", False),
        ({"optimizer": {"type": "AdamW"}}, "optimizer.decoupled_weight_decay", True),
        ({"optimizer": {"type": "Adam"}}, "optimizer.decoupled_weight_decay", True),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "betas": [0.8, 0.95]}}},
            "optimizer.decoupled_weight_decay", False,
        ),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.95]}}}, "optimizer.adam_beta1", 0.8),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.95]}}}, "optimizer.adam_beta2", 0.95),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.optimizer", "lamb"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}, "optimizer.sgd_momentum", 0.5),
        ({"optimizer": {"type": "Muon", "params": {"momentum": 0.5}}}, "optimizer.muon_momentum", 0.5),
        ({"fp16": {"enabled": True}}, "precision.loss_scaler", "deepspeed"),
        ({"zero_optimization": True}, "optimizer.zero_stage", 1),
        ({"zero_optimization": {"reduce_bucket_size": 5e8}}, "optimizer.bucket_size", 500_000_000),
        ({"pipeline": {"partition": "parameters"}}, "parallel.pipeline_split", "deepspeed-parameters"),
        ({"pipeline": {"partition": "type:layers"}}, "parallel.pipeline_split", "deepspeed-type:layers"),
        ({"pipeline": {"partition": "best"}}, "parallel.pipeline_split", "uniform"),
        ({"pipeline": {"activation_checkpoint_interval": 2}}, "recompute.recompute_num_layers", 2),
        ({"tensor_parallel": {"autotp_size": 2}}, "parallel.tensor_model_parallel_size", 2),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "parallel.tensor_model_parallel_size", 2),
        ({"tensor_parallel": {"tp_size": 0}}, "parallel.tensor_model_parallel_size", 1),
        ({"moe": {"num_experts": 4, "use_residual": True}}, "moe.mlp_type", "residual"),
        ({"moe": {"num_experts": 4, "type": "residual"}}, "moe.mlp_type", "residual"),
        ({"moe": {"num_experts": [2, 4]}}, "moe.num_experts", (2, 4)),
        ({"moe": {"num_experts": 4, "drop_tokens": False}}, "moe.disable_moe_token_dropping", True),
        (
            {"moe": {"num_experts": 4, "k": 2, "top2_2nd_expert_sampling": False}},
            "moe.disable_moe_top2_2nd_expert_sampling", True,
        ),
        ({"moe": {"num_experts": 4}}, "moe.moe_family", "megatron-deepspeed"),
        ({"moe": {"enabled": False, "num_experts": 4}}, "moe.num_experts", (1,)),
        ({"tensorboard": {"enabled": True, "output_path": "a", "job_name": "b"}}, "logging.tensorboard_dir", "a/b"),
        ({"tensorboard": {"enabled": False, "output_path": "a"}}, "logging.tensorboard_dir", None),
        ({"wandb": {"enabled": True, "project": "a", "team": "b"}}, "watching.wandb_project", "a"),
        ({"wandb": {"enabled": True, "project": "a", "team": "b"}}, "watching.wandb_entity", "b"),
        ({"wandb": {"enabled": True}}, "watching.wandb_project", "deepspeed"),
        ({"wandb": {"project": "a", "group": "b"}}, "watching.wandb_project", None),
        ({"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}}, "run.seed", 1234),
        ({"wall_clock_breakdown": True}, "watching.timing_log_level", 1),
        ({"wall_clock_breakdown": False}, "watching.timing_log_level", 0),
        ({"flops_profiler": {"enabled": True, "profile_step": 7}}, "watching.flops_profiler", 7),
        ({"flops_profiler": {"enabled": True, "profile_step": "auto"}}, "watching.flops_profiler", 1),
        ({"flops_profiler": {"enabled": False, "profile_step": 7}}, "watching.flops_profiler", None),
        ({"curriculum_learning": {"enabled": False, "schedule_type": "x"}}, "curriculum.curriculum_schedule_type",
         None),
    ],
)  # fmt: skip
def test_what_is_worked_out(section, field, want, file):
    section = section | ({"train_batch_size": 4} if "moe" not in section else {})
    config, _ = parsed(f"{file(section)} {'--num-layers 4' if 'moe' in section else ''}")
    where, name = field.split(".")
    assert vars(vars(config)[where])[name] == want


# ------------------------------------------------------------------------------------------- agreement with flags


def test_auto_takes_the_flags_value_or_the_default(file):
    auto = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    }  # fmt: skip
    config, _ = parsed(f"{file(auto)} --micro-batch-size 2 --clip-grad 0.5 --bf16")
    assert (config.batch.micro_batch_size, config.batch.global_batch(2), config.optimizer.clip_grad) == (2, 4, 0.5)
    assert config.precision.bf16 and not config.precision.fp16 and config.optimizer.bucket_size == 40_000_000
    assert 'train_micro_batch_size_per_gpu is "auto", but there is no --micro-batch-size' in refused(file(auto))
    cycle = {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": "auto"}}}
    assert 'scheduler.params.cycle_min_lr is "auto", but there is no --cycle-min-lr' in refused(file(cycle))


@pytest.mark.parametrize(
    ("section", "flags", "told"),
    [
        ({}, "--micro-batch-size 4", "train_micro_batch_size_per_gpu says --micro-batch-size 2, but --"),
        ({}, "--global-batch-size 8", "train_batch_size says --global-batch-size 4, but --global-batch-size 8 is"),
        ({"bf16": {"enabled": False}}, "--bf16", "bf16.enabled says --bf16 False, but --bf16 True is given"),
        ({"bf16": {"enabled": True}}, "--fp16", "ds.json: --fp16 and bf16.enabled"),
        ({"zero_optimization": {"stage": 2}}, "--zero-stage 1", "says --zero-stage 2, but --zero-stage 1 is given"),
        ({"zero_optimization": {"stage": 3}}, "", "ds.json: zero_optimization.stage 3: must be 0, 1 or 2"),
        ({"gradient_clipping": 1.0}, "--clip-grad 0.5", "gradient_clipping says --clip-grad 1.0, but --clip-grad 0.5"),
        ({"gradient_clipping": -1}, "", "gradient_clipping: --clip-grad -1.0: must be at least 0"),
        ({"tensor_parallel": {"tp_size": 2, "autotp_size": 4}}, "", "autotp_size says --tensor-model-parallel-size 4,"),
    ],
)  # fmt: skip
def test_a_value_that_contradicts_a_flag_is_refused(section, flags, told, file):
    """C137: neither of the two places is preferred in silence."""
    assert told in refused(f"{file(section)} {flags}")


def test_what_is_said_twice_alike_and_what_counts_less_than_a_flag_is_no_contradiction(file):
    same = {"zero_optimization": {"stage": 1}, "gradient_clipping": 1, "fp16": {"enabled": True, "loss_scale": 0}}
    flags = f"{file(same)} --zero-stage=1.0 --clip-grad 1.0 --fp16 --micro-batch-size 2 --global-batch-size 4"
    config, notices = parsed(f"{flags} --loss-scaler megatron --log-interval 1")
    assert config.logging.log_interval == 1 and config.precision.loss_scaler == "megatron" and len(notices) == 1
    assert parsed(flags)[0].logging.log_interval == 10 and parsed(flags)[0].precision.loss_scaler == "deepspeed"
    board = {"tensorboard": {"enabled": True, "output_path": "a"}}
    assert parsed(f"{file(board)} --tensorboard-dir b")[0].logging.tensorboard_dir == "b"


def test_a_file_that_says_nothing_of_clipping_is_told_what_that_means(file):
    """DeepSpeed's documentation says 1.0; its code did not clip until June 2026."""
    for section, flags, clip, lines in (
        ({}, "", 1.0, 1), ({}, "--clip-grad 0.5", 0.5, 0), ({"gradient_clipping": 0}, "", 0.0, 0),
        ({"gradient_clipping": "auto"}, "", 1.0, 1),
    ):  # fmt: skip
        config, notices = parsed(f"{file(section)} {flags}")
        assert config.optimizer.clip_grad == clip
        assert sum("the gradient's norm is clipped at 1.0" in line for line in notices) == lines


def test_sizes_of_batches_must_be_one_equation(file):
    """64 samples are not 2 x 8 x 2."""
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    config, _ = parsed(file(sizes))
    with pytest.raises(ValueError) as wrong:
        check_world(config, 2)
    assert str(wrong.value) == (
        "--global-batch-size 64 (train_batch_size) must be --micro-batch-size 2 x --gradient-accumulation-steps 8 x "
        "data size 2 = 32"
    )
    check_world(config, 4)
    config, _ = parsed(file(sizes | {"train_batch_size": "auto"}))
    assert config.batch.global_batch(2) == 32


# ------------------------------------------------------------------------------------------------------ wrong files


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{\n  "a": 1, // one\n}', "ds.json: line 2 column 11: not JSON: it has no comments"),
        ('# all\n{"a": 1}', "ds.json: line 1 column 1: not JSON: it has no comments"),
        ('{\n  "train_batch_size": 4,\n}', "not JSON: a comma stands before the end"),
        ('{"betas": [1, 2,]}', "not JSON: a comma stands before the end"),
        ('{"train_batch_size": CONFIG_BATCH_SIZE}', "line 1 column 22: not JSON: Expecting value"),
        ('{"train_batch_size": 4, "train_batch_size": 8}', '"train_batch_size" stands twice in one section'),
        ('{"gradient_clipping": NaN}', "NaN is no JSON number"),
        ("[1]", "must hold one JSON object, not [1]"),
        ("", "line 1 column 1: not JSON: Expecting value"),
        ('{"zero_optimisation": {"stage": 1}}', 'unknown section "zero_optimisation"; did you mean "zero_optim'),
        ('{"fp16": {"enbled": true}}', 'unknown key "fp16.enbled"; did you mean "fp16.enabled"?'),
        ('{"xyzzy": 1, "fp61": {}}', 'unknown key "xyzzy"; unknown section "fp61"; did you mean "fp16"?'),
        ('{"fp16": 1}', "fp16 1: must be a section, as {...}"),
        (
            '{"zero_optimization": {"offload_param": {"devise": "cpu"}}}',
            'unknown key "zero_optimization.offload_param.devise"; did you mean "zero_optimization.offload_param.dev',
        ),
        ('{"train_batch_size": "4"}', 'train_batch_size "4": must be a whole number'),
        ('{"train_batch_size": 4.5}', "train_batch_size 4.5: must be a whole number"),
        ('{"gradient_clipping": true}', "gradient_clipping true: must be a number"),
        ('{"bf16": {"enabled": "yes"}}', 'bf16.enabled "yes": must be true or false'),
        ('{"curriculum_learning": {"enabled": "yes"}}', 'curriculum_learning.enabled "yes": must be true or false'),
        ('{"wall_clock_breakdown": 1}', "wall_clock_breakdown 1: must be true or false"),
        ('{"tensorboard": {"enabled": true, "output_path": 3}}', "tensorboard.output_path 3: must be a string"),
        ('{"flops_profiler": {"enabled": true, "profile_step": 0}}', "flops_profiler.profile_step: --flops-profiler 0"),
        ('{"optimizer": {"type": "OneBitAdam"}}', 'optimizer.type "OneBitAdam": not available yet; there are Adam'),
        ('{"optimizer": {"params": {"betas": [0.9]}}}', "optimizer.params.betas [0.9]: must be two numbers in a list"),
        ('{"optimizer": {"params": {"momentum": 0.9}}}', "goes with the types SGD and Muon"),
        ('{"scheduler": {"type": "Cosine"}}', "scheduler.type: --lr-scheduler Cosine: must be one of LRRangeTest"),
        ('{"communication_data_type": "fp16"}', "gradients are reduced in fp32 or bf16"),
        ('{"curriculum_learning": {"enabled": true}}', "curriculum_learning needs schedule_type"),
        ('{"curriculum_learning": {"enabled": true, "curriculum_type": "v"}}', "not available yet; there is seqlen"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_in_one_line(text, told, file):
    assert told in refused(file(text))


def test_a_file_that_is_not_there_and_a_run_without_one(tmp_path):
    assert refused(f"--deepspeed --deepspeed_config {tmp_path}/no.json") == (
        f"{tmp_path}/no.json: cannot be read: No such file or directory"
    )
    assert refused("--deepspeed") == "--deepspeed needs --deepspeed_config FILE"
    assert refused(f"--deepscale --deepscale_config {tmp_path}") == f"{tmp_path}: cannot be read: Is a directory"


def test_a_file_is_read_alike_by_the_run_and_by_its_flags(tmp_path, file):
    """A run by the file and one by the flags that it stands for have the same configuration."""
    sections = [FP16, CURRICULUM, {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}]
    by_file = vars(parsed(f"{file(*sections)} --defaults megazero")[0])
    words = ["--defaults megazero"]
    for asked in translated(json.loads((tmp_path / "ds.json").read_text())).asked:
        words += [f"--{asked.flag}", *asked.words]
    by_flags = vars(parsed(" ".join(words))[0])
    assert {name for name in by_file if by_file[name] != by_flags[name]} == {"run"}
