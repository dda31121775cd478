"""scripts/compare_layouts.py: equal layouts pass, a difference is found and named, wrong usage is told at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megazero.config import PrecisionConfig
from scripts import compare_layouts
from tests.harness import Job, run_script
from tests.training import SMALL

FLAGS = f"{SMALL} --fp64".replace("--train-iters 5 ", "")


def run(capsys: pytest.CaptureFixture, code: int, layouts: str, *more: str, flags: str = FLAGS) -> tuple[str, str]:
    """Standard output and error of the command, run here; it starts the training runs as processes of their own."""
    try:
        got = compare_layouts.main(["--layouts", *layouts.split(), *more, "--", *flags.split()])
    except SystemExit as left:
        got = left.code
    out, err = capsys.readouterr()
    assert got == code, err
    return out, err


def fork(flags: Sequence[str], layout: compare_layouts.Layout, folder: Path) -> None:
    """In place of compare_layouts.launch: the same runs as forked ranks, which need no start of Python."""
    own = ("--save", str(folder), "--metrics-jsonl", str(folder / "metrics.jsonl"))
    with Job([*flags, *own], layout.world, folder) as job:
        assert job.wait() == [0] * layout.world, job.erred()


def test_layouts_that_train_alike_are_within_the_tolerance_and_leave_nothing_behind(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out, err = run(capsys, 0, "1,1,1 2,1,1", "--steps", "2", "--json")
    told = json.loads(out)
    assert told["first"] == "1,1,1" and told["within_tolerance"] is True
    assert told["tolerances"] == dict.fromkeys(("loss", "grad_norm", "weights", "moments"), 1e-10)
    assert [(row["layout"], row["step"]) for row in told["differences"]] == [("2,1,1", 1), ("2,1,1", 2)]
    for row in told["differences"]:
        assert max(row["loss"], row["grad_norm"], row["weights"], row["moments"]) < 1e-10
        assert row["weights"] > 0 and row["worst_weights"] and row["worst_moments"].startswith("exp_avg")
    assert "2,1,1: 2 processes" in err and not list(tmp_path.iterdir())


def test_what_is_above_the_tolerance_is_named_and_the_exit_code_is_1(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data 2 doubles the batch that is derived, and then cuts it otherwise: the last digits differ from one rank's."""
    monkeypatch.setattr(compare_layouts, "launch", fork)
    flags = FLAGS.replace("--global-batch-size 8 ", "")
    out, err = run(capsys, 1, "1,1,1 1,1,2 1,1,1,1", "--steps", "2", "--tolerance", "0", flags=flags)
    assert "above the tolerance of 0e+00" in err and " of layout 1,1,2: " in err
    rows = {tuple(line.split()[:2]): line for line in out.splitlines()}
    assert "*" in rows["1,1,2", "2"], "a star where it differs"
    assert rows["1,1,1", "2"].split()[2:] == ["0.0e+00"] * 4, "the same layout again differs by nothing, in any bit"


def test_experts_are_compared_over_any_number_of_ranks(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_layouts, "launch", fork)
    experts = "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    out, _ = run(capsys, 0, "1,1,1 1,1,2,2", "--steps", "1", "--json", flags=f"{FLAGS} {experts}")
    assert [row["layout"] for row in json.loads(out)["differences"]] == ["1,1,2,2"]


def saved_run(folder: Path, flags: str = "") -> Path:
    own = f"--train-iters 2 --save {folder} --save-interval 1 --metrics-jsonl {folder}/metrics.jsonl"
    assert pretrain_gpt.main(f"{FLAGS} {own} {flags}".split()) == 0
    return folder


def test_each_precision_has_its_tolerance() -> None:
    """Narrower numbers have wider ones: fp64, fp32, fp16, bf16."""
    flags = ({"fp64": True}, {}, {"fp16": True}, {"bf16": True})
    found = [compare_layouts.tolerances_of(PrecisionConfig(**flag), None) for flag in flags]
    assert [found[0]["loss"], found[2]["loss"]] == [1e-10, 2e-4]
    for measure in compare_layouts.MEASURES:
        assert sorted(each[measure] for each in found) == [each[measure] for each in found]
    assert compare_layouts.tolerances_of(PrecisionConfig(fp16=True), 0.5)["weights"] == 0.5


def test_each_measure_tells_what_it_says(tmp_path: Path) -> None:
    """Weight decay changes weights and the second step's loss; Adam's betas change moments, and at first only those."""
    first = saved_run(tmp_path / "first")
    same = compare_layouts.differences(saved_run(tmp_path / "same"), first, 2, 1e-3)
    assert {measure: value for measure, (value, _) in same.items()} == dict.fromkeys(compare_layouts.MEASURES, 0.0)
    decay = saved_run(tmp_path / "decay", "--weight-decay 0")
    at_1, at_2 = (compare_layouts.differences(decay, first, step, 1e-3) for step in (1, 2))
    assert at_1["loss"][0] == at_1["grad_norm"][0] == at_1["moments"][0] == 0 and at_1["weights"][0] > 1e-5
    assert 1e-9 < at_2["loss"][0] < 1e-3 and at_2["weights"][0] > at_1["weights"][0] and at_2["moments"][0] > 1e-9
    betas = compare_layouts.differences(saved_run(tmp_path / "betas", "--adam-beta2 0.99"), first, 1, 1e-3)
    assert betas["weights"][0] < 1e-12 and betas["moments"][0] == pytest.approx(9.0)
    assert betas["moments"][1].startswith("exp_avg_sq of ")


def test_a_number_that_is_none_is_above_every_tolerance() -> None:
    difference = compare_layouts.Difference("2,1,1", 1, "weights", float("nan"), 1e9, "head")
    assert difference.excess > 1 and compare_layouts.largest({"a": 1.0, "b": float("nan")})[1] == "b"
    assert json.loads(compare_layouts.as_json(compare_layouts.Layout(1, 1, 1), [difference], {}))["differences"] == [
        {"layout": "2,1,1", "step": 1, "weights": None, "worst_weights": "head"}
    ]
    assert torch.isnan(torch.tensor(compare_layouts.relative(1.0, float("nan"))))


@pytest.mark.parametrize(
    ("layouts", "more", "flags", "told"),
    [
        ("1,1,1", "", "", "give two or more"),
        ("1,1,1 2,1", "", "", "--layouts 2,1: a layout is tensor,pipeline,data sizes"),
        ("1,1,1 2,0,1", "", "", "--layouts 2,0,1: a layout is tensor,pipeline,data sizes"),
        ("1,1,1 1,1,2,2", "", "", "layout 1,1,2,2: --expert-model-parallel-size 2 needs --num-experts above 1"),
        ("1,1,1 1,1,1,2", "", "--num-experts 4", "layout 1,1,1,2: --expert-model-parallel-size 2 does not divide"),
        ("1,1,1 1,1,2,2", "", "--num-experts 4 --moe-expert-parallel-size 2", "cannot be given here: --layouts says"),
        ("1,1,1 2,1,1", "--steps 0", "", "--steps 0: must be at least 1"),
        ("1,1,1 2,1,1", "--tolerance -1", "", "--tolerance -1.0: must be at least 0"),
        ("1,1,1 2,1,1", "--steps many", "", "invalid int value"),
        ("1,1,1 3,1,1", "", "", "layout 3,1,1: --num-attention-heads 4 is not divisible by"),
        ("1,1,1 1,5,1", "", "", "layout 1,5,1: --num-layers 4 is below --pipeline-model-parallel-size 5"),
        ("1,1,1 1,1,3", "", "", "layout 1,1,3: --global-batch-size 8 must be --micro-batch-size 2 x accumulation"),
        ("1,1,1 2,1,1", "", "--tensor-model-parallel-size 2", "cannot be given here: --layouts says it"),
        ("1,1,1 2,1,1", "", "--save_interval=3", "--save_interval cannot be given here"),
        ("1,1,1 2,1,1", "", "--load x", "--load cannot be given here"),
        ("1,1,1 2,1,1", "--steps 9", "--train-iters 8", "--steps 9: the run ends after 8"),
        ("1,1,1 2,1,1", "", "--hiden-size 8", "did you mean --hidden-size?"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2_before_anything_runs(
    capsys: pytest.CaptureFixture, layouts: str, more: str, flags: str, told: str
) -> None:
    out, err = run(capsys, 2, layouts, *more.split(), flags=f"{FLAGS} {flags}")
    assert told in err and err.startswith("compare_layouts.py: error: ") and err.count("\n") == 1 and out == ""


def test_a_run_that_fails_shows_its_error_line() -> None:
    flags = FLAGS.replace("--mock-data", "--data-path missing_text_document")
    command = ["scripts/compare_layouts.py", "--layouts", "1,1,1", "2,1,1", "--steps", "1", "--", *flags.split()]
    (ended,) = run_script(command)
    assert ended.code == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("compare_layouts.py: error: layout 1,1,1: ")
    assert "missing_text_document" in ended.stderr
