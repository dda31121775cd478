"""Draws the loss of a learning-rate range test against its rate, and suggests the bounds of a cycle (1Cycle).

    python scripts/plot_lr_test.py runs/lr_range_test/metrics.jsonl --out lr_test.png --train-iters 10000

The rule, on the losses up to the first that is not a number, each averaged with its neighbours (a window of 1/12 of the
steps). The fall is the way from the first averaged loss to the lowest one.

    maximum   the rate at the lowest averaged loss, if afterwards the loss rises by more than a tenth of the fall: the
              largest rate that still helped. If it does not rise, the last rate tested, and more should be.
    minimum   the rate at which the first tenth of the fall was made, but not below 1/20 nor above 1/4 of the maximum
              (Smith, arXiv 1803.09820 and 1506.01186).
    span      steps of the cycle, half of them upwards: nine tenths of --train-iters, so that the rate can fall further
              at the end; without it twice the steps that the test took from the minimum to the maximum.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from scripts.picture import GREY, LABEL, SMALL, Picture, Rect, Text, svg, write_png  # noqa: E402

WINDOW = 12                     # the steps over this: how many are averaged
TURN, BEGIN = 0.1, 0.1          # shares of the fall: of a rise that is a divergence, of a fall that has begun
LOWEST, HIGHEST = 20, 4         # the maximum over these: bounds of the minimum
CYCLE = 0.9                     # share of --train-iters

WIDTH, HEIGHT = 860, 420        # of the plot, in pixels
LEFT, TOP, RIGHT, BELOW = 70, 56, 24, 110
RAW, CURVE, SPAN = (190, 200, 214), (58, 110, 180), (226, 240, 230)
MINIMUM, MAXIMUM = (38, 150, 136), (196, 84, 62)
SUFFIXES = (".svg", ".png")
LOGARITHMIC = 10                # from this ratio of the rates on, their axis is logarithmic


@dataclass(frozen=True)
class Curve:
    """A range test: rate and loss of each step, and averaged losses. `broken`: a loss that is no number followed."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smooth: tuple[float, ...]
    broken: bool


@dataclass(frozen=True)
class Suggestion:
    """The bounds of a cycle, and its steps; `at` are the steps of the test where its rates were those."""

    minimum: float
    maximum: float
    span: int
    diverged: bool
    at: tuple[int, int]

    @property
    def flags(self) -> str:
        """For the training command line."""
        up, down = -(-self.span // 2), self.span // 2
        return (
            f"--lr-scheduler OneCycle --cycle-min-lr {self.minimum:.3g} --cycle-max-lr {self.maximum:.3g} "
            f"--cycle-first-step-size {up} --cycle-second-step-size {down}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Draw and suggest what the flags ask for. Returns the exit code."""
    made = parser()
    asked = made.parse_args(argv)
    try:
        if asked.out is not None and asked.out.suffix not in SUFFIXES:
            raise ValueError(f"--out {asked.out}: the name must end in {' or '.join(SUFFIXES)}")
        if asked.train_iters is not None and asked.train_iters < 4:
            raise ValueError(f"--train-iters {asked.train_iters}: must be at least 4")
        curve = read(asked.metrics)
        found = suggest(curve, asked.train_iters)
        if asked.out is not None:
            drawn = picture(curve, found, asked.metrics.name)
            if asked.out.suffix == ".svg":
                asked.out.write_text(svg(drawn))
            else:
                write_png(drawn, asked.out)
    except (ValueError, OSError) as wrong:
        made.error(str(wrong))
    if asked.json:
        told = {
            "minimum": found.minimum, "maximum": found.maximum, "span": found.span, "diverged": found.diverged,
            "lowest_loss": min(curve.smooth), "steps": len(curve.rates), "flags": found.flags,
        }  # fmt: skip
        print(json.dumps(told))
    else:
        print("\n".join((*notes(curve, found), *([] if asked.out is None else [f"written to {asked.out}"]))))
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags of this command."""
    made = argparse.ArgumentParser(
        "plot_lr_test.py", usage="plot_lr_test.py METRICS.jsonl [--out FILE] [--train-iters N] [--json]",
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("metrics", type=Path, metavar="METRICS.jsonl", help="what the test wrote with --metrics-jsonl")
    add("--out", type=Path, metavar="FILE", help="picture to write: .svg, or .png (needs Pillow)")
    add("--train-iters", type=int, metavar="N", help="steps of the training to come")
    add("--json", action="store_true", help="print the suggestion as one JSON object")
    return made


def read(file: Path) -> Curve:
    """The test's steps. Of an iteration that comes twice, as after a resume, the last counts. Raises ValueError."""
    steps: dict[int, tuple[float, float | None]] = {}
    try:
        for line in file.read_text().splitlines():
            record = json.loads(line) if line.strip() else {"split": None}
            if "split" not in record:
                steps[record["iteration"]] = (float(record["learning_rate"]), record["lm_loss"])
    except (ValueError, KeyError, TypeError) as wrong:
        raise ValueError(f"{file}: not what --metrics-jsonl writes: {wrong!r}") from wrong
    ordered = [steps[number] for number in sorted(steps)]
    good = next((at for at, (_, loss) in enumerate(ordered) if loss is None or not math.isfinite(loss)), len(ordered))
    if good < 3:
        raise ValueError(f"{file}: holds {good} steps with a loss that is a number, and a curve needs at least 3")
    rates, losses = zip(*ordered[:good])
    if rates[0] <= 0 or any(after < before for before, after in zip(rates, rates[1:])) or rates[0] == rates[-1]:
        raise ValueError(f"{file}: the learning rate does not grow from step to step: not a range test")
    return Curve(rates, losses, smoothed(losses), good < len(ordered))


def smoothed(losses: Sequence[float]) -> tuple[float, ...]:
    """Each loss averaged with as many neighbours before as after it; at the end those before are kept."""
    reach = len(losses) // WINDOW // 2
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    found = []
    for at in range(len(losses)):
        first = max(at - reach, 0)
        after = min(at + (at - first) + 1, len(losses))
        found.append((sums[after] - sums[first]) / (after - first))
    return tuple(found)


def suggest(curve: Curve, train_iters: int | None = None) -> Suggestion:
    """The bounds and the span by the rule above. Raises ValueError where the loss never falls."""
    smooth, last = curve.smooth, len(curve.smooth) - 1
    low = min(range(len(smooth)), key=smooth.__getitem__)
    fall = smooth[0] - smooth[low]
    if fall <= 0:
        raise ValueError(f"the loss never falls below its first value {smooth[0]:.4g}: test smaller rates")
    diverged = curve.broken or max(smooth[low:]) > smooth[low] + TURN * fall
    top = low if diverged else last
    maximum = curve.rates[top]
    begun = next(at for at, loss in enumerate(smooth) if loss <= smooth[0] - BEGIN * fall)
    minimum = min(max(curve.rates[begun], maximum / LOWEST), maximum / HIGHEST)
    bottom = next((at for at, rate in enumerate(curve.rates) if rate >= minimum), top)
    climb = max(top - bottom, 1)
    span = 2 * climb if train_iters is None else round(CYCLE * train_iters)
    return Suggestion(minimum, maximum, span, diverged, (bottom, top))


def notes(curve: Curve, found: Suggestion) -> list[str]:
    """What was found, for people."""
    low = min(curve.smooth)
    ended = (
        f"the loss turns at a rate of {found.maximum:.3g}" if found.diverged
        else f"the loss does not rise up to the last rate {found.maximum:.3g}: test larger ones for the true maximum"
    )
    return [
        f"{len(curve.rates)} steps, loss {curve.smooth[0]:.4g} to {low:.4g}; {ended}",
        f"minimum {found.minimum:.3g}, maximum {found.maximum:.3g}, a cycle of {found.span} steps:",
        found.flags,
    ]


# ------------------------------------------------------------------------------------------------------- the picture


@dataclass(frozen=True)
class Axis:
    """A range of values on a range of pixels."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value; values outside lie on the edge."""
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, between four and twelve of them."""
        if self.logarithmic:
            first, after = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            digits = (1, 2, 5) if after - first < 4 else (1,)
            every = [digit * 10.0**power for power in range(first, after + 1) for digit in digits]
            return [value for value in every if self.low <= value <= self.high]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step = max(step * times for times in (1, 2, 5) if step * times <= (self.high - self.low) / 4)
        first = math.ceil(self.low / step - 1e-9)
        return [step * at for at in range(first, math.floor(self.high / step + 1e-9) + 1)]


def picture(curve: Curve, found: Suggestion, title: str) -> Picture:
    """Raw and averaged losses over the rate, the suggested span shaded between its bounds."""
    rates, smooth = curve.rates, curve.smooth
    low, room = min(smooth), 0.35 * (smooth[0] - min(smooth))
    x = Axis(rates[0], rates[-1], LEFT, LEFT + WIDTH, rates[-1] / rates[0] >= LOGARITHMIC)
    y = Axis(low - room, smooth[0] + room, TOP + HEIGHT, TOP)
    start, end = x.place(found.minimum), x.place(found.maximum)
    shapes: list[Rect | Text] = [Rect(start, TOP, max(end - start, 1), HEIGHT, SPAN), *_axes(x, y)]
    for rate, loss in zip(rates, curve.losses):
        if y.low <= loss <= y.high:
            shapes.append(Rect(x.place(rate) - 1.5, y.place(loss) - 1.5, 3, 3, RAW))
    above = next((at for at, loss in enumerate(smooth) if loss > y.high), len(smooth))
    shapes += _line([(x.place(rate), y.place(loss)) for rate, loss in zip(rates[: above + 1], smooth)])
    for place, name, value, fill, anchor in (
        (start, "minimum", found.minimum, MINIMUM, "start"), (end, "maximum", found.maximum, MAXIMUM, "end"),
    ):  # fmt: skip
        shapes += [
            Rect(place - 1, TOP, 2, HEIGHT, fill),
            Text(place + (6 if anchor == "start" else -6), TOP + (14 if anchor == "start" else 30),
                 f"{name} {value:.3g}", LABEL, anchor, fill),
        ]  # fmt: skip
    told = [Text(LEFT, TOP + HEIGHT + 56 + 17 * at, line, LABEL) for at, line in enumerate(notes(curve, found))]
    shapes += [
        Text(LEFT, 22, f"{title}: learning-rate range test", 15),
        Text(LEFT, 42, "dots: loss of a step, line: averaged, shaded: the suggested cycle", SMALL, fill=GREY),
        Text(LEFT + WIDTH / 2, TOP + HEIGHT + 34, "learning rate", LABEL, "middle", GREY),
        *told,
    ]
    return Picture(LEFT + WIDTH + RIGHT, TOP + HEIGHT + BELOW, tuple(shapes))


def _axes(x: Axis, y: Axis) -> Iterator[Rect | Text]:
    """Grid lines with their values."""
    grid, bottom = (228, 228, 228), TOP + HEIGHT
    for value in x.ticks():
        yield Rect(x.place(value), TOP, 1, HEIGHT, grid)
        yield Text(x.place(value), bottom + 14, f"{value:.6g}", SMALL, "middle", GREY)
    for value in y.ticks():
        yield Rect(LEFT, y.place(value), WIDTH, 1, grid)
        yield Text(LEFT - 8, y.place(value), f"{value:.6g}", SMALL, "end", GREY)
    yield Rect(LEFT, bottom, WIDTH, 1, GREY)
    yield Rect(LEFT, TOP, 1, HEIGHT, GREY)


def _line(points: Sequence[tuple[float, float]]) -> Iterator[Rect]:
    """A line through points from left to right: for each pixel across, a bar over all heights that it takes there."""
    spans: dict[int, tuple[float, float]] = {}
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        first, last = math.floor(x0), math.floor(x1)
        for column in range(first, last + 1):
            ends = (max(x0, column), min(x1, column + 1))
            heights = [y0 + (y1 - y0) * (at - x0) / (x1 - x0) if x1 > x0 else y for at, y in zip(ends, (y0, y1))]
            low, high = spans.get(column, (math.inf, -math.inf))
            spans[column] = (min(low, *heights), max(high, *heights))
    for column, (low, high) in spans.items():
        yield Rect(column, low - 1, 1, high - low + 2, CURVE)


if __name__ == "__main__":
    sys.exit(main())
