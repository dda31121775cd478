"""bias + dropout + residual add: the kernel (in the interpreter) equals the formulas, and its draws are what they
should be: as many, the same again, and nothing kept."""

import pytest
import torch

from megazero.kernels.draws import bits_reference, keep_reference
from megazero.kernels.dropout_add import dropout_add, dropout_add_reference

pytest.importorskip("triton")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WIDTHS = (1, 2, 3, 7, 33, 1000, 1024, 4097, 20000, 70000)
SEED = 0xFEDCBA9876543210


def _assert_same(x, residual, *, biased=True, probability=0.25, dy=None, impl="triton"):
    bias = torch.randn(x.shape[-1]).to(x.dtype) if biased else None
    values = []
    for run in (lambda *a: dropout_add(*a, impl=impl), lambda *a: dropout_add_reference(*a[:4], SEED % 2**63)):
        leaves = [t.detach().requires_grad_() for t in (x, residual, bias) if t is not None]
        y = run(*leaves, *([] if biased else [None]), probability, SEED)
        y.backward(torch.ones(1, dtype=y.dtype).expand(y.shape) if dy is None else dy)
        values.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*values, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        tolerance = TOLERANCE[x.dtype]
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("width", WIDTHS)
def test_any_width_and_dtype_equals_the_formulas(width):
    torch.manual_seed(width)
    for dtype in TOLERANCE if width < 4000 else (torch.bfloat16,):
        x, residual, dy = torch.randn(3, 2 if width < 4000 else 1, 1, width).to(dtype)
        _assert_same(x, residual, dy=dy)
        if width < 4000:
            _assert_same(x, residual, dy=dy, biased=False)
            _assert_same(x, residual, dy=dy, probability=0.0)
            _assert_same(x, residual, dy=dy, probability=0.0, impl="torch")
    _assert_same(x, residual.float())               # the residual stream may be wider


def test_any_strides(monkeypatch):
    monkeypatch.setattr("megazero.kernels.dropout_add.PARTIALS", 3)        # fewer programs than rows
    torch.manual_seed(0)
    dense = torch.randn(3, 2, 4, 16)
    inputs = (
        dense[0].transpose(0, 1), dense[0, :, :, 3:9], dense[0, :, ::2], dense[0, :1].expand(2, 4, 16),
        dense[0, 0].t(), dense[::2, ::2, ::2], dense[0, 0, 0],
    )
    for x in inputs:
        _assert_same(x, torch.randn(x.shape))
        _assert_same(torch.randn(x.shape), x, dy=x)
    assert dropout_add(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), 0.5, 1, "triton").shape == (0, 8)


def test_offsets_beyond_two_to_the_31():
    far = torch.empty(2**31 + 128, dtype=torch.bfloat16)
    x = far.as_strided((2, 8), (2**31 + 64, 1))
    x.copy_(torch.randn(2, 8))
    _assert_same(x, torch.randn(2, 8).bfloat16())


def test_nan_that_is_dropped_is_gone_and_one_that_is_kept_stays():
    x = torch.full((4, 64), float("nan"))
    y = dropout_add(x, torch.zeros(4, 64), None, 0.5, 7, "triton")
    assert torch.equal(y.isnan(), keep_reference(7, 4, 64, 0.5)) and not y[~y.isnan()].any()


def test_the_numbers_are_those_of_philox():
    """The published answer for a counter and a key of zeros, with 7 rounds; then the kernel beside the formulas."""
    assert bits_reference(0, 1, 4).tolist() == [[0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]]
    for seed in (0, 5, SEED % 2**63):
        kept = dropout_add(torch.ones(2, 33), torch.zeros(2, 33), None, 0.5, seed, "triton") > 0
        assert torch.equal(kept, keep_reference(seed, 2, 33, 0.5))


@pytest.mark.parametrize("probability", (0.1, 0.5, 0.9))
def test_the_share_dropped_and_its_neighbours_are_independent(probability):
    """Within five standard deviations, by rows, by columns, and for pairs side by side; other seeds, other masks."""
    kept = keep_reference(SEED, 512, 512, probability).double()
    wanted, count = 1 - probability, kept.numel()
    spread = 5 * (wanted * probability) ** 0.5
    assert abs(kept.mean() - wanted) < spread / count**0.5
    for dim in (0, 1):
        assert (kept.mean(dim) - wanted).abs().max() < spread / 512**0.5
    centred = kept - wanted
    other_seed = keep_reference(SEED + 1, 512, 512, probability).double()
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(4, 1), other_seed):
        assert abs((centred * (other - other.mean())).mean()) < 5 * wanted * probability / count**0.5


def test_nothing_but_the_seed_is_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        x = torch.randn(4, 8, requires_grad=True)
        dropout_add(x, torch.randn(4, 8), torch.ones(8), 0.5, 1, "triton")
    assert not kept


def test_the_torch_path_draws_what_torch_draws():
    x, residual, bias = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    torch.manual_seed(3)
    y = dropout_add(x, residual, bias, 0.3, 99)
    torch.manual_seed(3)
    assert torch.equal(y, residual + torch.native_dropout(x + bias, 0.3, True)[0])
