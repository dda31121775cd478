"""Pictures of schedules and of real runs: text in the notation of the orders, SVG, PNG."""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from megazero.pipe.instructions import render
from megazero.pipe.lower import add_communication
from megazero.pipe.schedule import SCHEDULES, interleaved
from megazero.pipe.simulate import Costs, simulate
from scripts.draw_schedule import COLOURS, main, shade
from scripts.picture import readable

SVG = "{http://www.w3.org/2000/svg}"


def drawn(tmp_path, name, *flags):
    file = tmp_path / name
    assert main([*flags, "--out", str(file)]) == 0
    return file


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_is_one_line_per_rank_in_the_notation_of_orders(name, tmp_path):
    chunks = {"interleaved": 3, "zb-v": 2}.get(name, 1)
    flags = ("--schedule", name, "--ranks", "3", "--micro-batches", "4", "--chunks", str(chunks))
    lines = drawn(tmp_path, "a.txt", *flags).read_text().splitlines()
    assert lines == [f"{r}: {render(order)}" for r, order in enumerate(SCHEDULES[name](3, 4, chunks))]
    lines = drawn(tmp_path, "b.txt", *flags, "--evaluate").read_text().splitlines()
    assert lines == [f"{r}: {render(order)}" for r, order in enumerate(SCHEDULES[name].forward_only(3, 4, chunks))]


def test_an_interleaved_schedule_is_drawn_in_the_groups_that_are_asked_for(tmp_path, capsys):
    flags = ("--schedule", "interleaved", "--ranks", "2", "--micro-batches", "5", "--group", "3")
    lines = drawn(tmp_path, "a.txt", *flags).read_text().splitlines()
    assert lines == [f"{r}: {render(order)}" for r, order in enumerate(interleaved(2, 5, 2, 3))]
    assert "interleaved: 2 ranks, 2 stages each, 5 micro-batches in groups of 3" in capsys.readouterr().out


def bars(file):
    """(x, width, fill) of the bars of an SVG, and its texts."""
    root = ElementTree.parse(file).getroot()
    rects = [(float(r.get("x")), float(r.get("width")), r.get("fill")) for r in root.iter(f"{SVG}rect") if r.get("x")]
    legend = [r for r in rects if r[1] == 14]
    return [r for r in rects if r[2] in {fill for _, _, fill in legend} and r not in legend], [
        t.text for t in root.iter(f"{SVG}text")
    ]


def test_svg_shows_each_step_with_its_colour_and_micro_batch(tmp_path):
    file = drawn(tmp_path, "a.svg", "--schedule", "zb-h1", "--ranks", "4", "--micro-batches", "8", "--times", "1,1,2,0")
    steps, texts = bars(file)
    assert len(steps) == 4 * 8 * 3 and len({fill for _, _, fill in steps}) == 3
    widths = sorted(width for _, width, _ in steps)
    assert widths[-1] / widths[0] == pytest.approx(2, rel=0.1)
    assert [texts.count(str(micro)) >= 12 for micro in range(8)] == [True] * 8
    assert "zb-h1: 4 ranks, 8 micro-batches" in texts and "rank 3" in texts
    assert "F forward" in texts and "B input gradient" in texts and "W weight gradient" in texts
    assert any(text.startswith("makespan") and "bubble" in text for text in texts)
    assert sum(text == "idle 11.1%" for text in drawn_texts(tmp_path, "zb-h1")) == 4


def drawn_texts(tmp_path, name):
    return bars(drawn(tmp_path, "b.svg", "--schedule", name, "--ranks", "4", "--micro-batches", "8"))[1]


def test_many_ranks_and_micro_batches_fit_a_screen(tmp_path):
    """Their bars have no numbers then, and not every rank its name."""
    flags = ("--schedule", "1f1b", "--ranks", "64", "--micro-batches", "128")
    file = drawn(tmp_path, "a.svg", *flags)
    steps, texts = bars(file)
    root = ElementTree.parse(file).getroot()
    assert len(steps) == 64 * 128 * 2 and int(root.get("width")) < 2400 and int(root.get("height")) < 900
    assert "rank 0" in texts and "rank 1" not in texts and not any(text == "5" for text in texts)
    last = re.compile(r"rank (\d+)")
    assert max(int(found[1]) for text in texts if (found := last.fullmatch(text))) >= 60
    (one,) = {text for text in bars(drawn(tmp_path, "b.svg", "--schedule", "gpipe", "--ranks", "1", "--micro-batches",
                                          "1"))[1] if "gpipe" in text}
    assert one == "gpipe: 1 rank, 1 micro-batch"


def luminance(colour):
    red, green, blue = (c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_numbers_can_be_read_on_every_colour():
    """A contrast of 4.5 at least, as WCAG 2 asks of small text."""
    for kind in COLOURS:
        for chunks in (1, 2, 3, 4, 8):
            for chunk in range(chunks):
                fill = shade(kind, chunk, chunks)
                low, high = sorted((luminance(fill), luminance(readable(fill))))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (kind, chunk, chunks)


def test_the_stages_of_a_rank_have_their_own_shades(tmp_path):
    flags = ("--schedule", "interleaved", "--ranks", "2", "--micro-batches", "4", "--chunks", "3")
    steps, _ = bars(drawn(tmp_path, "a.svg", *flags))
    assert len(steps) == 2 * 4 * 3 * 2 and len({fill for _, _, fill in steps}) == 6


def test_png_is_the_same_picture(tmp_path):
    flags = ("--schedule", "zb-v", "--ranks", "2", "--micro-batches", "3")
    image = Image.open(drawn(tmp_path, "a.png", *flags))
    root = ElementTree.parse(drawn(tmp_path, "a.svg", *flags)).getroot()
    assert image.size == (int(root.get("width")), int(root.get("height")))
    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    fills = {tuple(bytes.fromhex(fill[1:])) for _, _, fill in bars(tmp_path / "a.svg")[0]}
    assert len(fills) == 6 and fills <= colours


def trace_of(folder, name, ranks, micros, chunks=1):
    """The files that a run as fast as its simulation would write."""
    folder.mkdir()
    report = simulate(add_communication(SCHEDULES[name](ranks, micros, chunks), ranks * chunks), Costs(2.0, 2.0, 1.0))
    for rank, steps in enumerate(report.timeline):
        events = [
            {
                "name": render([s.op]), "ph": "X", "pid": rank, "ts": 5e6 + 1e3 * s.start,
                "dur": 1e3 * (s.end - s.start),
                "args": {"kind": type(s.op).__name__, "micro": s.op.micro, "stage": s.op.stage, "iteration": i},
            }
            for i in (7, 8) for s in steps
        ]
        events.append({"name": "recvA0", "ph": "X", "ts": 0, "dur": 3, "args": {"kind": "RecvActivation"}})
        events.append({"name": "process_name", "ph": "M", "args": {"name": "rank"}})
        (folder / f"trace_rank_{rank:04d}.json").write_text(json.dumps({"traceEvents": events}))
    return report


def test_a_trace_is_drawn_as_the_run_that_wrote_it(tmp_path, capsys):
    """Its last iteration, from the first step on; messages and names of processes are left out."""
    folder = tmp_path / "trace"
    report = trace_of(folder, "interleaved", 2, 4, 2)
    lines = drawn(tmp_path, "a.txt", "--trace", str(folder)).read_text().splitlines()
    assert lines == [f"{r}: {render(order)}" for r, order in enumerate(SCHEDULES["interleaved"](2, 4, 2))]
    said = capsys.readouterr().out
    assert "trace, iteration 8: 2 ranks" in said
    assert f"makespan {report.makespan:.3g} ms, idle {report.bubble:.1%}" in said
    steps, texts = bars(drawn(tmp_path, "a.svg", "--trace", str(folder), "--iteration", "7"))
    assert len(steps) == 2 * 4 * 2 * 2 and "0 ms" in texts


def rewrite(folder, change):
    """Change each event of each rank's file."""
    for rank, file in enumerate(sorted(folder.iterdir())):
        events = json.loads(file.read_text())["traceEvents"]
        for event in events:
            if "iteration" in event["args"]:
                change(rank, event)
        file.write_text(json.dumps(events))


def told(tmp_path, capsys, folder):
    drawn(tmp_path, "t.svg", "--trace", str(folder))
    return capsys.readouterr().out


def test_a_run_is_set_beside_paper(tmp_path, capsys):
    """One that is as fast as its simulation, one with a pause, one with clocks that differ, one that lacks a rank."""
    report = trace_of(tmp_path / "even", "zb-v", 2, 4, 2)
    span = f"{report.makespan:.3g} ms"
    said = told(tmp_path, capsys, tmp_path / "even")
    assert f"on paper {span} with these means, {span} with the time of each step; the run {span}" in said
    assert "mean ms by stage: F 2 2 2 2, B 2 2 2 2, W 1 1 1 1" in said and "clocks" not in said
    trace_of(tmp_path / "late", "zb-v", 2, 4, 2)
    rewrite(tmp_path / "late", lambda rank, e: e.update(ts=e["ts"] + 7e3 * (e["ts"] > 5e6 + 2e4)))
    late = f"{report.makespan + 7:.3g} ms"
    assert f"on paper {span} with these means, {span} with the time of each step; the run {late}" in told(
        tmp_path, capsys, tmp_path / "late")
    trace_of(tmp_path / "skewed", "zb-v", 2, 4, 2)
    rewrite(tmp_path / "skewed", lambda rank, e: e.update(ts=e["ts"] - 5e3 * rank))
    assert "the ranks' clocks differ by 5 ms or more" in told(tmp_path, capsys, tmp_path / "skewed")
    trace_of(tmp_path / "part", "zb-v", 2, 4, 2)
    (tmp_path / "part" / "trace_rank_0001.json").unlink()
    assert "on paper" not in told(tmp_path, capsys, tmp_path / "part")


def test_the_pipelines_of_data_ranks_are_told_apart(tmp_path, capsys):
    """Ranks 0 and 1 hold the first stage, 2 and 3 the last; the second pipeline took longer."""
    folder = tmp_path / "trace"
    report = trace_of(folder, "1f1b", 2, 3)
    files = sorted(folder.iterdir())
    (folder / "trace_rank_0003.json").write_text(files[1].read_text())
    files[1].rename(folder / "trace_rank_0002.json")
    (folder / "trace_rank_0001.json").write_text(files[0].read_text())
    rewrite(folder, lambda rank, e: e.update(ts=e["ts"] + 4e3 * (rank % 2 == 1 and e["ts"] > 5e6 + 1e4)))
    said = told(tmp_path, capsys, folder)
    paper, run = f"{report.makespan:.3g} ms", f"{report.makespan + 4:.3g} ms"
    assert f"on paper {paper} with these means, {paper} with the time of each step; the run {run}" in said


def test_the_trace_of_all_ranks_is_written_as_one(tmp_path, capsys):
    trace_of(tmp_path / "trace", "1f1b", 2, 3)
    events = json.loads(drawn(tmp_path, "all.json", "--trace", str(tmp_path / "trace")).read_text())["traceEvents"]
    assert {e["pid"] for e in events if "pid" in e} == {0, 1} and len(events) == 2 * (2 * 2 * 3 + 2)
    assert "must end in .svg, .png, .txt" in refused(capsys, "--schedule", "1f1b", "--out", str(tmp_path / "a.json"))


def refused(capsys, *flags):
    with pytest.raises(SystemExit) as left:
        main(flags)
    assert left.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_drawn_is_refused_in_one_line(tmp_path, capsys):
    out = ("--out", str(tmp_path / "a.svg"))
    schedule = ("--schedule", "1f1b")
    assert "--out a.pdf: the name must end in .svg, .png, .txt" in refused(capsys, *schedule, "--out", "a.pdf")
    message = refused(capsys, *schedule, "--out", "/dev/null/x.svg")
    assert "error: --out /dev/null/x.svg cannot be written: Not a directory" in message
    message = refused(capsys, *schedule, "--out", str(tmp_path / "no" / "x.png"))
    assert "no/x.png cannot be written: No such file" in message
    for times in ("1,2", "0,0,0,1", "1,1,1,inf", "nan,1,1,1", "1,1,1,nan", "1,-1,1,1"):
        assert f"--times {times}: must be four numbers" in refused(capsys, *schedule, "--times", times, *out)
    assert "must be at least 1" in refused(capsys, *schedule, "--ranks", "0", *out)
    assert "--group 4: 1f1b has no groups" in refused(capsys, *schedule, "--group", "4", *out)
    message = refused(capsys, "--schedule", "interleaved", "--group", "3", *out)
    assert "a group of 3 micro-batches is too small for 4 pipeline ranks" in message
    assert "1f1b runs 1 stage on each pipeline rank, not 2" in refused(capsys, *schedule, "--chunks", "2", *out)
    assert "one of the arguments --schedule --trace is required" in refused(capsys, *out)
    folder = tmp_path / "trace"
    folder.mkdir()
    assert "there is no .json file" in refused(capsys, "--trace", str(folder), *out)
    (folder / "trace_rank_0000.json").write_text('[{"args": {"kind": "Forward"}}]')
    assert "trace_rank_0000.json: not a trace of a pipeline" in refused(capsys, "--trace", str(folder), *out)
    (folder / "trace_rank_0000.json").write_text("[]")
    assert "no forward or backward is in it" in refused(capsys, "--trace", str(folder), *out)
    trace_of(tmp_path / "good", "1f1b", 2, 2)
    message = refused(capsys, "--trace", str(tmp_path / "good"), "--iteration", "9", *out)
    assert "--iteration 9: the trace holds [7, 8]" in message


def test_png_without_its_library_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    message = refused(capsys, "--schedule", "1f1b", "--out", str(tmp_path / "a.png"))
    assert "a .png needs Pillow (pip install pillow)" in message
