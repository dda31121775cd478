"""Each rule of the configuration by itself: bounds, choices, rules across fields and sections, JSON, derived values."""

from __future__ import annotations

import json

import pytest

from megazero.config import (
    SECTIONS,
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DeepSpeedScheduleConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
    ScheduleConfig,
    check_world,
)
from megazero.config_distill import DistillConfig
from megazero.settings import section_settings

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}


def model(**changes) -> ModelConfig:
    return ModelConfig(**(SHAPE | changes))


def config(model_changes: dict | None = None, **sections) -> Config:
    batch = sections.pop("batch", BatchConfig(micro_batch_size=2))
    return Config(model=model(**(model_changes or {})), batch=batch, **sections)


def test_one_field_is_one_flag_with_help():
    names = [setting.name for name, kind in SECTIONS.items() for setting in section_settings(name, kind)]
    assert len(names) == len(set(names))
    for name, kind in SECTIONS.items():
        assert kind.__doc__
        for setting in section_settings(name, kind):
            assert setting.help, setting.name


def test_nothing_is_written_back():
    with pytest.raises(AttributeError):
        config().model.num_layers = 5  # type: ignore[misc]


def test_unset_fields_follow_from_others():
    plain = model()
    assert (plain.head_dim, plain.query_groups, plain.queries_per_group) == (8, 4, 1)
    assert (plain.ffn, plain.gated, plain.bias, plain.qkv_bias, plain.tied, plain.positions) == (
        128, False, True, True, True, 16,
    )  # fmt: skip
    llama = model(
        activation="swiglu",
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        disable_bias_linear=True,
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=True,
        max_position_embeddings=64,
    )
    assert (llama.ffn, llama.queries_per_group, llama.bias, llama.qkv_bias, llama.tied, llama.positions) == (
        10880, 4, False, True, False, 64,
    )  # fmt: skip
    assert model(group_query_attention=True).query_groups == 1
    assert model(kv_channels=5, hidden_size=30).head_dim == 5
    assert model(ffn_hidden_size=7).ffn == 7


@pytest.mark.parametrize("hidden", range(24, 9000, 101))
def test_swiglu_width_is_the_one_of_megatron(hidden):
    assert model(hidden_size=hidden, kv_channels=8, activation="swiglu").ffn == int((4 * hidden * 2 / 3) / 64) * 64


def test_vocabulary_is_padded_for_the_tensor_size():
    assert model().padded_vocab(50257, 1) == 50304
    assert model().padded_vocab(50257, 8) == 51200
    assert model(make_vocab_size_divisible_by=1).padded_vocab(97, 4) == 100  # C030
    assert model(make_vocab_size_divisible_by=1).padded_vocab(97, 1) == 97


MODEL_FAULTS = [
    ({"num_layers": 0}, "--num-layers 0: must be at least 1"),
    ({"num_layers": "4"}, "--num-layers '4': must be of type int"),
    ({"num_layers": True}, "--num-layers True: must be of type int"),
    ({"hidden_size": 30}, "--hidden-size 30 is not divisible by --num-attention-heads 4"),
    ({"num_query_groups": 3}, "--num-attention-heads 4 is not divisible by --num-query-groups 3"),
    ({"max_position_embeddings": 8}, "--seq-length 16 is above --max-position-embeddings 8"),
    ({"normalization": "BatchNorm"}, "--normalization BatchNorm: must be one of LayerNorm, RMSNorm"),
    ({"hidden_dropout": 1.0}, "--hidden-dropout 1.0: must be below 1"),
    ({"attention_dropout": -0.1}, "--attention-dropout -0.1: must be at least 0"),
    ({"label_smoothing": 1}, "--label-smoothing 1: must be below 1"),
    ({"norm_epsilon": float("nan")}, "--norm-epsilon nan: must be a finite number"),
    ({"norm_epsilon": 0.0}, "--norm-epsilon 0.0: must be above 0"),
    ({"rotary_percent": 1.5}, "--rotary-percent 1.5: must be at most 1"),
    ({"rotary_percent": 0.4, "position_embedding_type": "rope"}, "is 3 elements: rotary positions need an even number"),
    ({"use_rope_scaling": True}, "--use-rope-scaling needs --position-embedding-type rope, not learned_absolute"),
    ({"rope_high_freq_factor": 1.0}, "--rope-high-freq-factor 1.0 must be above --rope-low-freq-factor 1.0"),
    ({"hidden_size": 16, "activation": "swiglu"}, "--hidden-size 16 is too small"),
    ({"window_size": "4"}, "--window-size 4: must be two whole numbers L,R"),
    ({"window_size": "-2,0"}, "--window-size -2,0: must be two whole numbers L,R of at least -1"),
    ({"window_size": "4,4"}, "--window-size 4,4: R must be 0 (or -1), for no query looks ahead"),
    ({"window_attn_skip_freq": "2"}, "--window-attn-skip-freq 2 needs --window-size"),
    ({"window_size": "4,0", "window_attn_skip_freq": "[1,0]"}, "--window-attn-skip-freq [1,0] has 2 entries"),
    ({"window_size": "4,0", "window_attn_skip_freq": "0"}, "--window-attn-skip-freq 0: must be a number of at least 1"),
]


def test_windows_are_those_of_megatron():
    """--window-attn-skip-freq N: every N-th layer sees all; in a list 1 is a window."""
    def windows(size, skip=None):
        return model(window_size=size, window_attn_skip_freq=skip).windows

    assert model().windows == windows("-1,0") == (None,) * 4
    assert windows("128,0") == windows("(128, -1)") == windows("[128,0]") == (128,) * 4
    assert windows("0,0", "2") == (0, None, 0, None) and windows("3,0", "1") == (None,) * 4
    assert windows("3,0", "([1]*1+[0]*1)*2") == (3, None, 3, None)


def test_a_sink_is_not_for_the_fused_op():
    with pytest.raises(ValueError, match="--attention-backend flash has no --softmax-type off-by-one: auto and unfus"):
        config({"softmax_type": "off-by-one"}, run=RunConfig(attention_backend="flash"))


@pytest.mark.parametrize(("changes", "message"), MODEL_FAULTS)
def test_a_model_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError) as wrong:
        model(**changes)
    assert message in str(wrong.value)
    assert "\n" not in str(wrong.value)


SECTION_FAULTS = [
    (ParallelConfig, {"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 0: must be at least 1"),
    (
        ParallelConfig,
        {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 2},
        "--expert-tensor-parallel-size 2: must be 1 or --tensor-model-parallel-size 4",
    ),
    (ParallelConfig, {"pipeline_schedule": "x"}, "must be one of gpipe, 1f1b, interleaved, zb-h1, zb-v"),
    (BatchConfig, {"micro_batch_size": 0}, "--micro-batch-size 0: must be at least 1"),
    (
        BatchConfig,
        {"micro_batch_size": 1, "train_iters": 5, "train_samples": 9},
        "--train-iters 5 and --train-samples 9: give one",
    ),
    (
        BatchConfig,
        {"micro_batch_size": 1, "global_batch_size": 8, "rampup_batch_size": (2, 2)},
        "--rampup-batch-size 2 2: needs START INCREMENT SAMPLES, and --global-batch-size",
    ),
    (BatchConfig, {"micro_batch_size": 1, "rampup_batch_size": (2, 2, 9)}, "and --global-batch-size"),
    (
        BatchConfig,
        {"micro_batch_size": 1, "global_batch_size": 8, "rampup_batch_size": (2, 4, 9)},
        "increments of 4 do not lead from 2 to --global-batch-size 8",
    ),
    (
        BatchConfig,
        {"micro_batch_size": 1, "global_batch_size": 8, "rampup_batch_size": (2, 0, 9)},
        "--rampup-batch-size 2 0 9: must be at least 1, 1 and 0",
    ),
    (
        BatchConfig,
        {"micro_batch_size": 1, "global_batch_size": 8, "step_batch_size_schedule": ("0:8",)},
        "--step-batch-size-schedule 0:8 and --global-batch-size 8: give one",
    ),
    (
        BatchConfig,
        {"micro_batch_size": 1, "step_batch_size_schedule": ("0:8 1G:9",)},
        '--step-batch-size-schedule "0:8 1G:9": 1G:9 is not TOKENS:SIZE',
    ),
    (BatchConfig, {"micro_batch_size": 1, "step_batch_size_schedule": ("5:8",)}, "must begin at 0"),
    (BatchConfig, {"micro_batch_size": 1, "step_batch_size_schedule": ("0:0",)}, "must be at least 1"),
    (OptimizerConfig, {"adam_beta2": 1.0}, "--adam-beta2 1.0: must be below 1"),
    (OptimizerConfig, {"clip_grad": -1.0}, "--clip-grad -1.0: must be at least 0"),
    (OptimizerConfig, {"zero_stage": 3}, "--zero-stage 3: must be 0, 1 or 2"),
    (ScheduleConfig, {"lr": 0.1, "min_lr": 0.2}, "--min-lr 0.2 is above --lr 0.1"),
    (ScheduleConfig, {"lr": 0.1, "lr_warmup_init": 0.2}, "--lr-warmup-init 0.2 is above --lr 0.1"),
    (
        ScheduleConfig,
        {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3},
        "--lr-warmup-fraction 0.1 and --lr-warmup-iters 3: give one",
    ),
    (
        ScheduleConfig,
        {"lr_warmup_fraction": 0.1, "lr_warmup_samples": 3},
        "--lr-warmup-fraction 0.1 and --lr-warmup-samples 3: give one",
    ),
    (ScheduleConfig, {"lr_warmup_fraction": 1.0}, "--lr-warmup-fraction 1.0: must be below 1"),
    (ScheduleConfig, {"lr_decay_iters": 0}, "--lr-decay-iters 0: must be at least 1"),
    (ScheduleConfig, {"lr_decay_style": "WSD"}, "WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples"),
    (ScheduleConfig, {"start_weight_decay": 0.1}, "constant excludes --start-weight-decay and --end-weight-decay"),
    (ScheduleConfig, {"weight_decay_incr_style": "cosine"}, "cosine needs --start-weight-decay and"),
    (
        ScheduleConfig,
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
        "--end-weight-decay 0.1 is below --start-weight-decay 0.2",
    ),
    (ScheduleConfig, {"lr_decay_tokens": 5, "lr_decay_iters": 4}, "--lr-decay-iters 4 and --lr-decay-tokens 5: give"),
    (ScheduleConfig, {"lr_warmup_tokens": 5, "lr_warmup_iters": 4}, "--lr-warmup-iters 4 and --lr-warmup-tokens 5: gi"),
    (ScheduleConfig, {"lr_warmup_tokens": 5, "lr_warmup_fraction": 0.1}, "--lr-warmup-fraction 0.1 and --lr-warmup-t"),
    (ScheduleConfig, {"decoupled_min_lr": 0.1}, "--decoupled-min-lr 0.1 needs --decoupled-lr"),
    (ScheduleConfig, {"decoupled_lr": 0.1, "decoupled_min_lr": 0.2}, "--decoupled-min-lr 0.2 is above --decoupled-lr"),
    (ScheduleConfig, {"lr": 1, "min_lr": 0.2, "decoupled_lr": 0.1}, "--min-lr 0.2 is above --decoupled-lr 0.1"),
    (
        ScheduleConfig,
        {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler: give one of them, not both",
    ),
    (DeepSpeedScheduleConfig, {"lr_scheduler": "Step"}, "--lr-scheduler Step: must be one of LRRangeTest, OneCycle"),
    (DeepSpeedScheduleConfig, {"lr_scheduler": "OneCycle"}, "OneCycle needs --cycle-min-lr and --cycle-max-lr"),
    (
        DeepSpeedScheduleConfig,
        {"lr_scheduler": "OneCycle", "cycle_min_lr": 0.2, "cycle_max_lr": 0.1},
        "--cycle-min-lr 0.2 is above --cycle-max-lr 0.1",
    ),
    (
        DeepSpeedScheduleConfig,
        {"lr_scheduler": "WarmupLR", "warmup_min_lr": 0.2, "warmup_max_lr": 0.1},
        "--warmup-min-lr 0.2 is above --warmup-max-lr 0.1",
    ),
    (DeepSpeedScheduleConfig, {"cycle_max_lr": 0.1}, "--cycle-max-lr 0.1 goes only with --lr-scheduler OneCycle"),
    (DeepSpeedScheduleConfig, {"cycle_momentum": False}, "--no-cycle-momentum goes only with --lr-scheduler OneCycle"),
    (
        DeepSpeedScheduleConfig,
        {"lr_range_test_staircase": True, "lr_scheduler": "WarmupLR"},
        "--lr-range-test-staircase goes only with --lr-scheduler LRRangeTest",
    ),
    (
        DeepSpeedScheduleConfig,
        {"total_num_steps": 9, "lr_scheduler": "WarmupLR"},
        "--total-num-steps 9 goes only with --lr-scheduler WarmupDecayLR or WarmupCosineLR",
    ),
    (DeepSpeedScheduleConfig, {"cycle_max_mom": 1.0}, "--cycle-max-mom 1.0: must be below 1"),
    (PrecisionConfig, {"bf16": True, "fp64": True}, "--bf16 and --fp64: give one of them, not both"),
    (PrecisionConfig, {"bf16": True, "fp16": True}, "--fp16 and --bf16: give one of them, not both"),
    (PrecisionConfig, {"fp64": True, "fp16": True}, "--fp16 and --fp64: give one of them, not both"),
    (PrecisionConfig, {"fp32_residual_connection": True}, "--fp32-residual-connection needs --bf16 or --fp16"),
    (PrecisionConfig, {"grad_reduce_in_bf16": True, "fp16": True}, "--grad-reduce-in-bf16 needs --bf16"),
    (
        PrecisionConfig,
        {"initial_loss_scale": 4.0, "initial_scale_power": 0},
        "--initial-loss-scale 4.0 and --initial-scale-power 0: give one of them",
    ),
    (
        PrecisionConfig,
        {"fp16": True, "initial_scale_power": 1, "min_loss_scale": 4},
        "--initial-scale-power 1, which is 2 is below --min-loss-scale 4",
    ),
    (
        PrecisionConfig,
        {"fp16": True, "initial_loss_scale": 0.5},
        "--initial-loss-scale 0.5 is below --min-loss-scale 1",
    ),
    (PrecisionConfig, {"loss_scale": -1.0}, "--loss-scale -1.0: must be at least 0"),
    (PrecisionConfig, {"hysteresis": 0}, "--hysteresis 0: must be at least 1"),
    (PrecisionConfig, {"loss_scale_window": 0}, "--loss-scale-window 0: must be at least 1"),
    (RecomputeConfig, {"recompute_granularity": "full"}, "full needs --recompute-method uniform or block"),
    (
        RecomputeConfig,
        {"recompute_granularity": "selective", "recompute_method": "block"},
        "--recompute-method block goes only with --recompute-granularity full",
    ),
    (RecomputeConfig, {"recompute_num_layers": 1}, "--recompute-num-layers 1 goes only with"),
    (DataConfig, {"mock_data": True, "data_path": ("a",)}, "--mock-data and --data-path a: give one"),
    (DataConfig, {"data_path": ("0.3", "a", "b")}, "--data-path 0.3 a b: give a weight before each prefix, or"),
    (DataConfig, {"data_path": ("0.3", "a", "x", "b")}, "--data-path 0.3 a x b: give a weight before each prefix, or"),
    (DataConfig, {"data_path": ("-1", "a", "1", "b")}, "--data-path -1 a 1 b: no weight may be below 0"),
    (DataConfig, {"data_path": ("0", "a", "0.0", "b")}, "--data-path 0 a 0.0 b: no weight may be below 0, and one"),
    (DataConfig, {"train_data_path": ("a",), "data_path": ("b",)}, "--data-path b and --train-data-path a: give one"),
    (DataConfig, {"train_data_path": ("a",), "mock_data": True}, "--mock-data and --train-data-path a: give one"),
    (DataConfig, {"valid_data_path": ("a",)}, "--valid-data-path a needs --train-data-path"),
    (DataConfig, {"test_data_path": ("a",)}, "--test-data-path a needs --train-data-path"),
    (DataConfig, {"valid_set": ("corpus",)}, "--valid-set corpus: must be NAME=PREFIX"),
    (DataConfig, {"valid_set": ("web=",)}, "--valid-set web=: must be NAME=PREFIX"),
    (DataConfig, {"valid_set": ("valid=a",)}, "--valid-set valid=a: the name is taken, as are train, valid, test"),
    (DataConfig, {"valid_set": ("web=a", "web=b")}, "--valid-set web=b: there is another set of this name"),
    (DataConfig, {"valid_set": ("web=1", "a", "b")}, "--valid-set web: 1 a b: give a weight before each prefix"),
    (DataConfig, {"sample_order": "megatron", "mock_data": True}, "--sample-order megatron goes with token files"),
    (DataConfig, {"split": "0,0,0"}, "--split 0,0,0: must be up to three weights"),
    (DataConfig, {"split": "1,2,3,4"}, "--split 1,2,3,4: must be up to three weights"),
    (DataConfig, {"num_workers": -1}, "--num-workers -1: must be at least 0"),
    (CheckpointConfig, {"save": "x"}, "--save x needs --save-interval"),
    (CheckpointConfig, {"save": "x", "save_interval": 0}, "--save-interval 0: must be at least 1"),
    (CheckpointConfig, {"auto_resume": True}, "--auto-resume needs --save"),
    (CheckpointConfig, {"ckpt_step": 3}, "--ckpt-step 3 needs --load"),
    (CheckpointConfig, {"finetune": True}, "--finetune needs --load"),
    (CheckpointConfig, {"keep_last": 2}, "--keep-last 2 needs --save"),
    (RunConfig, {"kernel": ("adam=fast",)}, "--kernel adam=fast: must be OP=triton or OP=torch"),
    (RunConfig, {"world_size": 0}, "--world-size 0: must be at least 1"),
]


@pytest.mark.parametrize(("section", "values", "message"), SECTION_FAULTS)
def test_a_section_that_cannot_be_is_refused(section, values, message):
    with pytest.raises(ValueError) as wrong:
        section(**values)
    assert message in str(wrong.value)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("split", "weights"),
    [("969,30,1", (969, 30, 1)), ("'99,1,0'", (99, 1, 0)), ("969, 30, 1", (969, 30, 1)), ("0.9,.1", (0.9, 0.1, 0)),
     ("100", (100, 0, 0)), ("1e2,1,1", (100, 1, 1))],
)  # fmt: skip
def test_split_weights_are_the_numbers_in_the_text(split, weights):
    assert DataConfig(split=split).split_weights == weights


@pytest.mark.parametrize(
    ("changes", "tensor", "words"),
    [
        ({"num_attention_heads": 6, "hidden_size": 48}, 4, "--num-attention-heads 6"),
        ({"ffn_hidden_size": 30}, 4, "--ffn-hidden-size 30"),
        ({"num_query_groups": 2}, 4, "--num-query-groups 2"),
        ({"seq_length": 18}, 4, "--seq-length 18"),
    ],
)
def test_c079_sizes_that_tensor_ranks_cannot_cut_are_refused_by_name(changes, tensor, words):
    with pytest.raises(ValueError) as wrong:
        config(changes, parallel=ParallelConfig(tensor_model_parallel_size=tensor))
    assert str(wrong.value) == f"{words} is not divisible by --tensor-model-parallel-size {tensor}"


def test_c057_stages_may_be_uneven_but_never_empty():
    config({"num_layers": 5}, parallel=ParallelConfig(pipeline_model_parallel_size=4))
    with pytest.raises(ValueError, match="--num-layers 3 is below --pipeline-model-parallel-size 4"):
        config({"num_layers": 3}, parallel=ParallelConfig(pipeline_model_parallel_size=4))
    for how in (
        {"pipeline_model_parallel_layout": "E|t|t|L"}, {"account_for_loss_in_pipeline_split": True},
        {"account_for_embedding_in_pipeline_split": True}, {"pipeline_split": "parameters"},
    ):
        config({"num_layers": 2}, parallel=ParallelConfig(pipeline_model_parallel_size=4, **how))


def test_layers_per_virtual_stage_count_the_ends_that_count_in_the_split():
    """As in Megatron: six blocks, the embedding and the head are two stages of two on each of two ranks."""
    ends = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    how = ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2, **ends)
    assert how.chunks(6) == 2 and how.schedule(6) == "interleaved"
    with pytest.raises(ValueError, match=r"--num-layers 8 \+ 2 \(--account-for-embedding-in-pipeline-split, .* is"):
        how.chunks(8)
    with pytest.raises(ValueError, match="stage 2; --num-virtual-stages-per-pipeline-rank cuts unevenly"):
        ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2).chunks(6)


def test_more_layers_recomputed_than_there_are_is_refused():
    recompute = RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=5)
    with pytest.raises(ValueError, match="--recompute-num-layers 5 is above --num-layers 4"):
        config(recompute=recompute)


def test_a_loss_in_chunks_is_refused_beside_a_teacher_whose_logits_are_whole():
    with pytest.raises(ValueError, match="--loss-chunk-size 64 goes without --kd and --mos: the teacher's logits"):
        config(recompute=RecomputeConfig(loss_chunk_size=64), distill=DistillConfig(kd=True, load_teacher="x"))


def in_iterations(**schedule) -> Config:
    return config(batch=BatchConfig(micro_batch_size=2, train_iters=10), schedule=ScheduleConfig(**schedule))


def in_samples(**schedule) -> Config:
    return config(batch=BatchConfig(micro_batch_size=2, train_samples=100), schedule=ScheduleConfig(**schedule))


@pytest.mark.parametrize("name", ["lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"])
def test_c126_iterations_with_a_length_in_samples_names_both_flags(name):
    with pytest.raises(ValueError, match=f"--train-iters 10 and --{name.replace('_', '-')} 4"):
        in_iterations(**{name: 4})


@pytest.mark.parametrize("name", ["lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"])
def test_c126_samples_with_a_length_in_iterations_names_both_flags(name):
    with pytest.raises(ValueError, match=f"--train-samples 100 and --{name.replace('_', '-')} 4"):
        in_samples(**{name: 4})


@pytest.mark.parametrize("unit", ["iters", "samples"])
@pytest.mark.parametrize("name", ["decay", "warmup"])
def test_c126_tokens_may_stand_beside_iterations_or_samples(unit, name):
    schedule = ScheduleConfig(**{f"lr_{name}_tokens": 64})
    config(batch=BatchConfig(micro_batch_size=2, train_tokens=800, **{f"train_{unit}": 10}), schedule=schedule)


def test_c126_a_run_in_tokens_mixes_no_iterations_with_samples():
    batch = BatchConfig(micro_batch_size=2, train_tokens=800)
    config(batch=batch, schedule=ScheduleConfig(lr_warmup_samples=3))
    with pytest.raises(ValueError, match="--lr-decay-iters 9 and --lr-warmup-samples 3: count all in iterations or"):
        config(batch=batch, schedule=ScheduleConfig(lr_warmup_samples=3, lr_decay_iters=9))


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({"lr_decay_style": "cosine"}, "--lr-decay-style cosine"),
        ({"lr_warmup_iters": 3}, "--lr-warmup-iters 3"),
        ({"lr": 1.0, "min_lr": 0.1}, "--min-lr 0.1"),
        ({"decoupled_lr": 0.1}, "--decoupled-lr 0.1"),
    ],
)
def test_one_shape_of_the_learning_rate_excludes_another(flags, shown):
    named = DeepSpeedScheduleConfig(lr_scheduler="LRRangeTest")
    config(deepspeed_schedule=named, schedule=ScheduleConfig(lr=1.0, weight_decay=0.1))
    with pytest.raises(ValueError, match=f"--lr-scheduler LRRangeTest and {shown}: give one"):
        config(deepspeed_schedule=named, schedule=ScheduleConfig(**flags))


def test_c126_a_run_in_samples_takes_the_ceiling_of_steps():
    batch = BatchConfig(micro_batch_size=2, train_samples=100)
    assert [batch.iterations(size) for size in (8, 10, 100, 101)] == [13, 10, 1, 1]
    assert BatchConfig(micro_batch_size=2, train_iters=7).iterations(8) == 7
    with pytest.raises(ValueError, match="give --train-iters or --train-samples"):
        BatchConfig(micro_batch_size=2).iterations(8)


def test_warmup_ends_before_the_decay():
    in_iterations(lr_warmup_iters=9)
    in_samples(lr_warmup_fraction=0.99)
    with pytest.raises(ValueError, match="--lr-warmup-iters 10 must be below --train-iters 10"):
        in_iterations(lr_warmup_iters=10)
    with pytest.raises(ValueError, match="--lr-warmup-tokens 64 must be below --lr-decay-tokens 64"):
        in_iterations(lr_warmup_tokens=64, lr_decay_tokens=64)
    with pytest.raises(ValueError, match="--lr-warmup-iters 5 must be below --lr-decay-iters 5"):
        in_iterations(lr_warmup_iters=5, lr_decay_iters=5)
    with pytest.raises(ValueError, match="--lr-warmup-samples 100 must be below --train-samples 100"):
        in_samples(lr_warmup_samples=100)


def test_the_tail_of_wsd_fits_between_warmup_and_end():
    in_iterations(lr_decay_style="WSD", lr_warmup_iters=4, lr_wsd_decay_iters=6)
    with pytest.raises(ValueError, match="--lr-wsd-decay-iters 7 and a warm-up of 4 do not fit into --train-iters 10"):
        in_iterations(lr_decay_style="WSD", lr_warmup_iters=4, lr_wsd_decay_iters=7)


def test_a_world_that_the_layout_does_not_fill_is_refused():
    cut = config(parallel=ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    assert cut.parallel.data_size(8) == 2
    check_world(cut, 8)
    for world in (0, 1, 2, 6):
        with pytest.raises(ValueError, match=f"world size {world} is not a multiple of --tensor-model-parallel-size 2"):
            check_world(cut, world)


def test_c137_a_batch_that_is_not_filled_shows_the_equation():
    wrong_batch = config(batch=BatchConfig(micro_batch_size=2, global_batch_size=7))
    with pytest.raises(ValueError) as wrong:
        check_world(wrong_batch, 2)
    assert str(wrong.value) == (
        "--global-batch-size 7 must be --micro-batch-size 2 x accumulation x data size 2, but 7 / (2 x 2) = 1.75"
    )


def test_micro_batches_fill_the_global_batch():
    batch = BatchConfig(micro_batch_size=2, global_batch_size=24)
    assert [batch.micro_batches(data) for data in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]
    assert BatchConfig(micro_batch_size=3).global_batch(4) == 12
    assert BatchConfig(micro_batch_size=3).micro_batches(4) == 1
    with pytest.raises(ValueError, match="= 0.5"):
        BatchConfig(micro_batch_size=2, global_batch_size=2).micro_batches(2)


def full() -> Config:
    return config(
        {"position_embedding_type": "rope", "rotary_base": 5e5},
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        batch=BatchConfig(micro_batch_size=2, train_samples=100, exit_duration_in_mins=1.5),
        schedule=ScheduleConfig(lr=3e-4, lr_warmup_samples=5),
        data=DataConfig(data_path=("corpus",)),
        run=RunConfig(kernel=("adam=torch", "layer_norm=triton")),
    )


def test_json_there_and_back_is_the_same_configuration():
    for one in (config(), full()):
        assert Config.from_json(one.to_json()) == one
    assert list(json.loads(full().to_json())) == list(SECTIONS)


def test_json_of_another_version_is_read_or_refused_by_name():
    sections = json.loads(full().to_json())
    del sections["run"], sections["model"]["qk_layernorm"]
    assert Config.from_json(json.dumps(sections)).model == full().model
    for change, message in (
        ({"future": {}}, "a configuration is a dict of the sections"),
        ({"model": sections["model"] | {"depth": 3}}, "section model of the configuration: unknown setting 'depth'"),
        ({"batch": {}}, "section batch of the configuration: setting 'micro_batch_size' is missing"),
        ({"batch": 3}, "section batch of the configuration: must be a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            Config.from_json(json.dumps(sections | change))
