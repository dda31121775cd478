"""What tests/test_compiled.py shows, through the C++ compiler, which takes minutes: scripts/soak.sh runs it."""

import pytest

from tests.test_compiled import check
from tests.test_parity import ZB_H1
from tests.training import LLAMA


@pytest.mark.parametrize(
    ("layout", "flags"),
    [((1, 1, 1), LLAMA), ((2, 1, 1), LLAMA), ((1, 2, 1), f"{LLAMA} {ZB_H1}")],
)
def test_through_the_compiler_the_same_model_is_trained(layout, flags):
    check(layout, flags, None)
