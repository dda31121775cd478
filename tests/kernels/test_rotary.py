"""Rotary positions: the Triton kernel (in the interpreter) and the torch path equal the plain formulas, in place."""

import pytest
import torch

from megazero.kernels.rotary import rotary_, rotary_reference

pytest.importorskip("triton")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SEQ, BATCH = 3, 2
# (query groups, queries of a group + 2, head_dim, half): partial, odd, wider than any block's worth of heads
SHAPES = [
    (1, 3, 2, 1), (2, 4, 6, 3), (2, 3, 10, 3), (1, 5, 33, 16), (3, 3, 64, 32), (1, 9, 300, 150), (1, 3, 1030, 514),
]


def _angles(half, dtype, batch=1):
    angle = torch.rand(SEQ, batch, 1, 1, half, dtype=torch.float64) * 100
    exact = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(exact), angle.sin().to(exact)


def _assert_same(impl, fused, angles, heads, interleaved, dy=None):
    """The values in place, whatever the strides, and the gradient that the formulas have."""
    dy = torch.randn(fused.shape).to(fused.dtype) if dy is None else dy
    leaf = fused.detach().requires_grad_()
    wanted = rotary_reference(leaf, *angles, heads, interleaved)
    (wanted_grad,) = torch.autograd.grad(wanted, leaf, dy)
    place = torch.empty_strided(fused.shape, fused.stride(), dtype=fused.dtype).copy_(fused)
    rotary_(place, *angles, heads=heads, interleaved=interleaved, impl=impl)
    product = leaf.contiguous() * 1.0
    turned = rotary_(product, *angles, heads=heads, interleaved=interleaved, impl=impl)
    assert turned.data_ptr() == product.data_ptr()
    (grad,) = torch.autograd.grad(turned, leaf, dy)
    for got, want in ((place, wanted), (turned, wanted), (grad, wanted_grad)):
        torch.testing.assert_close(got, want, rtol=TOLERANCE[fused.dtype], atol=TOLERANCE[fused.dtype])


@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_head_equals_the_formulas(shape, interleaved):
    torch.manual_seed(0)
    *heads, half = shape
    for dtype in TOLERANCE if half < 100 else (torch.float32, torch.bfloat16):
        fused = torch.randn(SEQ, BATCH, heads[0] * heads[1] * heads[2]).to(dtype)
        for impl in ("triton", "torch"):
            _assert_same(impl, fused, _angles(half, dtype), tuple(heads), interleaved)
        _assert_same("triton", fused, _angles(half, dtype, BATCH), tuple(heads), interleaved)


@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
def test_any_strides(interleaved):
    torch.manual_seed(0)
    heads, angles = (2, 4, 6), _angles(2, torch.float32, BATCH)
    dense = torch.randn(2 * BATCH, SEQ, 50)
    for fused in (dense[:BATCH].transpose(0, 1)[..., :48], dense[::2].transpose(0, 1)[..., 1:49]):
        _assert_same("triton", fused, angles, heads, interleaved)
    fused = torch.randn(SEQ, BATCH, 48)
    for dy in (dense[:BATCH].transpose(0, 1)[..., :48], torch.ones(1).expand(SEQ, BATCH, 48)):
        _assert_same("triton", fused, angles, heads, interleaved, dy)
    _assert_same("triton", torch.randn(SEQ, 48, BATCH).transpose(1, 2), angles, heads, interleaved)


def test_offsets_beyond_two_to_the_31():
    far = torch.empty(2**31 + 128, dtype=torch.bfloat16)
    fused = far.as_strided((2, 1, 12), (2**31 + 64, 12, 1))
    values = torch.randn(2, 1, 12).bfloat16()
    fused.copy_(values)
    angle = torch.rand(2, 1, 1, 1, 2)
    rotary_(fused, angle.cos(), angle.sin(), heads=(1, 3, 4), interleaved=False, impl="triton")
    wanted = rotary_reference(values, angle.cos(), angle.sin(), (1, 3, 4), False)
    torch.testing.assert_close(fused, wanted, rtol=2e-2, atol=2e-2)


def test_a_token_of_nan_stays_alone_and_values_stay_to_the_bit():
    fused = torch.randn(SEQ, BATCH, 36)
    fused[1, 0, :12] = float("nan")
    before = fused.clone()
    rotary_(fused, *_angles(2, torch.float32), heads=(3, 3, 4), interleaved=True, impl="triton")
    assert torch.equal(fused.isnan(), before.isnan())
    values = (fused.unflatten(2, (3, 3, 4))[:, :, 1:, -1], before.unflatten(2, (3, 3, 4))[:, :, 1:, -1])
    assert torch.equal(*values)
