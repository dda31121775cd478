"""Compiles every Triton kernel for GPUs that need not be here, and prints what became of it.

    python benchmarks/kernels_static.py [--target cuda:90 ...] [--op swiglu ...] [--json FILE]

Registers, spilled bytes and shared memory are read from the binary; 16-byte vectors from its assembly; bytes per
element are counted from the loads and stores of the kernel's intermediate code, beside the least possible. The
kernels are those of kernel_list.py, for contiguous bf16 rows whose width is a multiple of 16.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed
os.environ["TRITON_INTERPRET"] = "0"        # in the interpreter there is nothing to compile

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from benchmarks.kernel_list import CASES, FP32, Case  # noqa: E402

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
SIZES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
TYPES = {"eps": "fp32", "seed": "i64"}      # of arguments that are no pointers; otherwise i32
POINTERS = {"mask": "u8", "label": "i64", "factor": "fp64", "partial": "fp64"}      # to anything but the dtype or fp32
LOOSE = ("rows", "each", "first", "real", "queries", "batch", "heads", "seed", "row")   # no multiples of 16
PASSES_ON = "addptr|splat|broadcast|expand_dims|bitcast|reshape"       # operations on a pointer


class Access(NamedTuple):
    """One load or store of a kernel."""

    pointer: str        # the argument, without _ptr
    elements: int       # at once; 1 is a scalar
    bytes: int
    depth: int          # of the loop it stands in


def build(case: Case, target: str) -> Any:
    """The kernel, compiled with the types and alignments that a launch with contiguous rows would give it."""
    kernel = vars(importlib.import_module(f"megazero.kernels.{case.op}"))[case.kernel]
    constants = {n: tl.float32 if v == FP32 else v for n, v in case.constants.items() if n in kernel.arg_names}
    constants |= {n: 1 for n in kernel.arg_names if n.endswith("_inner")}
    signature, aligned = {}, {}
    for number, name in enumerate(kernel.arg_names):
        stem = name.removesuffix("_ptr")
        pointer, kind = stem != name, TYPES.get(name, "i64" if name.endswith("_stride") else "i32")
        if name in constants:
            signature[name] = "constexpr"
            continue
        if stem in case.fp32:
            kind = "fp32"
        elif pointer:
            kind = POINTERS.get(stem, "bf16")
        kind = kernel.params[number].annotation_type or kind
        signature[name] = f"*{kind}" if pointer else kind
        if pointer or kind[0] == "i" and name not in LOOSE:
            aligned[(number,)] = [["tt.divisibility", 16]]
    backend, arch = target.split(":")
    gpu = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=gpu, options={"num_warps": case.constants["num_warps"]})


def accesses(code: str) -> list[Access]:
    """The loads and stores of Triton's intermediate code, each with the argument that its pointer comes from."""
    came_from: dict[str, str] = {}
    found, depth = [], 0
    for line in code.splitlines():
        line = re.sub(r"loc\([^)]*\)+", "", line).strip()
        made = re.match(rf"(%[\w#]+)(?::\d+)? = tt\.(?:{PASSES_ON}) (%[\w#]+)", line)
        if made:
            came_from[made[1]] = came_from.get(made[2], made[2])
        access = re.search(r"tt\.(?:load|store|atomic_rmw\s\w+, \w+, \w+,) (%[\w#]+)", line)
        kind = re.search(r"((?:\d+x)*)!tt\.ptr<(\w+)>", line)
        if access and kind:
            pointer = came_from.get(access[1], access[1]).lstrip("%").removesuffix("_ptr")
            count = math.prod(int(n) for n in kind[1].split("x") if n)
            found.append(Access(pointer, count, count * SIZES[kind[2]], depth))
        if line.startswith("scf.for") or "= scf.for" in line:
            depth += 1
        elif depth and line.strip() == "}":         # that of a reduction is "})"
            depth -= 1
    return found


def moved(case: Case, found: Sequence[Access]) -> float:
    """Bytes for each element. Where a kernel loops, what stands outside the loop is a matter of once a program."""
    deepest = max(access.depth for access in found)
    each = [a for a in found if a.depth == deepest and a.elements > 1 and a.pointer not in case.cached]
    return sum(a.bytes for a in each) / case.elements


def in_binary(built: Any) -> dict[str, int]:
    """Registers and spilled bytes of the compiled kernel."""
    if "amdgcn" in built.asm:
        notes = dict(re.findall(r"\.(\w+_count):\s+(\d+)", built.asm["amdgcn"]))
        spilled = 4 * (int(notes["vgpr_spill_count"]) + int(notes["sgpr_spill_count"]))
        return {"registers": int(notes["vgpr_count"]), "spilled_bytes": spilled}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"(\w+):(\d+)", told))
    return {"registers": int(used["REG"]), "spilled_bytes": int(used["STACK"]) + int(used["LOCAL"])}


def widths(built: Any) -> list[int]:
    """Bytes that one thread moves in each access to global memory, as the assembly says."""
    if "amdgcn" in built.asm:
        words = re.findall(r"(?:global|buffer)_(?:load|store)_(\w+)", built.asm["amdgcn"])
        sizes = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
        return [sizes.get(word, 2) for word in words]
    vectors = re.findall(r"(?:ld|st)\.global(?:\.L\d::\w+|\.\w+::\w+)*(?:\.v(\d))?\.[bf](\d+)", built.asm["ptx"])
    return [int(count or 1) * int(bits) // 8 for count, bits in vectors]


def measure(case: Case, target: str) -> dict[str, Any]:
    """A row of the table."""
    built = build(case, target)
    found, sizes = accesses(built.asm["ttir"]), widths(built)
    return {
        "op": case.op, "kernel": case.kernel, "note": case.note, "name": case.name, "target": target,
        **in_binary(built), "shared_memory": built.metadata.shared,
        "bytes_per_element": moved(case, found), "least": case.least,
        "vectors": sum(size >= 16 for size in sizes), "narrow": sum(size < 16 for size in sizes),
        "scalars": sum(access.elements == 1 for access in found),
        "code_bytes": len(built.asm["hsaco" if "hsaco" in built.asm else "cubin"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Returns 1 where a kernel spills registers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--op", action="append", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    asked = parser.parse_args(argv)
    rows = []
    titles = f"{'registers':>10}{'spilled':>8}{'shared':>8}{'bytes':>7}{'least':>7}{'vectors':>9}"
    print(f"{'kernel':44}{'target':12}{titles}")
    for case in CASES:
        if asked.op and case.op not in asked.op:
            continue
        for target in asked.target or TARGETS:
            r = measure(case, target)
            rows.append(r)
            print(
                f"{r['name']:44}{target:12}{r['registers']:10}{r['spilled_bytes']:8}{r['shared_memory']:8}"
                f"{r['bytes_per_element']:7.3g}{r['least']:7.3g}{r['vectors']:5}/{r['vectors'] + r['narrow']}",
                flush=True,
            )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    return int(any(row["spilled_bytes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
