"""The growing batch: Megatron's ramp and staircase, as pure functions of the samples consumed so far."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.batch_sizes import BatchSizes, constant, ramp, staircase
from megazero.config import BatchConfig, Config, ModelConfig, ScheduleConfig, check_world
from megazero.flags import UsageError, parse
from megazero.lr_curves import Done
from megazero.lr_schedule import make_schedule

ramps = st.builds(
    lambda start, increment, increments, samples: (start, increment, samples, start + increment * increments),
    st.integers(1, 50), st.integers(1, 20), st.integers(0, 30), st.integers(0, 5000),
)  # fmt: skip


def of_megatron(start: int, increment: int, samples: int, last: int, consumed: int) -> int:
    """Megatron's rule as it is written, with its division by nothing left out."""
    if consumed > samples or last == start or samples == 0:
        return last
    return start + int(consumed / (samples / ((last - start) / increment))) * increment


@settings(deadline=None)
@given(ramps, st.lists(st.integers(0, 6000), max_size=50))
def test_a_ramp_is_the_rule_of_megatron(numbers, points):
    sizes = ramp(*numbers)
    for consumed in (*points, 0, numbers[2], numbers[2] + 1, *sizes.starts, *(s - 1 for s in sizes.starts[1:])):
        assert sizes.at(consumed) == of_megatron(*numbers, consumed), consumed


def test_a_ramp_follows_megatron_where_its_quotient_is_rounded_down():
    later = 0  # sizes that begin one sample later than in exact arithmetic
    for increments in range(1, 200, 3):
        for samples in range(increments, 4000, 97):
            for number, start in enumerate(ramp(1, 1, samples, increments + 1).starts):
                assert of_megatron(1, 1, samples, increments + 1, start) == number + 1
                assert start == 0 or of_megatron(1, 1, samples, increments + 1, start - 1) == number
                later += start > -(-number * samples // increments)
    assert later > 0


def test_a_ramp_of_gpt3():
    sizes = ramp(16, 16, 5_859_375, 1536)  # SC'21's scripts
    assert [sizes.at(n) for n in (0, 61_677, 61_678, 3_000_000, 5_859_375, 10**9)] == [16, 16, 32, 784, 1536, 1536]
    assert len(sizes.sizes) == 96 and sizes.last == 1536
    assert sizes.consumed(111_354) < 146_484_375 <= sizes.consumed(111_355) and sizes.steps(146_484_375) == 111_355


@pytest.mark.parametrize(
    ("text", "starts", "sizes"),
    [
        ("0:768 250B:1536", (0, 250 * 10**9 // 4096), (768, 1536)),
        ("0:8,1.5K:16,2M:32", (0, 0, 488), None),
        ("2M:32 0:8 1t:64", (0, 488, 244140625), (8, 32, 64)),
        ("0:8", (0,), (8,)),
    ],
)
def test_a_staircase_counts_tokens(text, starts, sizes):
    if sizes is None:
        with pytest.raises(ValueError, match="each entry at another sample"):
            staircase([text], 4096)
    else:
        assert staircase([text], 4096) == staircase(text.split(), 4096) == BatchSizes(starts, sizes)


@pytest.mark.parametrize("text", ["", "5:8", "0:0", "0:8 0:9", "0:8 100", "0:8 x:9", "0:8 1Q:9", "0:8.5", "-0:8"])
def test_a_staircase_that_leads_nowhere_is_refused(text):
    with pytest.raises(ValueError, match="--step-batch-size-schedule"):
        staircase([text], 1)


sizes_of_any_kind = st.one_of(
    st.integers(1, 50).map(constant),
    ramps.map(lambda numbers: ramp(*numbers)),
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 60)), max_size=6).map(
        lambda parts: BatchSizes(
            (0, *(sum(gap for gap, _ in parts[: i + 1]) for i in range(len(parts)))), (7, *(size for _, size in parts))
        )
    ),
)


@settings(deadline=None)
@given(sizes_of_any_kind, st.integers(0, 8000), st.integers(0, 300))
def test_steps_and_samples_are_those_of_a_run(sizes, samples, middle):
    consumed, steps, at = 0, 0, {0: 0}
    while consumed < samples or steps < middle:
        consumed += sizes.at(consumed)
        steps += 1
        at[steps] = consumed
    needed = next(step for step, total in at.items() if total >= samples)
    assert sizes.steps(samples) == needed
    assert all(sizes.consumed(step) == total for step, total in at.items())
    resumed = min(middle, needed)  # the rest of the run, from wherever it stopped
    assert sizes.steps(samples, at[resumed]) == needed - resumed


@settings(deadline=None)
@given(ramps, st.integers(0, 6000), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_sizes_do_not_depend_on_micro_batch_or_data_size(numbers, consumed, micro, data):
    each = micro * data
    start, increment, samples, last = (numbers[0] * each, numbers[1] * each, numbers[2], numbers[3] * each)
    batch = BatchConfig(
        micro_batch_size=micro, global_batch_size=last, rampup_batch_size=(start, increment, samples), train_samples=9
    )
    size = batch.sizes(data, 16).at(consumed)
    assert size == ramp(start, increment, samples, last).at(consumed)
    assert batch.micro_batches(data, size) * each == size


def config(**batch) -> Config:
    model = ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, seq_length=16)
    return Config(model=model, batch=BatchConfig(micro_batch_size=2, **batch))


def test_every_size_on_the_way_must_be_filled_c137():
    check_world(config(global_batch_size=16, rampup_batch_size=(4, 4, 100)), 2)
    with pytest.raises(ValueError) as wrong:
        check_world(config(global_batch_size=16, rampup_batch_size=(4, 3, 100)), 1)
    assert str(wrong.value) == (
        "a growing global batch of 7 must be --micro-batch-size 2 x accumulation x data size 1, but 7 / (2 x 1) = 3.5"
    )
    with pytest.raises(ValueError, match=r"a growing global batch of 12 must be .* 12 / \(2 x 4\) = 1.5"):
        check_world(config(step_batch_size_schedule=("0:8 1K:12 2K:16",)), 4)
    with pytest.raises(ValueError, match=r"--global-batch-size 17 must be"):
        check_world(config(global_batch_size=17, rampup_batch_size=(17, 1, 100)), 1)


def test_entries_that_fall_on_one_sample_are_refused_by_the_sequence_length():
    with pytest.raises(ValueError, match="each entry at another sample"):
        config(step_batch_size_schedule=("0:8 10:16",))
    assert config(step_batch_size_schedule=("0:8 32:16",)).batch.sizes(1, 16) == BatchSizes((0, 2), (8, 16))


def test_length_of_a_run_with_a_growing_batch():
    ramped = BatchConfig(
        micro_batch_size=1, global_batch_size=8, rampup_batch_size=(2, 2, 12), train_samples=60, eval_iters=1
    )
    sizes = ramped.sizes(1, 16)  # 2 2 | 4 | 6 | 8 ...
    assert [sizes.consumed(step) for step in range(7)] == [0, 2, 4, 8, 14, 22, 30]
    assert ramped.iterations(sizes) == 10 and sizes.consumed(10) == 62
    assert ramped.iterations(sizes, done=4, consumed_samples=14) == 10
    assert ramped.iterations(sizes, done=4, consumed_samples=32) == 8  # the batch was larger until then
    in_steps = BatchConfig(micro_batch_size=1, global_batch_size=8, rampup_batch_size=(2, 2, 12), train_iters=5)
    assert in_steps.iterations(in_steps.sizes(1, 16)) == 5


def test_learning_rate_counts_samples_in_a_ramp():
    batch = BatchConfig(micro_batch_size=1, global_batch_size=8, rampup_batch_size=(2, 2, 12), train_samples=60)
    sizes = batch.sizes(1, 16)
    schedule = make_schedule(ScheduleConfig(lr=1.0, lr_warmup_samples=30), batch, sizes.last)
    rates = [schedule.at(Done(step, sizes.consumed(step))).learning_rate for step in range(11)]
    assert rates == pytest.approx([n / 30 for n in (0, 2, 4, 8, 14, 22, 30)] + [1 - (n - 30) / 30 for n in (38, 46, 54)]
                                  + [0])  # fmt: skip


def test_a_batch_is_rounded_down_to_whole_micro_batches_where_that_is_asked_for():
    for batch, sizes in (
        ({"global_batch_size": 15}, (12,)),
        ({"global_batch_size": 12}, (12,)),
        ({"global_batch_size": 15, "rampup_batch_size": (7, 4, 64)}, (6, 6, 12)),
    ):
        rounded = config(**batch, decrease_batch_size_if_needed=True)
        assert rounded.batch.sizes(3, 16).sizes == sizes
        check_world(rounded, 3)
    with pytest.raises(ValueError, match="a global batch of 7 is below --micro-batch-size x data size = 16"):
        check_world(rounded, 8)
    with pytest.raises(ValueError, match="a growing global batch of 7 must be --micro-batch-size 2 x accumulation"):
        check_world(config(**batch), 3)


def test_growing_batches_on_the_command_line():
    base = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 97 --mock-data --lr 1"
    parsed, _ = parse(
        f"{base} --micro-batch-size 2 --global-batch-size 16 --train-samples 1000 --rampup-batch-size 4 4 100".split()
    )
    assert parsed.batch.rampup_batch_size == (4, 4, 100)
    assert Config.from_json(parsed.to_json()) == parsed
    words = [*base.split(), "--micro-batch-size", "2", "--train-iters", "9", "--step-batch-size-schedule"]
    quoted, _ = parse([*words, "0:768 250B:1536"])
    loose, _ = parse([*words, "0:768", "250B:1536"])
    assert quoted.batch.sizes(4, 16) == loose.batch.sizes(4, 16) == BatchSizes((0, 250 * 10**9 // 16), (768, 1536))
    with pytest.raises(UsageError, match="--rampup-batch-size and --step-batch-size-schedule|give one of them"):
        parse([*words, "0:768", "--rampup-batch-size", "4", "4", "9"])
