"""GELU by tanh and SwiGLU on a CPU, which keep their slopes, equal torch's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from megazero.kernels import cached
from megazero.kernels.gelu_tanh import gelu_tanh
from megazero.kernels.swiglu import swiglu

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


OPS = {
    "gelu_tanh": (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    "swiglu": (swiglu, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2,), (3, 66), (7, 5, 30)])
@pytest.mark.parametrize("op", OPS)
def test_value_and_slope_are_those_of_torch_in_whole_and_broken_blocks(monkeypatch, op, dtype, shape):
    monkeypatch.setattr(cached, "BLOCK", 64)
    x = (8 * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))).requires_grad_()
    ours, theirs = (f(x) for f in OPS[op])
    dy = torch.randn(theirs.shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    (dx,), (expected,) = (torch.autograd.grad(y, x, dy) for y in (ours, theirs))
    torch.testing.assert_close(dx, expected, rtol=0, atol=8 * TOLERANCE[dtype])


def test_far_from_zero_it_is_flat_or_the_value_itself():
    x = torch.tensor([-1e4, -60.0, -0.0, 0.0, 60.0, 1e4, float("nan")], requires_grad=True)
    y = gelu_tanh(x)
    assert y[:6].tolist() == [0, 0, 0, 0, 60, 1e4] and y[6].isnan()
    (dx,) = torch.autograd.grad(y.nansum(), x)
    assert dx[:6].tolist() == [0, 0, 0.5, 0.5, 1, 1]


def test_a_transposed_input_and_one_without_a_backward_are_taken_too():
    x = torch.randn(5, 7, dtype=torch.float64).T.requires_grad_()
    torch.testing.assert_close(gelu_tanh(x), F.gelu(x, approximate="tanh"))
    assert gelu_tanh(x.detach()).equal(F.gelu(x.detach(), approximate="tanh"))
    assert gelu_tanh(torch.empty(0, 3, requires_grad=True)).shape == (0, 3)
