"""SwiGLU and bias + GELU: the Triton kernels (in the interpreter) and torch's ops equal the plain formulas."""

import pytest
import torch

from megazero.kernels.bias_gelu import bias_gelu, bias_gelu_reference
from megazero.kernels.swiglu import swiglu, swiglu_reference

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")     # infinity is meant
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WIDTHS = (1, 2, 3, 7, 33, 1000, 1024, 4097, 20000, 70000)
OPS = {
    "swiglu": (swiglu, swiglu_reference, ()),
    "gelu": (bias_gelu, bias_gelu_reference, ("none",)),
    "gelu_tanh": (bias_gelu, bias_gelu_reference, ("tanh",)),
}


def _values(run, leaves, dy):
    """Output and the gradients of all inputs, as `run` computes them."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = run(*leaves)
    assert y.dtype == leaves[0].dtype
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def _assert_same(name, impl, x, dy, biased=True):
    op, reference, rest = OPS[name]
    leaves = [x]
    if name != "swiglu" and biased:
        leaves.append(torch.randn(x.shape[-1]).to(x.dtype))
    elif name != "swiglu":
        rest = (None, *rest)
    got = _values(lambda *a: op(*a, *rest, impl=impl), leaves, dy)
    wanted = _values(lambda *a: reference(*a, *rest), leaves, dy)
    tolerance = TOLERANCE[x.dtype]
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))


def _input(name, *shape, dtype=torch.float32):
    """x and dy [*shape], x twice as wide for a gate and an up."""
    x = torch.randn(*shape[:-1], shape[-1] * (2 if name == "swiglu" else 1)) * 3
    return x.to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", OPS)
def test_any_width_and_dtype_equals_the_formulas(name, width):
    torch.manual_seed(width)
    if width > 4000:        # the interpreter takes its time for each block
        _assert_same(name, "triton", *_input(name, 2 if width < 20000 else 1, width))
        return
    for dtype in TOLERANCE:
        for impl in ("triton", "torch"):
            _assert_same(name, impl, *_input(name, 2, 2, width, dtype=dtype))
    _assert_same(name, "triton", *_input(name, 3, width), biased=False)


@pytest.mark.parametrize("name", OPS)
def test_any_strides(name):
    torch.manual_seed(0)
    dense = torch.randn(3, 2, 4, 16)
    inputs = {
        "transposed leading dims": dense[0].transpose(0, 1),
        "a slice of each row": dense[0, :, :, 3:9],
        "every second row": dense[0, :, ::2],
        "expanded": dense[0, :1].expand(2, 4, 16),
        "transposed rows": dense[0, 0].t(),
        "three strides": dense[::2, ::2, ::2],
        "one row": dense[0, 0, 0],
    }
    for x in inputs.values():
        narrow = x.chunk(2, -1)[0] if name == "swiglu" else x
        _assert_same(name, "triton", x, narrow)
        _assert_same(name, "triton", torch.randn(x.shape), torch.ones(1).expand(narrow.shape))


@pytest.mark.parametrize("name", OPS)
def test_more_rows_than_programs_and_none(name, monkeypatch):
    monkeypatch.setattr("megazero.kernels.bias_gelu.PARTIALS", 4)
    _assert_same(name, "triton", *_input(name, 11, 3))
    x, dy = _input(name, 0, 3, 8)
    op, _, rest = OPS[name]
    leaves = [x] if name == "swiglu" else [x, torch.ones(8)]
    assert not any(t.any() for t in _values(lambda *a: op(*a, *rest, impl="triton"), leaves, dy))


@pytest.mark.parametrize("name", OPS)
def test_offsets_beyond_two_to_the_31(name):
    far = torch.empty(2**31 + 128, dtype=torch.bfloat16)  # only the pages of two rows are ever touched
    x = far.as_strided((2, 8), (2**31 + 64, 1))
    x.copy_(torch.randn(2, 8))
    _assert_same(name, "triton", x, torch.randn(2, 4 if name == "swiglu" else 8).bfloat16())


@pytest.mark.parametrize("name", OPS)
def test_nan_stays_alone_and_large_values_saturate(name):
    """silu and gelu of -1e4 are -0, of 1e4 the value itself, and their slopes 0 and 1: no infinity meets a zero."""
    torch.manual_seed(0)
    x, dy = _input(name, 4, 8)
    x[1], x[2], x[3] = float("nan"), 1e4, -1e4
    op, _, rest = OPS[name]
    arguments = () if name == "swiglu" else (None, *rest)
    y, dx = _values(lambda a: op(a, *arguments, impl="triton"), [x], dy)
    assert y[1].isnan().all() and dx[1].isnan().all()
    for t in (y, dx):
        assert t[[0, 2, 3]].isfinite().all()
    assert torch.equal(y[2], torch.full((8,), 1e8 if name == "swiglu" else 1e4)) and not y[3].any()
