"""Choosing kernels: by flag, by op, by device; without triton everything runs on the torch path."""

import subprocess
import sys

import pytest
import torch

from megazero.kernels import dispatch
from megazero.kernels.dispatch import OPS, Kernels, use_triton

from ..harness import ROOT


def test_one_choice_for_all_and_exceptions_for_some():
    kernels = Kernels("torch", ("rms_norm=triton", "rms_norm=auto"))
    assert kernels.impl("layer_norm") == "torch" and kernels.impl("rms_norm") == "auto"
    assert {Kernels().impl(op) for op in OPS} == {"auto"}
    assert Kernels("torch") == Kernels("torch") and hash(Kernels("torch"))


@pytest.mark.parametrize(
    "default, exceptions, words",
    [
        ("cuda", (), "--kernels 'cuda': it is one of auto, triton, torch"),
        ("auto", ("layernorm=torch",), "--kernel layernorm=torch: no op 'layernorm'(.*)layer_norm"),
        ("auto", ("layer_norm=fast",), "--kernel layer_norm='fast': it is one of"),
        ("auto", ("layer_norm",), "--kernel layer_norm='': it is one of"),
    ],
)
def test_an_unknown_op_or_implementation_is_refused_with_its_flag(default, exceptions, words):  # C139
    with pytest.raises(ValueError, match=words):
        Kernels(default, exceptions)


def test_auto_on_a_cpu_is_torch():
    assert not use_triton(torch.zeros(1), "auto") and not use_triton(torch.zeros(1), "torch")


@pytest.mark.skipif(dispatch.triton is None, reason="triton is not installed")
def test_triton_on_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    assert use_triton(torch.zeros(1), "triton")  # in the interpreter, which conftest.py asks for
    monkeypatch.setattr(dispatch.triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="needs a CUDA tensor"):
        use_triton(torch.zeros(1), "triton")


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # an import of it now fails as if it were not installed
import torch
from megazero.kernels.dispatch import Kernels
from megazero.kernels.layer_norm import layer_norm
from megazero.kernels.rms_norm import rms_norm
x, w = torch.randn(2, 8, requires_grad=True), torch.ones(8)
(layer_norm(x, w, w) + rms_norm(x, w, impl="torch")).sum().backward()
for refused in (lambda: Kernels("triton"), lambda: rms_norm(x, w, impl="triton")):
    try:
        refused()
    except ValueError as error:
        print(error)
"""


def test_without_triton_the_torch_path_works_and_triton_is_refused():  # C139
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("triton is not installed here") == 2
