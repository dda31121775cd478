"""What tests/test_compiled.py shows, through the C++ compiler, which takes minutes: scripts/soak.sh runs it."""

from unittest import mock

import pytest
import torch

from megazero.kernels import dispatch
from megazero.kernels.dispatch import check_compiler
from megazero.kernels.swiglu import swiglu
from tests.test_compiled import CPU, check
from tests.test_parity import ZB_H1
from tests.training import LLAMA


@pytest.mark.parametrize(
    ("layout", "flags"),
    [((1, 1, 1), LLAMA), ((2, 1, 1), LLAMA), ((1, 2, 1), f"{LLAMA} {ZB_H1}")],
)
def test_through_the_compiler_the_same_model_is_trained(layout, flags):
    check(layout, flags, None)


def test_a_compiler_makes_of_a_formula_what_torch_does():
    """One formula through all of torch.compile, forward and backward, where there is a compiler."""
    with mock.patch.object(dispatch, "BACKEND", "inductor"):
        try:
            check_compiler(CPU)
        except ValueError as missing:
            pytest.skip(str(missing))
        dispatch.compiled.cache_clear()
        gate_and_up = torch.randn(5, 26, dtype=torch.float64, requires_grad=True)
        found, expected = (
            torch.autograd.grad(swiglu(gate_and_up, impl).sin().sum(), gate_and_up)[0]
            for impl in ("compiled", "torch")
        )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
