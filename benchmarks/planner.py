"""Whether the planner ranks layouts as this machine does: two CPU processes, layouts that differ clearly, real steps.

What the machine does in a product, in a pass over memory and between two processes is measured first; from that and the
flags each layout's time is predicted, and then run. Of layouts that are predicted a quarter apart the slower one must
be slower. Exit code 1 where one is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from megazero.flags import parse  # noqa: E402
from megazero.parallel.collectives import all_gather  # noqa: E402
from megazero.parallel.groups import World, choose_device, connect, disconnect, open_mesh  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.planner.devices import LINK_SHARE, MATMUL_SHARE, MEMORY_SHARE, Device  # noqa: E402
from megazero.planner.layout import layout_of  # noqa: E402
from megazero.planner.step import predict  # noqa: E402
from megazero.products import products_of  # noqa: E402

RANKS = 2
APART = 1.25            # ratio of predictions from which on an order is claimed
LAYOUTS = {
    "data 2": "--micro-batch-size 4",
    "data 2, recomputed": "--micro-batch-size 4 --checkpoint-activations",
    "tensor 2": "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 8",
    "tensor 2, 8 micro-batches": "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1",
    "pipeline 2, 8 micro-batches": "--pipeline-model-parallel-size 2 --micro-batch-size 1",
    "pipeline 2, 1 micro-batch": "--pipeline-model-parallel-size 2 --micro-batch-size 8",
    "pipeline 2, 1 micro-batch, recomputed":
        "--pipeline-model-parallel-size 2 --micro-batch-size 8 --checkpoint-activations",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8, help="of each run; the first three do not count [8]")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE as well")
    parser.add_argument("--link-seconds", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.link_seconds:
        return tell_link()
    torch.set_num_threads(1)
    device = this_machine()
    seen = device.flops * MATMUL_SHARE / 2, device.bandwidth * MEMORY_SHARE, device.link * LINK_SHARE
    flops, bandwidth, link = (n / 1e9 for n in seen)
    print(f"one core: {flops:.1f} GFLOP/s in fp32, {bandwidth:.1f} GB/s; between processes {link:.2f} GB/s")
    model = (
        f"--num-layers {asked.layers} --hidden-size {asked.hidden} --num-attention-heads 8 --seq-length {asked.seq} "
        "--vocab-size 1024 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 --mock-data --lr 1e-4 "
        f"--tokenizer-type NullTokenizer --train-iters {asked.steps} --num-workers 0"
    )
    rows = []
    for name, words in LAYOUTS.items():
        config, _ = parse(f"{model} {words}".split())
        predicted = predict(layout_of(config, 1024, RANKS), device).seconds
        measured = run(f"{model} {words}".split())
        rows.append((name, predicted, measured))
        print(f"{name:40} predicted {predicted:.3f} s, measured {measured:.3f} s, {measured / predicted:.2f} of it")
    wrong = []
    for a, b in combinations(sorted(rows, key=lambda row: row[1]), 2):
        if b[1] / a[1] > APART and b[2] <= a[2]:
            wrong.append(f"{b[0]} should be slower than {a[0]}")
    print("\n".join(wrong) or "ranked right")
    if asked.json:
        told = {name: {"predicted": predicted, "measured": measured} for name, predicted, measured in rows}
        Path(asked.json).write_text(json.dumps({"layouts": told, "wrong": wrong}, indent=1) + "\n")
    return int(bool(wrong))


def this_machine() -> Device:
    """One core as a device: its products and passes reach by measure what the planner takes as their shares."""
    a, b = torch.randn(512, 1024), torch.randn(1024, 1024)
    products = products_of(a.device)
    flops = 2 * a.numel() * 1024 / best(lambda: products.of(a, b))
    large, to = torch.randn(2**24), torch.empty(2**24)
    bandwidth = 2 * large.nbytes / best(lambda: to.copy_(large))
    told = launched([__file__, "--link-seconds"])
    link = float(told.split()[-1])
    return Device(
        "this machine", 2 * flops / MATMUL_SHARE, 1e12, bandwidth / MEMORY_SHARE, 1, link / LINK_SHARE,
        link / LINK_SHARE, RANKS, tile=16,
    )


def best(run: Callable[[], object], times: int = 7) -> float:
    """The shortest time that a call took."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def tell_link() -> int:
    """As one of two processes: print bytes per second of an all-gather, of what the other has."""
    world = World.from_environment()
    device, backend = choose_device("gloo", world.local_rank)
    connect(world, device, backend, timeout_minutes=5)
    mesh = open_mesh(Topology(data=RANKS), device)
    x = torch.zeros(2**20)
    seconds = best(lambda: all_gather(x, mesh.data))
    if world.rank == 0:
        print(x.nbytes / seconds)
    disconnect()
    return 0


def run(words: list[str]) -> float:
    """Seconds of a step: the median of those after the first three."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        launched([str(ROOT / "pretrain_gpt.py"), *words, "--metrics-jsonl", str(path)])
        steps = [json.loads(line) for line in path.read_text().splitlines()]
    return statistics.median(step["seconds"] for step in steps[3:])


def launched(words: list[str]) -> str:
    """What two processes print. Raises CalledProcessError where they fail."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=900).stdout


if __name__ == "__main__":
    sys.exit(main())
