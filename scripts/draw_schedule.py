"""Draws what each pipeline rank does when: as a schedule says, or as a real run did.

    python scripts/draw_schedule.py --schedule zb-h1 --ranks 4 --micro-batches 8 --times 1,1.2,0.9,0.1 --out zb-h1.svg
    python scripts/draw_schedule.py --trace runs/a/trace --out run.png

A bar is a step: its colour says which kind, its number which micro-batch, its shade which of the rank's stages.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from megazero.pipe.instructions import (  # noqa: E402
    SHORT,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    render,
)
from megazero.pipe.lower import add_communication  # noqa: E402
from megazero.pipe.schedule import SCHEDULES  # noqa: E402
from megazero.pipe.simulate import Costs, Report, Step, simulate  # noqa: E402

COLOURS = {
    Forward: (58, 110, 180), BackwardInput: (38, 150, 136), BackwardWeight: (235, 165, 60), Backward: (196, 84, 62)
}
MEANING = {
    Forward: "forward", BackwardInput: "input gradient", BackwardWeight: "weight gradient", Backward: "whole backward"
}
KINDS = {word: kind for kind in COLOURS for word in (kind.__name__, SHORT[kind])}

ROW, GAP, LEFT, TOP, RIGHT = 26, 4, 70, 64, 24                  # pixels
NARROWEST, SHORTEST, LONGEST = 24, 860, 16_000                  # of a usual bar, of the timeline
LABEL, SMALL = 12, 11                                           # font sizes
INK, GREY = (30, 30, 30), (120, 120, 120)
SUFFIXES = (".svg", ".png", ".txt")

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Timeline:
    """What is drawn: a row of steps for each rank, in units of `unit`."""

    title: str
    notes: tuple[str, ...]
    unit: str
    rows: dict[int, tuple[Step, ...]]

    @property
    def span(self) -> float:
        """The end of the last step; the first one starts at 0 or later."""
        return max((step.end for row in self.rows.values() for step in row), default=0.0)


@dataclass(frozen=True)
class Rect:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: Colour


@dataclass(frozen=True)
class Text:
    """Text in the middle of its line; `anchor` says what of it is at x: start, middle or end."""

    x: float
    y: float
    text: str
    size: int
    anchor: str = "start"
    fill: Colour = INK


@dataclass(frozen=True)
class Picture:
    """Shapes in pixels, later ones on top."""

    width: int
    height: int
    shapes: tuple[Rect | Text, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the flags ask for. Returns the exit code."""
    made = parser()
    asked = made.parse_args(argv)
    try:
        if asked.out.suffix not in SUFFIXES:
            raise ValueError(f"--out {asked.out}: the name must end in {', '.join(SUFFIXES)}")
        with named("--trace", asked.trace, "read"):
            timeline = of_trace(asked.trace, asked.iteration) if asked.trace else of_schedule(asked)
        with named("--out", asked.out, "written"):
            write(timeline, asked.out)
    except ValueError as wrong:
        made.error(str(wrong))
    print("\n".join((timeline.title, *timeline.notes, f"written to {asked.out}")))
    return 0


@contextmanager
def named(flag: str, path: Path | None, done: str) -> Iterator[None]:
    """What is wrong with a file is told with the flag that names it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {error.filename or path} cannot be {done}: {error.strerror or error}") from error


def parser() -> argparse.ArgumentParser:
    """The flags of this command."""
    made = argparse.ArgumentParser(
        "draw_schedule.py", usage=argparse.SUPPRESS, description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--schedule", choices=sorted(SCHEDULES), help="a schedule, run on paper")
    what.add_argument("--trace", type=Path, metavar="DIR", help="what a run wrote with --trace-pipeline DIR")
    add("--ranks", type=int, default=4, metavar="P", help="pipeline ranks [4]")
    add("--micro-batches", type=int, default=8, metavar="M", help="micro-batches of a step [8]")
    add("--chunks", type=int, metavar="V", help="stages on each rank [the least that the schedule runs]")
    add("--group", type=int, metavar="N", help="micro-batches of a group where it is interleaved [as many as ranks]")
    add("--times", default="1,1,1,0", metavar="F,B,W,SEND",
        help="of a stage's forward, input gradient, weight gradient and of a message [1,1,1,0]")
    add("--evaluate", action="store_true", help="draw an evaluation on the schedule's stages instead of training")
    add("--iteration", type=int, metavar="N", help="of a trace that holds several [its last]")
    add("--out", type=Path, required=True, metavar="FILE",
        help=".svg, .png (needs Pillow) or .txt: one line per rank, as F0 F1 B0 W0, stages as .0 .1")
    return made


# ------------------------------------------------------------------------------------------------- what is drawn


def of_schedule(asked: argparse.Namespace) -> Timeline:
    """The schedule on paper."""
    schedule, ranks, micros = SCHEDULES[asked.schedule], asked.ranks, asked.micro_batches
    least = 2 if schedule.name == "interleaved" else schedule.chunks[0]
    chunks = least if asked.chunks is None else asked.chunks
    if asked.group is not None:
        if schedule.grouped is None:
            raise ValueError(f"--group {asked.group}: {schedule.name} has no groups of micro-batches; interleaved has")
        schedule = schedule.in_groups(asked.group)
    orders = (schedule.forward_only if asked.evaluate else schedule)(ranks, micros, chunks)
    report = simulate(add_communication(orders, ranks * chunks), _costs(asked.times))
    per_rank = "" if chunks == 1 else f", {chunks} stages each"
    groups = "" if asked.group is None else f" in groups of {asked.group}"
    return Timeline(
        f"{schedule.name}{' (evaluation)' if asked.evaluate else ''}: {ranks} ranks{per_rank}, "
        f"{micros} micro-batches{groups}",
        (f"F, B, W, send = {asked.times}", *_findings(report)), "", dict(enumerate(report.timeline)),
    )


def _costs(times: str) -> Costs:
    try:
        values = [float(word) for word in times.split(",")]
    except ValueError:
        values = []
    if len(values) != 4 or min(values) < 0 or not sum(values[:3]) < float("inf"):
        raise ValueError(f"--times {times}: must be four numbers, as 1,1,1,0: forward, input, weight, message")
    return Costs(*values)


def _findings(report: Report) -> Iterator[str]:
    yield f"makespan {report.makespan:g}, bubble {report.bubble:.1%}"
    if any(report.peak_held):
        live, held = map(_brief, (report.peak_live, report.peak_held))
        yield f"held per rank until the input gradient: {live} (micro-batches of one stage)"
        if held != live:
            yield f"held per rank until the weight gradient: {held}"


def _brief(numbers: Sequence[int]) -> str:
    """One number per rank, of many ranks the first and last ones."""
    shown = map(str, numbers) if len(numbers) <= 16 else (*map(str, numbers[:4]), "...", *map(str, numbers[-4:]))
    return " ".join(shown)


def of_trace(folder: Path, iteration: int | None) -> Timeline:
    """What a run did, from one Chrome-trace file per rank: events with ts and dur in microseconds.

    Each event's args say kind, micro and stage, and may say the iteration. Times are as each rank's clock has them.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"--trace {folder}: there is no .json file")
    rows = {_rank(file): _steps(file) for file in files}
    known = {step_iteration for row in rows.values() for step_iteration, _ in row if step_iteration is not None}
    wanted = iteration if iteration is not None else max(known, default=None)
    if iteration is not None and iteration not in known:
        raise ValueError(f"--iteration {iteration}: the trace holds {sorted(known) or 'no numbers of iterations'}")
    chosen = {rank: [s for n, s in row if n in (None, wanted)] for rank, row in rows.items()}
    start = min((step.start for row in chosen.values() for step in row), default=None)
    if start is None:
        raise ValueError(f"--trace {folder}: no forward or backward is in it")
    scaled = {
        rank: tuple(Step(s.op, (s.start - start) / 1e3, (s.end - start) / 1e3) for s in sorted(row, key=_by_start))
        for rank, row in sorted(chosen.items())
    }
    title = f"{folder.name}{'' if wanted is None else f', iteration {wanted}'}: {len(rows)} ranks"
    timeline = Timeline(title, (), "ms", scaled)
    busy = sum(step.end - step.start for row in scaled.values() for step in row)
    note = f"makespan {timeline.span:.3g} ms, idle {1 - busy / (timeline.span * len(rows)):.1%}"
    return Timeline(title, (note,), "ms", scaled)


def _by_start(step: Step) -> float:
    return step.start


def _rank(file: Path) -> int:
    digits = re.findall(r"\d+", file.stem)
    if not digits:
        raise ValueError(f"{file}: the name must say the rank, as trace_rank_0003.json")
    return int(digits[-1])


def _steps(file: Path) -> list[tuple[int | None, Step]]:
    """(iteration, step) of each forward and backward in a trace file, in microseconds."""
    steps = []
    try:
        read = json.loads(file.read_text())
        for event in read["traceEvents"] if isinstance(read, dict) else read:
            args = event.get("args", {})
            kind = KINDS.get(args.get("kind"))
            if event.get("ph", "X") == "X" and kind is not None:
                op, start = kind(int(args["micro"]), int(args["stage"])), float(event["ts"])
                steps.append((args.get("iteration"), Step(op, start, start + float(event["dur"]))))
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ValueError(f"{file}: not a trace of a pipeline: {wrong}") from wrong
    return steps


# ---------------------------------------------------------------------------------------------- how it is written


def write(timeline: Timeline, file: Path) -> None:
    """The timeline as text or picture, as the file's name ends."""
    if file.suffix == ".txt":
        lines = [f"{rank}: {render([step.op for step in row])}\n" for rank, row in timeline.rows.items()]
        file.write_text("".join(lines))
    elif file.suffix == ".svg":
        file.write_text(svg(picture(timeline)))
    else:
        write_png(picture(timeline), file)


def picture(timeline: Timeline) -> Picture:
    """Rows of bars with a legend above, the time and the findings below."""
    durations = [s.end - s.start for row in timeline.rows.values() for s in row if s.end > s.start] or [1.0]
    span = timeline.span or 1.0
    scale = min(max(NARROWEST / statistics.median_low(durations), SHORTEST / span), LONGEST / span)
    width, bottom = int(LEFT + span * scale + RIGHT), TOP + len(timeline.rows) * (ROW + GAP)
    steps = [step for row in timeline.rows.values() for step in row]
    chunks = max(len({step.op.stage for step in row}) for row in timeline.rows.values())
    shapes: list[Rect | Text] = [Text(12, 18, timeline.title, 15), *_legend({type(s.op) for s in steps}, chunks)]
    for tick, label in _ticks(span):
        x = LEFT + tick * scale
        shapes += [
            Rect(x, TOP - 4, 1, bottom - TOP + 8, (225, 225, 225)),
            Text(x, bottom + 14, label + (f" {timeline.unit}" if timeline.unit else ""), SMALL, "middle", GREY),
        ]
    for place, (rank, row) in enumerate(timeline.rows.items()):
        y = TOP + place * (ROW + GAP)
        shapes.append(Text(LEFT - 8, y + ROW / 2, f"rank {rank}", LABEL, "end"))
        shapes += _bars(row, y, scale)
    notes = [Text(12, bottom + 38 + 18 * at, note, LABEL) for at, note in enumerate(timeline.notes)]
    width = max(width, *(_text_width(note) + 24 for note in notes))
    return Picture(width, bottom + 36 + 18 * len(notes), (*shapes, *notes))


def _bars(row: Sequence[Step], y: float, scale: float) -> Iterator[Rect | Text]:
    """The bars of one rank, each with its micro-batch where that fits."""
    place = {stage: at for at, stage in enumerate(sorted({step.op.stage for step in row}))}
    for step in row:
        x, width = LEFT + step.start * scale, (step.end - step.start) * scale
        fill = _shade(step.op, place[step.op.stage], len(place))
        gap = min(1.0, width / 4)
        yield Rect(x + gap / 2, y, width - gap, ROW, fill)
        label = Text(x + width / 2, y + ROW / 2, str(step.op.micro), LABEL, "middle", _readable(fill))
        if _text_width(label) + 2 < width:
            yield label


def _shade(op: Compute | type[Compute], chunk: int, chunks: int) -> Colour:
    """The colour of a kind of step, lighter for the later stages of a rank."""
    red, green, blue = COLOURS[op if isinstance(op, type) else type(op)]
    white = 0.62 * chunk / max(chunks - 1, 1)
    return tuple(round(c + (255 - c) * white) for c in (red, green, blue))


def _readable(fill: Colour) -> Colour:
    red, green, blue = fill
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 135 else (255, 255, 255)


def _legend(kinds: set[type], chunks: int) -> Iterator[Rect | Text]:
    """A box for each kind that occurs, in each stage's shade."""
    x = float(LEFT)
    for kind in (kind for kind in COLOURS if kind in kinds):
        for chunk in range(chunks):
            yield Rect(x, 38, 14, 12, _shade(kind, chunk, chunks))
            x += 14
        label = Text(x + 5, 44, f"{SHORT[kind]} {MEANING[kind]}", LABEL)
        yield label
        x += _text_width(label) + 24
    if chunks > 1:
        yield Text(x, 44, "(a rank's stages: the first is darkest)", LABEL, fill=GREY)


def _ticks(span: float) -> Iterator[tuple[float, str]]:
    """Round times, about ten of them."""
    power = 10.0 ** math.floor(math.log10(span / 10))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= span / 10 * 0.999)
    for count in range(int(span / step + 1e-9) + 1):
        yield count * step, f"{count * step:g}"


def _text_width(text: Text) -> int:
    """Pixels, about: a digit of a sans-serif font is 0.56 of its size wide."""
    return round(0.58 * text.size * len(text.text))


def svg(what: Picture) -> str:
    """The picture as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{what.width}" height="{what.height}" '
        f'viewBox="0 0 {what.width} {what.height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{what.width}" height="{what.height}" fill="#ffffff"/>',
    ]
    for shape in what.shapes:
        fill = "#{:02x}{:02x}{:02x}".format(*shape.fill)
        if isinstance(shape, Rect):
            size = f'width="{shape.width:.2f}" height="{shape.height:.2f}"'
            lines.append(f'<rect x="{shape.x:.2f}" y="{shape.y:.2f}" {size} fill="{fill}"/>')
        else:
            place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size}" text-anchor="{shape.anchor}"'
            lines.append(f'<text {place} dominant-baseline="central" fill="{fill}">{escape(shape.text)}</text>')
    return "\n".join((*lines, "</svg>", ""))


def write_png(what: Picture, file: Path) -> None:
    """The picture as a PNG file. Raises ValueError where the library for it is missing."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ModuleNotFoundError as missing:
        raise ValueError(f"--out {file}: a .png needs Pillow (pip install pillow); .svg and .txt do not") from missing
    image = Image.new("RGB", (what.width, what.height), "white")
    draw = ImageDraw.Draw(image)
    fonts = {size: ImageFont.load_default(size) for size in {s.size for s in what.shapes if isinstance(s, Text)}}
    for shape in what.shapes:
        if isinstance(shape, Rect):
            right, low = shape.x + max(shape.width, 1) - 1, shape.y + shape.height - 1
            draw.rectangle((round(shape.x), round(shape.y), round(right), round(low)), fill=shape.fill)
        else:
            anchor = {"start": "lm", "middle": "mm", "end": "rm"}[shape.anchor]
            draw.text((shape.x, shape.y), shape.text, fill=shape.fill, font=fonts[shape.size], anchor=anchor)
    image.save(file)


if __name__ == "__main__":
    sys.exit(main())
