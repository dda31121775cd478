"""The loss scale: both families' rules step by step, what ends a run, and what a checkpoint keeps of it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import pytest

from megazero.config import PrecisionConfig
from megazero.loss_scale import LARGEST, LossScaler, ScaleState, make_loss_scaler

STEPS = "........x.x..x....xx...."  # x: the gradient overflows
START = {"fp16": True, "initial_loss_scale": 16.0, "loss_scale_window": 3, "hysteresis": 2}

# The scale after each of STEPS.
VECTORS = {
    "deepspeed": [16, 16, 16, 32, 32, 32, 64, 64, 64, 64, 32, 32, 32, 16, 16, 16, 16, 32, 32, 16, 16, 16, 16, 32],
    "deepspeed, consecutive": [
        16, 16, 16, 32, 32, 32, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 128, 128, 64, 64, 64, 64, 128,
    ],
    "megatron": [16, 16, 32, 32, 32, 64, 64, 64, 64, 64, 32, 32, 32, 16, 16, 16, 32, 32, 32, 16, 16, 16, 32, 32],
}  # fmt: skip


def scaler(**flags) -> LossScaler:
    return make_loss_scaler(PrecisionConfig(**flags))


def states(rule: LossScaler, steps: str, state: ScaleState | None = None) -> list[ScaleState]:
    """The state after each step."""
    found, now = [], state or rule.start()
    for step in steps:
        now = rule.after(now, overflow=step == "x")
        found.append(now)
    return found


@pytest.mark.parametrize("name", VECTORS)
def test_each_rule_gives_its_familys_scales(name):
    family, _, consecutive = name.partition(", ")
    rule = scaler(loss_scaler=family, consecutive_hysteresis=bool(consecutive), **START)
    assert [state.scale for state in states(rule, STEPS)] == VECTORS[name]


@dataclass
class Megatron:
    """Its DynamicGradScaler, as published."""

    scale: float
    window: int
    hysteresis: int
    least: float = 1.0

    def __post_init__(self) -> None:
        self.growth, self.left = 0, self.hysteresis

    def update(self, overflow: bool) -> float:
        if overflow:
            self.growth = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, self.least)
        else:
            self.growth += 1
            if self.growth == self.window:
                self.growth, self.left, self.scale = 0, self.hysteresis, self.scale * 2
        return self.scale


@dataclass
class DeepSpeed:
    """Its DynamicLossScaler, as published."""

    scale: float
    window: int
    hysteresis: int
    consecutive: bool
    least: float = 1.0

    def __post_init__(self) -> None:
        self.iteration, self.last, self.left = 0, -1, self.hysteresis

    def update(self, overflow: bool) -> float | None:
        """The scale, or None where it raises."""
        if overflow:
            if self.hysteresis == 1 or self.left == 1:
                if self.scale == self.least:
                    return None
                self.scale = max(self.scale / 2, self.least)
            else:
                self.left -= 1
            self.last = self.iteration
        else:
            if self.consecutive:
                self.left = self.hysteresis
            quiet = self.iteration - self.last - 1
            if quiet > 0 and quiet % self.window == 0:
                self.left = self.left if self.consecutive else self.hysteresis
                self.scale *= 2
        self.iteration += 1
        return self.scale


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_every_short_history_ends_as_in_the_published_rules(window, hysteresis):
    flags = {"fp16": True, "initial_loss_scale": 4.0, "loss_scale_window": window, "hysteresis": hysteresis}
    megatron = scaler(**flags)
    by_deepspeed = [(scaler(loss_scaler="deepspeed", consecutive_hysteresis=c, **flags), c) for c in (False, True)]
    for history in itertools.product(".x", repeat=9):
        published = Megatron(4.0, window, hysteresis)
        want = [published.update(step == "x") for step in history]
        assert [state.scale for state in states(megatron, "".join(history))] == want
        for rule, consecutive in by_deepspeed:
            other, state = DeepSpeed(4.0, window, hysteresis, consecutive), rule.start()
            for step in history:
                state, scale = rule.after(state, overflow=step == "x"), other.update(step == "x")
                assert (rule.reason_to_stop(state, "w") is not None) == (scale is None), history
                if scale is None:
                    break
                assert state.scale == scale, history


def test_the_rule_is_a_function_of_the_state_and_changes_nothing():
    rule = scaler(**START)
    state = states(rule, "..x")[-1]
    assert rule.after(state, overflow=True) == rule.after(state, overflow=True)
    assert state == states(rule, "..x")[-1]
    with pytest.raises(AttributeError):
        state.scale = 3.0  # type: ignore[misc]


def test_initial_scales_are_the_families_or_the_flags():
    assert scaler(fp16=True).start().scale == 2.0**32
    assert scaler(fp16=True, loss_scaler="deepspeed").start().scale == 2.0**16
    assert scaler(fp16=True, initial_scale_power=11).start().scale == 2048
    assert scaler(fp16=True, initial_loss_scale=100.0).start().scale == 100


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp64": True}])
def test_without_fp16_the_scale_is_one(precision):
    rule = scaler(loss_scale=8.0, hysteresis=5, **precision)
    assert {state.scale for state in states(rule, STEPS)} == {1.0} and rule.start().scale == 1.0


def test_a_constant_scale_stays_and_its_skips_are_counted():
    rule = scaler(fp16=True, loss_scale=128.0, loss_scaler="deepspeed")
    found = states(rule, STEPS)
    assert {state.scale for state in found} == {128.0}
    assert found[-1].skipped == STEPS.count("x") == 5
    assert scaler(fp16=True, loss_scale=0.0, initial_loss_scale=16.0).dynamic  # DeepSpeed's word for dynamic


def test_skips_are_counted_in_all_and_in_a_row():
    found = states(scaler(**START), "x..xx.xxx")
    assert [state.skipped for state in found] == [1, 1, 1, 2, 3, 3, 4, 5, 6]
    assert [state.consecutive for state in found] == [1, 0, 0, 1, 2, 0, 1, 2, 3]


def test_a_scale_never_grows_to_infinity():
    rule = scaler(fp16=True, initial_scale_power=126, loss_scale_window=1)
    assert [state.scale for state in states(rule, "...")] == [LARGEST] * 3


# ------------------------------------------------------------------------------------------------------- the floor


def test_at_the_floor_megatron_stays_and_deepspeed_stops():
    flags = {"fp16": True, "initial_loss_scale": 4.0, "min_loss_scale": 2.0, "hysteresis": 1}
    for rule, stops in (
        (scaler(**flags), False),
        (scaler(loss_scaler="deepspeed", **flags), True),
        (scaler(loss_scale_floor="stop", **flags), True),
        (scaler(loss_scaler="deepspeed", loss_scale_floor="stay", **flags), False),
    ):
        found = states(rule, "xxx")
        assert [state.scale for state in found] == [2.0, 2.0, 2.0]
        told = [rule.reason_to_stop(state, "layers.0.mlp.up.weight") for state in found]
        assert [line is not None for line in told] == [False, stops, stops]
        if stops:
            assert told[1] == (
                "overflow at the smallest loss scale 2, first in the gradient of layers.0.mlp.up.weight: "
                "--min-loss-scale 2 and --loss-scale-floor stop end the run here, after 2 skipped steps in all"
            )


def test_a_clean_step_leaves_the_floor_behind():
    rule = scaler(fp16=True, initial_loss_scale=1.0, hysteresis=1, loss_scale_floor="stop")
    found = states(rule, "x.")
    assert [rule.reason_to_stop(state, "w") is None for state in found] == [False, True]


def test_c090_a_run_of_skips_ends_naming_scale_and_parameter():
    rule = scaler(fp16=True, initial_loss_scale=8.0, max_consecutive_skips=3, hysteresis=1)
    found = states(rule, "xx.xxx")
    assert [rule.reason_to_stop(state, "w") is not None for state in found] == [False] * 5 + [True]
    assert rule.reason_to_stop(found[-1], "embedding.word.weight (rank 3)") == (
        "3 steps in a row were skipped for overflow, the last one first in the gradient of embedding.word.weight "
        "(rank 3), and the loss scale is 1 by now: so many end the run (--max-consecutive-skips)"
    )
    never = scaler(fp16=True, initial_loss_scale=8.0, max_consecutive_skips=0)
    assert all(never.reason_to_stop(state, "w") is None for state in states(never, "x" * 200))


@pytest.mark.parametrize(
    "flags",
    [{}, {"initial_loss_scale": 1000.0}, {"min_loss_scale": 3.0}, {"hysteresis": 5}, {"loss_scale": 64.0}],
)
def test_c090_by_default_a_run_comes_down_to_the_smallest_scale_before_it_ends(flags):
    """Every overflow from the first scale downwards is borne, and ten at the smallest."""
    rule = scaler(fp16=True, **flags)
    found = states(rule, "x" * 100)
    ended = next(number for number, state in enumerate(found, 1) if rule.reason_to_stop(state, "w"))
    arrived = next((number for number, state in enumerate(found, 1) if state.scale == rule.smallest), 0)
    assert ended == arrived + 10


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("name", VECTORS)
def test_c040_a_saved_state_goes_on_as_if_it_had_never_stopped(name):
    family, _, consecutive = name.partition(", ")
    rule = scaler(loss_scaler=family, consecutive_hysteresis=bool(consecutive), **START)
    straight = states(rule, STEPS)
    for stop in range(len(STEPS)):
        saved = json.loads(json.dumps(straight[stop].to_dict()))
        resumed = rule.resume(saved)
        assert resumed == straight[stop]
        assert states(rule, STEPS[stop + 1 :], resumed) == straight[stop + 1 :]


def test_a_checkpoint_without_a_scale_or_with_one_of_another_kind_starts_one():
    dynamic, constant, none = scaler(**START), scaler(fp16=True, loss_scale=8.0), scaler(bf16=True)
    assert dynamic.resume(None) == dynamic.start()
    for old in (constant, none):
        state = dynamic.resume(states(old, "x..x")[-1].to_dict())
        assert (state.scale, state.clean, state.hysteresis, state.skipped, state.consecutive) == (16.0, 0, 2, 2, 1)
    assert constant.resume(states(dynamic, "....")[-1].to_dict()).scale == 8.0


def test_new_bounds_hold_for_an_old_state():
    old = states(scaler(**START), "xx")[-1]
    assert old.scale == 8.0
    assert scaler(**START | {"min_loss_scale": 12.0}).resume(old.to_dict()).scale == 12.0
    assert scaler(**START | {"hysteresis": 1}).resume(scaler(**START).start().to_dict()).hysteresis == 1


@pytest.mark.parametrize("saved", [{"scale": 0.0}, {"scale": float("nan")}, {"scale": float("inf")}, {"scal": 1.0}, {}])
def test_a_state_that_cannot_be_is_refused(saved):
    with pytest.raises(ValueError, match="the checkpoint's loss scale"):
        scaler(**START).resume(saved)
