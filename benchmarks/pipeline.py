"""How fast a pipeline step is: beside torch.distributed.pipelining, and beside one process with as many threads.

    python benchmarks/pipeline.py --processes 2 4 --json pipeline.json

One step is all forwards and backwards of a global batch of a stack of transformer blocks in plain torch, the same for
all. In each round the ways take turns on the same processes, and medians of ratios within a round are shown, so that a
machine with other work is fair to all. "One process" has as many threads as all ranks together; perfect scaling is p
times the speed of one process with the threads of one rank. Its bound is m / (m + (p - 1) / v) for m micro-batches, p
ranks and v stages on each, where every thread has a core of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from megazero.cores import usable_cores  # noqa: E402
from megazero.parallel.collectives import all_reduce  # noqa: E402
from megazero.parallel.groups import Mesh, mesh_on_paper, open_mesh  # noqa: E402
from megazero.parallel.params import adopt, collect, initialize  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.pipe.engine import PipeEngine  # noqa: E402
from megazero.pipe.lower import add_communication  # noqa: E402
from megazero.pipe.p2p import Wires, edges_of  # noqa: E402
from megazero.pipe.schedule import SCHEDULES  # noqa: E402
from megazero.pipe.stage import LayerSpec, Recompute, build_stages, cut_layers  # noqa: E402

SEED = 1
CHUNKS = {"1f1b": 1, "interleaved": 2}
# Threads that wait give their core away: spinning, two threads on busy cores take many times as long as one.
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
Batch = tuple[Tensor, Tensor]  # input and target, each [micro-batch, seq, hidden]
Way = Callable[[], float]  # one step: the mean loss where it is known, else 0


class Block(nn.Module):
    """Pre-norm transformer block, [micro-batch, seq, hidden]; the first one of a model reads the micro-batch."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 64
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor | None, batch: Batch | None = None) -> Tensor:
        x = batch[0] if x is None else x
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Loss(nn.Module):
    """The mean over the micro-batches of the squared error."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__()
        self.micro_batches = micro_batches

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.compare(x, batch[1])

    def compare(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(x, target) / self.micro_batches


def blocks_of(args: argparse.Namespace) -> list[LayerSpec]:
    """The model but for its loss."""
    return [LayerSpec(f"blocks.{i}", lambda mesh: adopt(Block(args.hidden), std=0.02)) for i in range(args.layers)]


def data_of(args: argparse.Namespace) -> Batch:
    """A global batch, [micro-batches x micro-batch, seq, hidden]."""
    shape = (2, args.micro_batches * args.micro_batch, args.seq, args.hidden)
    x, target = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x, target


def own_way(args: argparse.Namespace, mesh: Mesh, schedule: str) -> tuple[Way, Callable[[], None]]:
    """A step of this product's engine, and what clears its gradients."""
    ranks, chunks, order = mesh.pipeline.size, CHUNKS[schedule], SCHEDULES[schedule]
    layers = [*blocks_of(args), LayerSpec("loss", lambda mesh: Loss(args.micro_batches), cost=0.0)]
    stages = build_stages(layers, mesh, cut_layers(layers, order.homes(ranks, chunks)), Recompute())
    infos = collect([named for stage in stages.values() for named in stage.named_layers()])
    initialize(infos, mesh.topology, mesh.rank, seed=SEED)
    programs = add_communication(order(ranks, args.micro_batches, chunks), ranks * chunks)
    wires = Wires(mesh.pipeline, edges_of(programs))
    engine = PipeEngine(stages, ranks * chunks - 1, wires, device=mesh.device)
    batches = list(zip(*(part.split(args.micro_batch) for part in data_of(args)), strict=True))

    def step() -> float:
        return sum(loss.item() for loss in engine.run(programs[mesh.stage], batches))

    def clear() -> None:
        for stage in stages.values():
            stage.zero_grad()

    return step, clear


def torch_way(args: argparse.Namespace, mesh: Mesh, schedule: str) -> tuple[Way, Callable[[], None]]:
    """A step of torch.distributed.pipelining, and what clears its gradients."""
    ranks, chunks = mesh.pipeline.size, CHUNKS[schedule]
    stages = []
    for number in range(mesh.stage, ranks * chunks, ranks):
        share = args.layers // (ranks * chunks)
        part = [(spec.name, spec.build(mesh)) for spec in blocks_of(args)[number * share : (number + 1) * share]]
        initialize(collect(part), mesh.topology, mesh.rank, seed=SEED)
        module = nn.Sequential(*(layer for _, layer in part))
        stages.append(PipelineStage(module, number, ranks * chunks, mesh.device, group=mesh.pipeline.handle))
    how = {"n_microbatches": args.micro_batches, "loss_fn": Loss(args.micro_batches).compare, "scale_grads": False}
    runner = Schedule1F1B(stages[0], **how) if chunks == 1 else ScheduleInterleaved1F1B(stages, **how)
    x, target = data_of(args)
    has_first, has_last = mesh.stage == 0, mesh.stage == ranks - 1

    def step() -> float:
        losses: list[Tensor] = []
        given = {"target": target, "losses": losses} if has_last else {}
        runner.step(*([x] if has_first else []), return_outputs=False, **given)
        return sum(loss.item() for loss in losses)

    def clear() -> None:
        for stage in stages:
            stage.submod.zero_grad()

    return step, clear


def timed(way: Way, clear: Callable[[], None], mesh: Mesh) -> tuple[float, float]:
    """(seconds of the slowest rank, loss) of one step."""
    clear()
    dist.barrier()
    start = time.perf_counter()
    loss = way()
    found = all_reduce(torch.tensor([time.perf_counter() - start, loss], dtype=torch.float64), mesh.pipeline, "max")
    return found[0].item(), found[1].item()


def timed_alone(way: Way, clear: Callable[[], None], mesh: Mesh, threads: int) -> tuple[float, float]:
    """The same of one process with so many threads, while the others wait."""
    found = torch.zeros(2, dtype=torch.float64)
    if mesh.rank == 0:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        clear()
        start = time.perf_counter()
        loss = way()
        found = torch.tensor([time.perf_counter() - start, loss], dtype=torch.float64)
        torch.set_num_threads(before)
    told = all_reduce(found, mesh.pipeline)
    return told[0].item(), told[1].item()


def work(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One rank of the measurement: medians over the rounds, by schedule."""
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = open_mesh(Topology(pipeline=ranks))
    one = own_way(args, mesh_on_paper(Topology(), 0), "1f1b")
    found = {}
    for schedule, chunks in CHUNKS.items():
        ways = {"megazero": own_way(args, mesh, schedule), "torch": torch_way(args, mesh, schedule)}
        seconds: dict[str, list[float]] = {name: [] for name in ("a part", "one process", *ways)}
        for turn in range(args.rounds + 2):
            told = {
                "a part": timed_alone(*one, mesh, args.threads),
                "one process": timed_alone(*one, mesh, args.threads * ranks),
            }
            for name in list(ways)[:: -1 if turn % 2 else 1]:
                told[name] = timed(*ways[name], mesh)
            losses = [loss for _, loss in told.values()]
            assert max(losses) - min(losses) < 1e-5 * max(losses), f"the ways differ: {told}"
            for name, (took, _) in told.items() if turn > 1 else ():  # the first rounds warm up
                seconds[name].append(took)
        found[schedule] = figures(seconds, ranks) | {
            "bound": args.micro_batches / (args.micro_batches + (ranks - 1) / chunks)
        }
    dist.destroy_process_group()
    return found if mesh.rank == 0 else {}


def figures(seconds: dict[str, list[float]], ranks: int) -> dict[str, float]:
    """Medians of one schedule, and of ratios within a round."""
    def ratio(slow: str, fast: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))

    return {
        "seconds": statistics.median(seconds["megazero"]),
        "seconds of torch": statistics.median(seconds["torch"]),
        "ratio (above 1: faster than torch)": ratio("torch", "megazero"),
        "efficiency against one process": ratio("one process", "megazero"),
        "efficiency of torch against it": ratio("one process", "torch"),
        "share of perfect scaling": ratio("a part", "megazero") / ranks,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--processes", type=int, nargs="+", default=[2, 4], help="pipeline ranks; default: 2 4")
    add("--threads", type=int, default=1, help="of each process; default: 1")
    add("--layers", type=int, default=8, help="default: 8")
    add("--hidden", type=int, default=256, help="default: 256")
    add("--seq", type=int, default=64, help="default: 64")
    add("--micro-batch", type=int, default=1, help="samples; default: 1")
    add("--micro-batches", type=int, default=8, help="of a step; default: 8")
    add("--rounds", type=int, default=15, help="of which medians are taken; default: 15")
    add("--json", metavar="FILE", help="write the numbers to FILE as well")
    add("--worker", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for stages in (processes * max(CHUNKS.values()) for processes in args.processes):
        if args.layers % stages:
            parser.error(f"--layers {args.layers} is not divisible by {stages} stages")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.worker:
        found = work(args)
        if found:
            Path(args.worker).write_text(json.dumps(found))
        return
    everything = {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in args.processes:
            file = Path(folder) / "found.json"
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command = [*launch, __file__, *(sys.argv[1:] if argv is None else argv), "--worker", str(file)]
            subprocess.run(command, check=True, env={**os.environ, **THREADS})
            everything[f"{processes} processes"] = json.loads(file.read_text())
    cores = usable_cores()
    for title, schedules in everything.items():
        for schedule, numbers in schedules.items():
            print(f"{title} x {args.threads} threads on {cores} cores, {schedule}, {args.micro_batches} micro-batches")
            print("\n".join(f"  {name:36}{value:10.3f}" for name, value in numbers.items()))
    if args.json:
        Path(args.json).write_text(json.dumps({"cores": cores, "threads": args.threads, **everything}, indent=1) + "\n")


if __name__ == "__main__":
    main()
