"""--compile: formulas between the products go through torch.compile whole, and any layout trains the same model."""

from unittest import mock

import pytest
import torch

import pretrain_gpt
from megazero.config import RunConfig
from megazero.kernels import dispatch
from megazero.kernels.dispatch import COMPILED, OPS, Kernels, check_compiler
from tests.test_parity import LIMITS, ZB_H1, one_rank
from tests.training import LLAMA, SMALL, distance, train

RECOMPUTED = "--recompute-method uniform --recompute-num-layers 1"
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def traced(trainer):
    """Of torch.compile all but the C++ compiler, which takes seconds for each formula; scripts/soak.sh has it."""
    dispatch.BACKEND = "aot_eager"
    dispatch.compiled.cache_clear()


def graphs(trainer):
    """How many formulas were captured, and how often that broke off."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def check(layout, flags, before):
    """fp64, five steps: losses, norms, weights, moments are those of one rank without; each formula is one graph."""
    got = train(f"--fp64 --compile {flags}", layout, before=before, look=graphs, timeout=1200)
    dispatch.compiled.cache_clear()
    for name, value in distance(got, one_rank(flags)).items():
        assert value <= LIMITS[name], f"{name} differ by {value:.1e}"
    assert all(captured > 2 and not broken for captured, broken in got.seen), got.seen


@pytest.mark.parametrize(
    ("layout", "flags"), [((1, 1, 1), LLAMA), ((1, 2, 1), f"{LLAMA} --recompute-granularity full {RECOMPUTED} {ZB_H1}")]
)
def test_compiled_formulas_train_the_same_model(layout, flags):
    with mock.patch.object(dispatch, "BACKEND", "aot_eager"):
        check(layout, flags, traced)


def test_without_compiler_it_is_refused_before_any_process_waits(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert pretrain_gpt.main(f"{SMALL} --compile".split()) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "--compile: no C++ compiler no-such-compiler -O2 is found here" in told
    monkeypatch.setattr(dispatch, "triton", None)
    with pytest.raises(ValueError, match="--compile: triton is not installed here, and a GPU needs it"):
        check_compiler(GPU)
    monkeypatch.setattr(dispatch.sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(ValueError, match="--compile: Python's headers are not installed here"):
        check_compiler(CPU, "sh")


def test_what_cannot_be_compiled_is_chosen_as_ever():
    kernels = Kernels("compiled", ("softmax=torch",))
    assert {op: kernels.impl(op) for op in OPS} == {
        op: "torch" if op == "softmax" else "compiled" if op in COMPILED else "auto" for op in OPS
    }
    with pytest.raises(ValueError, match="--compile and --kernels torch: give one of them, not both"):
        RunConfig(compile=True, kernels="torch")
