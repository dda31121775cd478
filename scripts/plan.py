"""Predicts a step of training on a cluster: its time, MFU, memory, bubble and exposed communication, without a run.

    python scripts/plan.py --gpus 64 --gpu a100-80gb --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
        --seq-length 2048 --vocab-size 50257 --global-batch-size 512 --bf16 --search

Flags of pretrain_gpt.py say which model, batch and layout. With --search all layouts are weighed, those flags of the
layout that are given stay as they are, and the best are printed with their command lines. Where the layout does not
fit, the steps are printed that make it smaller. docs/planner.md writes the model of time down.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from megazero.config import Config, check_world  # noqa: E402
from megazero.flags import Given, parse, split_words  # noqa: E402
from megazero.planner.devices import DEVICES, Device  # noqa: E402
from megazero.planner.layout import Layout, layout_of  # noqa: E402
from megazero.planner.search import best_layouts, ladder  # noqa: E402
from megazero.planner.step import Prediction, hardware_tflops, predict  # noqa: E402
from megazero.settings import flag_name  # noqa: E402

# Field of Layout -> flags that settle it.
SETTLES = {
    "tensor": ("tensor-model-parallel-size", "model-parallel-size"),
    "pipeline": ("pipeline-model-parallel-size",),
    "expert": ("expert-model-parallel-size", "moe-expert-parallel-size"),
    "schedule": ("pipeline-schedule", "enable-zbh1-pipeline"),
    "chunks": ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"),
    "micro_batch": ("micro-batch-size", "batch-size"),
    "recompute": (
        "recompute-granularity", "recompute-activations", "checkpoint-activations", "activations-checkpoint-method",
    ),
}
INSTEAD = {"world-size": "--gpus", "device-memory-gb": "--gpu-memory-gb"}
BESIDE = ("recompute-method", "recompute-num-layers", "checkpoint-num-layers", "activations-checkpoint-num-layers")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 where nothing fits; 2 where the flags are wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=int, required=True, help="devices of the cluster")
    parser.add_argument("--gpu", choices=DEVICES, default="a100-80gb", help="which kind")
    parser.add_argument("--gpus-per-node", type=int, help="devices of a node [8]")
    parser.add_argument("--link-gb-per-s", type=float, help="between devices of a node, per device and direction")
    parser.add_argument("--network-gb-per-s", type=float, help="out of the node, per device and direction")
    parser.add_argument("--gpu-memory-gb", type=float, help="memory of a device")
    parser.add_argument("--gpu-tflops", type=float, help="its peak in 16-bit matrix products")
    parser.add_argument("--search", action="store_true", help="weigh all layouts that the given flags leave open")
    parser.add_argument("--best", type=int, default=10, help="how many of them to print [10]")
    parser.add_argument("--as-json", "--json", action="store_true", help="for programs")
    asked, words = parser.parse_known_args(argv)
    try:
        given = split_words(words)
        for flag in given:
            if flag.name in INSTEAD:
                raise ValueError(f"{flag.typed} goes with pretrain_gpt.py: give {INSTEAD[flag.name]}")
        config, _ = parse([*words, "--print-layout"])
        vocab = config.model.vocab_size
        if vocab is None:
            raise ValueError("missing: --vocab-size")
        device = device_of(asked)
        if asked.search:
            return search(asked, config, given, device)
        check_world(config, asked.gpus)
        layout = layout_of(config, vocab, asked.gpus)
        tell([predict(layout, device)], given, asked.as_json)
    except (ValueError, OSError) as wrong:
        print(f"plan.py: error: {wrong}", file=sys.stderr)
        return 2
    return told_to_fit(layout, device, asked.as_json)


def device_of(asked: argparse.Namespace) -> Device:
    """The device, with what was given in place of its data sheet. ValueError where a number cannot be."""
    for name in ("gpus", "best"):
        if vars(asked)[name] < 1:
            raise ValueError(f"--{name} {vars(asked)[name]}: must be at least 1")
    given = {}
    for name, flag, unit in (
        ("per_node", "gpus_per_node", 1), ("link", "link_gb_per_s", 1e9), ("network", "network_gb_per_s", 1e9),
        ("memory", "gpu_memory_gb", 1e9), ("flops", "gpu_tflops", 1e12),
    ):
        value = vars(asked)[flag]
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag_name(flag)} {value}: must be above 0")
        given |= {} if value is None else {name: value * unit}
    return replace(DEVICES[asked.gpu], **given)


def search(asked: argparse.Namespace, config: Config, given: Sequence[Given], device: Device) -> int:
    """Weigh all layouts and print the best, or how the given one could fit."""
    names = {flag.name for flag in given}
    settled = {field for field, flags in SETTLES.items() if names & set(flags)}
    if "chunks" in settled and "schedule" not in settled:
        settled.add("schedule")
    batch = config.batch.global_batch_size
    if batch is None:
        raise ValueError("--search needs --global-batch-size")
    alone = replace(config.batch, global_batch_size=None, rampup_batch_size=(), micro_batch_size=1)
    start = layout_of(replace(config, batch=alone), config.model.vocab_size or 0, asked.gpus)
    start = replace(start, micro_batch=config.batch.micro_batch_size)
    best = best_layouts(start, device, settled, world=asked.gpus, batch=batch, count=asked.best)
    if best:
        tell(best, given, asked.as_json)
        return 0
    print("no layout fits" if not asked.as_json else "[]")
    each = max(1, batch // (start.data * start.micro_batch))
    told_to_fit(replace(start, micro_batches=each), device, asked.as_json)
    return 1


def tell(found: Sequence[Prediction], given: Sequence[Given], as_json: bool) -> None:
    """Print predictions, the fastest first."""
    reports = [report(one, given) for one in found]
    if as_json:
        print(json.dumps(reports, indent=2))
        return
    print(f"{found[0].layout.world} x {found[0].device.name}, batch {found[0].layout.batch}")
    head = (
        "seconds", "MFU", "TFLOP/s", "GB", "fits", "bubble", "exposed", "tensor", "pipeline", "chunks", "data",
        "expert", "micro", "schedule", "recompute",
    )
    rows = [tuple(shown(row[name]) for name in head) for row in reports]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for number, row in enumerate(reports, 1):
        print(f"\n{number}: {row['command']}")


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value or "-")


def report(one: Prediction, given: Sequence[Given]) -> dict[str, Any]:
    """What is told of a prediction."""
    layout = one.layout
    return {
        "seconds": one.seconds, "MFU": one.mfu, "TFLOP/s": one.tflops, "hardware_tflops": hardware_tflops(one),
        "GB": one.fullest.total / 1e9, "bytes": one.fullest.classes, "fits": one.fits, "bubble": one.bubble,
        "exposed": one.exposed, "exchange_seconds": one.exchange, "reduction_seconds": one.reduction,
        "update_seconds": one.update, "tensor": layout.tensor, "pipeline": layout.pipeline, "chunks": layout.chunks,
        "data": layout.data, "expert": layout.expert, "micro": layout.micro_batch, "schedule": layout.schedule,
        "recompute": layout.recompute, "command": command(layout, given),
    }


def command(layout: Layout, given: Sequence[Given]) -> str:
    """The command line of a layout: what was given, with the layout's flags in place of those that were."""
    replaced = {flag for flags in SETTLES.values() for flag in flags} | set(BESIDE)
    kept = [word for flag in given if flag.name not in replaced for word in (flag.typed, *flag.words)]
    words: list[Any] = [
        "--tensor-model-parallel-size", layout.tensor, "--pipeline-model-parallel-size", layout.pipeline,
        "--micro-batch-size", layout.micro_batch,
    ]
    if layout.pipeline > 1:
        words += ["--pipeline-schedule", layout.schedule]
        words += ["--num-virtual-stages-per-pipeline-rank", layout.chunks] if layout.chunks > 1 else []
    typed = [flag.typed for flag in given if flag.name in SETTLES["expert"]]        # which family's, too
    if layout.expert > 1 or typed:
        words += [*(typed or ["--expert-model-parallel-size"])[:1], layout.expert]
    if layout.recompute is not None:
        words += ["--recompute-granularity", layout.recompute]
    if layout.recompute == "full":
        words += ["--recompute-method", layout.method, "--recompute-num-layers", layout.group]
    return f"pretrain_gpt.py {shlex.join([*kept, *map(str, words)])}"


def told_to_fit(layout: Layout, device: Device, as_json: bool) -> int:
    """Where the layout is too large, the steps that make it smaller. Returns the exit code."""
    rungs = ladder(layout, device)
    if not rungs or as_json:
        return int(bool(rungs))
    print(
        f"\nit does not fit into the {device.usable / 1e9:.1f} GB that are usable of {device.memory / 1e9:.1f}; "
        "each step on top of those before it:"
    )
    for rung in rungs:
        saved = rung.before - rung.after
        print(f"  {rung.words}: saves {saved / 1e9:.1f} GB, {rung.after / 1e9:.1f} GB are left")
    if rungs[-1].after > device.usable:
        print("  and still it does not fit: more devices, or a smaller model")
    return 1


if __name__ == "__main__":
    sys.exit(main())
