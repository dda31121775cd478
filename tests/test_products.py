"""bf16 products through fp32, fp32 products by oneDNN: chosen once by the CPU, the same numbers, no product left."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_gpt
from megazero import products as products_module
from megazero.flags import parse
from megazero.parallel.groups import World, open_mesh
from megazero.products import Products, describe_products, products_of
from tests.training import LLAMA, SMALL, Recorder

WIDE = Products(through=torch.float32)
# Any operation that multiplies matrices; attention's fused op by the start of its name.
PRODUCTS = ("_linear_pointwise", "mm", "addmm", "addmm_", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm")
ATTENTION = "_scaled_dot_product"


class InBf16(TorchDispatchMode):
    """Notes products of bf16 tensors, and those by oneDNN."""

    def __init__(self):
        super().__init__()
        self.found, self.products, self.onednn, self.shapes = set(), 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS or name.startswith(ATTENTION):
            self.products += 1
            if name == "_linear_pointwise":
                self.onednn += 1
                self.shapes.add((args[0].shape, args[1].shape))
            if any(isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 for x in args):
                self.found.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("capabilities", "through"),
    [
        ({"architecture": "x86_64", "avx512_bf16": True}, None),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, None),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"architecture": "x86_64"}, torch.float32),
        ({"architecture": "aarch64"}, None),
    ],
)
def test_the_processor_decides(capabilities, through):
    """And only for bf16 on a CPU; a run says so where it matters."""
    with mock.patch.object(torch.cpu, "get_capabilities", lambda: capabilities):
        chosen = products_of(torch.device("cpu"))
        assert chosen.through == through and products_of(torch.device("cuda")).through is None
    assert len(describe_products(chosen, torch.bfloat16)) == (through is not None)
    assert not describe_products(chosen, torch.float32) and not chosen.widens(torch.ones(1))


AMD = {"architecture": "x86_64", "sse4a": True, "avx512_f": True, "avx512_bf16": True}


@pytest.mark.parametrize(
    ("capabilities", "library", "onednn"),
    [
        (AMD, "auto", True),
        (AMD, "torch", False),
        (AMD | {"avx512_f": False}, "auto", False),
        (AMD | {"sse4a": False}, "auto", False),
        (AMD | {"sse4a": False}, "onednn", True),
        ({}, "auto", False),
    ],
)
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_the_processor_or_the_user_chooses_the_library(capabilities, library, onednn):
    with (
        mock.patch.object(torch.cpu, "get_capabilities", lambda: capabilities),
        mock.patch.object(torch.backends.mkl, "is_available", lambda: True),
    ):
        chosen = products_of(torch.device("cpu"), library)
    assert chosen.onednn == onednn and len(describe_products(chosen, torch.float32)) == onednn
    with pytest.raises(ValueError, match="--cpu-matmul onednn: needs a run on a CPU"):
        products_of(torch.device("cuda"), "onednn")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_by_onednn_are_the_same(dtype, monkeypatch):
    """Of matrices that are cut, transposed and three-dimensional; other dtypes and small products are left to torch."""
    generator = torch.Generator().manual_seed(1)
    left, weight, bias = (torch.randn(*n, generator=generator).to(dtype) for n in ((6, 7, 90), (40, 90), (40,)))
    left, weight = left[:, :, 3:83].transpose(0, 1), weight[:, 10:]
    rows, fast = left.flatten(0, 1), Products(onednn=True)
    for small, step in ((0, 1), (0, 32), (2**20, 1)):
        monkeypatch.setattr(products_module, "SMALL", small)
        monkeypatch.setattr(products_module, "ROWS", step)
        with InBf16() as seen:
            found = [
                fast.of(left, weight.T), fast.linear(left, weight, bias), fast.linear(left, weight),
                torch.empty(42, 40, dtype=dtype), torch.ones(80, 80, dtype=torch.promote_types(dtype, torch.float32)),
            ]
            fast.into_(found[3], rows, weight.T, bias)
            fast.add_(found[4], rows.T, rows)
        assert seen.onednn == (5 if dtype == torch.float32 and small == 0 else 0)
        exact = left.double() @ weight.double().T
        expected = [exact, exact + bias, exact, (exact + bias).flatten(0, 1), 1 + rows.double().T @ rows.double()]
        found.append(torch.ones(80, 4, dtype=found[4].dtype))
        fast.add_(found[5], rows.T, rows[:, :4])                # the right one is small
        expected.append(1 + rows.double().T @ rows[:, :4].double())
        for got, want in zip(found, expected, strict=True):
            error = (got - want).abs().max() / want.abs().max()
            assert error < {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 2**-8}[dtype]
        # A dispatch mode would hide what autograd takes for a view.
        assert not fast.linear(left, weight, bias)._is_view() and not fast.linear(left, weight)._is_view()


def test_only_for_onednn_is_the_smaller_matrix_put_first():
    """Elsewhere a gradient would be added column by column."""
    left, right, grad = torch.ones(64, 90).bfloat16(), torch.ones(64, 4).bfloat16(), torch.zeros(90, 4)
    with mock.patch.object(torch, "matmul", wraps=torch.matmul) as multiplied:
        Products().add_(grad, left.T, right)
    assert [tuple(x.shape) for x in multiplied.call_args.args] == [(90, 64), (64, 4)] and (grad == 64).all()


def test_onednn_meets_few_shapes_whatever_the_rows():
    """As those of an expert, which are others at each step: memory would grow with each."""
    weight, grad, fast = torch.ones(64, 128), torch.zeros(64, 128), Products(onednn=True)
    with InBf16() as seen:
        for rows in range(200, 400, 3):
            x = torch.ones(rows, 128)
            out = fast.linear(x, weight)
            fast.add_(grad, out.T, x)
            assert (out == 128).all() and out.shape == (rows, 64)
    assert (grad == 128 * sum(range(200, 400, 3))).all()
    assert 2 <= len(seen.shapes) <= 8 < seen.onednn


def test_results_are_rounded_as_those_of_bf16_products():
    """Sums are taken in fp32 either way, in another order perhaps: one unit in the last place at the most."""
    generator = torch.Generator().manual_seed(1)
    left, right, bias = (torch.randn(*n, generator=generator).bfloat16() for n in ((33, 50), (50, 20), (20,)))
    out, expected = torch.empty(33, 20).bfloat16(), left.double() @ right.double() + bias.double()
    for products in (Products(), WIDE):
        products.into_(out, left, right, bias)
        assert (out.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    found, own = WIDE.of(left, right), left @ right
    assert found.dtype == torch.bfloat16
    assert (found == own).float().mean() > 0.95
    torch.testing.assert_close(found, own, rtol=2**-7, atol=1e-6)
    grads = []
    for products in (Products(), WIDE):
        grads.append(torch.ones(33, 20))
        products.add_(grads[-1], left, right)
    torch.testing.assert_close(grads[1], grads[0], rtol=2**-7, atol=1e-6)
    assert torch.equal(grads[1], 1 + found.float()), "the product is rounded before it is added"


def train(products, flags, seen):
    """The losses of two steps, of which `seen` sees all operations. `products` None: as the flags say."""
    config, _ = parse(f"{SMALL} --train-iters 2 {flags}".split())
    products = products or products_of(torch.device("cpu"), config.run.cpu_matmul)
    plan, record = pretrain_gpt.prepare(config, World()), Recorder()
    trainer, progress = pretrain_gpt.build(plan, open_mesh(plan.topology, products=products), record)
    with seen:
        trainer.train(progress, 2, None)
    return [step["lm_loss"] for step in record.steps]


def watched(products, flags):
    """The same, and what was seen of all products."""
    seen = InBf16()
    losses = train(products, flags, seen)
    assert seen.products > 100
    return losses, seen


@pytest.mark.parametrize(
    "flags", ["--num-experts 4 --num-layers 2 --expert-interval 2", "--attention-backend unfused --loss-chunk-size 9"]
)
def test_no_product_of_a_model_is_taken_in_bf16(flags):
    """Dense layers, experts, attention by torch's op and in three steps, head and loss; forward and backward."""
    losses, seen = watched(WIDE, f"--bf16 {flags}")
    assert not seen.found
    own, seen = watched(Products(), f"--bf16 {flags}")
    assert {"mm", "addmm"} <= seen.found, "this test can see them"
    assert losses == pytest.approx(own, rel=2e-3)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_a_run_multiplies_by_the_library_that_is_asked_for(monkeypatch):
    """Experts, dense layers, the head; forward, and both gradients."""
    monkeypatch.setattr(products_module, "SMALL", 0)
    monkeypatch.setattr(products_module, "ROWS", 1)
    flags = "--num-experts 4 --num-layers 2 --expert-interval 2"
    losses, seen = watched(None, f"{flags} --cpu-matmul onednn")
    own, without = watched(None, f"{flags} --cpu-matmul torch")
    assert without.onednn == 0 and seen.onednn > 0.8 * seen.products
    assert losses == pytest.approx(own, rel=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_positions_turn_what_onednn_multiplied(monkeypatch):
    """In place, which autograd forbids where it takes a product for a view: unwatched, as a mode would hide that."""
    monkeypatch.setattr(products_module, "SMALL", 0)
    own, found = (
        train(None, f"{LLAMA} --num-layers 2 --cpu-matmul {library}", nullcontext()) for library in ("torch", "onednn")
    )
    assert found == pytest.approx(own, rel=1e-5)
