"""Statistics and gradient of rows of logits: torch and the Triton kernels (in the interpreter) equal the formulas."""

import pytest
import torch

from megazero.kernels.cross_entropy import gradient_reference, logits_gradient, row_statistics, statistics_reference
from megazero.kernels.dispatch import triton

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=["torch"] if triton is None else ["torch", "triton"])
def impl(request):
    return request.param


def _assert_same(impl, logits, real, first=10, share=0.2):
    """Labels on the first and last real column, and of other ranks, on both sides."""
    rows, columns = logits.shape
    labels = torch.tensor([first, first + real - 1, first - 1, first + real, first + real // 2])[torch.arange(rows) % 5]
    place, exact = {"first": first, "real": real}, torch.promote_types(logits.dtype, torch.float32)
    found, expected = row_statistics(logits, labels, **place, impl=impl), statistics_reference(logits, labels, **place)
    assert found.dtype == exact and found.shape == (4, rows)
    limit = max(1e-5 * (exact != torch.float64), 1e-12)
    size = logits[:, :real].abs().double().nan_to_num(0.0, 0.0).sum(1).max().item() if real else 0.0
    torch.testing.assert_close(found[:3], expected[:3], rtol=limit, atol=limit, equal_nan=True)
    torch.testing.assert_close(found[3], expected[3], rtol=limit, atol=limit * size, equal_nan=True)

    log_n, dy = torch.randn(2, rows, dtype=exact)
    log_n += expected[0].nan_to_num(0.0, 0.0, 0.0) + 1
    rest = {"share": share, "vocab": 1000, **place}
    wanted = gradient_reference(logits, labels, log_n, dy, **rest)
    got = logits_gradient(logits, labels, log_n, dy, **rest, impl=impl)
    limit = TOLERANCE[logits.dtype]
    torch.testing.assert_close(got, wanted, rtol=limit, atol=limit * 0.1, equal_nan=True)
    assert not got[:, real:].any()
    return labels, log_n, dy, rest, got


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", (1, 2, 3, 7, 33, 1000, 1024, 4097, 20000, 70000))
def test_any_width_equals_the_formulas(impl, width, dtype):
    """C145; whole and with padding that would win, with and without smoothing; in place, the same bits."""
    logits = 3 * torch.randn(5 if width < 5000 else 2, width, generator=torch.Generator().manual_seed(width))
    logits = logits.to(dtype)
    labels, log_n, dy, rest, gradient = _assert_same(impl, logits, width)
    own = logits.clone()
    inside = logits_gradient(own, labels, log_n, dy, **rest, in_place=True, impl=impl)
    assert inside.data_ptr() == own.data_ptr() and torch.equal(inside, gradient)
    logits[:, -(width // 3 + 1) :] = 6e4
    _assert_same(impl, logits, width - width // 3 - 1, first=0, share=0.0)


def test_any_strides(impl):
    dense = torch.randn(4, 6, 30)
    for logits in (dense[:, 0], dense[0, :, 3:20], dense[0].t(), dense[0, :1].expand(5, 30), dense[::2, 1, ::3]):
        labels, log_n, dy, rest, gradient = _assert_same(impl, logits, logits.shape[1] - 1)
        if logits.stride(0) and logits.stride(1) == 1:
            base = dense.clone()
            own = base.as_strided(logits.shape, logits.stride(), logits.storage_offset())
            assert torch.equal(logits_gradient(own, labels, log_n, dy, **rest, in_place=True, impl=impl), gradient)
            assert (base != dense).sum() <= logits.numel(), "and nothing beside the rows is written"
    none = torch.zeros(0, dtype=torch.int64)
    assert row_statistics(torch.randn(0, 5), none, first=0, real=5, impl=impl).shape == (4, 0)


def test_offsets_beyond_two_to_the_31(impl):
    far = torch.empty(2**31 + 128, dtype=torch.bfloat16)   # only the pages of two rows are ever touched
    logits = far.as_strided((2, 8), (2**31 + 64, 1))
    logits.copy_(torch.randn(2, 8))
    labels, log_n, dy, rest, gradient = _assert_same(impl, logits, 8)
    assert torch.equal(logits_gradient(logits, labels, log_n, dy, **rest, in_place=True, impl=impl), gradient)


def test_extreme_rows(impl):
    """A row of NaN stays alone; infinities and large logits give what the formulas give."""
    logits = torch.randn(5, 5000)
    logits[1, 4900] = torch.nan
    logits[2, :4999] = -torch.inf
    logits[3] *= 1e30
    found = row_statistics(logits, torch.zeros(5, dtype=torch.int64), first=0, real=5000, impl=impl)
    expected = statistics_reference(logits, torch.zeros(5, dtype=torch.int64), first=0, real=5000)
    assert found[1, 1].isnan() and found[1, [0, 2, 3, 4]].isfinite().all()
    rows = [0, 2, 3, 4]
    torch.testing.assert_close(found[:2, rows], expected[:2, rows], rtol=1e-5, atol=0)
    alone = row_statistics(logits, torch.zeros(5, dtype=torch.int64), first=9000, real=0, impl=impl)
    assert (alone[0] == -torch.inf).all() and not alone[1:].any(), "a rank with padding alone"
