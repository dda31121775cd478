"""The range test: the suggestion on curves whose answer is known, the picture, and the script from end to end."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from megazero.flags import parse
from scripts.plot_lr_test import CURVE, MAXIMUM, MINIMUM, SPAN, main, read, suggest

ROOT = Path(__file__).resolve().parent.parent
LEARNS, TURNS = 8e-4, 4e-3  # of the synthetic curve: where it falls, and where it begins to rise


def loss_at(rate: float) -> float:
    """From 6 down to about 2.5 around LEARNS, and up again from TURNS on."""
    return 2.5 + 3.5 / (1 + (rate / LEARNS) ** 1.5) + 80 * max(0.0, rate / TURNS - 1) ** 2


def written(folder: Path, last: float, *, steps: int = 600, noise: float = 0.0, tail: tuple = ()) -> Path:
    """Metrics of a linear test from 1e-4 to `last`, as a run writes them."""
    draw, file = random.Random(1), folder / "metrics.jsonl"
    records = []
    for step in range(steps):
        rate = 1e-4 + (last - 1e-4) * step / (steps - 1)
        records.append({"iteration": step + 1, "learning_rate": rate, "lm_loss": loss_at(rate) + draw.gauss(0, noise)})
    for step, loss in enumerate(tail, steps + 1):
        records.append({"iteration": step, "learning_rate": last + 1e-6 * step, "lm_loss": loss})
    records.insert(3, {"split": "valid", "iteration": 3, "lm_loss": 9.0, "ppl": 1.0})
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def asked(capsys: pytest.CaptureFixture, file: Path, *flags: str) -> dict:
    assert main([str(file), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_maximum_is_where_the_loss_turns_and_the_minimum_where_its_fall_begins(noise, tmp_path, capsys):
    found = asked(capsys, written(tmp_path, 8e-3, noise=noise), "--train-iters", "1000")
    assert found["diverged"] and found["steps"] == 600
    assert 0.75 * TURNS < found["maximum"] < 1.1 * TURNS
    tenth = next(rate for rate in (1e-4 + 1e-6 * k for k in range(10**4)) if loss_at(rate) < 6.0 - 0.1 * 3.3)
    assert found["minimum"] == pytest.approx(max(tenth, found["maximum"] / 20), rel=0.5)
    assert found["maximum"] / 20 <= found["minimum"] <= found["maximum"] / 4
    assert found["lowest_loss"] == pytest.approx(loss_at(TURNS), abs=0.1)
    assert found["span"] == 900 and found["flags"] == (
        f"--lr-scheduler OneCycle --cycle-min-lr {found['minimum']:.3g} --cycle-max-lr {found['maximum']:.3g} "
        "--cycle-first-step-size 450 --cycle-second-step-size 450"
    )


def test_the_rule_to_the_letter_on_a_few_steps(tmp_path):
    """Too few to average: fall 10 to 2, a tenth of it by the third step, the lowest at the seventh."""
    file = tmp_path / "m.jsonl"
    losses = (10.0, 9.5, 9.1, 7.0, 5.0, 3.0, 2.0, 2.5, 2.9)
    lines = [json.dumps({"iteration": n, "learning_rate": n / 10, "lm_loss": x}) for n, x in enumerate(losses, 1)]
    file.write_text("\n".join(lines))
    found = suggest(read(file))
    assert (found.maximum, found.diverged, found.at) == (0.7, True, (1, 6))
    assert found.minimum == pytest.approx(0.175) and found.span == 10  # 0.3 is above a quarter of the maximum
    assert suggest(read(file), 1000).span == 900
    file.write_text("\n".join(lines[:-1]))  # a rise of less than a tenth of the fall is none
    assert (suggest(read(file)).maximum, suggest(read(file)).diverged) == (0.8, False)


def test_without_a_turn_the_last_rate_is_the_maximum_and_more_is_asked_for(tmp_path, capsys):
    file = written(tmp_path, 0.9 * TURNS)
    found = asked(capsys, file)
    assert not found["diverged"] and found["maximum"] == pytest.approx(0.9 * TURNS)
    assert main([str(file)]) == 0
    assert "the loss does not rise up to the last rate 0.0036: test larger ones" in capsys.readouterr().out


def test_the_span_follows_the_pace_of_the_test_where_no_length_is_given(tmp_path, capsys):
    found = asked(capsys, written(tmp_path, 8e-3))
    steps = (found["maximum"] - found["minimum"]) / (8e-3 - 1e-4) * 599
    assert found["span"] == pytest.approx(2 * steps, abs=4)


def test_a_loss_that_is_no_number_ends_the_curve_and_counts_as_a_turn(tmp_path, capsys):
    found = asked(capsys, written(tmp_path, 0.9 * TURNS, tail=(None, 3.0)))
    assert found["diverged"] and found["steps"] == 600
    assert found["maximum"] <= 0.9 * TURNS


def test_the_suggested_flags_are_taken_by_the_training_script(tmp_path, capsys):
    found = asked(capsys, written(tmp_path, 8e-3))
    words = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --vocab-size 9 --micro-batch-size 1"
    config, _ = parse(f"{words} --train-iters 9 --mock-data {found['flags']}".split())
    assert config.deepspeed_schedule.cycle_max_lr == pytest.approx(found["maximum"], rel=1e-2)


def test_the_picture_shows_curve_bounds_and_span(tmp_path, capsys):
    file = written(tmp_path, 8e-3, noise=0.1)
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    for out in (svg, png):
        assert main([str(file), "--out", str(out)]) == 0
        assert f"written to {out}" in capsys.readouterr().out
    root = ElementTree.parse(svg).getroot()
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "learning rate" in texts and any(text.startswith("maximum 0.00") for text in texts)
    boxes = [
        (box.get("fill"), *(float(box.get(side)) for side in ("x", "y", "width", "height")))
        for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("x")
    ]  # fmt: skip
    of = {fill: [box for box in boxes if box[0] == "#{:02x}{:02x}{:02x}".format(*fill)] for fill in (SPAN, CURVE)}
    (span,) = of[SPAN]
    left, right = ([b[1] for b in boxes if b[0] == "#{:02x}{:02x}{:02x}".format(*c)] for c in (MINIMUM, MAXIMUM))
    assert span[1] == pytest.approx(left[0] + 1) and span[1] + span[3] == pytest.approx(right[0] + 1)
    columns = sorted(box[1] for box in of[CURVE])
    assert len(columns) > 500 and columns == [float(k) for k in range(int(columns[0]), int(columns[-1]) + 1)]
    image = Image.open(png).convert("RGB")
    colours = {colour for _, colour in image.getcolors(1 << 20)}
    assert {CURVE, MINIMUM, MAXIMUM, SPAN} <= colours


@pytest.mark.parametrize(
    ("content", "flags", "told"),
    [
        ("", (), "holds 0 steps"),
        ("{]", (), "not what --metrics-jsonl writes"),
        ('{"iteration": 1, "learning_rate": 1}', (), "not what --metrics-jsonl writes: KeyError('lm_loss')"),
        (None, ("--out", "a.gif"), "--out a.gif: the name must end in .svg or .png"),
        (None, ("--train-iters", "3"), "--train-iters 3: must be at least 4"),
        ([(1, 1.0), (1, 2.0), (1, 3.0)], (), "the learning rate does not grow from step to step"),
        ([(1, 1.0), (2, 2.0), (3, 3.0)], (), "the loss never falls below its first value 1: test smaller rates"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(content, flags, told, tmp_path, capsys):
    file = written(tmp_path, 1e-3)
    if isinstance(content, list):
        lines = [{"iteration": n, "learning_rate": rate, "lm_loss": loss} for n, (rate, loss) in enumerate(content)]
        content = "\n".join(map(json.dumps, lines))
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as left:
        main([str(file), *flags])
    assert left.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_file_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.jsonl")])
    assert "none.jsonl" in capsys.readouterr().err


def test_the_script_tests_trains_draws_and_suggests(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/lr_range_test.sh", "--seed", "5"], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"TINY": "1", "OUT": str(tmp_path), "MEGAZERO_PYTHON": sys.executable, "TRAIN_ITERS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["learning_rate"] for step in steps] == pytest.approx([1e-3 * (1 + 4 * k / 4) for k in range(48)])
    assert all(math.isfinite(step["lm_loss"]) for step in steps)
    assert "a cycle of 180 steps" in done.stdout and "--lr-scheduler OneCycle --cycle-min-lr" in done.stdout
    assert Image.open(tmp_path / "lr_range_test.png").size[0] > 800
