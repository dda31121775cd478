"""What a resumed run may change: not the model, the schedule only where a flag says so, the rest at will."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.config import (
    BatchConfig,
    Config,
    DeepSpeedScheduleConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
)
from megazero.config_moe import MoEConfig
from megazero.lr_curves import Done
from megazero.lr_schedule import make_schedule
from megazero.resume import MODEL_FIELDS, check_same_model, differences, with_agreed_schedule
from megazero.settings import section_settings

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}


def config(schedule: ScheduleConfig | None = None, **model) -> Config:
    return Config(
        model=ModelConfig(**(SHAPE | model)),
        batch=BatchConfig(micro_batch_size=2, train_iters=10),
        schedule=schedule or ScheduleConfig(lr=3e-4),
    )


def test_every_field_of_the_table_exists():
    sections = {"model": ModelConfig, "moe": MoEConfig}
    assert {setting.name for name, kind in sections.items() for setting in section_settings(name, kind)} >= MODEL_FIELDS


def test_c053_another_model_is_refused_with_both_values():
    with pytest.raises(ValueError) as wrong:
        check_same_model(config(), config(hidden_size=64, num_layers=6))
    assert str(wrong.value).startswith("the checkpoint holds another model: ")
    assert "--hidden-size: 32 in the checkpoint, 64 now" in str(wrong.value)
    assert "--num-layers: 4 in the checkpoint, 6 now" in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_c053_anything_else_is_listed_and_honoured():
    old = config()
    new = replace(old, logging=LoggingConfig(log_interval=1), parallel=ParallelConfig(tensor_model_parallel_size=2))
    check_same_model(old, new)
    found = [(d.section, d.name, d.old, d.new) for d in differences(old, new)]
    assert found == [("parallel", "tensor_model_parallel_size", 1, 2), ("logging", "log_interval", 100, 1)]
    assert differences(old, old) == []


def experts(**moe) -> Config:
    return replace(config(), moe=MoEConfig(**moe))


def test_c053_other_experts_are_another_model_and_another_spelling_is_not():
    old = experts(num_experts=(4,), expert_interval=2)
    for same in ({"moe_layer_freq": "[0,1,0,1]", "moe_family": "megatron-deepspeed"}, {"num_experts": (4, 4)}):
        check_same_model(old, experts(**({"num_experts": (4,)} | same)))
    for other in (
        {"num_experts": (2, 4)}, {"num_experts": (1,)}, {"expert_interval": 1}, {"mlp_type": "residual"},
        {"moe_family": "megatron-lm"}, {"moe_router_topk": 2}, {"moe_ffn_hidden_size": 8},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="the checkpoint holds another model"):
            check_same_model(old, experts(**({"num_experts": (4,), "expert_interval": 2} | other)))
    check_same_model(experts(), experts(moe_router_topk=3, mlp_type="residual"))  # both dense
    assert [d.name for d in differences(old, replace(old, moe=replace(old.moe, moe_aux_loss_coeff=(0.5,))))] == [
        "moe_aux_loss_coeff"
    ]


@pytest.mark.parametrize(
    "same",
    [
        {"ffn_hidden_size": 128},
        {"kv_channels": 8},
        {"num_query_groups": 4, "group_query_attention": True},
        {"max_position_embeddings": 16},
        {"vocab_size": 97},
        {"add_qkv_bias": True},
        {"window_size": "-1,0", "window_attn_skip_freq": "2"},
    ],
)
def test_two_spellings_of_one_model_do_not_differ(same):
    assert differences(config(), config(**same)) == []


def test_two_known_vocabularies_differ():
    with pytest.raises(ValueError, match="--vocab-size: 97 in the checkpoint, 98 now"):
        check_same_model(config(vocab_size=97), config(vocab_size=98))


def test_other_windows_and_another_softmax_are_another_model():
    with pytest.raises(ValueError, match="another model: --window-size: .*; --softmax-type: vanilla in the checkpoint"):
        check_same_model(config(), config(window_size="4,0", softmax_type="learnable"))


def test_more_positions_are_another_model_only_as_a_table():
    with pytest.raises(ValueError, match="--max-position-embeddings: 16 in the checkpoint, 32 now"):
        check_same_model(config(), config(seq_length=32))
    check_same_model(config(position_embedding_type="rope"), config(position_embedding_type="rope", seq_length=32))


def first_rate(resumed: Config) -> float:
    """The learning rate of the step after five."""
    return make_schedule(resumed.schedule, resumed.batch, 8).at(Done(5, 5 * 8)).learning_rate


def test_c121_a_schedule_goes_on_as_the_flag_says():
    saved = config()
    for flag, lr in (("override_opt_param_scheduler", 1e-5), ("use_checkpoint_opt_param_scheduler", 3e-4)):
        asked = config(ScheduleConfig(lr=1e-5, **{flag: True}))
        assert first_rate(with_agreed_schedule(saved, asked)) == pytest.approx(lr * 0.5, rel=1e-12)


def test_c121_the_schedule_is_a_function_of_the_flags_however_often_a_run_was_resumed():
    """Overridden once, then goes on by the checkpoint, then overridden again: the flags of old resumes do not stay."""
    forced = config(ScheduleConfig(lr=1e-5, override_opt_param_scheduler=True))
    kept = config(ScheduleConfig(lr=7.0, use_checkpoint_opt_param_scheduler=True))
    second = with_agreed_schedule(config(), forced)
    third = with_agreed_schedule(second, kept)
    assert first_rate(third) == first_rate(second) == pytest.approx(0.5e-5, rel=1e-12)
    assert third.schedule.use_checkpoint_opt_param_scheduler and not third.schedule.override_opt_param_scheduler
    assert with_agreed_schedule(third, config(ScheduleConfig(lr=1e-5))).schedule.lr == 1e-5
    assert first_rate(with_agreed_schedule(third, forced)) == first_rate(forced)


def test_c121_without_a_flag_two_schedules_must_be_one():
    saved = config(ScheduleConfig(lr=3e-4, weight_decay=0.1))
    assert with_agreed_schedule(saved, config(ScheduleConfig(lr=3e-4, weight_decay=0.1))).schedule == saved.schedule
    with pytest.raises(ValueError) as wrong:
        with_agreed_schedule(saved, config(ScheduleConfig(lr=1e-5, lr_warmup_iters=2)))
    assert str(wrong.value) == (
        "the checkpoint has another schedule: --lr: 0.0003 in the checkpoint, 1e-05 now; --lr-warmup-iters: 0 in the "
        "checkpoint, 2 now; --weight-decay: 0.1 in the checkpoint, 0.01 now: give --override-opt_param-scheduler for "
        "this command line's, or --use-checkpoint-opt_param-scheduler for the checkpoint's"
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"min_lr": 1e-5}, "--min-lr"),
        ({"lr_decay_style": "cosine"}, "--lr-decay-style"),
        ({"lr_decay_iters": 9}, "--lr-decay-iters"),
        ({"lr_warmup_fraction": 0.1}, "--lr-warmup-fraction"),
        ({"decoupled_lr": 1e-3}, "--decoupled-lr"),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1},
            "--start-weight-decay",
        ),
    ],
)
def test_c121_every_part_of_a_schedule_counts(change, name):
    with pytest.raises(ValueError, match=f"{name}: .* in the checkpoint, .* now"):
        with_agreed_schedule(config(), config(ScheduleConfig(lr=3e-4, **change)))


def test_c121_a_schedule_of_deepspeed_counts_too():
    saved = replace(config(), deepspeed_schedule=DeepSpeedScheduleConfig(lr_scheduler="LRRangeTest"))
    with pytest.raises(ValueError, match="--lr-scheduler: LRRangeTest in the checkpoint, None now"):
        with_agreed_schedule(saved, config())
    kept = config(ScheduleConfig(lr=3e-4, use_checkpoint_opt_param_scheduler=True))
    assert with_agreed_schedule(saved, kept).deepspeed_schedule == saved.deepspeed_schedule


def test_c054_a_longer_run_with_the_same_flags_has_the_same_schedule():
    longer = replace(config(), batch=BatchConfig(micro_batch_size=2, train_iters=20))
    resumed = with_agreed_schedule(config(), longer)
    assert first_rate(resumed) == pytest.approx(3e-4 * 0.75, rel=1e-12)  # the decay lasts as long as the run


def test_a_saved_schedule_that_no_longer_fits_says_where_it_comes_from():
    saved = config(ScheduleConfig(lr=3e-4, lr_warmup_iters=5))
    kept = ScheduleConfig(lr=3e-4, use_checkpoint_opt_param_scheduler=True)
    new = replace(config(kept), batch=BatchConfig(micro_batch_size=2, train_samples=100))
    with pytest.raises(ValueError, match="--lr-warmup-iters 5.*in the checkpoint's schedule"):
        with_agreed_schedule(saved, new)
