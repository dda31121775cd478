"""What a resumed run may change: another model is refused, the schedule goes on, the rest follows the command line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.config import (
    BatchConfig,
    Config,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
)
from megazero.lr_schedule import make_schedule
from megazero.resume import MODEL_FIELDS, check_same_model, differences, with_saved_schedule
from megazero.settings import section_settings

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}


def config(schedule: ScheduleConfig | None = None, **model) -> Config:
    return Config(
        model=ModelConfig(**(SHAPE | model)),
        batch=BatchConfig(micro_batch_size=2, train_iters=10),
        schedule=schedule or ScheduleConfig(lr=3e-4),
    )


def test_every_field_of_the_table_exists():
    assert {setting.name for setting in section_settings("model", ModelConfig)} >= MODEL_FIELDS


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


@pytest.mark.parametrize(
    "same",
    [
        {"ffn_hidden_size": 128},
        {"kv_channels": 8},
        {"num_query_groups": 4, "group_query_attention": True},
        {"max_position_embeddings": 16},
        {"vocab_size": 97},
        {"add_qkv_bias": True},
    ],
)
def test_two_spellings_of_one_model_do_not_differ(same):
    assert differences(config(), config(**same)) == []


def test_two_known_vocabularies_differ():
    with pytest.raises(ValueError, match="--vocab-size: 97 in the checkpoint, 98 now"):
        check_same_model(config(vocab_size=97), config(vocab_size=98))


def test_more_positions_are_another_model_only_as_a_table():
    with pytest.raises(ValueError, match="--max-position-embeddings: 16 in the checkpoint, 32 now"):
        check_same_model(config(), config(seq_length=32))
    check_same_model(config(position_embedding_type="rope"), config(position_embedding_type="rope", seq_length=32))


def test_c121_the_schedule_goes_on_unless_overridden():
    saved = config()
    asked = config(ScheduleConfig(lr=1e-5))
    forced = config(ScheduleConfig(lr=1e-5, override_opt_param_scheduler=True))
    for new, lr in ((asked, 3e-4), (forced, 1e-5)):
        resumed = with_saved_schedule(saved, new)
        schedule = make_schedule(resumed.schedule, resumed.batch, 8)
        assert schedule.at(5 * 8)[0] == pytest.approx(lr * 0.5, rel=1e-12)


def test_a_saved_schedule_that_no_longer_fits_says_where_it_comes_from():
    saved = config(ScheduleConfig(lr=3e-4, lr_warmup_iters=5))
    new = replace(config(), batch=BatchConfig(micro_batch_size=2, train_samples=100))
    with pytest.raises(ValueError, match="--lr-warmup-iters 5.*in the checkpoint's schedule"):
        with_saved_schedule(saved, new)
