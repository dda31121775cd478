"""Softmax of attention scores: the Triton kernel (in the interpreter) and torch's path equal the plain formulas."""

import pytest
import torch

from megazero.kernels.softmax import softmax, softmax_reference

pytest.importorskip("triton")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WIDTHS = (1, 2, 3, 7, 33, 1000, 1024, 4097)


def _values(run, x, dy, sink=None):
    """Output and the gradients of x and, where there is one, of the sink, as `run` computes them."""
    leaves = [t.detach().requires_grad_() for t in (x, sink) if t is not None]
    y = run(*leaves)
    assert y.dtype == x.dtype and y.shape == x.shape
    y.backward(dy)
    return y.detach(), *(leaf.grad for leaf in leaves)


def _assert_same(impl, x, dy, scale=0.7, sink=None, **hidden):
    got = _values(lambda x, b=None: softmax(x, scale, impl=impl, sink=b, **hidden), x, dy, sink)
    wanted = _values(lambda x, b=None: softmax_reference(x, scale, sink=b, **hidden), x, dy, sink)
    tolerance, most = TOLERANCE[x.dtype], wanted[0].abs().max().item()
    sizes = (most, most * dy.abs().max().item(), dy.abs().sum().item())
    for a, b, size in zip(got, wanted, sizes, strict=False):
        assert a.dtype == b.dtype
        # relative to what is subtracted: a 16-bit gradient is made of 16-bit probabilities
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * size)
    return got


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
def test_any_width_equals_the_formulas(width, dtype):
    """C145, for plain, causal and masked rows."""
    torch.manual_seed(width)
    x, dy = (3 * torch.randn(2, 1, 3, width)).to(dtype)
    mask = torch.rand(3, width) < 0.6
    for impl in ("triton", "torch"):
        _assert_same(impl, x, dy)
        _assert_same(impl, x, dy, causal=True)
        _assert_same(impl, x, dy, mask=mask)
        _assert_same(impl, x, dy, causal=True, mask=mask)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", (1, 7, 1024))
def test_a_window_and_a_sink_equal_the_formulas(width, dtype):
    """Each alone and both, with a mask too, for windows from the own key alone to wider than the row."""
    torch.manual_seed(width)
    x, dy = (3 * torch.randn(2, 2, 3, 4, width)).to(dtype)
    mask, sink = torch.rand(4, width) < 0.6, torch.tensor([0.0, 2.0, -9.0]).to(dtype)
    mask[2] = False                                                     # sees the sink alone
    for impl in ("triton", "torch"):
        _assert_same(impl, x[0], dy[0], causal=True, window=0)
        for window in (width // 2, width + 3):
            _assert_same(impl, x[0], dy[0], causal=True, window=window, mask=mask, sink=sink)
        y, dx, db = _assert_same(impl, x, dy, mask=mask, sink=sink)
        assert not y[:, :, 2].any() and not dx[:, :, 2].any() and db.isfinite().all()


def test_a_window_and_a_sink_of_rows_wider_than_a_block():
    torch.manual_seed(0)
    x, dy = torch.randn(2, 1, 2, 3, 20000)
    x[..., 8500:] += 5.0
    for window in (3, 9000, 19998):                                     # a window from within a block, over several
        _assert_same("triton", x, dy, causal=True, window=window, sink=torch.tensor([6.0, 16.0]))


def test_a_sink_of_zero_is_softmax_off_by_one():
    """exp(x_j) / (1 + sum_i exp(x_i)), whatever the number of heads."""
    x = torch.randn(2, 3, 4, 5)
    for impl in ("triton", "torch"):
        torch.testing.assert_close(softmax(x, sink=torch.zeros(3), impl=impl), x.exp() / (1 + x.exp().sum(-1, True)))


@pytest.mark.parametrize("width", (9000, 20000, 70000))
def test_rows_wider_than_a_block_are_one_distribution(width):
    """C145; the largest score and much of the weight lie past the first block."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 2, width)
    x[:, 8500:] += 5.0
    mask = torch.rand(width) < 0.5
    _assert_same("triton", x, dy)
    _assert_same("triton", x, dy, causal=True, mask=mask)
    mask[:-3] = False                                      # whole blocks without a key
    _assert_same("triton", x, dy, mask=mask)
    y, dx = _assert_same("triton", x, dy, mask=torch.zeros(width, dtype=torch.bool))
    assert not y.any() and not dx.any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_row_that_sees_nothing_is_zeros(impl, dtype):
    """C148: zeros and a zero gradient, by a mask or because more queries than keys are asked for causally."""
    x, dy = torch.randn(2, 2, 5, 4).to(dtype)
    mask = torch.rand(2, 5, 4) < 0.7
    mask[:, 1], mask[0, 4], mask[1, 3, 0] = False, False, True
    y, dx = _assert_same(impl, x, dy, mask=mask)
    for rows in (y, dx):
        assert not rows[:, 1].any() and not rows[0, 4].any() and rows[1, 3].any()
    y, dx = _assert_same(impl, torch.cat((x, x), 1), torch.cat((dy, dy), 1), causal=True)
    assert not y[:, :6].any() and not dx[:, :6].any() and y[:, 6, 0].eq(1).all()


@pytest.mark.parametrize("width", (4, 20000))
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_nan_spoils_its_row_unless_it_is_hidden(impl, width):
    """C148."""
    x, dy = torch.randn(2, 3, width)
    x[1, 2] = x[2, 3] = torch.nan
    mask = torch.ones(3, width, dtype=torch.bool)
    mask[2, 3] = False
    y, dx = _values(lambda x: softmax(x, mask=mask, impl=impl), x, dy)
    assert y[1].isnan().all() and dx[1].isnan().all()
    assert y[[0, 2]].isfinite().all() and dx[[0, 2]].isfinite().all() and y[2, 3] == 0


def test_any_strides():
    """Of scores, of the mask and of the upstream gradient; the last dim too."""
    torch.manual_seed(0)
    dense = torch.randn(3, 2, 3, 6)
    inputs = {
        "queries and keys swapped": dense.mT,
        "heads last": dense.permute(0, 2, 3, 1),
        "every second key": dense[..., ::2],
        "every second of all": dense[::2, ::2, ::2, 1::2],
        "expanded heads": dense[:, :1].expand(3, 2, 3, 6),
        "expanded keys": dense[..., :1].expand(3, 2, 3, 6),
        "two dims": dense[0, 0].t(),
        "five dims": dense.view(3, 2, 1, 3, 6).transpose(1, 4),
        "one row": dense[0, 0, :1],
    }
    for x in inputs.values():
        mask = (torch.rand(x.shape[-1], x.shape[-2]) < 0.7).t()
        _assert_same("triton", x, torch.randn(x.shape), mask=mask)
        _assert_same("triton", torch.randn(x.shape), x, causal=True)
        _assert_same("triton", x, torch.ones(1).expand(x.shape))
    per_batch = torch.rand(3, 1, 3, 6) < 0.7              # as masks of documents are
    _assert_same("triton", dense, dense, mask=per_batch)


def test_no_rows_and_no_keys():
    for shape in ((0, 3, 8), (2, 0, 8), (2, 3, 0)):
        y, dx = _values(lambda x: softmax(x, causal=True, impl="triton"), torch.randn(shape), torch.randn(shape))
        assert y.shape == dx.shape == shape


def test_offsets_beyond_two_to_the_31():
    far = torch.empty(2**31 + 256, dtype=torch.bfloat16)   # only the pages of two rows and two columns are ever touched
    for strides in ((2**31 + 64, 1), (1, 2**31 + 64)):
        x = far.as_strided((2, 2), strides)
        x.copy_(torch.randn(2, 2))
        _assert_same("triton", x, torch.randn(2, 2).bfloat16())
        _assert_same("triton", torch.randn(2, 2).bfloat16(), x, causal=True)


def test_large_scores_stay_finite():
    """fp16 scores near its limit, and a scale that takes them beyond it."""
    x, dy = (6e4 * torch.rand(2, 3, 50)).half()
    for impl in ("triton", "torch"):
        y, _ = _assert_same(impl, x, dy / 6e4, scale=24.0)
        assert (y.sum(-1) - 1).abs().max() < 1e-2
