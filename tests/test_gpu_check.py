"""scripts/gpu_check.sh on a machine without GPU: its parts run in small, and one that fails takes nothing with it."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_check
from megazero.kernels.dispatch import OPS

from .harness import ROOT

pytest.importorskip("triton")


@pytest.mark.timeout(300)
def test_parts_are_measured_and_what_fails_is_told_in_a_line(tmp_path):
    """A part that does not exist stands for one that raises; after it a fresh process goes on."""
    parts = ["machine", "check no_such_op", "check rotary", "time swiglu triton", "time swiglu compile"]
    parts.append("gpt 350M torch")
    results = gpu_check.conduct(parts, "cpu", 280.0)
    assert list(results) == parts
    assert results.pop("check no_such_op") == {"part": "check no_such_op", "error": "KeyError: 'no_such_op'"}
    assert not [found for found in results.values() if "error" in found]
    assert results["check rotary"]["equal"] and results["machine"]["copy_gbs"] > 0
    assert results["gpt 350M torch"]["tokens_per_second"] > 0
    lines = gpu_check.table({p: {"part": p, "error": gpu_check.NOT_ASKED} for p in gpu_check.all_parts()} | results)
    assert not [line for line in lines if line.startswith("failed")]
    assert any(line.startswith("GPT 350M, torch: ") and "tokens/s" in line for line in lines)


def test_what_there_was_no_time_for_is_told():
    assert gpu_check.conduct(["machine"], "cpu", 0.0)["machine"]["error"] == "no time was left of 0 s"


def test_every_kernel_is_checked_and_timed():
    parts = gpu_check.all_parts()
    assert {p.split()[1] for p in parts if p.startswith("check")} == set(OPS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_says_so(tmp_path):
    command = ["bash", "scripts/gpu_check.sh", "--json", tmp_path / "found.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"MEGAZERO_PYTHON": sys.executable})
    assert done.returncode == 2 and "sees no GPU here" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "found.json").exists()


def test_the_script_writes_all_numbers(tmp_path, capsys):
    assert gpu_check.main(["--device", "cpu", "--only", "check swiglu", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["check swiglu"]["equal"] and found["machine"]["error"] == gpu_check.NOT_ASKED
    assert "yes" in capsys.readouterr().out
