"""Every Triton kernel compiles ahead of time for GPUs none of which needs to be here, and well: no register is
spilled, rows move 16 bytes at a time, and memory is passed over as few times as possible."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.kernel_list import CASES  # noqa: E402
from megazero.kernels.dispatch import OPS  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


@pytest.mark.timeout(600)
def test_kernels_compile_well_for_gpus_that_are_not_here(tmp_path):
    command = [sys.executable, "benchmarks/kernels_static.py", "--json", tmp_path / "rows.json"]
    env = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=str(ROOT))
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["target"] for row in rows] == [*TARGETS] * len(CASES)
    for row in rows:
        assert row["code_bytes"] > 0 and row["registers"] > 0, row
        assert row["spilled_bytes"] == 0, row
        assert row["bytes_per_element"] == row["least"], row
        if row["target"].startswith("cuda"):        # what is not a vector is a scalar, and there are vectors
            assert row["vectors"] > 0 and row["narrow"] <= row["scalars"], row


def test_c156_no_kernel_is_tuned_by_trial_runs():
    """They would be steps of the optimizer, and turn queries and keys several times: no decorator stands on jit."""
    for op in OPS:
        module = importlib.import_module(f"megazero.kernels.{op}")
        assert not [n for n, value in vars(module).items() if type(value).__name__ in ("Autotuner", "Heuristics")], op
        assert "autotune" not in Path(module.__file__).read_text().replace("Not autotuned", ""), op


def test_every_kernel_is_in_the_list():
    """A kernel is a compiled function that stores something."""
    for op in OPS:
        module = importlib.import_module(f"megazero.kernels.{op}")
        own = {
            name for name, value in vars(module).items()
            if type(value).__name__ in ("JITFunction", "InterpretedFunction") and value.fn.__module__ == module.__name__
            and any(argument.endswith("_ptr") for argument in value.arg_names)
        }
        assert own and own == {case.kernel for case in CASES if case.op == op}, op
