"""Draws what each pipeline rank does when: as a schedule says, or as a real run did.

    python scripts/draw_schedule.py --schedule zb-h1 --ranks 4 --micro-batches 8 --times 1,1.2,0.9,0.1 --out zb-h1.svg
    python scripts/draw_schedule.py --trace runs/a/trace --out run.png

A bar is a step: its colour says which kind, its number which micro-batch, its shade which of the rank's stages. Where
many of them would make it metres wide, bars are narrow and have no numbers. A grey line: a run's rank waits for a
message or hands one over.

What is said of a run: the share of time in which ranks compute nothing, and that of messages in it; each
stage's mean times, of which the largest one sets the pace; and how long the same steps would take on paper, where
messages take no time: with these mean times, which the schedule allows, and with the time that each step took, to which
what is missing was lost between the steps. --out FILE.json writes the trace of all ranks as one, to be opened in a
browser (ui.perfetto.dev or chrome://tracing).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from megazero.pipe.traced import Traced, clock_lag, compare, events_of, read_trace, stage_means  # noqa: E402
from scripts.picture import (  # noqa: E402
    GREY,
    LABEL,
    SMALL,
    Colour,
    Picture,
    Rect,
    Text,
    readable,
    svg,
    text_width,
    write_png,
)

# Kinds and shades differ by 30 or more in CIE Lab, also for eyes that do not tell red from green.
COLOURS = {
    Forward: (34, 78, 196), BackwardInput: (24, 114, 56), BackwardWeight: (245, 187, 26), Backward: (198, 56, 54)
}
LIGHTEST = 0.52                 # how much white is in the shade of a rank's last stage
MEANING = {
    Forward: "forward", BackwardInput: "input gradient", BackwardWeight: "weight gradient", Backward: "whole backward"
}
LINE = (150, 150, 150)          # of messages

ROW, THIN, LEFT, TOP, RIGHT = 26, 9, 70, 64, 96                 # pixels; THIN: of many ranks
MANY = 32                                                       # ranks
NARROWEST, SHORTEST, LONGEST = 24, 860, 6_000                   # of a usual bar with its number, of such a timeline
BARE, LONGEST_BARE = 2, 12_000                                  # of a usual bar and a timeline without numbers
CLOCKS = 0.05                   # milliseconds by which ranks' clocks may seem to differ before it is told
SUFFIXES = (".svg", ".png", ".txt")


@dataclass(frozen=True)
class Timeline:
    """What is drawn: a row of steps for each rank, in units of `unit`, and when it was busy with messages alone."""

    title: str
    notes: tuple[str, ...]
    unit: str
    rows: dict[int, tuple[Step, ...]]
    messages: Mapping[int, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    @property
    def span(self) -> float:
        """The end of the last step; the first one starts at 0 or later."""
        return max((step.end for row in self.rows.values() for step in row), default=0.0)

    def idle(self, rank: int) -> float:
        """The share of the whole time in which a rank runs no step."""
        return 1 - sum(step.end - step.start for step in self.rows[rank]) / self.span if self.span else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the flags ask for. Returns the exit code."""
    made = parser()
    asked = made.parse_args(argv)
    try:
        suffixes = SUFFIXES if asked.trace is None else (*SUFFIXES, ".json")
        if asked.out.suffix not in suffixes:
            raise ValueError(f"--out {asked.out}: the name must end in {', '.join(suffixes)}")
        with named("--trace", asked.trace, "read"):
            timeline = of_trace(asked.trace, asked.iteration) if asked.trace else of_schedule(asked)
            events = merged(asked.trace) if asked.out.suffix == ".json" else []
        with named("--out", asked.out, "written"):
            if asked.out.suffix == ".json":
                asked.out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
            else:
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
    add("--chunks", type=int, metavar="V", help="stages on each rank [2 of interleaved and zb-v, else 1]")
    add("--group", type=int, metavar="N", help="micro-batches of a group where it is interleaved [as many as ranks]")
    add("--times", default="1,1,1,0", metavar="F,B,W,SEND",
        help="of a stage's forward, input gradient, weight gradient and of a message [1,1,1,0]")
    add("--evaluate", action="store_true", help="draw an evaluation on the schedule's stages instead of training")
    add("--iteration", type=int, metavar="N", help="of a trace that holds several [its last]")
    add("--out", type=Path, required=True, metavar="FILE",
        help=".svg, .png (needs Pillow) or .txt: one line per rank, as F0 F1 B0 W0, stages as .0 .1; of a trace also "
        ".json: that of all ranks")
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
        f"{schedule.name}{' (evaluation)' if asked.evaluate else ''}: {_counted(ranks, 'rank')}{per_rank}, "
        f"{_counted(micros, 'micro-batch', 'es')}{groups}",
        (f"F, B, W, send = {asked.times}", *_findings(report)), "", dict(enumerate(report.timeline)),
    )


def _costs(times: str) -> Costs:
    try:
        values = [float(word) for word in times.split(",")]
    except ValueError:
        values = []
    if len(values) != 4 or min(values) < 0 or not 0 < sum(values[:3]) < math.inf or not values[3] < math.inf:
        raise ValueError(f"--times {times}: must be four numbers, as 1,1,1,0: forward, input, weight, message")
    return Costs(*values)


def _findings(report: Report) -> Iterator[str]:
    yield f"makespan {report.makespan:g}, bubble {report.bubble:.1%}"
    if any(report.peak_held):
        live, held = map(_brief, (report.peak_live, report.peak_held))
        yield f"held per rank until the input gradient: {live} (micro-batches of one stage)"
        if held != live:
            yield f"held per rank until the weight gradient: {held}"


def _brief(numbers: Sequence[int | str]) -> str:
    """One number per rank or stage, of many the first and last ones."""
    shown = map(str, numbers) if len(numbers) <= 16 else (*map(str, numbers[:4]), "...", *map(str, numbers[-4:]))
    return " ".join(shown)


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{'' if count == 1 else plural}"


def of_trace(folder: Path, iteration: int | None) -> Timeline:
    """What a run did in an iteration."""
    wanted, rows = read_trace(folder, iteration)
    title = f"{folder.name}{'' if wanted is None else f', iteration {wanted}'}: {_counted(len(rows), 'rank')}"
    drawn = {rank: row.steps for rank, row in rows.items()}
    timeline = Timeline(title, (), "ms", drawn, {rank: row.messages for rank, row in rows.items()})
    return replace(timeline, notes=tuple(_told(timeline, rows)))


def _told(timeline: Timeline, rows: Mapping[int, Traced]) -> Iterator[str]:
    """What a trace tells: see the top of this file."""
    span, ranks = timeline.span, list(timeline.rows)
    idle = statistics.mean(map(timeline.idle, ranks))
    messages = sum(end - start for these in timeline.messages.values() for start, end in these)
    share = messages / (span or 1.0) / len(ranks)
    yield f"makespan {_ms(span)} ms, idle {idle:.1%}" + (f" (messages {share:.1%})" if share else "")
    means = stage_means(rows)
    by_kind = {kind: [means[place] for place in sorted(means, key=_stage) if place[0] is kind] for kind in COLOURS}
    each = [f"{SHORT[kind]} {_brief(list(map(_ms, these)))}" for kind, these in by_kind.items() if these]
    yield f"mean ms by stage: {', '.join(each)}"
    paper = compare(rows)
    if paper is not None:
        yield (
            f"on paper {_ms(paper.even)} ms with these means, {_ms(paper.taken)} ms with the time of each step; "
            f"the run {_ms(paper.run)} ms"
        )
    lag = clock_lag(rows)
    if lag > CLOCKS:
        yield f"the ranks' clocks differ by {_ms(lag)} ms or more: a step began before what it needs from another rank"


def _ms(time: float) -> str:
    """Three digits, but no exponent."""
    return f"{time:.3g}" if time < 999.5 else f"{time:.0f}"


def _stage(place: tuple[type[Compute], int]) -> int:
    return place[1]


def merged(folder: Path) -> list[dict[str, object]]:
    """The events of all ranks."""
    return [event for file in sorted(folder.glob("*.json")) for event in events_of(file)]


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
    """Rows of bars with a legend above, each rank's idle share beside them, the time and the findings below."""
    steps = [step for row in timeline.rows.values() for step in row]
    span, scale, numbered = timeline.span or 1.0, *_scale(timeline, steps)
    ranks, end = list(timeline.rows), LEFT + span * scale
    high = ROW if len(ranks) <= MANY else THIN
    each = high + (4 if high == ROW else 1)
    bottom = TOP + len(ranks) * each
    chunks = max(len({step.op.stage for step in row}) for row in timeline.rows.values())
    has_messages = any(timeline.messages.values())
    shapes: list[Rect | Text] = [
        Text(12, 18, timeline.title, 15), *_legend({type(s.op) for s in steps}, chunks, has_messages)
    ]
    for tick, label in _ticks(span):
        x = LEFT + tick * scale
        shapes += [
            Rect(x, TOP - 4, 1, bottom - TOP + 8, (225, 225, 225)),
            Text(x, bottom + 14, label + (f" {timeline.unit}" if timeline.unit else ""), SMALL, "middle", GREY),
        ]
    every = -(-(LABEL + 2) // each)                                 # rows that are labelled
    for place, rank in enumerate(ranks):
        y = TOP + place * each
        if place % every == 0:
            shapes.append(Text(LEFT - 8, y + high / 2, f"rank {rank}", LABEL, "end"))
            shapes.append(Text(end + 8, y + high / 2, f"idle {timeline.idle(rank):.1%}", LABEL, fill=GREY))
        for start, stop in timeline.messages.get(rank, ()):
            shapes.append(Rect(LEFT + start * scale, y + high / 2 - 1, (stop - start) * scale, 2, LINE))
        shapes += _bars(timeline.rows[rank], y, scale, high, numbered)
    notes = [Text(12, bottom + 38 + 18 * at, note, LABEL) for at, note in enumerate(timeline.notes)]
    width = max(int(end) + RIGHT, *(text_width(shape) + 24 for shape in (shapes[0], *notes)))
    return Picture(width, bottom + 36 + 18 * len(notes), (*shapes, *notes))


def _scale(timeline: Timeline, steps: Sequence[Step]) -> tuple[float, bool]:
    """Pixels of a unit of time, and whether bars have numbers: where that would make the picture too wide, they are
    just wide enough to be seen."""
    usual = statistics.median_low([s.end - s.start for s in steps if s.end > s.start] or [1.0])
    span = timeline.span or 1.0
    if span * NARROWEST / usual <= LONGEST:
        return max(NARROWEST / usual, SHORTEST / span), True
    return min(max(BARE / usual, 2 * SHORTEST / span), LONGEST_BARE / span), False


def _bars(row: Sequence[Step], y: float, scale: float, high: int, numbered: bool) -> Iterator[Rect | Text]:
    """The bars of one rank, each with its micro-batch where that fits."""
    place = {stage: at for at, stage in enumerate(sorted({step.op.stage for step in row}))}
    for step in row:
        x, width = LEFT + step.start * scale, (step.end - step.start) * scale
        fill = shade(step.op, place[step.op.stage], len(place))
        gap = 1.0 if width >= 4 else 0.0
        yield Rect(x + gap / 2, y, width - gap, high, fill)
        label = Text(x + width / 2, y + high / 2, str(step.op.micro), LABEL, "middle", readable(fill))
        if numbered and high == ROW and text_width(label) + 2 < width:
            yield label


def shade(op: Compute | type[Compute], chunk: int, chunks: int) -> Colour:
    """The colour of a kind of step, lighter for the later stages of a rank."""
    red, green, blue = COLOURS[op if isinstance(op, type) else type(op)]
    white = LIGHTEST * chunk / max(chunks - 1, 1)
    return tuple(round(c + (255 - c) * white) for c in (red, green, blue))


def _legend(kinds: set[type], chunks: int, has_messages: bool) -> Iterator[Rect | Text]:
    """A box for each kind that occurs, in each stage's shade, and a line for messages."""
    x = float(LEFT)
    for kind in (kind for kind in COLOURS if kind in kinds):
        for chunk in range(chunks):
            yield Rect(x, 38, 14, 12, shade(kind, chunk, chunks))
            x += 14
        label = Text(x + 5, 44, f"{SHORT[kind]} {MEANING[kind]}", LABEL)
        yield label
        x += text_width(label) + 24
    if has_messages:
        yield Rect(x, 43, 14, 2, LINE)
        label = Text(x + 19, 44, "messages", LABEL)
        yield label
        x += text_width(label) + 38
    if chunks > 1:
        yield Text(x, 44, "(a rank's stages: the first is darkest)", LABEL, fill=GREY)


def _ticks(span: float) -> Iterator[tuple[float, str]]:
    """Round times, about ten of them."""
    power = 10.0 ** math.floor(math.log10(span / 10))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= span / 10 * 0.999)
    for count in range(int(span / step + 1e-9) + 1):
        yield count * step, f"{count * step:g}"


if __name__ == "__main__":
    sys.exit(main())
