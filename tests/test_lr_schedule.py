"""Learning rate and weight decay against Megatron's values, and the mapping from flags to lengths in samples or tokens.

DeepSpeed's schedules are in test_lr_curves.py.
"""

from __future__ import annotations

import json

import pytest

from megazero.batch_sizes import ramp
from megazero.config import BatchConfig, ScheduleConfig
from megazero.lr_curves import Done
from megazero.lr_schedule import Rates, Schedule, decoupled, make_schedule, print_lr_lines

POINTS = (0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21)
WSD_HEAD = (0, 0.25, 0.5, 1, 1, 1, 1, 1)

# Megatron's OptimizerParamScheduler: max 1, min 0.1, warm-up 4, decay 20, tail of WSD 8.
RATES = {
    "linear": (0, 0.25, 0.5, 1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1, 0.1),
    "cosine": (0, .25, .5, 1, .965746, .868198, .722208, .55, .377792, .231802, .134254, .1, .1),
    "inverse-square-root": (0, .25, .5, 1, .816497, .707107, .632456, .57735, .534522, .5, .471405, .447214, .1),
    "constant": (0, .25, .5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
}  # fmt: skip
TAILS = {
    "linear": (0.775, 0.55, 0.325, 0.1, 0.1),
    "cosine": (0.868198, 0.55, 0.231802, 0.1, 0.1),
    "exponential": (0.713614, 0.472792, 0.270286, 0.1, 0.1),
    "minus_sqrt": (0.55, 0.363604, 0.220577, 0.1, 0.1),
}
DECAYS = {
    "linear": (0, .005, .01, .02, .03, .04, .05, .06, .07, .08, .09, .1, .1),
    "cosine": (0, .000616, .002447, .009549, .020611, .034549, .05, .065451, .079389, .090451, .097553, .1, .1),
}  # fmt: skip


SEQUENCE = 16


def after(samples: int) -> Done:
    """So many samples of SEQUENCE tokens, in updates of one sample."""
    return Done(samples, samples, samples * SEQUENCE)


def rate(schedule: Schedule, samples: int) -> float:
    return schedule.at(after(samples)).learning_rate


def sampled(**changes) -> ScheduleConfig:
    return ScheduleConfig(**({"lr": 1.0, "min_lr": 0.1, "lr_warmup_samples": 4} | changes))


def rates(config: ScheduleConfig) -> list[float]:
    schedule = make_schedule(config, BatchConfig(micro_batch_size=1, train_samples=20), 1)
    return [rate(schedule, n) for n in POINTS]


@pytest.mark.parametrize("style", RATES)
def test_each_style_gives_megatrons_rates(style):
    assert rates(sampled(lr_decay_style=style)) == pytest.approx(RATES[style], abs=5e-7)


@pytest.mark.parametrize("style", TAILS)
def test_each_tail_of_wsd_gives_megatrons_rates(style):
    config = sampled(lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_samples=8)
    assert rates(config) == pytest.approx(WSD_HEAD + TAILS[style], abs=5e-7)


@pytest.mark.parametrize("style", DECAYS)
def test_weight_decay_grows_as_megatrons(style):
    config = sampled(weight_decay_incr_style=style, start_weight_decay=0.0, end_weight_decay=0.1)
    schedule = make_schedule(config, BatchConfig(micro_batch_size=1, train_samples=20), 1)
    assert [schedule.at(after(n)).weight_decay for n in POINTS] == pytest.approx(DECAYS[style], abs=5e-7)


def test_constant_weight_decay_is_the_flag():
    schedule = make_schedule(sampled(weight_decay=0.3), BatchConfig(micro_batch_size=1, train_samples=20), 1)
    assert {schedule.at(after(n)).weight_decay for n in POINTS} == {0.3}
    assert schedule.at(after(4)) == Rates(1.0, 0.3, None)


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root", "constant", "WSD"])
def test_iterations_are_samples_times_the_global_batch(style):
    iterations = ScheduleConfig(
        lr=1.0, lr_decay_style=style, lr_warmup_iters=3, lr_decay_iters=15, lr_wsd_decay_iters=6,
        weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=1.0,
    )  # fmt: skip
    samples = ScheduleConfig(
        lr=1.0, lr_decay_style=style, lr_warmup_samples=24, lr_decay_samples=120, lr_wsd_decay_samples=48,
        weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=1.0,
    )  # fmt: skip
    by_iterations = make_schedule(iterations, BatchConfig(micro_batch_size=1, train_iters=20), 8)
    by_samples = make_schedule(samples, BatchConfig(micro_batch_size=1, train_samples=160), 8)
    assert by_iterations == by_samples


def test_warmup_by_fraction_is_a_share_of_the_decay():
    batch = BatchConfig(micro_batch_size=1, train_iters=20)
    by_fraction = make_schedule(ScheduleConfig(lr=1.0, lr_warmup_fraction=0.25, lr_decay_iters=16), batch, 8)
    by_iterations = make_schedule(ScheduleConfig(lr=1.0, lr_warmup_iters=4, lr_decay_iters=16), batch, 8)
    assert by_fraction == by_iterations


def test_warmup_starts_at_its_initial_rate():
    config = ScheduleConfig(lr=1.0, lr_warmup_iters=4, lr_warmup_init=0.2)
    schedule = make_schedule(config, BatchConfig(micro_batch_size=1, train_iters=20), 2)
    assert [rate(schedule, n) for n in (0, 4, 8)] == pytest.approx([0.2, 0.6, 1.0])


def test_without_warmup_the_first_step_has_the_largest_rate():
    batch = BatchConfig(micro_batch_size=1, train_iters=20)
    for style in ("linear", "cosine", "constant", "inverse-square-root"):
        assert rate(make_schedule(ScheduleConfig(lr=0.5, lr_decay_style=style), batch, 4), 0) == 0.5


def test_rates_go_from_largest_to_smallest_and_stay_there():
    batch = BatchConfig(micro_batch_size=1, train_iters=100)
    for style in ("linear", "cosine", "inverse-square-root", "WSD"):
        config = ScheduleConfig(lr=1.0, min_lr=0.1, lr_decay_style=style, lr_warmup_iters=5, lr_wsd_decay_iters=20)
        schedule = make_schedule(config, batch, 3)
        values = [rate(schedule, n) for n in range(15, 400)]
        assert values[0] == 1.0 and values[-1] == 0.1
        assert all(after <= before for before, after in zip(values, values[1:], strict=False))


def test_c124_the_rate_of_a_step_does_not_know_of_accumulation():
    config = ScheduleConfig(lr=1.0, lr_warmup_iters=2)
    lines = []
    for micro in (8, 4, 1):
        batch = BatchConfig(micro_batch_size=micro, global_batch_size=8, train_iters=6)
        size = batch.global_batch(1)
        lines.append(list(print_lr_lines(make_schedule(config, batch, size), map(after, range(0, 6 * size, size)))))
    assert lines[0] == lines[1] == lines[2]


def test_printed_lines_hold_what_each_step_updates_with():
    config = ScheduleConfig(lr=1.0, lr_warmup_iters=2, weight_decay=0.1)
    schedule = make_schedule(config, BatchConfig(micro_batch_size=1, train_iters=6), 8)
    lines = [json.loads(line) for line in print_lr_lines(schedule, map(after, range(0, 56, 8)))]
    assert [list(line) for line in lines] == [["step", "learning_rate", "weight_decay"]] * 7
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["learning_rate"] for line in lines] == [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert {line["weight_decay"] for line in lines} == {0.1}


def test_a_schedule_needs_a_rate_and_a_length():
    with pytest.raises(ValueError, match="give --lr"):
        make_schedule(ScheduleConfig(), BatchConfig(micro_batch_size=1, train_iters=6), 8)
    with pytest.raises(ValueError, match="give --train-iters or --train-samples"):
        make_schedule(ScheduleConfig(lr=1.0), BatchConfig(micro_batch_size=1), 8)


# ----------------------------------------------------------------------------------------------------------- tokens


def in_tokens(batch: BatchConfig, size: int = 1, **changes) -> Schedule:
    return make_schedule(ScheduleConfig(lr=1.0, min_lr=0.1, **changes), batch, size, seq_length=SEQUENCE)


@pytest.mark.parametrize("style", RATES)
def test_a_schedule_in_tokens_has_megatrons_rates_at_as_many_tokens(style):
    batch = BatchConfig(micro_batch_size=1, train_tokens=20 * SEQUENCE)
    schedule = in_tokens(batch, lr_decay_style=style, lr_warmup_tokens=4 * SEQUENCE)
    assert [rate(schedule, n) for n in POINTS] == pytest.approx(RATES[style], abs=5e-7)
    assert in_tokens(batch, lr_decay_style=style, lr_warmup_fraction=0.2) == schedule


def test_tokens_are_counted_as_they_were_not_as_samples():
    """Samples of fewer tokens, as a curriculum has them, let a schedule in tokens fall behind one in samples."""
    batch = BatchConfig(micro_batch_size=1, train_samples=20)
    schedule = in_tokens(batch, lr_decay_tokens=20 * SEQUENCE, lr_warmup_tokens=4 * SEQUENCE)
    assert schedule.at(Done(8, 8, 4 * SEQUENCE)).learning_rate == 1.0
    assert schedule.at(Done(24, 24, 12 * SEQUENCE)).learning_rate == pytest.approx(0.55)
    assert schedule.at(Done(99, 99, 20 * SEQUENCE)).learning_rate == pytest.approx(0.1)
    assert schedule.at(Done(99, 99, 20 * SEQUENCE + 1)).learning_rate == 0.1


@pytest.mark.parametrize("warmup", [{"lr_warmup_samples": 4}, {"lr_warmup_tokens": 4 * SEQUENCE}])
def test_a_decay_in_tokens_begins_at_the_tokens_of_the_warmup(warmup):
    batch = BatchConfig(micro_batch_size=1, train_samples=20)
    schedule = in_tokens(batch, lr_decay_tokens=20 * SEQUENCE, lr_decay_style="cosine", **warmup)
    assert [rate(schedule, n) for n in POINTS] == pytest.approx(RATES["cosine"], abs=5e-7)
    by_iterations = BatchConfig(micro_batch_size=1, train_iters=10)
    steps = in_tokens(by_iterations, 2, lr_decay_tokens=20 * SEQUENCE, lr_decay_style="cosine", lr_warmup_iters=2)
    assert [rate(steps, n) for n in POINTS] == pytest.approx(RATES["cosine"], abs=5e-7)


def test_a_warmup_in_samples_counts_samples_before_a_decay_in_tokens():
    schedule = in_tokens(
        BatchConfig(micro_batch_size=1, train_samples=20), lr_decay_tokens=20 * SEQUENCE, lr_warmup_samples=4
    )
    assert schedule.at(Done(2, 2, 3)).learning_rate == 0.5
    assert schedule.at(Done(5, 5, 9)).learning_rate == 1.0  # few tokens so far: the decay has not begun


def test_a_warmup_in_tokens_turns_a_decay_in_samples_into_tokens():
    batch = BatchConfig(micro_batch_size=1, train_samples=20)
    mixed = in_tokens(batch, lr_warmup_tokens=4 * SEQUENCE)
    assert mixed == in_tokens(batch, lr_warmup_tokens=4 * SEQUENCE, lr_decay_tokens=20 * SEQUENCE)
    tail = in_tokens(batch, lr_warmup_tokens=4 * SEQUENCE, lr_decay_style="WSD", lr_wsd_decay_samples=8)
    assert [rate(tail, n) for n in POINTS] == pytest.approx(WSD_HEAD + TAILS["exponential"], abs=5e-7)


def test_lengths_in_different_units_are_compared_where_the_batch_is_known():
    batch = BatchConfig(micro_batch_size=1, train_iters=10)
    with pytest.raises(ValueError, match="--lr-warmup-iters 64 must be below --lr-decay-tokens 64"):
        in_tokens(batch, 2, lr_decay_tokens=64, lr_warmup_iters=2)
    with pytest.raises(ValueError, match="--lr-wsd-decay-iters 64 and a warm-up of 16 do not fit into --lr-decay-tok"):
        in_tokens(
            batch, 2, lr_decay_tokens=64, lr_decay_style="WSD", lr_wsd_decay_iters=2, lr_warmup_tokens=16
        )


def test_weight_decay_grows_over_the_samples_of_a_run_in_tokens():
    batch = BatchConfig(micro_batch_size=1, train_tokens=20 * SEQUENCE - 3)
    schedule = in_tokens(batch, weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.1)
    assert [schedule.at(after(n)).weight_decay for n in POINTS] == pytest.approx(DECAYS["linear"], abs=5e-7)


def test_a_run_ends_at_its_tokens_or_before():
    length = {"micro_batch_size": 1, "train_tokens": 100 * SEQUENCE}
    assert BatchConfig(**length).iterations(8, seq_length=SEQUENCE) == 13
    assert BatchConfig(**length | {"train_tokens": 100 * SEQUENCE + 1}).iterations(10, seq_length=SEQUENCE) == 11
    for both, expected in (
        ({"train_iters": 5}, 5), ({"train_iters": 50}, 13), ({"train_samples": 16}, 2), ({"train_samples": 160}, 13),
    ):  # fmt: skip
        assert BatchConfig(**length, **both).iterations(8, seq_length=SEQUENCE) == expected
    growing = ramp(2, 2, 12, 8)  # 2 2 | 4 | 6 | 8 ...
    assert BatchConfig(**length).iterations(growing, seq_length=SEQUENCE) == 15
    assert BatchConfig(**length).iterations(growing, seq_length=SEQUENCE, done=4, consumed_samples=14,
                                             consumed_tokens=14 * SEQUENCE) == 15


# ------------------------------------------------------------------------------------------------- parts of the model


def test_decoupled_rates_have_the_shape_of_the_others():
    batch = BatchConfig(micro_batch_size=1, train_samples=20)
    config = sampled(decoupled_lr=0.5, decoupled_min_lr=0.05, lr_decay_style="cosine")
    schedule = make_schedule(config, batch, 1)
    own = decoupled(schedule, config)
    assert [rate(own, n) for n in POINTS] == pytest.approx([0.5 * value for value in RATES["cosine"]], abs=5e-7)
    assert own.decay == schedule.decay
    above = sampled(decoupled_lr=2.0)
    assert rate(decoupled(make_schedule(above, batch, 1), above), 21) == 0.1  # --min-lr
    assert decoupled(make_schedule(sampled(), batch, 1), sampled()) is None
