"""What watching costs: training steps that tell nothing beside the same steps as a run tells of them.

Two gloo processes with a model that is cut over both train one machine in turns, a block of steps for each way of
watching; ratios are taken within a round. In each block of the usual way five steps are watched, which in a run is so
once in a hundred, so it is a bound. Processor time is what other work on the machine changes least.

    python benchmarks/watching.py --json watching.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from megazero.batch_sizes import constant  # noqa: E402
from megazero.config import BatchConfig, LoggingConfig, ModelConfig  # noqa: E402
from megazero.config_schedule import ScheduleConfig  # noqa: E402
from megazero.config_watching import WatchingConfig  # noqa: E402
from megazero.data.loader import DocumentRules, Loader, Share  # noqa: E402
from megazero.data.samples import MockSamples  # noqa: E402
from megazero.flops import Flops, model_flops  # noqa: E402
from megazero.gpt import GPTSetup, gpt_layers  # noqa: E402
from megazero.lr_schedule import make_schedule  # noqa: E402
from megazero.machine import Machine, Setup, assemble  # noqa: E402
from megazero.metrics import Metrics  # noqa: E402
from megazero.parallel.groups import open_mesh  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.products import products_of  # noqa: E402
from megazero.snapshot import Saver  # noqa: E402
from megazero.trainer import Asked, Feed, Progress, Schedules, Trainer  # noqa: E402
from megazero.watching import StepWatch  # noqa: E402

RANKS = 2
BARE, USUAL, ALL = "nothing", "the usual", "everything, each step"
NEVER = 10**9


def ways(folder: Path, steps: int) -> dict[str, tuple[LoggingConfig, WatchingConfig]]:
    """How steps are watched, by name."""
    places = {"tensorboard_dir": str(folder / "tensorboard"), "metrics_jsonl": str(folder / "metrics.jsonl")}
    return {
        BARE: (LoggingConfig(log_interval=NEVER), WatchingConfig(straggler_interval=0)),
        USUAL: (LoggingConfig(log_interval=steps, **places), WatchingConfig(straggler_interval=steps)),
        ALL: (
            LoggingConfig(log_interval=1, log_timers_to_tensorboard=True, **places),
            WatchingConfig(timing_log_level=2, log_comms=True, log_memory=True, straggler_interval=1),
        ),
    }  # fmt: skip


class Nobody:
    """Is told everything and keeps nothing: what stands in the place of Metrics."""

    def say(self, line: str) -> None:
        """Nothing is printed."""

    def train(self, record: Mapping[str, object]) -> None:
        """Nothing is kept."""

    def took(self, what: str, iteration: int, seconds: float) -> None:
        """Nothing is kept."""


def trainers(machine: Machine, model: ModelConfig, args: argparse.Namespace, folder: Path) -> dict[str, Trainer]:
    """One for each way, all of one machine."""
    mesh = machine.mesh
    batch = BatchConfig(micro_batch_size=args.batch, global_batch_size=args.batch, train_iters=NEVER, eval_iters=0)
    sizes = constant(args.batch)
    loader = Loader(
        MockSamples(args.vocab, args.seq, 1), Share(args.batch, sizes), vocab_size=args.vocab, seed=1,
        rules=DocumentRules(), num_workers=0,
    )  # fmt: skip
    rates = ScheduleConfig(lr=1e-4, lr_decay_style="constant")
    schedules = Schedules(make_schedule(rates, batch, sizes, seq_length=args.seq))
    flops = Flops(model_flops(model, vocab=args.vocab, batch=1) / args.seq)
    made = {}
    for name, (logging, watching) in ways(folder, args.steps).items():
        told = Nobody() if name == BARE else Metrics(
            logging, iterations=NEVER, world=RANKS, writes=mesh.rank == 0, flops=lambda seq_length: flops,
            watching=watching,
        )
        made[name] = Trainer(
            machine, {"train": Feed(loader, mesh, True, 0)}, schedules, asked=Asked(batch, logging), metrics=told,
            watching=StepWatch(mesh, logging, watching, machine.optimizer.bytes),
            saver=Saver(folder, machine.optimizer, mesh, config=model),
        )  # fmt: skip
    return made


def race(rank: int, folder: str, args: argparse.Namespace) -> None:
    """One of the processes. Rank 0 leaves seconds of a step, by way and round, in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    model = ModelConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.hidden // 64, seq_length=args.seq,
        attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    layers = gpt_layers(GPTSetup(model, args.vocab, torch.float32))
    machine = assemble(layers, open_mesh(Topology(tensor=RANKS), products=products_of(torch.device("cpu"))), Setup())
    made = trainers(machine, model, args, Path(folder))
    progress = dict.fromkeys(made, Progress())
    wall: dict[str, list[float]] = {name: [] for name in made}
    worked: dict[str, list[float]] = {name: [] for name in made}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for turn in range(args.rounds + 1):                     # the first one warms up
            gc.collect()
            for name in list(made) if turn % 2 else list(reversed(made)):
                dist.barrier()
                start, worked_start = time.perf_counter(), time.process_time()
                progress[name] = made[name].train(progress[name], progress[name].iteration + args.steps, None)
                if turn:
                    wall[name].append((time.perf_counter() - start) / args.steps)
                    worked[name].append((time.process_time() - worked_start) / args.steps)
    if rank == 0:
        idle = idle_share(machine, statistics.median(worked[BARE]))
        Path(folder, "told").write_text(json.dumps({"wall": wall, "worked": worked, "idle": idle}))
    dist.barrier()
    dist.destroy_process_group()


def idle_share(machine: Machine, step_seconds: float) -> float:
    """What the calls of a step that nobody watches cost, over the step: a call and its end, two hundred of them."""
    group, times = machine.mesh.world, 10_000
    start = time.process_time()
    for _ in range(times):
        with group.begin("all-gather", 1):
            pass
        group.watch.enter("forward")
    return 200 * (time.process_time() - start) / times / step_seconds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--seq", type=int, default=256)
    add("--vocab", type=int, default=4096)
    add("--batch", type=int, default=4, help="samples of a step; default: 4")
    add("--steps", type=int, default=10, help="of each way in a round; default: 10")
    add("--rounds", type=int, default=15, help="of which medians are taken; default: 15")
    add("--json", metavar="FILE", help="write the numbers to FILE as well")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(race, (folder, args), nprocs=RANKS)
        told = json.loads(Path(folder, "told").read_text())
    found = {}
    print(f"{'told of a step':<24}{'ms':>9}{'processor ms':>14}{'of nothing':>12}{'processor':>11}")
    for name in told["wall"]:
        wall, worked = told["wall"][name], told["worked"][name]
        found[name] = {
            "seconds": statistics.median(wall), "processor_seconds": statistics.median(worked),
            "ratio": statistics.median(a / b for a, b in zip(wall, told["wall"][BARE], strict=True)),
            "processor_ratio": statistics.median(a / b for a, b in zip(worked, told["worked"][BARE], strict=True)),
        }  # fmt: skip
        seconds, processor, ratio, processor_ratio = found[name].values()
        print(f"{name:<24}{1e3 * seconds:9.2f}{1e3 * processor:14.2f}{ratio:12.4f}{processor_ratio:11.4f}")
    print(f"200 calls that nobody watches take {told['idle']:.4%} of a step")
    if args.json:
        Path(args.json).write_text(json.dumps({"ways": found, "unwatched_calls": told["idle"]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
