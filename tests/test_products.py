"""bf16 products through fp32 on a CPU without bf16 instructions: chosen once, the same numbers, and no product left."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain_gpt
from megazero.flags import parse
from megazero.parallel.groups import World, open_mesh
from megazero.products import Products, describe_products, products_of
from tests.training import SMALL, Recorder

WIDE = Products(through=torch.float32)
# Any operation that multiplies matrices; attention's fused op by the start of its name.
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm")
ATTENTION = "_scaled_dot_product"


class InBf16(TorchDispatchMode):
    """Notes products of bf16 tensors."""

    def __init__(self):
        super().__init__()
        self.found, self.products = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS or name.startswith(ATTENTION):
            self.products += 1
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


def train(products, flags):
    """The losses of two steps, and the products of bf16 tensors among all of them."""
    config, _ = parse(f"{SMALL} --bf16 --train-iters 2 {flags}".split())
    plan, record, seen = pretrain_gpt.prepare(config, World()), Recorder(), InBf16()
    trainer, progress = pretrain_gpt.build(plan, open_mesh(plan.topology, products=products), record)
    with seen:
        trainer.train(progress, 2, None)
    assert seen.products > 100
    return [step["lm_loss"] for step in record.steps], seen.found


@pytest.mark.parametrize(
    "flags", ["--num-experts 4 --num-layers 2 --expert-interval 2", "--attention-backend unfused --loss-chunk-size 9"]
)
def test_no_product_of_a_model_is_taken_in_bf16(flags):
    """Dense layers, experts, attention by torch's op and in three steps, head and loss; forward and backward."""
    losses, left = train(WIDE, flags)
    assert not left
    own, found = train(Products(), flags)
    assert {"mm", "addmm"} <= found, "this test can see them"
    assert losses == pytest.approx(own, rel=2e-3)
