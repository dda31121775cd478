"""The report of an environment: what it tells, and that its self test tries what a run uses and notices a fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megazero.kernels.dispatch import OPS
from megazero.products import Products
from scripts import report_environment as script
from tests.harness import on_ranks

CPU = torch.device("cpu")


def one_that_loses_what_it_reduces() -> list[dict]:
    """The self test of a world whose all-reduce does nothing."""
    script.collectives = lambda group, wires: [script.Test("all-reduce", lambda x: x, 3.0)]
    return script.try_collectives(2, CPU, 0.1)


def test_every_collective_is_tried_and_timed():
    first, second = on_ranks(2, script.try_collectives, 2, CPU, 0.5)
    assert first == second and len(first) == 6 * len(script.SIZES)
    assert all(row["right"] and row["seconds"] > 0 and row["bus_bytes_per_second"] > 0 for row in first)
    assert {row["collective"] for row in first} >= {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
    assert {row["bytes"] for row in first if row["collective"] == "all-gather"} == {2 * size for size in script.SIZES}
    for rows in on_ranks(2, one_that_loses_what_it_reduces):
        assert [row["right"] for row in rows] == [False] * len(script.SIZES)


@pytest.mark.parametrize("flags", ["--json /none/such.json", "--ranks 0", "--seconds 0"])
def test_a_flag_that_cannot_be_is_told_before_the_test(flags: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as left:
        script.main(flags.split())
    assert left.value.code == 2 and flags.split()[0] in capsys.readouterr().err


def test_the_report_tells_versions_kernels_and_faults(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    file = tmp_path / "report.json"
    assert script.main(["--ranks", "1", "--seconds", "100", "--json", str(file)]) == 0
    text, report = capsys.readouterr().out, json.loads(file.read_text())
    assert f"torch {torch.__version__}" in text and report["packages"]["torch"] == torch.__version__
    assert report["impls"] == dict.fromkeys(OPS, "torch") and f"kernels    torch: {', '.join(OPS)}" in text
    assert [row["op"] for row in report["kernels"]] == list(OPS)
    assert {row["op"] for row in report["kernels"] if not row["right"]} == {"dropout_add"}      # not tried
    assert report["network"]["lo"] and report["cpus"] >= 1
    monkeypatch.setattr(script, "differences", lambda *_: {"a": 2.0})
    monkeypatch.setattr(script, "products_of", lambda device: Products(onednn=True))
    assert script.main(["--ranks", "1"]) == 1
    text = capsys.readouterr().out
    assert "WRONG, 2.00 of the tolerance" in text and "products   fp32 matrix products by oneDNN" in text
    assert [row["right"] for row in script.try_kernels(-1.0)] == [None] * len(OPS)
