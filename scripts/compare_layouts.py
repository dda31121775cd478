"""Runs the same training steps in several layouts on this machine and prints how far the results are from the first's.

    python scripts/compare_layouts.py --layouts 1,1,1 2,2,1 2,1,2 --steps 5 -- --fp64 <flags of pretrain_gpt.py>

A layout is tensor,pipeline,data sizes, or tensor,pipeline,data,expert. All take the same samples: the global batch is
--global-batch-size, or the micro-batch size times the largest data size. Exit code 1: something differs by more than
its tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from megazero.checkpoint import Reader, folder_of  # noqa: E402
from megazero.config import Config, PrecisionConfig, check_world  # noqa: E402
from megazero.flags import parse, split_words  # noqa: E402
from scripts.ranks import free_port, variables  # noqa: E402

FRONT_DOOR = Path(__file__).resolve().parent.parent / "pretrain_gpt.py"
MEASURES = ("loss", "grad_norm", "weights", "moments")

# dtype -> tolerance of each of MEASURES, for a few steps at a learning rate of about 1e-3. A sum in another order
# differs in the last digit, 1e-7 in fp32, 5e-4 in fp16, 4e-3 in bf16. Adam divides a gradient by its own size even
# where it is nothing but rounding, as that of a key bias is: in fp32 such weights differ by a part of the learning
# rate, in fp16 and bf16 by as much as one step up against one step down, so there only the other measures tell more.
TOLERANCES = {
    "fp64": (1e-10, 1e-10, 1e-10, 1e-10),
    "fp32": (1e-5, 1e-5, 2e-3, 1e-4),
    "fp16": (2e-4, 2e-3, 2.0, 5e-2),
    "bf16": (1e-3, 1e-2, 2.0, 2e-1),
}

# Flags of the training script that would change what is compared -> why they are refused here.
NOT_HERE = {
    "tensor_model_parallel_size": "--layouts says it",
    "pipeline_model_parallel_size": "--layouts says it",
    "expert_model_parallel_size": "--layouts says it",
    "moe_expert_parallel_size": "--layouts says it",
    "save": "checkpoints are written to a temporary folder",
    "save_interval": "every step is saved",
    "load": "every layout starts from its own initial weights",
    "auto_resume": "every layout starts from its own initial weights",
    "ckpt_step": "every layout starts from its own initial weights",
    "metrics_jsonl": "it goes to a temporary folder",
    "tensorboard_dir": "nothing but differences is told",
    "exit_interval": "--steps says it",
    "exit_duration_in_mins": "--steps says it",
    "skip_train": "this trains",
    "print_layout": "this runs",
    "print_lr": "this runs",
    "print_config": "this runs",
    "world_size": "--layouts says it",
    "json": "this runs",
    "device_memory_gb": "this runs",
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, written tensor,pipeline,data or tensor,pipeline,data,expert."""

    tensor: int
    pipeline: int
    data: int
    expert: int = 1

    @staticmethod
    def read(text: str) -> Layout:
        """From "tp,pp,dp" or "tp,pp,dp,ep". Raises ValueError."""
        sizes = text.split(",")
        if len(sizes) not in (3, 4) or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"--layouts {text}: a layout is tensor,pipeline,data sizes (and expert), each at least 1")
        return Layout(*map(int, sizes))

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"{self.tensor},{self.pipeline},{self.data}" + (f",{self.expert}" if self.expert > 1 else "")


@dataclass(frozen=True)
class Difference:
    """How far one measure of one step is from the first layout's; `tensor` is the one that differs most."""

    layout: str
    step: int
    measure: str
    value: float
    tolerance: float
    tensor: str | None = None

    @property
    def excess(self) -> float:
        """Above 1 where the tolerance does not hold; infinite for what is not a number."""
        if math.isnan(self.value):
            return math.inf
        return self.value / self.tolerance if self.tolerance else (math.inf if self.value else 0.0)

    def __str__(self) -> str:
        of = f" of {self.tensor}" if self.tensor else ""
        return f"{self.measure}{of} at step {self.step} of layout {self.layout}: {self.value:.1e}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "compare_layouts.py", usage=argparse.SUPPRESS, description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--layouts", nargs="+", required=True, metavar="T,P,D", help="two or more; the first is compared with")
    add("--steps", type=int, default=5, metavar="N", help="optimizer steps to compare [5]")
    add("--tolerance", type=float, metavar="X", help="one for all measures, instead of the dtype's own")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all within tolerance; 1: not; 2: wrong usage, or a run that failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    args, flags = parser().parse_args(words[:at]), words[at + 1 :]
    try:
        layouts = [Layout.read(text) for text in args.layouts]
        config, commands = plan(layouts, args, flags)
        tolerances = tolerances_of(config.precision, args.tolerance)
        if (config.model.attention_dropout or config.model.hidden_dropout) and len({x.tensor for x in layouts}) > 1:
            print(
                "compare_layouts.py: layouts of another tensor size draw other dropout masks and train another model: "
                "add --attention-dropout 0 --hidden-dropout 0 to compare them",
                file=sys.stderr,
            )
        with tempfile.TemporaryDirectory(prefix="compare-layouts-") as folder:
            found = list(compare(layouts, commands, Path(folder), tolerances, steps=args.steps, lr=config.schedule.lr))
    except ValueError as wrong:
        print(f"compare_layouts.py: error: {wrong}", file=sys.stderr)
        return 2
    worst = max(found, key=lambda difference: difference.excess)
    print((as_json if args.json else as_table)(layouts[0], found, tolerances))
    if worst.excess > 1:
        print(f"compare_layouts.py: above the tolerance of {worst.tolerance:.0e}: {worst}", file=sys.stderr)
        return 1
    return 0


def plan(layouts: Sequence[Layout], args: argparse.Namespace, flags: Sequence[str]) -> tuple[Config, list[list[str]]]:
    """The configuration of the first layout, and each layout's flags. Raises ValueError before anything runs."""
    if len(layouts) < 2:
        raise ValueError(f"--layouts {layouts[0]}: give two or more, the first is what the others are compared with")
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: must be at least 1")
    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        raise ValueError(f"--tolerance {args.tolerance}: must be at least 0")
    for given in split_words(flags):
        name = given.name.replace("-", "_")
        if name in NOT_HERE:
            raise ValueError(f"{given.typed} cannot be given here: {NOT_HERE[name]}")
    own = ["--exit-interval", str(args.steps), "--save-interval", "1"]
    names = {given.name.replace("_", "-") for given in split_words(flags)}
    if not names & {"train-iters", "train-samples", "train-tokens"}:
        own += ["--train-iters", str(args.steps)]
    config, _ = parse([*flags, *own])
    batch = config.batch.global_batch(max(layout.data for layout in layouts))
    if not names & {"global-batch-size", "step-batch-size-schedule"}:
        own += ["--global-batch-size", str(batch)]
    length = config.batch.iterations(batch, seq_length=config.seq_lengths)
    if length < args.steps:
        raise ValueError(f"--steps {args.steps}: the run ends after {length} (--train-iters)")
    commands = []
    for layout in layouts:
        sizes = ("--tensor-model-parallel-size", layout.tensor, "--pipeline-model-parallel-size", layout.pipeline)
        sizes += ("--expert-model-parallel-size", layout.expert)
        commands.append([*flags, *own, *map(str, sizes)])
        try:
            asked, _ = parse([*commands[-1], "--save", "."])
            check_world(asked, layout.world)
        except ValueError as wrong:
            raise ValueError(f"layout {layout}: {wrong}") from wrong
    return config, commands


def tolerances_of(precision: PrecisionConfig, one: float | None) -> dict[str, float]:
    """The tolerance of each measure."""
    dtype = next((name for name in ("fp64", "fp16", "bf16") if vars(precision)[name]), "fp32")
    return dict(zip(MEASURES, TOLERANCES[dtype] if one is None else (one,) * len(MEASURES), strict=True))


def compare(
    layouts: Sequence[Layout], commands: Sequence[list[str]], folder: Path, tolerances: dict[str, float], *,
    steps: int, lr: float,
) -> Iterator[Difference]:
    """Run every layout, and yield every difference from the first. On the disk are at most two layouts' checkpoints."""
    first = folder / "first"
    for number, (layout, flags) in enumerate(zip(layouts, commands, strict=True)):
        mine = folder / "other" if number else first
        start = time.monotonic()
        launch(flags, layout, mine)
        print(f"{layout}: {layout.world} processes, {time.monotonic() - start:.1f} s", file=sys.stderr)
        if number:
            for step in range(1, steps + 1):
                for measure, (value, tensor) in differences(mine, first, step, lr).items():
                    yield Difference(str(layout), step, measure, value, tolerances[measure], tensor)
            shutil.rmtree(mine)


def launch(flags: Sequence[str], layout: Layout, folder: Path) -> None:
    """One training run to its end, its files in `folder`. Raises ValueError with the error line of a run that fails."""
    folder.mkdir()
    port = free_port()
    own = ("--save", str(folder), "--metrics-jsonl", str(folder / "metrics.jsonl"))
    command = [sys.executable, str(FRONT_DOOR), *flags, *own]
    processes = []
    try:
        for rank in range(layout.world):
            place = [f"{name}={value}" for name, value in variables(rank, layout.world, port).items()]
            with open(folder / f"output-{rank}", "wb") as output:
                processes.append(subprocess.Popen(
                    ["env", *place, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                ))
        wait_for(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode not in (0, -signal.SIGKILL)]
    if failed or any(process.returncode for process in processes):
        raise ValueError(f"layout {layout}: {error_line(folder, failed)}")


def wait_for(processes: Sequence[subprocess.Popen], grace: float = 10.0) -> None:
    """Until all have ended, or `grace` seconds after the first has failed: the others may wait for it in vain."""
    deadline = math.inf
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if deadline == math.inf and any(process.poll() for process in processes):
            deadline = time.monotonic() + grace
        time.sleep(0.02)


def error_line(folder: Path, failed: Sequence[int]) -> str:
    """What a failed run said last: the line of the rank that spoke of an error, else any rank's last line."""
    texts = [(folder / f"output-{rank}").read_text(errors="replace").strip() for rank in failed]
    lines = [text.splitlines()[-1] for text in texts if text]
    told = [line for line in lines if "pretrain_gpt.py: error:" in line] or lines or ["failed without a word"]
    return told[0].removeprefix("pretrain_gpt.py: error: ")


def differences(mine: Path, first: Path, step: int, lr: float) -> dict[str, tuple[float, str | None]]:
    """Measure -> (difference after `step` steps, the tensor that differs most). `lr`: the largest learning rate.

    Loss and gradient norm relative to the first's; a weight's max|a - b| / max(max|b|, lr); a moment's |a - b| / |b|
    in the L2 norm.
    """
    a, b = record_of(mine, step), record_of(first, step)
    out: dict[str, tuple[float, str | None]] = {
        measure: (relative(a[key], b[key]), None) for measure, key in (("loss", "lm_loss"), ("grad_norm", "grad_norm"))
    }
    ours, theirs = Reader(folder_of(mine, step)), Reader(folder_of(first, step))
    if ours.tensors.keys() != theirs.tensors.keys():
        raise ValueError(f"the layouts hold different tensors: {sorted(ours.tensors.keys() ^ theirs.tensors.keys())}")
    weights, moments = {}, {}
    for name, entry in theirs.tensors.items():
        for kind in entry.dtypes:
            x, y = ours.read(name, kind).double(), theirs.read(name, kind).double()
            if kind == "weight":
                weights[name] = ((x - y).abs().max() / max(y.abs().max().item(), lr)).item()
            else:
                size = torch.linalg.vector_norm(y).item()
                moments[f"{kind} of {name}"] = torch.linalg.vector_norm(x - y).item() / (size or 1.0)
    return out | {"weights": largest(weights), "moments": largest(moments)}


def record_of(folder: Path, step: int) -> dict[str, float]:
    """What a run's metrics say of one training step."""
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["iteration"] == step and "split" not in record:
            return {key: math.nan if value is None else value for key, value in record.items()}
    raise ValueError(f"{folder}: the run told nothing of step {step}")


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a)


def largest(values: dict[str, float]) -> tuple[float, str]:
    """The largest value and its name; one that is not a number counts as larger than any."""
    name = max(values, key=lambda key: math.inf if math.isnan(values[key]) else values[key])
    return values[name], name


def by_step(found: Sequence[Difference]) -> dict[tuple[str, int], dict[str, Difference]]:
    """(layout, step) -> measure -> difference, in the order of the runs."""
    rows: dict[tuple[str, int], dict[str, Difference]] = {}
    for difference in found:
        rows.setdefault((difference.layout, difference.step), {})[difference.measure] = difference
    return rows


def as_table(first: Layout, found: Sequence[Difference], tolerances: dict[str, float]) -> str:
    """For people: a line per layout and step; a star marks what is above its tolerance."""
    lines = [
        f"difference from layout {first}: relative for losses and norms, of the worst tensor for weights and moments",
        f"{'layout':14}{'step':>5}  " + "".join(f"{measure:>10} " for measure in MEASURES),
        f"{'tolerance':21}" + "".join(f"{tolerances[measure]:>10.1e} " for measure in MEASURES),
    ]
    for (layout, step), row in by_step(found).items():
        cells = [f"{row[measure].value:>10.1e}{'*' if row[measure].excess > 1 else ' '}" for measure in MEASURES]
        lines.append(f"{layout:14}{step:>5}  " + "".join(cells))
    nearest = max(found, key=lambda difference: difference.excess)
    lines.append(f"nearest to its tolerance, or above: {nearest}, {nearest.excess:.1e} of the tolerance")
    return "\n".join(line.rstrip() for line in lines)


def as_json(first: Layout, found: Sequence[Difference], tolerances: dict[str, float]) -> str:
    """One object; what is not a number is null."""
    steps = []
    for (layout, step), row in by_step(found).items():
        values = {measure: None if math.isnan(d.value) else d.value for measure, d in row.items()}
        worst = {f"worst_{measure}": d.tensor for measure, d in row.items() if d.tensor}
        steps.append({"layout": layout, "step": step, **values, **worst})
    within = all(difference.excess <= 1 for difference in found)
    told = {"first": str(first), "tolerances": tolerances, "within_tolerance": within, "differences": steps}
    return json.dumps(told, indent=1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # so that processes and files go where this one is ended
    sys.exit(main())
