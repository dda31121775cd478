"""What a run says of its optimizer: groups, bytes per rank beside the formula, traffic, early buckets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import pretrain_gpt
from megazero import summary
from megazero.parallel.groups import mesh_on_paper
from megazero.parallel.topology import Topology
from tests.training import SMALL, train

# Of SMALL: tables 97 x 32 and 16 x 32; in each of 4 blocks two norms (4 x 32), qkv and out (4 x 32 x 32, 4 x 32), up
# and down (2 x 32 x 128, 128 + 32); the final norm 2 x 32.
MATRICES = 97 * 32 + 16 * 32 + 4 * (4 * 32 * 32 + 2 * 32 * 128)
VECTORS = 4 * (4 * 32 + 4 * 32 + 128 + 32) + 2 * 32


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1)])
def test_groups_are_those_of_the_whole_model_in_any_layout(layout):
    told = train("--decoupled-lr 1e-4", layout, iterations=1).said[0]
    assert told == (
        f"weight decay on 18 tensors of {MATRICES:,} elements (matrices, embeddings and head), none on 34 tensors of "
        f"{VECTORS:,} elements (biases and norms); --decoupled-lr for 2 tensors of {113 * 32:,} elements (embeddings "
        f"and head), --lr for 50 tensors of {MATRICES + VECTORS - 113 * 32:,} elements"
    )


@pytest.mark.parametrize(
    ("flags", "terms", "per_element"),
    [
        ("--bf16 --zero-stage 0", "18 + 0 / 2", 18),
        ("--bf16 --zero-stage 1", "6 + 12 / 2", 12),
        ("--bf16 --zero-stage 2", "2 + 16 / 2", 10),
        ("--zero-stage 1", "8 + 8 / 2", 12),
        ("--zero-stage 1 --optimizer sgd", "8 + 4 / 2", 10),
    ],
)
def test_bytes_of_a_rank_stand_beside_the_formula(flags, terms, per_element):
    """At data 2. What test_zero_runs measures, and FACTS f.3 in its words; padding is less than 1% here."""
    said = train(f"{flags} --hidden-size 256 --micro-batch-size 1", (1, 1, 2), iterations=1).said
    *classes, total, elements, formula = numbers(said[1])
    assert f", {terms} bytes for each of " in said[1]
    assert sum(classes) == pytest.approx(total, abs=0.3)
    assert formula == pytest.approx(per_element * elements / 2**20, abs=0.1)
    assert formula - 0.1 <= total < 1.01 * formula + 0.1
    assert (len(said) == 4) == ("--zero-stage 2" in flags)
    peak = re.fullmatch(r"peak memory of the first step: (\S+) MiB resident, on rank [01], which .*", said[-1])
    assert float(peak[1].replace(",", "")) > total, "what the rank holds is part of it"


def test_the_rank_that_holds_the_most_is_named_with_what_it_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(summary, "gather_objects", lambda own, group: [2**30, 5 * 2**30, own])
    told = summary.peak_memory(mesh_on_paper(Topology(data=3), 2))
    assert told == "peak memory of the first step: 5,120 MiB resident, on rank 1, which holds the most"


def numbers(line: str) -> list[float]:
    """MiB of parameters, gradients, master and moments, in all, elements, MiB by the formula."""
    found = re.fullmatch(
        r"MiB per rank, of the fullest: parameters (\S+), gradients (\S+), master (\S+), moments (\S+), in all (\S+); "
        r"by the formula of stage \d, .* bytes for each of (\S+) parameters, (\S+)", line,
    )
    return [float(word.replace(",", "")) for word in found.groups()]


def test_stage_2_says_what_it_sends():
    said = train("--zero-stage 2 --micro-batch-size 1", (1, 1, 2), iterations=1).said
    assert said[2] == (
        "--zero-stage 2: a step reduces gradients 4 times, once for each micro-batch, and gathers parameters once: 2.5 "
        "times what stage 1 sends over the data ranks"
    )


def test_the_share_of_early_buckets_ends_a_run_with_overlap(tmp_path: Path, capsys: pytest.CaptureFixture):
    """In the first backward it is learned which reports are to be awaited; in four of five, all are early."""
    path = tmp_path / "m.jsonl"
    flags = f"{SMALL} --bucket-size 4000 --metrics-jsonl {path}"
    assert pretrain_gpt.main(f"{flags} --overlap-grad-reduce".split()) == 0
    told = json.loads(path.read_text().splitlines()[-1])
    started = told["buckets_started"]
    assert told == {
        "split": "train", "iteration": 5, "buckets_started": started, "buckets_started_early": started * 4 // 5,
        "early_share": 0.8,
    }
    line = f"80.0% of gradient buckets started before the end of backward: {started * 4 // 5} of {started}"
    assert line in capsys.readouterr().out.splitlines()
    path.unlink()
    assert pretrain_gpt.main(flags.split()) == 0
    assert "gradient buckets" not in capsys.readouterr().out and "split" not in path.read_text()
