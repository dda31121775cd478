"""Narrow numbers in whole runs: a wide residual stream, and gradients that travel in bf16."""

from __future__ import annotations

import functools

import pytest
import torch

from megazero.trainer import Trainer
from tests.training import Outcome, train

DEEP = "--num-layers 16 --global-batch-size 4 --train-iters 2"


@functools.cache
def one_rank(flags: str) -> Outcome:
    return train(flags)


def wire(trainer: Trainer) -> set[torch.dtype]:
    """The dtypes of what this rank has sent and received between stages."""
    engine = trainer.machine.engine
    forms = [*engine._sent.values(), *engine._received.values()]
    return {dtype for form in forms for dtype, _, _ in form.parts}


def off(got: Outcome, exact: Outcome) -> float:
    """The mean over the tensors of how far their first moments, which are sums of gradients, are apart. A bias of keys
    has a gradient of nothing but rounding."""
    names = [key for key in exact.state if key[1] == "exp_avg" and "qkv.bias" not in key[0]]
    each = [(got.state[key] - exact.state[key]).norm() / exact.state[key].norm() for key in names]
    return torch.stack(each).mean().item()


@pytest.mark.parametrize(
    ("narrow", "layout"), [("--bf16", (2, 2, 1)), ("--fp16 --initial-loss-scale 1024", (1, 2, 1))]
)
def test_a_residual_stream_in_fp32_is_nearer_to_a_run_in_fp32_and_travels_so(narrow, layout):
    """On the wire between stages too. Tensor ranks round, each its part of a product; a pipeline changes nothing."""
    wide = one_rank(f"{DEEP} {narrow} --fp32-residual-connection")
    plain, exact = one_rank(f"{DEEP} {narrow}"), one_rank(DEEP)
    assert off(wide, exact) < 0.8 * off(plain, exact), (off(wide, exact), off(plain, exact))
    got = train(f"{DEEP} {narrow} --fp32-residual-connection", layout, look=wire)
    assert got.seen == [{torch.float32}] * len(got.seen)
    assert got.losses == pytest.approx(wide.losses, rel=3e-4)
    assert off(got, wide) < (1e-6 if layout == (1, 2, 1) else 2 * off(wide, exact))


@pytest.mark.parametrize(
    ("layout", "flags"), [((1, 1, 2), "--zero-stage 1"), ((1, 1, 4), "--zero-stage 2"), ((2, 1, 2), "--zero-stage 0")]
)
def test_gradients_that_travel_in_bf16_train_the_model_of_one_rank_to_bf16(layout, flags):
    """Rounded once per sum over ranks, 2^-9 relative: the norm of the first gradient is off by less than 2e-3, and
    moments by more than where it travels in fp32, which shows that the flag does something."""
    base, narrow = "--bf16 --bucket-size 4000 --overlap-grad-reduce", "--grad-reduce-in-bf16"
    want, wide, got = one_rank("--bf16"), train(f"{base} {flags}", layout), train(f"{base} {flags} {narrow}", layout)
    assert got.losses == pytest.approx(want.losses, rel=1e-3)
    assert got.norms[0] == pytest.approx(want.norms[0], rel=2e-3)
    assert got.norms == pytest.approx(want.norms, rel=2e-2)
    assert 1e-4 < off(got, wide) < 2e-2, off(got, wide)
    if layout[0] == 1:
        assert off(wide, want) < off(got, want) < 2e-2
