"""Adam's one pass over a flat shard: the Triton kernel (in the interpreter) equals torch's and the plain formulas."""

import itertools
from dataclasses import replace

import pytest
import torch

from megazero.kernels import adam
from megazero.kernels.adam import AdamStep, adam_, adam_reference_

pytest.importorskip("triton")
STEP = AdamStep(1e-2, (0.9, 0.95), 1e-8, 0.1, True, 1)


def _shard(count, dtype=torch.float32):
    """weight, grad, exp_avg, exp_avg_sq [count]."""
    generator = torch.Generator().manual_seed(count)
    w, g, m, v = torch.randn(4, count, generator=generator, dtype=torch.float64).to(dtype).unbind()
    return w.clone(), g.clone(), 0.1 * m, v.square()


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 33, 1000, 1024, 4097])
def test_any_length_equals_the_formulas(count, dtype, impl):
    """C145; with and without a factor and a copy, both decays, late in a run too."""
    factor, limit = torch.tensor(0.37, dtype=torch.float64), 1e-12 if dtype == torch.float64 else 1e-5
    narrow = {torch.float32: torch.float16, torch.float64: torch.float32}[dtype]
    for decoupled, step, extras in itertools.product((True, False), (1, 1000), (True, False)):
        numbers = replace(STEP, decoupled=decoupled, step=step)
        found, expected = _shard(count, dtype), _shard(count, dtype)
        copies = [torch.full((count,), torch.nan, dtype=narrow) for _ in range(2)]
        adam_(*found, numbers, factor=factor if extras else None, copy=copies[0] if extras else None, impl=impl)
        adam_reference_(
            *expected, numbers, factor=factor if extras else None, copy=copies[1] if extras else None
        )
        for number in (0, 2, 3):
            torch.testing.assert_close(found[number], expected[number], rtol=limit, atol=limit)
        if extras:
            assert torch.equal(copies[0], found[0].to(narrow))
        else:
            assert copies[0].isnan().all()


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_twenty_steps_are_torchs(decoupled, impl):
    """C151, C156: to 1e-6 from the first step on, with a rate and gradients that vary; the other decay is not it."""
    weight, _, exp_avg, exp_avg_sq = _shard(1500)
    exp_avg.zero_(), exp_avg_sq.zero_()
    kinds = (torch.optim.AdamW, torch.optim.Adam) if decoupled else (torch.optim.Adam, torch.optim.AdamW)
    theirs = [torch.nn.Parameter(weight.clone()) for _ in kinds]
    optimizers = [kind([p], 1.0, (0.9, 0.95), weight_decay=0.1) for kind, p in zip(kinds, theirs, strict=True)]
    for step in range(20):
        rate, grad = 1e-3 * (step + 1), torch.randn(1500) * 10.0 ** (step % 3 - 2)
        numbers = replace(STEP, learning_rate=rate, decoupled=decoupled, step=step + 1)
        adam_(weight, 8 * grad, exp_avg, exp_avg_sq, numbers, factor=torch.tensor(0.125), impl=impl)
        for p, optimizer in zip(theirs, optimizers, strict=True):
            p.grad, optimizer.param_groups[0]["lr"] = grad.clone(), rate
            optimizer.step()
        apart = [((weight - p.detach()).abs().max() / p.detach().abs().max()).item() for p in theirs]
        assert apart[0] < 1e-6, (step, apart)
    assert apart[1] > 1e-3
    state = optimizers[0].state[theirs[0]]
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-5, atol=1e-6 * exp_avg.abs().max().item())
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_the_master_moves_by_what_its_copy_cannot_show(impl):
    """C154: 200 steps of 1e-4, each below half the spacing of bf16 at 1; the master moves by their sum, and the copy
    is the master rounded."""
    weight, exp_avg, exp_avg_sq = torch.ones(40), torch.zeros(40), torch.zeros(40)
    copy = weight.bfloat16()                               # which the interpreter cuts off, and a GPU rounds
    for step in range(200):
        numbers = AdamStep(1e-4, (0.9, 0.999), 1e-8, 0.0, True, step + 1)
        adam_(weight, torch.full((40,), 1e-3), exp_avg, exp_avg_sq, numbers, copy=copy, impl=impl)
        assert step or (copy >= 1 - 2.0**-8).all(), "the first step moves the copy by nothing or by its whole spacing"
    torch.testing.assert_close(weight, torch.full((40,), 1 - 200e-4), rtol=1e-5, atol=0)
    assert (copy.float() - weight).abs().max() < 2.0**-8 and (copy < 0.99).all()
    torch.testing.assert_close(exp_avg, torch.full((40,), 1e-3 * (1 - 0.9**200)), rtol=2e-6, atol=0)
    torch.testing.assert_close(exp_avg_sq, torch.full((40,), 1e-6 * (1 - 0.999**200)), rtol=1e-5, atol=0)


def test_a_nan_stays_where_it_is():
    weight, grad, exp_avg, exp_avg_sq = _shard(1030)
    grad[5] = torch.nan
    adam_(weight, grad, exp_avg, exp_avg_sq, STEP, impl="triton")
    for t in (weight, exp_avg, exp_avg_sq):
        assert t.isnan().nonzero().flatten().tolist() == [5]


def test_nothing_of_a_step_is_a_compile_time_value(monkeypatch):
    """Steps, rates, decays and sizes alike reach the kernel as floats: ints would be specialised, and 1 compiled in."""
    calls = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: calls.append((args, options))

    monkeypatch.setattr(adam, "_update", Recorder())
    for step in (1, 2, 16):
        adam_(*_shard(32), AdamStep(1, (0, 0.5), 0, 1, step == 1, step), impl="triton")
    assert all(type(number) is float for args, _ in calls for number in args[7:]) and len(calls[0][0]) == 15
    assert all(options == calls[0][1] for _, options in calls) and calls[0][1]["BLOCK"] == adam.BLOCK
