"""Train through random faults, and see that nothing is lost and that the end is that of a run that nobody disturbed.

    python scripts/soak_faults.py --faults 200 --ranks 2 --seed 1 --save runs/soak

Ranks are killed, stopped, suspended and started again, disks are full, saves are damaged, flags are wrong. After each
fault it is checked that all ranks are gone in time with the right exit codes and one clear line, that every save is
whole, and that the next start goes on after the newest one. The first part of the faults hits a job with dropout that
keeps its layout: its losses and every bit of its final state must be those of an undisturbed run. The second hits one
in double precision that may start in another layout each time: losses, weights and moments must agree to 1e-10. Last
comes a table of all faults; exit code 1 where anything is not as it must be.

    --kinds kill-save --part 1 --faults 30      SIGKILL of a random rank while it saves, 30 times
    --kinds signal --part 1 --faults 20         a signal in start-up, a step, a save or an evaluation, 20 times
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

import torch  # noqa: E402

from megazero.checkpoint import folder_of  # noqa: E402
from scripts.ranks import read_save  # noqa: E402
from scripts.soak_job import RATE, SAVE_INTERVAL, Fault, Job, Layout, Part, Soak  # noqa: E402
from scripts.soak_kinds import Kind, can_mount, kinds  # noqa: E402

CLOSE = 1e-10           # of losses, weights and moments in double precision
SHOWN = 20              # differences of two runs that are named
PATIENCE = 1800.0       # seconds for the run that nobody disturbs


def main(argv: Sequence[str] | None = None) -> int:
    """Disturb as often as asked. Returns 0 where everything was as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default="", help="beginnings of names of kinds, with commas; default: all")
    parser.add_argument("--part", type=int, choices=(1, 2), help="1: one layout, 2: many; default: both")
    parser.add_argument("--save", type=Path, required=True, help="folder that is not there yet")
    parser.add_argument("--json", type=Path, help="file to write the table to")
    asked = parser.parse_args(argv)
    if asked.save.exists():
        parser.error(f"--save {asked.save}: is there already")
    began, mounts = monotonic(), can_mount(asked.save / "disk")
    print(f"full and read-only disks: {'small ones are mounted' if mounts else 'RLIMIT_FSIZE and chmod, without root'}")
    faults, wrong = [], []
    chosen = [part for number, part in enumerate(parts(asked.ranks), 1) if asked.part in (None, number)]
    for number, part in enumerate(chosen):
        every = kinds(mounts=mounts, layouts=len(part.layouts))
        named = [kind for kind in every if kind.name.startswith(tuple(asked.kinds.split(",")))]
        if not named:
            parser.error(f"--kinds {asked.kinds}: the kinds are {', '.join(kind.name for kind in every)}")
        first = asked.faults * 3 // 5 if len(chosen) > 1 else asked.faults
        draw = random.Random(f"{asked.seed} {part.name}")
        soak = Soak(asked.save / part.name, part, draw)
        try:
            disturb(soak, deck(named, asked.faults - first if number else first, draw), faults)
            wrong += finish(soak)
        except ValueError as error:             # it does not start, or does not end
            wrong.append(f"{part.name}: {error}")
        finally:
            soak.close()
    rows = table(faults)
    print("\n" + "\n".join(lines(rows)))
    wrong = [text for fault in faults for text in fault.wrong] + wrong
    minutes = (monotonic() - began) / 60
    print(f"{len(faults)} faults in {minutes:.1f} minutes; wrong: {wrong or 'nothing'}")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"rows": rows, "wrong": wrong, "minutes": minutes}, indent=1) + "\n")
    return 1 if wrong else 0


def parts(ranks: int) -> tuple[Part, Part]:
    """One job that keeps its layout, and one that has another at each start."""
    layers = f"--num-layers {max(2, ranks)}"
    layouts: list[Layout] = [(1, "")]
    for tensor in (1, 2, 4):
        for pipeline in (1, 2, 4):
            data = ranks // tensor // pipeline
            if tensor * pipeline * data == ranks:
                words = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
                stages = (0, 1, 2) if data > 1 else (1,)
                layouts += [(ranks, f"{words} --zero-stage {stage}") for stage in stages]
    single = f"{layers} --hidden-dropout 0.1 --attention-dropout 0.1"
    # Without a bias of the keys, whose gradient is rounding alone, which Adam divides by its own size.
    double = f"{layers} --fp64 --disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
    fixed: Layout = (ranks, "--pipeline-model-parallel-size 2")
    return Part("one-layout", single, (fixed,), True), Part("many-layouts", double, tuple(layouts), False)


# --------------------------------------------------------------------------------------------------------------- faults


def deck(every: Sequence[Kind], count: int, draw: random.Random) -> list[Kind]:
    """So many faults in random order: one of each kind where there are enough, and of the others as shares say."""
    drawn = list(every)[:count]
    total, dealt, left = sum(kind.share for kind in every), 0.0, count - len(drawn)
    for kind in every:
        before, dealt = round(dealt), dealt + kind.share / total * left
        drawn += [kind] * (round(dealt) - before)
    draw.shuffle(drawn)
    return drawn


def disturb(soak: Soak, left: list[Kind], faults: list[Fault]) -> None:
    """Inject faults, in this order as far as they fit, and add what became of each. One during which this process was
    suspended does not count and comes again, but what it has lost does."""
    print(f"{soak.part.name}: {len(left)} faults", flush=True)
    soak.make_saves(3)
    while left:
        kind = next((kind for kind in left if kind.fits(soak)), None)
        if kind is None:
            soak.quit() if soak.job is not None else soak.make_saves(3)
            continue
        fault = Fault(kind.name)
        soak.clock.look()
        gaps = soak.clock.gaps
        kind.inject(soak, fault)
        seconds = "" if fault.seconds is None else f" {fault.seconds:.1f} s;"
        head = f"fault {len(faults) + 1} {fault.kind}: {fault.told};{seconds} newest save {soak.good}"
        if soak.clock.gaps > gaps and not fault.lost:
            print(f"{head}; not counted: suspended meanwhile", flush=True)
            continue
        left.remove(kind)
        faults.append(fault)
        print(f"{head}; {fault.wrong or 'all is well'}", flush=True)


def table(faults: Iterable[Fault]) -> list[dict]:
    """A row for each kind and one for all."""
    faults = list(faults)
    rows = []
    for name in [*dict.fromkeys(sorted(fault.kind for fault in faults)), "all"]:
        these = [fault for fault in faults if name in (fault.kind, "all")]
        answers = [fault for fault in these if fault.seconds is not None]
        moments = [fault.in_moment for fault in these if fault.in_moment is not None]
        rows.append({
            "kind": name, "injected": len(these), "in_moment": f"{sum(moments)}/{len(moments)}" if moments else "-",
            "answered": f"{sum(not fault.wrong for fault in answers)}/{len(answers)}" if answers else "-",
            "survived": sum(fault.survived for fault in these),
            "longest": round(max((fault.seconds for fault in answers), default=0.0), 1) if answers else "-",
            "lost": sum(fault.lost for fault in these), "wrong": sum(bool(fault.wrong) for fault in these),
        })  # fmt: skip
    return rows


def lines(rows: Sequence[dict]) -> list[str]:
    """The table as text."""
    heads = {
        "kind": "fault", "injected": "injected", "in_moment": "in its moment", "answered": "answered",
        "survived": "survived", "longest": "longest answer, s", "lost": "lost saves", "wrong": "wrong",
    }
    text = [list(heads.values())] + [[str(row[key]) for key in heads] for row in rows]
    widths = [max(len(line[at]) for line in text) for at in range(len(heads))]
    return [
        "  ".join([line[0].ljust(widths[0]), *(f"{cell:>{w}}" for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in text
    ]


# ------------------------------------------------------------------------------------------------------------- the end


def finish(soak: Soak) -> list[str]:
    """Let the job run to its end, beside one that nobody disturbs; in what they differ."""
    if soak.job is not None:
        soak.quit()
    end, straight = (soak.good // SAVE_INTERVAL + 2) * SAVE_INTERVAL, soak.folder / "straight"
    straight.mkdir()
    codes, jobs = [], []
    for folder, interval in (soak.folder, SAVE_INTERVAL), (straight, end):
        words = f"{soak.words(end, folder=folder)} --save-interval {interval}"
        jobs.append(Job(folder, words, soak.part.layouts[-1], soak.start))
        soak.clock.wait(jobs[-1].is_over, PATIENCE)
        codes += jobs[-1].end()
    if any(codes):
        return [f"{soak.part.name}: exit codes {codes} at the end: {[job.said()[-1500:] for job in jobs]}"]
    for fault in soak.pending:
        fault.survived = f"going on after iteration {soak.good}\n" in jobs[0].said()
    soak.pending.clear()
    wrong, far = unlike(soak, straight, end)
    how = "equal in every bit" if soak.part.exact else f"within {far.worst:.1e}"
    print(f"{soak.part.name}: {end} steps, {far.repeated} of them made twice; losses, evaluations, weights and moments "
          f"{how if not wrong else 'differ'} from an undisturbed run's", flush=True)
    return wrong


@dataclass
class Distance:
    """How far two runs are apart, and how many steps the first has made again."""

    worst: float = 0.0
    repeated: int = 0


def unlike(soak: Soak, straight: Path, end: int) -> tuple[list[str], Distance]:
    """In what the disturbed run differs from the other: each loss of each step and evaluation that either has told,
    each tensor at the end."""
    limit, found, wrong = 0.0 if soak.part.exact else CLOSE, Distance(), []
    got, want = told(soak.folder / "metrics.jsonl"), dict(told(straight / "metrics.jsonl"))
    for key, loss in got:
        apart = abs(loss - want[key]) / abs(want[key]) if key in want else 1.0
        found.worst = max(found.worst, apart)
        if apart > limit:
            wrong.append(f"{soak.part.name}: {key} has loss {loss}, undisturbed {want.get(key)}")
    steps = [key for key, _ in got if key[0] == "train"]
    found.repeated = len(steps) - len(set(steps))
    missing = [key for key in want if key[0] == "train" and key not in set(steps)]
    wrong += [f"{soak.part.name}: {len(missing)} steps were never told of, the first {missing[0]}"] if missing else []
    states = [read_save(folder_of(folder / "saves", end)) for folder in (soak.folder, straight)]
    for key in states[1]:
        apart = distance(states[0][key], states[1][key], weight=key[1] == "weight")
        found.worst = max(found.worst, apart)
        if apart > limit or soak.part.exact and not torch.equal(states[0][key], states[1][key]):
            wrong.append(f"{soak.part.name}: {key} differs by {apart:.1e}")
    return wrong[:SHOWN], found


def told(path: Path) -> list[tuple[tuple[str, int], float]]:
    """The loss of each step and evaluation, in the order in which they were made."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue                # the kill came while it was written
        if "lm_loss" in record:
            found.append(((record.get("split", "train"), record["iteration"]), record["lm_loss"]))
    return found


def distance(got: torch.Tensor, want: torch.Tensor, *, weight: bool) -> float:
    """Of weights the largest difference over the largest of them, or the learning rate; of moments that of norms."""
    apart = (got - want).double()
    if weight:
        return (apart.abs().max() / want.abs().max().clamp(min=RATE)).item()
    return (apart.norm() / want.double().norm().clamp(min=1e-300)).item()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # so that no rank and no disk is left behind
    sys.exit(main())
