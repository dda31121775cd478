"""Draws loss, learning rate and throughput of one or several runs from what --metrics-jsonl wrote.

    python scripts/plot_run.py runs/a/metrics.jsonl runs/b --out runs.png --over tokens

A RUN is such a file, or a folder with one: its name is the run's. Thin lines are the losses of steps, thick ones their
mean over a window, dots evaluations; throughput is a median over the window, so that pauses do not hide it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg", ".pdf")
WINDOW = 50                     # the steps over this: how many are averaged
OVER = {"iterations": "iteration", "samples": "consumed_samples", "tokens": "consumed_tokens", "hours": "hours"}
KEYS = ("iteration", "consumed_samples", "consumed_tokens", "lm_loss", "learning_rate", "seconds", "tokens_per_second")


@dataclass(frozen=True)
class Run:
    """A run's steps in order, each with KEYS and "hours" of training; evaluations by set: (iteration, loss)."""

    name: str
    steps: tuple[Mapping[str, float], ...]
    evaluations: Mapping[str, tuple[tuple[int, float], ...]]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 with one line where a file or flag is wrong."""
    args = parse(argv)
    try:
        if args.out.suffix not in SUFFIXES:
            raise ValueError(f"--out {args.out}: must end in one of {', '.join(SUFFIXES)}")
        runs = [read(place) for place in args.runs]
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("the package matplotlib is not installed here (pip install matplotlib)")
        draw(runs, args.out, over=args.over, window=args.window)
    except (ValueError, OSError) as wrong:
        print(f"plot_run.py: error: {wrong}", file=sys.stderr)
        return 2
    for run in runs:
        print(summary(run))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a file of --metrics-jsonl, or a folder with one")
    add("--out", type=Path, required=True, metavar="FILE", help=f"the picture: {', '.join(SUFFIXES)}")
    add("--over", choices=OVER, default="iterations", help="what lies to the right; default: iterations")
    add("--window", type=int, metavar="N", help=f"steps to average; default: a {WINDOW}th of them")
    args = parser.parse_args(argv)
    if args.window is not None and args.window < 1:
        parser.error(f"--window {args.window}: must be at least 1")
    return args


def read(place: Path) -> Run:
    """The run in a file or folder. Of an iteration that comes twice, as after a resume, the last counts; a line that a
    killed process left torn is passed over. Raises ValueError."""
    file, name = place, place.stem if place.stem != "metrics" else place.parent.name or place.stem
    if place.is_dir():
        found = sorted(place.glob("*.jsonl"))
        if len(found) != 1:
            raise ValueError(f"{place}: holds {len(found)} .jsonl files, and not one: name the file")
        file, name = found[0], place.name
    steps: dict[int, dict[str, float]] = {}
    evaluations: dict[str, dict[int, float]] = {}
    torn = 0
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            torn += bool(line.strip())
            continue
        if "split" not in record:
            if missing := [key for key in KEYS if key not in record]:
                raise ValueError(f"{file}: not what --metrics-jsonl writes: a line has no {missing[0]}")
            steps[record["iteration"]] = {key: math.nan if record[key] is None else record[key] for key in KEYS}
        elif record.get("lm_loss") is not None:
            evaluations.setdefault(record["split"], {})[record["iteration"]] = record["lm_loss"]
    if not steps or torn > len(steps):
        raise ValueError(f"{file}: holds no training step of --metrics-jsonl")
    ordered, hours = [steps[number] for number in sorted(steps)], 0.0
    for step in ordered:
        hours += step["seconds"] / 3600
        step["hours"] = hours
    points = {split: tuple(sorted(told.items())) for split, told in evaluations.items()}
    return Run(name, tuple(ordered), points)


def rolling(values: Sequence[float], window: int, of: Callable[[Sequence[float]], float]) -> list[float]:
    """`of` the last `window` finite values up to each one; nan before the first."""
    found, last = [], []
    for value in values:
        if math.isfinite(value):
            last = [*last[-window + 1 :], value] if window > 1 else [value]
        found.append(of(last) if last else math.nan)
    return found


def summary(run: Run) -> str:
    """A line of text about a run."""
    first, last = run.steps[0], run.steps[-1]
    rate = statistics.median(step["tokens_per_second"] for step in run.steps)
    told = [f"{split} {points[-1][1]:.4f} at {points[-1][0]}" for split, points in run.evaluations.items()]
    return ", ".join(
        [
            f"{run.name}: iterations {first['iteration']} to {last['iteration']}",
            f"lm loss {first['lm_loss']:.4f} to {last['lm_loss']:.4f}", *told,
            f"{rate:,.0f} tokens/s, {last['hours']:.2f} hours",
        ]
    )  # fmt: skip


def draw(runs: Sequence[Run], out: Path, *, over: str, window: int | None) -> None:
    """Three plots below each other, one colour for each run."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (loss, rate, speed) = pyplot.subplots(
        3, 1, sharex=True, figsize=(10, 10), height_ratios=(3, 1.2, 1.2), layout="constrained"
    )
    for number, run in enumerate(runs):
        _draw_run(run, (loss, rate, speed), f"C{number}", over=over, window=window or max(len(run.steps) // WINDOW, 1))
    _frame_losses(loss, runs)
    for axes, label in ((loss, "lm loss"), (rate, "learning rate"), (speed, "tokens/s")):
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    speed.margins(y=0.15)
    speed.set_ylim(bottom=0)
    speed.set_xlabel({"iterations": "iteration", "hours": "hours of training"}.get(over, f"consumed {over}"))
    loss.legend(loc="upper right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def _draw_run(run: Run, plots: Sequence[Any], colour: str, *, over: str, window: int) -> None:
    loss, rate, speed = plots
    at = [step[OVER[over]] for step in run.steps]
    losses = [step["lm_loss"] for step in run.steps]
    loss.plot(at, losses, color=colour, alpha=0.3, linewidth=0.8)
    loss.plot(at, rolling(losses, window, statistics.fmean), color=colour, linewidth=1.8, label=run.name)
    place = {step["iteration"]: x for step, x in zip(run.steps, at, strict=True)}
    for marker, (split, points) in zip("osD^vP*X", run.evaluations.items(), strict=False):
        known = [(place[number], value) for number, value in points if number in place]
        if known:
            xs, ys = zip(*known, strict=True)
            loss.plot(xs, ys, marker, color=colour, markeredgecolor="white", label=f"{run.name}, {split}")
    rate.plot(at, [step["learning_rate"] for step in run.steps], color=colour)
    rates = [step["tokens_per_second"] for step in run.steps]
    speed.plot(at, rolling(rates, window, statistics.median), color=colour)


def _frame_losses(axes: Any, runs: Sequence[Run]) -> None:
    """A few steps far above all others do not flatten the curves: from the lowest loss to the highest but for the top
    hundredth."""
    losses = sorted(step["lm_loss"] for run in runs for step in run.steps if math.isfinite(step["lm_loss"]))
    if losses:
        low, high = losses[0], losses[int(0.99 * (len(losses) - 1))]
        room = 0.05 * (high - low) or 0.5
        axes.set_ylim(low - room, high + room)


if __name__ == "__main__":
    sys.exit(main())
