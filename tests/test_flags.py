"""The command line: every kind of flag, every alias, and one line for whatever cannot be."""

from __future__ import annotations

import json
import operator
import shlex
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from megazero import flag_file, flag_tables
from megazero.config import SECTIONS, Config, OptimizerConfig
from megazero.config_data import read_blend
from megazero.config_schedule import PARAMETERS
from megazero.flag_families import EVIDENCE
from megazero.flag_tables import ACCEPTED_FLAGS, ANSWERED, BESIDE, LEADERS, REFUSED_FLAGS, RENAMED, SETS
from megazero.flags import (
    READING,
    UsageError,
    all_names,
    all_settings,
    help_text,
    in_words_of,
    parse,
    read,
    split_words,
)
from scripts import flag_table
from tests.known_flags import KNOWN

SHAPE = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 97"
BASE = f"{SHAPE} --micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data"


def parsed(words: str) -> Config:
    return parse(f"{BASE} {words}".split())[0]


def fault(words: str) -> str:
    """The one line that a command line is refused with."""
    with pytest.raises(UsageError) as wrong:
        parse(words.split())
    assert "\n" not in str(wrong.value)
    return str(wrong.value)


def kinds_of(name: str) -> list[str]:
    own = {setting.replace("_", "-") for setting in all_settings()}
    tables = {"honoured": own, "alias": {*RENAMED, *SETS}, "accepted": ACCEPTED_FLAGS, "refused": REFUSED_FLAGS}
    return [kind for kind, names in tables.items() if name in names]


def test_every_flag_of_both_families_is_answered_in_every_spelling_and_never_abbreviated():
    settings = all_settings()
    known = set(all_names(settings))
    for name in KNOWN:
        for typed in (f"--{name}", f"--{name.replace('-', '_')}", f"--{name.replace('_', '-')}=1"):
            try:
                assert not read(split_words([typed]), settings).unknown, typed
            except UsageError as wrong:     # it has no value, or another one
                assert str(wrong).startswith("--") and "unknown" not in str(wrong)
        assert name[:-1] in KNOWN or name[:-1].replace("_", "-") not in known, name
    assert len(KNOWN) > 300


def test_no_flag_has_two_kinds():
    own = [setting.replace("_", "-") for setting in all_settings()]
    for name in {*own, *RENAMED, *SETS, *ACCEPTED_FLAGS, *REFUSED_FLAGS}:
        assert len(kinds_of(name)) == 1, name
    assert {*flag_tables.VALUES, *ANSWERED, *BESIDE, *LEADERS} <= set(REFUSED_FLAGS)
    known = {*own, *RENAMED, *SETS, *ACCEPTED_FLAGS, *REFUSED_FLAGS}
    negated = {f"no-{setting.replace('_', '-')}" for setting, what in all_settings().items() if what.kind is bool}
    assert set(" ".join(EVIDENCE.values()).split()) <= known | negated and not known & set(READING)


def test_a_plain_command_line_is_the_defaults():
    config, notices = parse(BASE.split())
    assert notices == []
    assert (config.model.num_layers, config.model.vocab_size, config.schedule.lr) == (4, 97, 1e-3)
    assert config.model.normalization == "LayerNorm"
    assert config.data.mock_data


EXAMPLE = str(Path(__file__).resolve().parent.parent / "examples" / "ds_config.json")

# A value for each field that the usual one of its type does not fit, and flags without which a field makes no sense.
VALUES = {
    "curriculum_max_difficulty": "12", "deepspeed_config": EXAMPLE,
    "pipeline_model_parallel_layout": "Et|tL",
    "hidden_size": "64", "num_attention_heads": "8", "seq_length": "8", "lr": "0.25", "min_lr": "1e-4",
    "lr_warmup_init": "1e-4", "zero_stage": "0", "kernel": "adam=torch",
    "split": "8,1,1", "rampup_batch_size": "2 2 9", "step_batch_size_schedule": "0:2", "valid_set": "web=corpus",
    "rope_scaling_factor": "2", "rope_high_freq_factor": "2", "num_query_groups": "2",
    "train_tokens": "4096", "decoupled_min_lr": "0.25", "min_loss_scale": "0.25", "cycle_min_lr": "0.25",
    "cycle_max_mom": "0.875", "warmup_max_lr": "0.25", "warmup_min_lr": "0.25",
    "spike_window": "40", "window_size": "4,0", "window_attn_skip_freq": "2",
    "moe_layer_freq": "[0,1,1,0]", "moe_router_load_balancing_type": "seq_aux_loss aux_loss",
}  # fmt: skip
GROWING = "--curriculum-schedule-type fixed_linear"
ALONG = {
    "curriculum_schedule_type": "--curriculum-difficulty 2",
    "curriculum_min_difficulty": f"{GROWING} --curriculum-total-step 5 --curriculum-difficulty-step 1",
    "curriculum_max_difficulty": f"{GROWING} --curriculum-min-difficulty 8 --curriculum-total-step 5",
    "curriculum_total_step": f"{GROWING} --curriculum-min-difficulty 8",
    "curriculum_difficulty_step": f"{GROWING} --curriculum-min-difficulty 8 --curriculum-total-step 5",
    "curriculum_root_degree": (
        "--curriculum-schedule-type fixed_root --curriculum-min-difficulty 8 --curriculum-total-step 5"
    ),
    "curriculum_difficulty": "--curriculum-schedule-type fixed_discrete",
    "curriculum_max_step": "--curriculum-schedule-type fixed_discrete --curriculum-difficulty 2 4",
    "deepspeed": f"--deepspeed_config {EXAMPLE} --defaults megazero",
    "deepspeed_config": "--defaults megazero",
    "max_position_embeddings": "--seq-length 2",
    "use_rope_scaling": "--position-embedding-type rope",
    "lr_decay_style": "--lr-wsd-decay-iters 2",
    "start_weight_decay": "--weight-decay-incr-style linear --end-weight-decay 9",
    "end_weight_decay": "--weight-decay-incr-style linear --start-weight-decay 0",
    "weight_decay_incr_style": "--start-weight-decay 0 --end-weight-decay 1",
    "lr_decay_tokens": "--lr-warmup-tokens 1",
    "lr_warmup_tokens": "--lr-decay-tokens 3",
    "decoupled_min_lr": "--decoupled-lr 0.5",
    "fp32_residual_connection": "--fp16",
    "grad_reduce_in_bf16": "--bf16",
    "recompute_granularity": "--recompute-method uniform",
    "recompute_method": "--recompute-granularity full",
    "recompute_num_layers": "--recompute-granularity full --recompute-method uniform",
    "save": "--save-interval 3",
    "auto_resume": "--save x --save-interval 3",
    "ckpt_step": "--load x",
    "use_checkpoint_args": "--load x",
    "reset_iteration": "--load x",
    "mos": "--load-teacher x",
    "kd": "--load-teacher x",
    "finetune": "--load x",
    "keep_last": "--save x --save-interval 3",
    "world_size": "--print-layout",
    "json": "--print-layout",
    "device_memory_gb": "--print-layout",
    "rampup_batch_size": "--global-batch-size 8",
    "window_attn_skip_freq": "--window-size 4,0",
    "valid_data_path": "--train-data-path x",
    "test_data_path": "--train-data-path x",
    "sample_order": "--data-path x",
    "expert_model_parallel_size": "--num-experts 4",
    "expert_tensor_parallel_size": "--tensor-model-parallel-size 2",
    "moe_shared_expert_gate": "--moe-shared-expert-intermediate-size 8",
    "moe_router_enable_expert_bias": "--moe-router-score-function sigmoid",
    "moe_router_num_groups": "--moe-router-group-topk 2 --num-experts 4",
    "moe_router_group_topk": "--moe-router-num-groups 2 --num-experts 4",
}
PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "sample_order")
CYCLE = {"cycle_min_lr": "--cycle-min-lr 0.125", "cycle_max_lr": "--cycle-max-lr 0.75"}
for _name in PARAMETERS["OneCycle"]:
    ALONG[_name] = " ".join(["--lr-scheduler OneCycle", *(flag for name, flag in CYCLE.items() if name != _name)])
for _kind in ("LRRangeTest", "WarmupCosineLR", "WarmupDecayLR"):
    ALONG |= dict.fromkeys(PARAMETERS[_kind], f"--lr-scheduler {_kind}")
WITHOUT = {"train_samples": "--train-iters 10"} | dict.fromkeys(PATHS, "--mock-data")


@pytest.mark.parametrize("setting", all_settings().values(), ids=list(all_settings()))
def test_every_field_is_honoured(setting):
    usual = {bool: "", int: "2", float: "0.5", str: setting.choices[-1] if setting.choices else "text"}
    word = VALUES.get(setting.name, usual[setting.kind])
    base = BASE.replace(WITHOUT.get(setting.name, "no such flag"), "")
    if setting.name.startswith("lr_") and setting.name.endswith("_samples"):
        base = BASE.replace("--train-iters 10", "--train-samples 100")
    config, _ = parse(f"{base} {ALONG.get(setting.name, '')} --{setting.name.replace('_', '-')} {word}".split())
    values = tuple(True if setting.kind is bool else setting.kind(part) for part in word.split() or [word])
    assert vars(vars(config)[setting.section])[setting.name] == (values if setting.many else values[0])


@pytest.mark.parametrize(
    ("words", "section", "expected"),
    [
        ("--num-key-value-heads 2", "model", {"num_query_groups": 2}),
        ("--layernorm-epsilon 1e-6", "model", {"norm_epsilon": 1e-6}),
        ("--rotary-position-embeddings-theta 500000", "model", {"rotary_base": 500000}),
        ("--use-rotary-position-embeddings", "model", {"position_embedding_type": "rope"}),
        ("--use-rotary-position-embeddings --no-position-embedding", "model", {"position_embedding_type": "rope"}),
        ("--no-position-embedding --position-embedding-type rope", "model", {"position_embedding_type": "rope"}),
        ("--no-position-embedding", "model", {"position_embedding_type": "none"}),
        ("--swiglu", "model", {"activation": "swiglu"}),
        ("--swiglu --no-bias-gelu-fusion", "model", {"activation": "swiglu"}),
        ("--squared-relu", "model", {"activation": "squared_relu"}),
        ("--check-weight-hash-across-dp-replicas-interval 5", "operations", {"check_replicas": 5}),
        ("--openai-gelu", "model", {"activation": "gelu_tanh"}),
        ("--batch-size 2", "batch", {"micro_batch_size": 2}),
        ("--model-parallel-size 2", "parallel", {"tensor_model_parallel_size": 2}),
        ("--warmup 0.25", "schedule", {"lr_warmup_fraction": 0.25}),
        ("--save x --persistent-save-interval 7", "checkpoint", {"save_interval": 7}),
        ("--tokenizer-name-or-path x", "data", {"tokenizer_model": "x"}),
        ("--no-bias-gelu-fusion", "model", {"activation": "gelu"}),
        ("--enable-zbh1-pipeline", "parallel", {"pipeline_schedule": "zb-h1"}),
        ("--moe-expert-parallel-size 1", "parallel", {"expert_model_parallel_size": 1}),
        (f"--deepscale --deepscale-config {EXAMPLE}", "run", {"deepspeed": True, "deepspeed_config": EXAMPLE}),
        ("--topk 1", "moe", {"moe_router_topk": 1, "moe_family": "megatron-deepspeed"}),
        ("--topk 2 --moe-family megatron-lm", "moe", {"moe_router_topk": 2, "moe_family": "megatron-lm"}),
        ("--moe-loss-coeff 0.5", "moe", {"moe_aux_loss_coeff": (0.5,), "moe_family": "megatron-deepspeed"}),
        (
            "--moe-num-experts 4 --moe-top-k 1 --moe-loss-weight 0.5 --moe-capacity-factor 2",
            "moe",
            {"num_experts": (4,), "moe_router_topk": 1, "moe_aux_loss_coeff": (0.5,), "moe_expert_capacity_factor": 2.0,
             "moe_family": "megatron-lm", "moe_router_pre_softmax": True},
        ),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "optimizer", {"zero_stage": 2}),
        ("--ddp-bucket-size 5000", "optimizer", {"bucket_size": 5000}),
        ("--zero-reduce-bucket-size 5e8", "optimizer", {"bucket_size": 500_000_000}),
        ("--data-parallel-sharding-strategy no_shard", "optimizer", {"zero_stage": 0}),
        ("--bf16 --megatron-fsdp-grad-comm-dtype bf16", "precision", {"grad_reduce_in_bf16": True}),
        ("--num-experts '4 4' --expert-interval 2", "moe", {"num_experts": (4, 4)}),
        ("--num-experts 4,4 --expert-interval 2", "moe", {"num_experts": (4, 4)}),
        ("--split 90, 9, 1", "data", {"split": "90, 9, 1", "split_weights": (90.0, 9.0, 1.0)}),
        ("--lr_schedule LRRangeTest", "deepspeed_schedule", {"lr_scheduler": "LRRangeTest"}),
        ("--override-opt_param-scheduler", "schedule", {"override_opt_param_scheduler": True}),
        ("--use-checkpoint-opt_param-scheduler", "schedule", {"use_checkpoint_opt_param_scheduler": True}),
        (
            "--checkpoint-activations",
            "recompute",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            "recompute",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        ),
        (
            "--checkpoint-activations --activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            "recompute",
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        ),
        (
            "--activations-checkpoint-method uniform",
            "recompute",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        ("--use-flash-attn", "run", {"attention_backend": "sdpa"}),
        ("--use-flash-attn-v2", "run", {"attention_backend": "sdpa"}),
        ("--use-flash-attn-builder", "run", {"attention_backend": "sdpa"}),
        ("--use-flash-attn-triton --attention-backend unfused", "run", {"attention_backend": "unfused"}),
        ("--no-masked-softmax-fusion", "run", {"masked_softmax_fusion": False, "attention_backend": "auto"}),
        ("--no-query-key-layer-scaling", "model", {"apply_query_key_layer_scaling": False}),
        ("--recompute-activations", "recompute", {"recompute_granularity": "selective", "recompute_method": None}),
    ],
)
def test_an_alias_sets_its_fields(words, section, expected):
    config = vars(parse([*BASE.split(), *shlex.split(words)])[0])[section]
    assert {name: operator.attrgetter(name)(config) for name in expected} == expected


def test_every_alias_is_tested_above():
    tested = Path(__file__).read_text(encoding="utf-8")
    for name in {*RENAMED, *SETS}:
        assert f"--{name}" in tested, name


def test_spelling_is_tolerant_where_it_cannot_mislead():
    same = parsed("--train_iters=12 --normalization rmsnorm --lr-decay-style COSINE")
    assert (same.batch.train_iters, same.model.normalization, same.schedule.lr_decay_style) == (12, "RMSNorm", "cosine")
    assert parse([*BASE.split(), "--split", "'99,1,0'"])[0].data.split_weights == (99, 1, 0)
    assert parse([*BASE.split(), "--split", "969, 30, 1"])[0].data.split_weights == (969, 30, 1)
    assert parsed("--zero-stage 1.0").optimizer.zero_stage == 1
    words = BASE.replace("--train-iters 10", "--train-samples 1e6")
    assert parse(words.split())[0].batch.train_samples == 1_000_000
    assert isinstance(parse(words.split())[0].batch.train_samples, int)
    assert parsed("--seed 12_345 --clip-grad 1_0.5").run.seed == 12_345
    quoted = parse([*BASE.split(), "--lr-decay-style", "'cosine'", '--optimizer="sgd"'])[0]
    assert (quoted.schedule.lr_decay_style, quoted.optimizer.optimizer) == ("cosine", "sgd")
    for words in (["aux_loss", "seq_aux_loss"], ["aux_loss seq_aux_loss"], ["AUX_LOSS,seq_aux_loss"]):
        line = [*BASE.split(), "--moe-router-load-balancing-type", *words]
        assert parse(line)[0].moe.moe_router_load_balancing_type == ("aux_loss", "seq_aux_loss")


def test_the_last_of_equal_flags_counts():
    assert parsed("--num-layers 8 --num_layers 6").model.num_layers == 6
    assert not parsed("--bf16 --no-bf16").precision.bf16
    assert parsed("--no-bf16 --bf16").precision.bf16
    assert parsed("--no-load-optim").checkpoint.no_load_optim


def test_kernels_can_be_chosen_one_by_one():
    assert parsed("--kernel adam=torch --kernel layer_norm=triton").run.kernel == ("adam=torch", "layer_norm=triton")
    assert parsed("--kernels torch").run.kernels == "torch"


@pytest.mark.parametrize(
    ("typed", "ours"),
    [("auto", "auto"), ("sdpa", "sdpa"), ("flash", "sdpa"), ("fused", "sdpa"), ("unfused", "unfused"),
     ("local", "unfused")],
)
def test_attention_has_three_backends_by_the_names_of_both_families(typed, ours):
    words = f"--attention-backend {typed}"
    assert parsed(words).run.attention == ours
    if ours != "sdpa":
        assert parsed(f"{words} --apply-query-key-layer-scaling").model.apply_query_key_layer_scaling
    else:
        with pytest.raises(UsageError, match=f"{words} has no --apply-query-key-layer-scaling"):
            parsed(f"{words} --apply-query-key-layer-scaling")


def test_corpora_are_blended_with_weights_and_without():
    for words, expected in (
        ("1.0 corpus", [(1, "corpus")]),
        ("corpus", [(None, "corpus")]),
        ("a b c", [(None, "a"), (None, "b"), (None, "c")]),
        ("0.3 a 7e-1 b 0 c", [(Fraction(3, 10), "a"), (Fraction(7, 10), "b")]),
    ):
        data = parse(BASE.replace("--mock-data", f"--data-path {words}").split())[0].data
        assert read_blend("--data-path", data.data_path) == expected
    own = parse(BASE.replace("--mock-data", "--train-data-path a b --test-data-path 1 c").split())[0].data
    assert own.own_paths == {"train": ("a", "b"), "valid": (), "test": ("1", "c")}


def test_several_validation_sets_add_up():
    data = parsed("--valid-set web=a --valid-set code=0.3 b 0.7 c --valid-set=x.y-z=lang=en/d").data
    assert data.valid_sets == {"web": ["a"], "code": ["0.3", "b", "0.7", "c"], "x.y-z": ["lang=en/d"]}


def test_accepted_flags_are_told_once_with_their_reasons():
    _, notices = parse(
        f"{BASE} --use-mcore-models --sequence-parallel --DDP-impl local --data-impl mmap --hysteresis 2 "
        "--local_rank=3 --context-parallel-size 1 --num-experts 1 --sequence-parallel".split()
    )
    family, told = notices
    assert "--use-mcore-models, --DDP-impl, --data-impl (there is one implementation of each part)" in told
    assert "--sequence-parallel (the sequence is always cut over the tensor ranks between layers)" in told
    assert "--context-parallel-size (this value asks for nothing)" in told
    assert told.count("--sequence-parallel") == 1
    assert family.startswith("defaults of Megatron-LM (guessed from --use-mcore-models; --defaults says another)")


def test_flags_about_experts_are_told_where_there_are_none():
    """A script that has lost its --num-experts trains a dense model, and says so."""
    for experts, told in (("", 1), ("--num-experts 1", 1), ("--num-experts 0 1", 1), ("--num-experts 4", 0)):
        _, notices = parse(f"{BASE} {experts} --topk 2 --mlp-type residual --moe-loss-coeff 0.01".split())
        assert len(notices) == told
        assert all("--topk" in n and "--moe-loss-coeff (no layer has experts" in n for n in notices), notices
        assert all(n.count("--topk") == 1 for n in notices)


def test_an_accepted_flag_changes_nothing():
    plain = parse(BASE.split())[0]
    for name, (reason, arity) in ACCEPTED_FLAGS.items():
        words = [f"--{name}", *({"": [], "=": ["1"], "*": ["1", "2"]}[arity])]
        config, notices = parse([*BASE.split(), *words, "--defaults", "megazero"])
        assert config == plain, name
        assert notices[0].startswith("defaults of megazero (asked for by --defaults)")
        assert notices[1:] == [f"accepted without effect: --{name} ({reason})"]


def test_a_refused_flag_names_what_is_missing():
    for name, (reason, _) in REFUSED_FLAGS.items():
        if name not in LEADERS:
            assert fault(f"{BASE} --{name} 7 8") == f"--{name} 7 8: not available yet: {reason}"
            continue
        _, notices = parse(f"{BASE} --{name} 7 8".split())
        assert notices == [f"accepted without effect: --{name} (it says nothing without --{LEADERS[name]})"]
        assert f"--{name} 7 8" in fault(f"{BASE} --{LEADERS[name]} 7 --{name} 7 8")


def test_all_refusals_come_at_once():
    message = fault(f"{BASE} --fp8 --load-tag x --zero-stage 1")
    assert "--fp8: not available yet: fp8 and fp4" in message
    assert "--load-tag x: not available yet: choosing a checkpoint by DeepSpeed's tag" in message


def test_flags_of_the_loss_scale_are_told_to_be_idle_without_fp16():
    words = "--hysteresis 2 --loss-scale 12 --min_loss_scale 2"
    (notice,) = parse(f"{BASE} --bf16 {words}".split())[1]
    assert notice == (
        "accepted without effect: --loss-scale, --min-loss-scale, --hysteresis (the loss is scaled only with --fp16)"
    )
    config, (notice,) = parse(f"{BASE} --fp16 {words}".split())
    assert (config.precision.loss_scale, config.precision.min_loss_scale) == (12.0, 2.0)
    assert notice.endswith(": --min-loss-scale, --hysteresis (a constant --loss-scale does not move)")


def test_a_flag_that_says_nothing_beside_others_is_told_to():
    """Nothing is ignored in silence: each flag here counts with the words after it, and not without."""
    for idle, needs in (
        ("--save-interval 5", "--save x"), ("--eval-iters 3", "--eval-interval 5"), ("--no-load-optim", "--load x"),
        ("--override-opt_param-scheduler", "--save x --save-interval 5 --auto-resume"),
        ("--log-timers-to-tensorboard", "--tensorboard-dir x"), ("--wandb-exp-name x", "--wandb-project x"),
        ("--timing-log-option all", "--timing-log-level 1"), ("--spike-window 30", "--spike-action stop"),
        ("--rotary-base 500000", "--position-embedding-type rope"), ("--sgd-momentum 0.5", "--optimizer sgd"),
        ("--rope-scaling-factor 4", "--use-rope-scaling --position-embedding-type rope"),
        ("--adam-beta2 0.95", "--optimizer lamb"), ("--lamb-min-coeff 0.1", "--optimizer lamb"),
        ("--muon-bf16", "--optimizer muon"), ("--lr-wsd-decay-iters 3", "--lr-decay-style WSD"),
        ("--overlap-param-gather", "--zero-stage 1"), ("--tiktoken-pattern v1", "--tokenizer-type TikTokenizer"),
        ("--vocab-file x --merge-file x", "--tokenizer-type GPT2BPETokenizer"),
        ("--tokenizer-model x", "--tokenizer-type HFTokenizer"), ("--hysteresis 3", "--fp16 --loss-scale 0"),
        ("--expert-tensor-parallel-size 1", "--num-experts 4"), ("--profile-ranks 0", "--profile"),
        ("--kd-temp 2", "--kd --load-teacher x"), ("--check-replicas 5", ""),
        ("--microbatch-group-size-per-virtual-pipeline-stage 3",
         "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    ):
        assert parse(f"{BASE} {idle} {needs}".split())[1] == [], idle
        without = {"--adam-beta2 0.95": "--optimizer sgd", "--overlap-param-gather": "--zero-stage 0",
                   "--hysteresis 3": "--fp16 --loss-scale 8", "--spike-window 30": "--spike-action off"}
        if needs:
            others = without.get(idle, "--tokenizer-type NullTokenizer")
            (notice,) = parse(f"{BASE} {idle} {others}".split())[1]
            assert all(word.replace("_", "-") in notice for word in idle.split() if word.startswith("--")), notice
    (notice,) = parse(f"{BASE} --split 98,2,0".split())[1]
    assert notice == "accepted without effect: --split (only --data-path is split)"


def test_schedules_with_rates_of_their_own_need_no_lr():
    words = BASE.replace("--lr 1e-3", "")
    for own in ("--lr-scheduler LRRangeTest", "--lr-scheduler OneCycle --cycle-min-lr 1e-4 --cycle-max-lr 1e-3",
                "--lr-scheduler WarmupLR --warmup-max-lr 1e-3", "--lr-scheduler WarmupDecayLR"):  # fmt: skip
        assert parse(f"{words} {own}".split())[0].schedule.lr is None
    for needed in ("", "--lr-scheduler WarmupLR", "--lr-scheduler WarmupCosineLR"):
        assert fault(f"{words} {needed}") == "missing: --lr"


def test_a_run_may_be_counted_in_tokens_alone():
    """In the manner of Megatron-DeepSpeed, with underscores as they come."""
    words = BASE.replace("--train-iters 10", "--train-tokens 300000000000")
    config, notices = parse(
        f"{words} --lr_decay_tokens 260e9 --lr_warmup_tokens 375000000 --override-opt_param-scheduler --load x".split()
    )
    assert notices == [] and config.batch.train_tokens == 300 * 10**9
    assert (config.schedule.lr_decay_tokens, config.schedule.lr_warmup_tokens) == (260 * 10**9, 375 * 10**6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hiden-size 3", "unknown flag --hiden-size; did you mean --hidden-size?"),  # C137
        ("--num_layer 3", "unknown flag --num_layer; did you mean --num-layers?"),
        ("--swigul", "unknown flag --swigul; did you mean --swiglu?"),
        ("--qqqqqqqqq", "unknown flag --qqqqqqqqq"),
        ("--train-iter 3", "unknown flag --train-iter; did you mean --train-iters?"),  # never an abbreviation
        ("--num-layers 2.5", "--num-layers 2.5: must be a whole number"),
        ("--num-layers four", "--num-layers four: must be a whole number"),
        ("--num-layers 0", "--num-layers 0: must be at least 1"),
        ("--num-layers", "--num-layers takes one value, but got none"),
        ("--num-layers 3 4", "--num-layers takes one value, but got 3 4"),
        ("--lr nan", "--lr nan: must be a number"),
        ("--lr 1e999", "--lr inf: must be a finite number"),
        ("--lr -1", "--lr -1.0: must be at least 0"),
        ("--bf16 true", "--bf16 is a switch and takes no value, but got true"),
        ("--bf16=1", "--bf16 is a switch and takes no value, but got 1"),
        ("--swiglu yes", "--swiglu is a switch and takes no value, but got yes"),
        ("--use-mcore-models yes", "--use-mcore-models is a switch and takes no value, but got yes"),
        ("--data-impl", "--data-impl takes one value, but got none"),
        ("--lr-decay-style step", "--lr-decay-style step: must be one of constant, linear, cosine"),
        ("--optimizer adagrad", "--optimizer adagrad: must be one of adam"),
        ("--layernorm-epsilon 0", "--layernorm-epsilon 0.0: must be above 0"),
        ("--num-key-value-heads 3", "--num-attention-heads 4 is not divisible by --num-key-value-heads 3"),
        ("--swiglu --squared-relu", "--swiglu and --squared-relu contradict each other about --activation"),
        ("--activation gelu --swiglu", "--activation and --swiglu contradict each other"),
        ("--num-query-groups 2 --num-key-value-heads 4", "--num-query-groups and --num-key-value-heads contradict"),
        ("--no-position-embedding --position-embedding-type learned_absolute", "--no-position-embedding and"),
        ("--no-pipeline-parallel --pipeline-model-parallel-size 2", "--no-pipeline-parallel and --pipeline-model-par"),
        ("--checkpoint-activations --recompute-granularity selective", "--checkpoint-activations and --recompute-gra"),
        ("--recompute-granularity full", "--recompute-granularity full needs --recompute-method uniform or block"),
        ("--world-size 8", "--world-size goes with --print-layout"),
        ("--json", "--json goes with --print-layout"),
        ("--device-memory-gb 80", "--device-memory-gb goes with --print-layout"),
        (
            "--moe-expert-parallel-size 2",
            "--moe-expert-parallel-size 2 needs --num-experts above 1",
        ),
        ("--fp16 --bf16", "--fp16 and --bf16: give one of them, not both"),
        ("--lr-schedule cosine", "--lr-schedule cosine: must be one of LRRangeTest, OneCycle, WarmupLR"),
        ("--lr-warmup-tokens 3 --lr-warmup-iters 2", "--lr-warmup-iters 2 and --lr-warmup-tokens 3: give one of them"),
        (
            "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other",
        ),
        (
            "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler: give one of them, not both",
        ),
        ("--zero-stage 3", "--zero-stage 3: must be 0, 1 or 2"),
        ("--data-path corpus", "--mock-data and --data-path corpus: give one of them"),
        ("--valid-set", "--valid-set takes values, but got none"),
        ("--save=", "--save takes a value, but it is empty"),
        ("--num-layers=", "--num-layers : must be a whole number"),
        ("--seed 1__2", "--seed 1__2: must be a whole number"),
        ("--split 99,-1,2", "--split 99,-1,2: must be up to three weights of at least 0 with a sum above 0"),
        ("--position-embedding-type alibi", "--position-embedding-type alibi: must be one of learned_absolute, rope"),
        ("--rampup-batch-size 2 x 4", "--rampup-batch-size x: must be a whole number"),
        ("--lr-warmup-samples 3", "--train-iters 10 and --lr-warmup-samples 3"),  # C126
        ("--save x", "--save x needs --save-interval"),
    ],
)
def test_what_cannot_be_is_one_line(words, message):
    assert fault(f"{BASE} {words}").startswith(message)


def test_a_word_before_the_first_flag_is_refused():
    assert fault("train --num-layers 4") == "unexpected word 'train' before the first flag"


def test_missing_flags_are_listed_together():
    assert fault("") == (
        "missing: --num-layers, --hidden-size, --num-attention-heads, --seq-length, --micro-batch-size, --lr, "
        "--train-iters (or --train-samples), --data-path (or --mock-data), --vocab-size"
    )
    assert fault(BASE.replace("--vocab-size 97", "--tokenizer-type NullTokenizer")) == "missing: --vocab-size"
    assert fault(BASE.replace("--train-iters 10", "")) == "missing: --train-iters (or --train-samples)"


def test_a_command_that_only_prints_needs_less():
    layout, _ = parse(f"{SHAPE} --print-layout --world-size 8 --tensor-model-parallel-size 2".split())
    assert layout.run.world_size == 8
    parse(f"{BASE.replace('--mock-data', '')} --print-lr 5".split())
    parse(f"{SHAPE} --micro-batch-size 1 --print-config".split())
    assert fault(f"{SHAPE} --micro-batch-size 1 --print-lr 5") == "missing: --lr, --train-iters (or --train-samples)"


def test_c053_the_command_line_counts_more_than_a_base_and_a_base_more_than_a_default():
    base = parsed("--log-interval 7 --hidden-dropout 0.3 --swiglu")
    config, _ = parse("--log-interval 3".split(), base)
    assert (config.logging.log_interval, config.model.hidden_dropout, config.logging.tensorboard_queue_size) == (
        3,
        0.3,
        1000,
    )
    assert config.model == base.model
    with pytest.raises(UsageError, match="--hidden-size 30 is not divisible"):
        parse("--hidden-size 30".split(), base)


def test_defaults_are_those_of_the_family_that_the_flags_tell_of():
    """What differs by silence: evaluation, scores scaled by layers, whose experts, and the GELU without bias."""
    def differing(words: str) -> tuple:
        c = parsed(words)
        return c.batch.eval_interval, c.model.apply_query_key_layer_scaling, c.moe.family, c.model.activation

    theirs = (1000, True, "megatron-deepspeed", "gelu_tanh")
    assert differing("") == (None, False, "megatron-lm", "gelu_tanh")
    assert differing("--no-pipeline-parallel") == differing("--defaults megatron-deepspeed") == theirs
    assert differing("--use-mcore-models --disable-bias-linear") == (None, False, "megatron-lm", "gelu")
    assert differing("--no-pipeline-parallel --defaults megazero") == differing("")
    assert differing("--no-pipeline-parallel --use-mcore-models") == differing("")
    assert parse(f"{BASE} --no-pipeline-parallel --use-mcore-models".split())[1][0].startswith(
        "defaults of megazero (for there are flags of both families, --use-mcore-models, --no-pipeline-parallel; "
    )
    own = "--no-query-key-layer-scaling --eval-interval 7 --moe-family megatron-lm --swiglu"
    assert differing(f"{own} --no-pipeline-parallel") == (7, False, "megatron-lm", "swiglu")
    assert not parsed("--use-flash-attn-v2").model.apply_query_key_layer_scaling    # has none, there as here
    assert parse([], parsed("--defaults=megatron"))[0].batch.eval_interval is None
    assert fault(f"{BASE} --defaults neox").startswith("--defaults neox: must be one of megatron, megatron-deepspeed")
    (said,) = parse(f"{BASE} --num-key-value-heads 2 --eval-interval 5".split())[1]
    assert said == (
        "defaults of Megatron-DeepSpeed (guessed from --num-key-value-heads; --defaults says another): "
        "--apply-query-key-layer-scaling, --moe-family megatron-deepspeed"
    )


SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy"


def test_a_value_decides_whether_a_flag_is_refused():
    for words in (f"{SHARDED} optim", "--tensorboard-log-interval 1.0", "--fp8-margin 3", "--rope-type ROPE"):
        parsed(words)
    missing = "not available yet: cutting parameters over the data ranks"
    assert fault(f"{BASE} --use-megatron-fsdp") == f"--use-megatron-fsdp: {missing}"
    assert fault(f"{BASE} {SHARDED} optim_grads_params").endswith(f"optim_grads_params: {missing}")
    assert fault(f"{BASE} {SHARDED} optim --zero-stage 0") == (
        "--data-parallel-sharding-strategy and --zero-stage contradict each other about --zero-stage"
    )
    assert fault(f"{BASE} --fp8-format hybrid --fp8-margin 3") == (
        "--fp8-format hybrid, --fp8-margin 3: not available yet: fp8 and fp4"
    )
    assert parsed("--context-parallel-size 2 --context-parallel-size 1").model.bias is not None   # the last one counts


def test_a_file_gives_settings_and_the_command_line_counts_more(tmp_path):
    def read(name: str, text: str, words: str = "") -> Config:
        (tmp_path / name).write_text(text)
        return parse(f"--config {tmp_path / name} {words}".split())[0]

    flat = {"num-layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq-length": 16, "vocab_size": 97,
            "lr": 1e-3, "micro-batch-size": 2, "train_iters": "1e1", "mock-data": True, "bf16": False,
            "use-mcore-models": True, "no-exit-signal-handler": False, "deepscale": False, "topk": None,
            "num-experts": [4], "eval_interval": None}
    told = read("flat.json", json.dumps(flat))
    assert told == parse(f"{BASE} --num-experts 4".split())[0]
    lines = [*(f"{name}: {json.dumps(value)}" for name, value in flat.items()), "# yes", "clip-grad: 1e-3", ""]
    assert read("flat.yaml", "\n".join(lines)) == replace(told, optimizer=OptimizerConfig(clip_grad=1e-3))
    assert read("flat.json", json.dumps(flat), "--num-layers 6 --fp64").model.num_layers == 6
    assert read("flat.json", json.dumps(flat | {"optimizer": "sgd"})).optimizer.optimizer == "sgd"    # a section, too
    spoken = read("swiglu.json", json.dumps(flat | {"swiglu": True}), "--activation gelu")
    assert spoken.model.activation == "gelu"


def test_what_is_printed_is_read_back_as_it_was(tmp_path):
    """--print-config and --config are inverse, whatever family's defaults made the first."""
    file = tmp_path / "printed.json"
    for words in ("", "--no-pipeline-parallel --swiglu --num-experts 4 --topk 1", "--fp16 --loss-scale 8"):
        config = parsed(words)
        file.write_text(config.to_json())
        again, notices = parse(["--config", str(file)])
        assert again == config and notices == []
        assert parse(f"--config {file} --defaults megatron-deepspeed".split())[0] == config
        recomputed = parse(f"--config {file} --checkpoint-activations --lr 0.5".split())[0]
        assert recomputed.recompute.recompute_method == "uniform" and recomputed.schedule.lr == 0.5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"num_layers": 4,}', "no JSON: Expecting property name enclosed in double quotes in line 1, c"),
        ("a.json", "[4]", "the file must be a mapping of flags to values"),
        ("a.json", '{"model": 4}', "model must be a mapping of flags to values"),
        ("a.json", '{"num_layers": {"a": 4}}', "num_layers: must be a value or a list of values"),
        ("a.json", '{"num-layer": 4}', "unknown flag --num-layer; did you mean --num-layers?"),
        ("a.json", '{"num-layer": null}', "unknown flag --num-layer; did you mean --num-layers?"),
        ("a.json", '{"config": "b.json"}', "unknown flag --config"),
        ("a.json", '{"num_layers": "four"}', "--num_layers four: must be a whole number"),
        ("a.json", '{"num_layers": null}', "num_layers must have a value"),
        ("a.json", '{"bf16": "yes"}', "--bf16 is a switch and takes no value, but got yes"),
        ("a.json", '{"model": {"lr": 1}, "lr": 2}', "lr stands there twice"),
        ("a.json", '{"lr": 1, "lr": 2}', "lr stands there twice"),
        ("a.json", '{"min_lr": 1, "min-lr": 2}', "min-lr stands there twice"),
        ("a.yaml", "lr: 1\nrun:\n  seed: 1\n  seed: 2", "seed stands there twice, in line 4 again"),
        ("a.yaml", "num-layers: [4", "no YAML: while parsing a flow sequence"),
        ("none.yaml", None, "[Errno 2] No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_is_one_line(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert fault(f"{BASE} --config {tmp_path / name}").startswith(f"--config {tmp_path / name}: {message}")


def test_yaml_names_the_package_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(flag_file, "yaml", None)
    (tmp_path / "a.yaml").write_text("num-layers: 4")
    assert fault(f"{BASE} --config {tmp_path}/a.yaml").endswith("PyYAML: pip install pyyaml, or write JSON")


def test_an_error_after_parsing_names_the_flag_that_was_typed():
    message = "--expert-model-parallel-size 3 does not divide the 4 ranks (--expert-model-parallel-size-x)"
    assert in_words_of("--moe-expert-parallel-size 3 --bf16".split(), message) == message.replace(
        "--expert-model-parallel-size 3", "--moe-expert-parallel-size 3"
    )
    both = "--topk and --moe-router-topk contradict each other about --moe-router-topk"
    assert in_words_of("--topk 1 --moe-router-topk 2".split(), both) == both
    assert in_words_of("--bf16".split(), message) == in_words_of("bf16".split(), message) == message


def test_the_page_of_flags_is_that_of_the_tables():
    """Made by scripts/flag_table.py."""
    assert flag_table.PAGE.read_text(encoding="utf-8") == flag_table.page()


def test_help_shows_every_flag(capsys):
    with pytest.raises(SystemExit) as left:
        parse(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.strip() == help_text().strip()
    for name in (*all_settings(), *READING, *RENAMED, *SETS, *ACCEPTED_FLAGS, *REFUSED_FLAGS):
        assert f"--{name.replace('_', '-')}" in text
    for section in SECTIONS:
        assert f"\n{section}: " in text
    assert max(len(line) for line in text.splitlines()) <= 125


def test_a_command_line_is_read_in_no_time():
    words = f"{BASE} --use-mcore-models --bf16 --tensor-model-parallel-size 2 --save x --save-interval 5".split()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        parse(words)
        best = min(best, time.perf_counter() - start)
    assert best < 0.1  # some 4 ms when it was written
