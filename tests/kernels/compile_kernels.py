"""Compiles the Triton kernels of one module for a GPU that need not be here; prints one JSON line a kernel.

    python -m tests.kernels.compile_kernels megazero.kernels.layer_norm bf16 cuda:90

Run as a process of its own, since under TRITON_INTERPRET=1 there is nothing to compile. Arguments of a kernel are
typed by their names: NAME_ptr points to statistics if NAME is one of STATISTICS, else to tensors of the dtype.
"""

import importlib
import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

STATISTICS = ("mean", "rstd", "mean_g", "mean_gx", "dw", "db")  # fp32, as are the partial rows of a sum
WIDTHS = {"whole rows": (4096, True), "wide rows": (8192, False)}  # block size, whether it is the whole row


def argument_type(name: str, dtype: str) -> str:
    if name.endswith("_ptr"):
        return "*fp32" if name.removesuffix("_ptr") in STATISTICS else f"*{dtype}"
    if name.endswith("_stride"):
        return "i64"
    return "fp32" if name == "eps" else "i32"


def main(module: str, dtype: str, *targets: str) -> None:
    kernels = {name: k for name, k in vars(importlib.import_module(module)).items() if hasattr(k, "arg_names")}
    for target in targets:
        backend, arch = target.split(":")
        gpu = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)
        for name, kernel in kernels.items():
            if not any(argument.endswith("_ptr") for argument in kernel.arg_names):
                continue  # a function that kernels call
            for width, (block, whole) in WIDTHS.items():
                constants = {"BLOCK": block, "WHOLE": whole, "STATISTICS": tl.float32}
                signature = {a: "constexpr" if a in constants else argument_type(a, dtype) for a in kernel.arg_names}
                source = ASTSource(kernel, signature, constants)
                built = triton.compile(source, target=gpu, options={"num_warps": min(16, block // 512)})
                sizes = {stage: len(code) for stage, code in built.asm.items() if stage in ("cubin", "hsaco")}
                print(json.dumps({"kernel": name, "width": width, "target": target, **sizes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
