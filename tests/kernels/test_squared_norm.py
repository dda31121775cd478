"""The squared norm of a flat buffer: the Triton kernel (in the interpreter) equals the plain formula."""

from unittest import mock

import pytest
import torch

from megazero.kernels import squared_norm as module
from megazero.kernels.squared_norm import squared_norm, squared_norm_reference

pytest.importorskip("triton")
LENGTHS = (0, 1, 2, 3, 7, 33, 1000, 1024, 4097, 20000, 70000)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_any_length_equals_the_formula(length, dtype):
    """C145; in few programs with many blocks too, and from every second element."""
    flat = torch.randn(2 * length, generator=torch.Generator().manual_seed(length)).to(dtype)
    for part in (flat[:length], flat[::2]):
        expected = squared_norm_reference(part).item()
        for most in (module.PARTIALS, 2):
            with mock.patch.object(module, "PARTIALS", most):
                found = squared_norm(part, impl="triton")
            assert found.dtype == torch.float64 and found.shape == ()
            assert found.item() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-22, 1e15, 1e25])
def test_squares_are_summed_whatever_their_size(size, impl):
    """Beyond what squares in fp32 hold, too; and zeros, odd lengths and infinities."""
    flat = size * torch.randn(70_001, generator=torch.Generator().manual_seed(1))
    for part in (flat, flat[:1000], flat[:1024], flat.double()):
        assert squared_norm(part, impl).item() == pytest.approx(part.double().square().sum().item(), rel=1e-7)
        assert squared_norm(part * 0, impl).item() == 0.0
    flat[69_999] = torch.inf
    assert squared_norm(flat, impl).item() == torch.inf
    flat[3] = torch.nan
    assert squared_norm(flat, impl).isnan()


def test_two_runs_have_the_same_bits():
    """And every program has its own elements, whatever order they finish in."""
    flat = torch.randn(40_000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(squared_norm(flat, "triton"), squared_norm(flat.clone(), "triton"))
    assert module._partials_of(flat).numel() == 40
