"""Which implementation of an op runs: a Triton kernel, plain torch, or what torch.compile makes of the formulas.

The choice is made from the tensor and from what the caller asked, never from the environment or a global. This is
the only file that imports triton: where there is no wheel for a machine, everything runs on the torch path.
"""

from __future__ import annotations

import functools
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

IMPLS = ("auto", "triton", "torch", "compiled")
ATTENTIONS = ("auto", "sdpa", "unfused")
OPS = (
    "adam",
    "bias_gelu",
    "cross_entropy",
    "dropout_add",
    "layer_norm",
    "rms_norm",
    "rotary",
    "softmax",
    "squared_norm",
    "swiglu",
)
# What torch.compile can take whole: formulas of tensors alone. Products, exchanges, weight gradients and draws stay as
# they are between them, and so do rotary positions, which are turned in place.
COMPILED = ("bias_gelu", "dropout_add", "layer_norm", "rms_norm", "swiglu")
BACKEND = "inductor"            # of torch.compile
UNSPECIALIZED = ("seed",)       # arguments of kernels that differ from step to step


@dataclass(frozen=True)
class Kernels:
    """The implementation of each op: one for all (`--kernels`) and exceptions for some (`--kernel OP=IMPL`).

    `attention` (`--attention-backend`) is torch's fused op (sdpa), a softmax between two matrix products (unfused), or
    auto: the former wherever it does what is asked. "compiled" for all means auto for ops that are not among COMPILED.
    Raises ValueError for an unknown op or implementation, and for "triton" where triton is not installed.
    """

    default: str = "auto"
    exceptions: tuple[str, ...] = ()  # each "OP=IMPL"; the last one for an op counts
    attention: str = "auto"

    def __post_init__(self) -> None:
        assert self.attention in ATTENTIONS, self.attention
        _check_impl("--kernels ", self.default)
        for text in self.exceptions:
            op, _, impl = text.partition("=")
            if op not in OPS:
                raise ValueError(f"--kernel {text}: no op {op!r}; it is OP=IMPL with OP one of {', '.join(OPS)}")
            _check_impl(f"--kernel {op}=", impl)

    def impl(self, op: str) -> str:
        """What to hand to the op as `impl`."""
        assert op in OPS, op
        impl = dict(text.split("=") for text in self.exceptions).get(op, self.default)
        return "auto" if impl == "compiled" and op not in COMPILED else impl

    def norm(self, kind: str) -> str:
        """`impl` of the norm that a model calls LayerNorm or RMSNorm."""
        return self.impl("layer_norm" if kind == "LayerNorm" else "rms_norm")


def use_triton(x: Tensor, impl: str) -> bool:
    """Whether `impl` means the Triton kernel for a tensor like x; "auto" means it on a GPU where triton is installed.

    Raises ValueError for "triton" where the kernel cannot run.
    """
    if impl == "auto":
        return x.is_cuda and triton is not None
    _check_impl("impl ", impl)
    if impl == "triton" and not x.is_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(f"impl 'triton' needs a CUDA tensor, not one on {x.device} (or triton's interpreter)")
    return impl == "triton"


def use_compiled(x: Tensor, impl: str, *, has_own: bool = False) -> bool:
    """Whether `impl` means what torch.compile makes of the formulas. `has_own`: on a CPU torch has an op of its own,
    which is faster there than compiled code, and stays."""
    return impl == "compiled" and (x.is_cuda or not has_own)


@functools.cache
def compiled(function: Callable) -> Callable:
    """What torch.compile makes of a function of tensors, the same for all layers that use it. Compiled code lies where
    torch puts it; ranks of a host that compile the same wait for each other's files and take them."""
    return torch.compile(function, backend=BACKEND)


def check_compiler(device: torch.device, cxx: str | None = None) -> None:
    """Raises ValueError, naming what is missing, where torch.compile could compile nothing for `device`: triton for a
    GPU; for a CPU a C++ compiler (`cxx`, None: torch's choice) and the headers of Python."""
    if device.type == "cuda":
        if triton is None:
            raise ValueError("--compile: triton is not installed here, and a GPU needs it (pip install triton)")
        return
    compiler = cxx or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler.split()[0]) is None:
        raise ValueError(f"--compile: no C++ compiler {compiler} is found here: install it, or name another one in CXX")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise ValueError(f"--compile: Python's headers are not installed here (python3-dev): there is no {header}")


def jit(function: Callable) -> Callable:
    """triton.jit, which compiles anew for other values of no argument named in UNSPECIALIZED; the bare function where
    triton is not installed, and then nothing calls it."""
    return function if triton is None else triton.jit(function, do_not_specialize=UNSPECIALIZED)


def _check_impl(flag: str, impl: str) -> None:
    if impl not in IMPLS:
        raise ValueError(f"{flag}{impl!r}: it is one of {', '.join(IMPLS)}")
    if impl == "triton" and triton is None:
        raise ValueError(f"{flag}{impl!r}: triton is not installed here (pip install triton); 'torch' needs none")
