"""Draws loss, learning rate and throughput of one or several runs from what --metrics-jsonl wrote.

    python scripts/plot_run.py runs/a/metrics.jsonl runs/b --out runs.png --over tokens

A RUN is such a file, or a folder with one: its name is the run's. Thin lines are the losses of steps, thick ones their
mean over the window around each, dots evaluations; throughput is a median over the window, so that pauses do not hide
it. What an attempt did that the run went back behind, as after a resume, is not drawn.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg", ".pdf")
WINDOW = 50                     # the steps over this: how many are averaged
POINTS = 1000                   # of a line that is averaged, at most
MARKERS = "osD^vP*X"            # of evaluations, by set
GREY = "0.4"
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
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
        runs = told_apart([read(place) for place in args.runs], args.runs)
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
    """The run in a file or folder. Where it goes back to an earlier iteration, as after a resume, what was there from
    that one on counts no more; a line that a killed process left torn is passed over. Raises ValueError."""
    file, name = place, place.stem if place.stem != "metrics" else place.parent.name or place.stem
    if place.is_dir():
        found = sorted(place.glob("*.jsonl"))
        if len(found) != 1:
            raise ValueError(f"{place}: holds {len(found)} .jsonl files, and not one: name the file")
        file, name = found[0], place.name
    steps: dict[int, dict[str, float]] = {}
    evaluations: dict[str, dict[int, float]] = {}
    torn = reached = 0
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            torn += bool(line.strip())
            continue
        if "split" not in record:
            if missing := [key for key in KEYS if key not in record]:
                raise ValueError(f"{file}: not what --metrics-jsonl writes: a line has no {missing[0]}")
            now = record["iteration"]
            if now <= reached:
                steps = {number: step for number, step in steps.items() if number < now}
                evaluations = {
                    split: {number: loss for number, loss in told.items() if number < now}
                    for split, told in evaluations.items()
                }
            steps[now] = {key: math.nan if record[key] is None else record[key] for key in KEYS}
            reached = now
        elif record.get("lm_loss") is not None:
            evaluations.setdefault(record["split"], {})[record["iteration"]] = record["lm_loss"]
    if not steps or torn > len(steps):
        raise ValueError(f"{file}: holds no training step of --metrics-jsonl")
    ordered, hours = [steps[number] for number in sorted(steps)], 0.0
    for step in ordered:
        hours += step["seconds"] / 3600
        step["hours"] = hours
    points = {split: tuple(sorted(told.items())) for split, told in evaluations.items() if told}
    return Run(name, tuple(ordered), points)


def told_apart(runs: Sequence[Run], places: Sequence[Path]) -> list[Run]:
    """The same, those of one name by their places."""
    names = [run.name for run in runs]
    return [
        replace(run, name=str(place)) if names.count(run.name) > 1 else run
        for run, place in zip(runs, places, strict=True)
    ]


def smooth(
    values: Sequence[float], window: int, of: Callable[[Sequence[float]], float], at: Iterable[int]
) -> list[float]:
    """`of` the finite ones among the `window` values around each place; nan where there are none."""
    found = []
    for place in at:
        around = values[max(place - (window - 1) // 2, 0) : place + window // 2 + 1]
        known = [value for value in around if math.isfinite(value)]
        found.append(of(known) if known else math.nan)
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
    figure, plots = pyplot.subplots(
        3, 1, sharex=True, figsize=(10, 10), height_ratios=(3, 1.2, 1.2), layout="constrained"
    )
    names = dict.fromkeys(split for run in runs for split in run.evaluations)
    sets = dict(zip(names, itertools.cycle(MARKERS), strict=False))
    for number, run in enumerate(runs):
        _draw_run(run, plots, f"C{number}", over=over, window=window or max(len(run.steps) // WINDOW, 1), sets=sets)
    _dress(plots, runs, over)
    for split, marker in sets.items():
        plots[0].plot([], [], marker, color=GREY, label=split)
    figure.align_ylabels()
    figure.legend(loc="outside upper left", ncols=6, frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def _draw_run(
    run: Run, plots: Sequence[Any], colour: str, *, over: str, window: int, sets: Mapping[str, str]
) -> None:
    loss, rate, speed = plots
    at = [step[OVER[over]] for step in run.steps]
    places = sorted({*range(0, len(at), -(-len(at) // POINTS)), len(at) - 1})
    thin = [at[place] for place in places]
    losses, rates = ([step[key] for step in run.steps] for key in ("lm_loss", "tokens_per_second"))
    loss.plot(at, losses, color=colour, alpha=0.3, linewidth=0.8)
    loss.plot(thin, smooth(losses, window, statistics.fmean, places), color=colour, linewidth=1.8, label=run.name)
    place = {step["iteration"]: x for step, x in zip(run.steps, at, strict=True)}
    for split, points in run.evaluations.items():
        known = [(place[number], value) for number, value in points if number in place]
        if known:
            loss.plot(*zip(*known, strict=True), sets[split], color=colour, markeredgecolor="white", zorder=3)
    rate.plot(at, [step["learning_rate"] for step in run.steps], color=colour)
    speed.plot(thin, smooth(rates, window, statistics.median, places), color=colour)


def _dress(plots: Sequence[Any], runs: Sequence[Run], over: str) -> None:
    """Labels, grids, numbers that can be read, and what part of the losses is seen."""
    loss, rate, speed = plots
    for axes, label in ((loss, "lm loss"), (rate, "learning rate"), (speed, "tokens/s")):
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    speed.margins(y=0.15)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(shortened)
    if over != "hours":
        speed.xaxis.set_major_formatter(shortened)
    speed.set_xlabel({"iterations": "iteration", "hours": "hours of training"}.get(over, f"consumed {over}"))
    found = seen_losses(runs)
    if found is not None:
        room = 0.05 * (found[1] - found[0]) or 0.5
        loss.set_ylim(found[0] - room, found[1] + room)


def shortened(value: float, position: int | None = None) -> str:
    """A number for people: 12500000 is 12.5M."""
    size, unit = next((pair for pair in UNITS if abs(value) >= pair[0]), (1, ""))
    return f"{value / size:.4g}{unit}"


def seen_losses(runs: Sequence[Run]) -> tuple[float, float] | None:
    """The lowest and highest loss that is seen: a few steps far above all others do not flatten the curves, so the top
    hundredth is left out; every evaluation is seen. None: there is no finite one."""
    losses = sorted(step["lm_loss"] for run in runs for step in run.steps if math.isfinite(step["lm_loss"]))
    ends = [losses[0], losses[int(0.99 * (len(losses) - 1))]] if losses else []
    ends += [value for run in runs for points in run.evaluations.values() for _, value in points]
    return (min(ends), max(ends)) if ends else None


if __name__ == "__main__":
    sys.exit(main())
