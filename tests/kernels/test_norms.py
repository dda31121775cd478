"""Layer norm and RMS norm: the Triton kernels (in the interpreter) and torch's fused ops equal the plain formulas."""

import pytest
import torch

from megazero.kernels.layer_norm import add_layer_norm, layer_norm, layer_norm_reference
from megazero.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference

pytest.importorskip("triton")
NORMS = {"layer_norm": (layer_norm, layer_norm_reference, 2), "rms_norm": (rms_norm, rms_norm_reference, 1)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WIDTHS = (1, 2, 3, 7, 33, 1000, 1024, 4097)


def _values(run, x, parameters, dy):
    """Output and the gradients of all inputs, as `run` computes them."""
    leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
    y = run(*leaves)
    assert y.dtype == x.dtype and y.shape == x.shape
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def _assert_same(name, impl, x, dy):
    op, reference, count = NORMS[name]
    parameters = [torch.randn(x.shape[-1]).to(x.dtype) for _ in range(count)]
    got = _values(lambda *a: op(*a, 1e-5, impl), x, parameters, dy)
    wanted = _values(lambda *a: reference(*a, 1e-5), x, parameters, dy)
    tolerance = TOLERANCE[x.dtype]
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        # relative to the tensor's largest element: sums over a row cancel, and leave rounding of the row's size
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NORMS)
def test_any_width_equals_the_formulas(name, width, dtype):  # C145
    torch.manual_seed(width)
    x, dy = torch.randn(2, 3, 2, width).to(dtype).unbind(-2)
    for impl in ("triton", "torch"):
        _assert_same(name, impl, x, dy)


@pytest.mark.parametrize("width", (9000, 20000, 70000))
@pytest.mark.parametrize("name", NORMS)
def test_rows_wider_than_a_block_are_normed_whole(name, width):  # C145
    torch.manual_seed(0)
    x, dy = torch.randn(2, 2, width)
    x[:, 8500:] += 5.0  # what lies past the first block weighs
    _assert_same(name, "triton", x, dy)


@pytest.mark.parametrize("name", NORMS)
def test_more_rows_than_programs(name, monkeypatch):
    monkeypatch.setattr(f"megazero.kernels.{name}.PARTIALS", 4)
    torch.manual_seed(0)
    x, dy = torch.randn(2, 11, 3)
    _assert_same(name, "triton", x, dy)


@pytest.mark.parametrize("name", NORMS)
def test_any_strides(name):
    torch.manual_seed(0)
    dense = torch.randn(5, 4, 6, 16)
    inputs = {
        "transposed leading dims": dense[0].transpose(0, 1),
        "a slice of each row": dense[0, :, :, 3:10],
        "every second row": dense[0, :, ::2],
        "expanded": dense[0, :1].expand(4, 6, 16),
        "transposed rows": dense[0, 0].t(),
        "three strides": dense[::2, ::2, ::2],
        "one row": dense[0, 0, 0],
    }
    for x in inputs.values():
        _assert_same(name, "triton", x, torch.randn(x.shape))
        _assert_same(name, "triton", torch.randn(x.shape), x)
        _assert_same(name, "triton", x, torch.ones(1).expand(x.shape))


@pytest.mark.parametrize("name", NORMS)
def test_no_rows(name):
    x = torch.randn(0, 3, 8)
    _, *gradients = _values(lambda *a: NORMS[name][0](*a, 1e-5, "triton"), x, [torch.ones(8)] * NORMS[name][2], x)
    assert all(not g.any() for g in gradients)


@pytest.mark.parametrize("name", NORMS)
def test_offsets_beyond_two_to_the_31(name):
    far = torch.empty(2**31 + 128, dtype=torch.bfloat16)  # only the pages of two rows are ever touched
    x = far.as_strided((2, 8), (2**31 + 64, 1))
    x.copy_(torch.randn(2, 8))
    _assert_same(name, "triton", x, torch.randn(2, 8).bfloat16())


@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_large_values_stay_exact_enough(name):
    torch.manual_seed(0)
    x = (torch.randn(3, 1000) + 300).half()  # squares and sums are beyond fp16
    _assert_same(name, "triton", x, torch.randn(3, 1000).half())


@pytest.mark.parametrize("name", NORMS)
def test_a_row_of_nan_stays_alone(name):
    x = torch.randn(3, 8)
    x[1] = float("nan")
    y = NORMS[name][0](x, *[torch.ones(8)] * NORMS[name][2], 1e-5, "triton")
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_weight_gradients_of_16_bit_numbers_are_summed_in_fp32(op: str) -> None:
    """C085: 8192 rows whose gradients lean one way. A bf16 sum would stop growing: half and more of it is lost."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 64, generator=generator).bfloat16()
    dy = (torch.randn(8192, 64, generator=generator) + 1.0).bfloat16()
    names = ("weight", "bias") if op == "layer_norm" else ("weight",)
    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        parameters = []
        for name in names:
            parameter = torch.nn.Parameter(torch.full((64,), float(name == "weight"), dtype=dtype))
            parameter.grad_dtype = torch.promote_types(dtype, torch.float32)
            parameters.append(parameter)
        y = {"layer_norm": layer_norm, "rms_norm": rms_norm}[op](x.to(dtype), *parameters, 1e-5, impl="torch")
        y.backward(dy.to(dtype))
        found[dtype] = [parameter.grad.double() for parameter in parameters]
    for got, want in zip(found[torch.bfloat16], found[torch.float64], strict=True):
        assert ((got - want).norm() / want.norm()).item() < 5e-3


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_adds_is_the_norm_of_the_sum(name):
    """Both results and all gradients, for rows of one block and of many, a wider residual, any strides."""
    torch.manual_seed(0)
    _, reference, count = NORMS[name]
    adding = {"layer_norm": add_layer_norm, "rms_norm": add_rms_norm}[name]
    dense = torch.randn(4, 3, 66)
    pairs = [
        (torch.randn(3, 33), torch.randn(3, 33)), (dense[0, :, ::2], dense[1].t()[:3, :1].expand(3, 33)),
        (dense.transpose(0, 1), torch.randn(3, 4, 66)), (torch.randn(3, 9).double(), torch.randn(3, 9).double()),
        (torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()),
        (torch.randn(3, 64).bfloat16(), dense[0, :, :64]), (torch.randn(2, 17000), torch.randn(2, 17000)),
    ]
    for x, residual in pairs:
        wider = torch.promote_types(x.dtype, residual.dtype)
        parameters = [torch.randn(x.shape[-1]).to(wider) for _ in range(count)]
        dy, dh = torch.randn(2, *x.shape).to(wider)
        found = []
        for impl in ("triton", "torch", None):
            leaves = [t.detach().requires_grad_() for t in (x, residual, *parameters)]
            if impl is None:
                h = leaves[0] + leaves[1]
                y = reference(h, *leaves[2:], 1e-5)
            else:
                y, h = adding(*leaves, 1e-5, impl)
            torch.autograd.backward((y, h), (dy, dh))
            found.append([y.detach(), h.detach(), *(leaf.grad for leaf in leaves)])
        tolerance = TOLERANCE[x.dtype]
        for got in found[:2]:
            for a, b in zip(got, found[2], strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))
