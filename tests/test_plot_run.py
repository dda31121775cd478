"""The picture of runs: what is read from their files, what is refused, and what is drawn."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from PIL import Image

from scripts.plot_run import main, read, seen_losses, shortened, smooth, summary


def written(file: Path, steps: range, *, level: float = 0.0, torn: str = "") -> Path:
    """What a run writes: a loss of 4 / sqrt(step) + level, evaluated every tenth step; `torn` ends the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as out:
        for i in steps:
            step = {
                "iteration": i, "consumed_samples": 8 * i, "consumed_tokens": 128 * i, "lm_loss": 4 / i**0.5 + level,
                "grad_norm": 1.0, "learning_rate": 1e-3 * min(i / 20, 1.0), "seconds": 36.0, "tokens_per_second": 512.0,
            }  # fmt: skip
            out.write(json.dumps(step) + "\n")
            if i % 10 == 0:
                told = {"split": "valid", "iteration": i, "lm_loss": 4 / i**0.5 + level + 0.1, "ppl": 1.0}
                out.write(json.dumps(told) + "\n" + json.dumps({"split": "train", "iteration": i, "early_share": 1.0}))
                out.write("\n")
        out.write(torn)
    return file


def test_a_resumed_and_killed_run_has_each_step_once(tmp_path: Path):
    file = written(tmp_path / "small" / "metrics.jsonl", range(1, 31), level=5.0, torn='{"iteration": 31, "lm_\n')
    written(file, range(21, 41))
    run = read(file)
    assert run.name == "small" and read(tmp_path / "small") == run
    assert [step["iteration"] for step in run.steps] == list(range(1, 41))
    assert run.steps[20]["lm_loss"] == 4 / 21**0.5 and run.steps[19]["lm_loss"] == 4 / 20**0.5 + 5.0
    assert [number for number, _ in run.evaluations["valid"]] == [10, 20, 30, 40] and list(run.evaluations) == ["valid"]
    assert run.steps[-1]["hours"] == pytest.approx(0.4)
    assert summary(run).startswith("small: iterations 1 to 40, lm loss 9.0000 to 0.6325, valid 0.7325 at 40, 512 tok")


def test_what_a_run_went_back_behind_is_not_drawn(tmp_path: Path):
    """An attempt came to step 40 and its evaluation; the run went back to 20 and is at 25 now."""
    file = written(tmp_path / "a.jsonl", range(1, 41), level=5.0)
    written(file, range(21, 26))
    run = read(file)
    assert [step["iteration"] for step in run.steps] == list(range(1, 26))
    assert [number for number, _ in run.evaluations["valid"]] == [10, 20]


def test_a_mean_is_of_the_numbers_around_a_step_and_passes_over_what_is_none():
    values = [1.0, 3.0, math.nan, 5.0]
    assert smooth(values, 3, statistics.fmean, range(4)) == [2.0, 2.0, 4.0, 5.0]
    assert smooth(values, 2, statistics.fmean, (0, 3)) == [2.0, 5.0]
    assert math.isnan(smooth([math.nan], 3, statistics.fmean, [0])[0])


def test_every_evaluation_is_seen_and_a_few_wild_steps_are_not(tmp_path: Path):
    file = written(tmp_path / "a.jsonl", range(1, 201))
    text = file.read_text().replace('"lm_loss": 4.0,', '"lm_loss": 400.0,')
    file.write_text(text + json.dumps({"split": "test", "iteration": 200, "lm_loss": 0.1, "ppl": 1.0}) + "\n")
    low, high = seen_losses([read(file)])
    assert low == 0.1 and 2 < high < 4
    assert [shortened(number) for number in (0, 750.0, 12500, 3e8, 1.5e10)] == ["0", "750", "12.5k", "300M", "15B"]


def test_what_cannot_be_drawn_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    file, out = written(tmp_path / "a.jsonl", range(1, 5)), str(tmp_path / "x.png")
    (tmp_path / "text.jsonl").write_text("hello\n")
    (tmp_path / "other.jsonl").write_text('{"iteration": 1}\n')
    for words, told in (
        ([str(tmp_path), "--out", out], "holds 3 .jsonl files, and not one"),
        ([str(tmp_path / "none.jsonl"), "--out", out], "none.jsonl"),
        ([str(tmp_path / "text.jsonl"), "--out", out], "holds no training step"),
        ([str(tmp_path / "other.jsonl"), "--out", out], "a line has no consumed_samples"),
        ([str(file), "--out", "x.gif"], "--out x.gif: must end in one of .png, .svg, .pdf"),
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([str(file), "--out", out]) == 2
    assert "the package matplotlib is not installed here (pip install matplotlib)" in capsys.readouterr().err


def test_runs_are_drawn_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture):
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture")
    files = [written(tmp_path / f"{name}.jsonl", range(1, 101), level=level) for name, level in (("a", 0), ("b", 1))]
    out = tmp_path / "pictures" / "runs.png"
    assert main([*map(str, files), "--out", str(out), "--over", "tokens"]) == 0
    same = written(tmp_path / "other" / "a.jsonl", range(1, 3))
    assert [line[:2] for line in capsys.readouterr().out.splitlines()] == ["a:", "b:"]
    with Image.open(out) as picture:
        colours = {colour[:3] for _, colour in picture.convert("RGB").getcolors(2**20)}
        assert picture.size == (1200, 1200)
    assert {(31, 119, 180), (255, 127, 14)} <= colours           # each run has its own
    assert main([str(files[0]), str(same), "--out", str(out), "--over", "hours"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [str(files[0]), str(same)]
