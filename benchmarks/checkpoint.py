"""Saving and loading a state with Adam's moments, against torch.save, safetensors, torch's distributed checkpoint and a
raw write of the same bytes.

    python benchmarks/checkpoint.py --parameters 200_000_000 --processes 1 2 --disk /data --memory /dev/shm

All ways take turns within a round, another one first in each, each in a new folder. Every rank saves and loads its own
slices, 1/processes of all; a save ends when its bytes are synced and all ranks are done. Raw is a write of the buffers
as they lie with one fsync, and a read of them into memory that is there. Ready: loaded, and the weights carried to all
ranks, which every way needs before it can train. On the disk the files are put out of the page cache before they are
loaded, as far as the system does that. Memory (tmpfs) shows what the software itself costs. Every way has as many
threads as it likes; the distributed checkpoint is told to use two.
GB/s are medians of rounds, ratios medians of ratios within a round: where others work too, only these mean something.
The stall of a save in the background is measured against a plain copy of the same tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from megazero.cores import usable_cores  # noqa: E402
from megazero.parallel.groups import Mesh, World, connect, disconnect, open_mesh  # noqa: E402
from megazero.parallel.params import Initial, ParamInfo  # noqa: E402
from megazero.parallel.rules import Adam  # noqa: E402
from megazero.parallel.shard import ShardSpec  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.parallel.zero import Zero, ZeroOptimizer  # noqa: E402
from megazero.saver import Saver, Saving  # noqa: E402
from megazero.snapshot import fill  # noqa: E402
from megazero.trainer import Progress  # noqa: E402

HIDDEN = 1024
WAYS = ("raw", "megazero", "safetensors", "torch", "distributed")
DONE = ("save", "load", "ready")


class NoSettings:
    """A state without a model has no configuration."""

    def to_json(self) -> str:
        return "{}"


def make_optimizer(parameters: int, mesh: Mesh) -> ZeroOptimizer:
    """The weights of a GPT of about so many parameters, and Adam's moments, in fp32, cut over the data ranks."""
    shapes = {"embedding": (parameters // 8 // HIDDEN, HIDDEN)}
    layers = max(round(parameters * 7 / 8 / (12 * HIDDEN**2)), 1)
    for n in range(layers):
        shapes |= {
            f"layers.{n}.norm": (HIDDEN,), f"layers.{n}.qkv": (3 * HIDDEN, HIDDEN), f"layers.{n}.out": (HIDDEN, HIDDEN),
            f"layers.{n}.up": (4 * HIDDEN, HIDDEN), f"layers.{n}.down": (HIDDEN, 4 * HIDDEN),
        }  # fmt: skip
    infos = [
        ParamInfo(name, nn.Parameter(torch.randn(shape)), ShardSpec(shape, (None,) * len(shape)), Initial(), True)
        for name, shape in shapes.items()
    ]
    optimizer = ZeroOptimizer(infos, mesh, Adam(), dtype=torch.float32, zero=Zero(stage=2))
    for bucket in optimizer.buckets:
        for kind, data in bucket.slices.items():
            if kind != "weight":
                data.normal_()
    return optimizer


@dataclass
class Bench:
    """One rank's state, and each way to save and to load it."""

    mesh: Mesh
    optimizer: ZeroOptimizer
    saver: Saver | None = None

    @property
    def state(self) -> dict[str, Tensor]:
        """This rank's slices by a name that no other rank has."""
        named = enumerate(bucket.slices.items() for bucket in self.optimizer.buckets)
        return {f"{self.mesh.rank}/{n}/{kind}": data for n, slices in named for kind, data in slices}

    @property
    def bytes(self) -> int:
        """Of all ranks."""
        return sum(data.nbytes for data in self.state.values()) * self.mesh.world.size

    def file(self, folder: Path) -> Path:
        return folder / f"rank{self.mesh.rank}"

    def save(self, way: str, folder: Path) -> None:
        """Save to a folder that is there; the bytes are on the disk on return."""
        file = self.file(folder)
        if way == "megazero":
            saver = Saver(folder, self.optimizer, self.mesh, config=NoSettings())
            saver.save(Progress(1))
            saver.close()
        elif way == "distributed":
            dcp.save(self.state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=not self.many)
        elif way == "raw":
            with open(file, "wb", buffering=0) as out:
                for data in self.state.values():
                    out.write(memoryview(data.numpy()).cast("B"))
        elif way == "safetensors":
            save_file(self.state, file)
        else:
            torch.save(self.state, file)
        if file.exists():
            with open(file, "rb") as out:
                os.fsync(out.fileno())

    def load(self, way: str, folder: Path) -> None:
        """Load this rank's slices: into the state, but for torch and safetensors, which make tensors of their own."""
        file = self.file(folder)
        if way == "megazero":
            fill(folder / "iter_0000001", self.optimizer, self.mesh, moments=True)
        elif way == "distributed":
            dcp.load(self.state, storage_reader=dcp.FileSystemReader(folder), no_dist=not self.many)
        elif way == "raw":
            with open(file, "rb", buffering=0) as source:
                for data in self.state.values():
                    source.readinto(memoryview(data.numpy()).cast("B"))
        elif way == "safetensors":
            for data in load_file(file).values():
                data.sum()          # it maps the file, and reads when it is looked at
        else:
            torch.load(file, weights_only=True)

    @property
    def many(self) -> bool:
        return self.mesh.world.size > 1

    def timed(self, action: Callable[[], None]) -> float:
        """Seconds until all ranks are done."""
        if self.many:
            dist.barrier()
        start = time.perf_counter()
        action()
        if self.many:
            dist.barrier()
        return time.perf_counter() - start


def new_folder(bench: Bench, root: Path, name: str) -> Path:
    """An empty folder that all ranks see."""
    folder = root / name
    if bench.mesh.rank == 0:
        folder.mkdir()
    if bench.many:
        dist.barrier()
    return folder


def evict(bench: Bench, folder: Path) -> None:
    """Put the files of a folder out of the page cache."""
    for path in folder.rglob("*") if bench.mesh.rank == 0 else ():
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if bench.many:
        dist.barrier()


def peak_memory() -> int:
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def growth_of_a_save(bench: Bench, root: Path) -> tuple[int, float]:
    """Bytes that a plain save needs beside the state, and the folder's size over the tensors'."""
    folder = new_folder(bench, root, "growth")
    (Path("/proc/self") / "clear_refs").write_text("5")      # the peak is from now on
    before = peak_memory()
    bench.save("megazero", folder)
    grown = peak_memory() - before
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    real = sum(info.spec.numel for bucket in bench.optimizer.buckets for info in bucket.infos) * 12
    if bench.mesh.rank == 0:
        shutil.rmtree(folder)
    return grown, held / real


def stalls(bench: Bench, root: Path, rounds: int) -> list[float]:
    """How long saves in the background stop the run, over the time of a copy to the very same memory."""
    folder, found = new_folder(bench, root, "stall"), []
    saver = Saver(folder, bench.optimizer, bench.mesh, config=NoSettings(), how=Saving(background=True))
    for number in range(rounds + 1):            # the first one makes the buffers
        saved = []
        stall = bench.timed(lambda number=number, saved=saved: saved.append(saver.save(Progress(number))))
        saver.finish()
        if bench.mesh.rank == 0:
            shutil.rmtree(saved[0])             # all of them would not fit into memory
        slices = [data for parts in saver._slices().values() for data in parts]
        pairs = list(zip(saver._buffers.values(), slices, strict=True))
        copy = bench.timed(lambda pairs=pairs: [to.copy_(data) for to, data in pairs])
        found.append(stall / copy)
    saver.close()
    if bench.mesh.rank == 0:
        shutil.rmtree(folder)
    return found[1:]


def work(args: argparse.Namespace) -> dict[str, object]:
    """All figures of one number of processes, as one rank measures them."""
    world = World.from_environment()
    connect(world, torch.device("cpu"), "gloo")
    mesh = open_mesh(Topology(data=world.size))
    bench = Bench(mesh, make_optimizer(args.parameters, mesh))
    grown, size = growth_of_a_save(bench, args.memory)        # first: memory that others freed would hide it
    found: dict[str, object] = {"growth of a save in MiB": grown / 2**20, "folder over tensors": size}
    for medium in args.media:
        root = args.memory if medium == "memory" else args.disk
        seconds = {way: {done: [] for done in DONE} for way in WAYS}
        for number in range(args.rounds):
            first = number % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                folder = new_folder(bench, root, f"{way}-{number}")
                seconds[way]["save"].append(bench.timed(lambda way=way, folder=folder: bench.save(way, folder)))
                if medium == "disk":
                    evict(bench, folder)
                loading = bench.timed(lambda way=way, folder=folder: bench.load(way, folder))
                seconds[way]["load"].append(loading)
                seconds[way]["ready"].append(loading + bench.timed(bench.optimizer.publish))
                if mesh.rank == 0:
                    shutil.rmtree(folder)
        found[medium] = figures(seconds, bench.bytes)
    found["stall over a copy"] = statistics.median(stalls(bench, args.memory, args.rounds + 2))
    disconnect()
    return found


def figures(seconds: dict[str, dict[str, list[float]]], size: int) -> dict[str, dict[str, float]]:
    """GB/s of each way, and the ratios of our speed to that of raw and of the distributed checkpoint."""
    found = {}
    for what in DONE:
        ours = seconds["megazero"][what]
        numbers = {way: size / statistics.median(seconds[way][what]) / 1e9 for way in WAYS}
        for other in WAYS:
            if other != "megazero":
                ratios = [a / b for a, b in zip(seconds[other][what], ours, strict=True)]
                numbers[f"megazero over {other}"] = statistics.median(ratios)
        found[what] = numbers
    return found


def show(found: dict) -> None:
    """Print the figures of one number of processes."""
    for name, numbers in found.items():
        if isinstance(numbers, float):
            print(f"  {name:34}{numbers:8.3f}", flush=True)
            continue
        for what, speeds in numbers.items():
            print(f"  {what}, {name}")
            print("    GB/s:  " + "  ".join(f"{way} {speeds[way]:.2f}" for way in WAYS))
            print("    ratio: " + "  ".join(f"{way} {speed:.2f}" for way, speed in speeds.items() if way not in WAYS))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parameters", type=int, default=200_000_000, help="12 bytes each; default: 200_000_000")
    add("--processes", type=int, nargs="+", default=[1, 2], help="data ranks; default: 1 2")
    add("--media", nargs="+", choices=("memory", "disk"), default=["memory", "disk"], help="default: memory disk")
    add("--rounds", type=int, default=5, help="of which medians are taken; default: 5")
    add("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk; default: %(default)s")
    add("--memory", type=Path, default=Path("/dev/shm"), help="a folder in memory; default: /dev/shm")
    add("--json", metavar="FILE", help="write the numbers to FILE as well")
    add("--worker", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.worker:
        warnings.simplefilter("ignore")         # the distributed checkpoint has some to say of one process
        found = work(args)
        if World.from_environment().rank == 0:
            Path(args.worker).write_text(json.dumps(found))
        return
    everything = {}
    for processes in args.processes:
        with tempfile.TemporaryDirectory(dir=args.disk) as disk, tempfile.TemporaryDirectory(dir=args.memory) as memory:
            file = Path(disk) / "found.json"
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            asked = ["--parameters", args.parameters, "--rounds", args.rounds, "--disk", disk, "--memory", memory]
            command = [*launch, __file__, *map(str, asked), "--media", *args.media, "--worker", str(file)]
            subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
            found = everything[f"{processes} processes"] = json.loads(file.read_text())
        print(f"{processes} processes, {args.parameters:,} parameters, {usable_cores()} cores")
        show(found)
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
