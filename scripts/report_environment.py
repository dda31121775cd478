"""Tells what a machine has and whether it works: versions, devices, links, which kernels will run, and a self test.

    python scripts/report_environment.py                                    # this machine
    torchrun --nnodes 2 --nproc-per-node 8 ... scripts/report_environment.py    # the links between all ranks of a job

The self test lets every collective that a run uses move known numbers and times it (alone: between as many processes as
there are GPUs, or two on a CPU), and compares every op with its formulas. Exit code 1: something is wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.gpu_check import Bench, differences  # noqa: E402
from megazero.flops import device_peak  # noqa: E402
from megazero.kernels.dispatch import OPS, use_triton  # noqa: E402
from megazero.memory import GIB  # noqa: E402
from megazero.parallel.collectives import (  # noqa: E402
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from megazero.parallel.groups import Group, World, choose_device, connect, disconnect, open_mesh  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.pipe.p2p import Wires  # noqa: E402
from megazero.products import describe_products, products_of  # noqa: E402
from megazero.watching import bus_factor  # noqa: E402
from scripts.ranks import free_port  # noqa: E402

NEEDED = ("torch", "numpy", "safetensors", "sentencepiece", "tensorboard", "tokenizers", "tqdm")
OPTIONAL = ("triton", "matplotlib", "pillow", "wandb", "zstandard", "PyYAML", "transformers")
VARIABLES = re.compile(r"(NCCL|GLOO|TORCH|CUDA|OMP|MKL|TRITON|MASTER|SLURM_(NNODES|NTASKS|JOB_ID)|HSA|ROCM)_?\w*")
SIZES = (2**12, 2**20, 2**24)       # bytes on each rank
SECONDS = 10.0                      # of the self test, in all
SHAPE = (64, 1000)                  # of what ops are tried with

def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 where the self test found a fault."""
    args = parse(argv)
    world = World.from_environment()
    if world.size > 1 or args.worker:
        return take_part(args, world)
    report = machine()
    show(report)
    if not args.no_self_test:
        report["kernels"] = try_kernels(args.seconds / 2)
        report["collectives"] = between_processes(args) if args.ranks > 1 else []
        show_tests(report)
    return finish(args, report)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    ranks = torch.cuda.device_count() if torch.cuda.is_available() else 2
    add("--ranks", type=int, default=ranks, help=f"processes of the self test; default: {ranks}")
    add("--seconds", type=float, default=SECONDS, help=f"of the self test; default: {SECONDS:g}")
    add("--no-self-test", action="store_true", help="tell, but try nothing")
    add("--json", type=Path, metavar="FILE", help="write everything to FILE as well")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.ranks < 1 or args.seconds <= 0:
        parser.error(f"--ranks {args.ranks} and --seconds {args.seconds:g}: must be above 0")
    if args.json and (args.json.is_dir() or not os.access(args.json.parent, os.W_OK)):
        parser.error(f"--json {args.json}: cannot be written")
    return args


def finish(args: argparse.Namespace, report: Mapping[str, Any]) -> int:
    """Write what is asked for. The exit code."""
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [row for name in ("kernels", "collectives") for row in report.get(name, ()) if row["right"] is False]
    if wrong:
        print(f"{len(wrong)} faults: see WRONG above", file=sys.stderr)
    return 1 if wrong else 0


# ------------------------------------------------------------------------------------------------- what there is


def machine() -> dict[str, Any]:
    """All that can be told without trying it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": socket.gethostname(), "system": platform.platform(), "python": platform.python_version(),
        "packages": {name: version(name) for name in (*NEEDED, *OPTIONAL)},
        "cuda": torch.version.cuda, "hip": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "driver": tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or None,
        "cpus": os.cpu_count(), "torch_threads": torch.get_num_threads(), "memory_bytes": memory,
        "devices": devices(), "topology": tool("nvidia-smi", "topo", "-m"), "network": network(),
        "impls": {op: "triton" if use_triton(torch.empty(0, device=device()), "auto") else "torch" for op in OPS},
        "products": products(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)},
    }  # fmt: skip


def version(package: str) -> str | None:
    """None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def tool(*words: str) -> str:
    """What a program of the system says; nothing where there is none or it fails."""
    if shutil.which(words[0]) is None:
        return ""
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def device() -> torch.device:
    """What this process computes on."""
    return choose_device("auto", World.from_environment().local_rank)[0]


def devices() -> list[dict[str, Any]]:
    """The GPUs, and which of the others each can read."""
    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        told = torch.cuda.get_device_properties(number)
        peak = device_peak(told.name, half=True)
        others = [other for other in range(torch.cuda.device_count()) if other != number]
        found.append({
            "name": told.name, "memory_bytes": told.total_memory, "capability": f"{told.major}.{told.minor}",
            "processors": told.multi_processor_count, "peak_tflops": None if peak is None else peak / 1e12,
            "reads": [other for other in others if torch.cuda.can_device_access_peer(number, other)],
        })  # fmt: skip
    return found


def network() -> dict[str, str]:
    """Links to other hosts that are up, with their rate where the kernel knows it."""
    found = {}
    for link in sorted(Path("/sys/class/net").glob("*")):
        if read(link / "operstate") == "up" or link.name == "lo":
            rate = read(link / "speed")
            found[link.name] = f"{rate} Mbit/s" if rate and not rate.startswith("-") else "rate unknown"
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        found[f"{port.parts[-3]} port {port.name}"] = read(port / "rate") or "rate unknown"
    return found


def read(path: Path) -> str:
    """A line of the kernel's; nothing where it has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def products() -> list[str]:
    """What a run would say of its matrix products; nothing: they are as torch takes them."""
    dtypes = torch.float32, torch.bfloat16
    return list(dict.fromkeys(line for dtype in dtypes for line in describe_products(products_of(device()), dtype)))


def show(report: Mapping[str, Any]) -> None:
    print(f"host       {report['host']}, {report['system']}, Python {report['python']}")
    there = ", ".join(f"{name} {number}" for name, number in report["packages"].items() if number)
    print(f"packages   {there}")
    missing = [name for name, number in report["packages"].items() if number is None]
    needed = [f"{name} (needed)" if name in NEEDED else name for name in missing]
    print(f"missing    {', '.join(needed) or 'nothing'}")
    print(f"backends   CUDA {report['cuda']}, HIP {report['hip']}, NCCL {report['nccl']}, driver {report['driver']}")
    memory = report["memory_bytes"] / GIB
    print(f"processors {report['cpus']}, {report['torch_threads']} threads of torch, {memory:.1f} GiB of memory")
    for number, gpu in enumerate(report["devices"]):
        print(
            f"device {number}   {gpu['name']}, {gpu['memory_bytes'] / GIB:.1f} GiB, capability {gpu['capability']}, "
            f"{gpu['processors']} processors, peak {gpu['peak_tflops'] or 'unknown: --peak-tflops'} TFLOP/s, "
            f"reads devices {gpu['reads'] or 'none'}"
        )
    if not report["devices"]:
        print("devices    none: runs compute on the CPU, over gloo")
    print(f"network    {', '.join(f'{name} ({rate})' for name, rate in report['network'].items()) or 'none'}")
    if report["topology"]:
        print(report["topology"])
    impls = report["impls"]
    by_impl = {impl: [op for op in impls if impls[op] == impl] for impl in dict.fromkeys(impls.values())}
    print("kernels    " + "; ".join(f"{impl}: {', '.join(ops)}" for impl, ops in by_impl.items()))
    print(f"products   {'; '.join(report['products']) or 'as torch takes them'}")
    print(f"variables  {', '.join(f'{name}={value}' for name, value in report['variables'].items()) or 'none'}")


# --------------------------------------------------------------------------------------------------- does it work


def try_kernels(seconds: float) -> list[dict[str, Any]]:
    """Every op by what will run, beside its formulas. right: None where that was not tried."""
    bench, rows, deadline = Bench(device()), [], time.monotonic() + seconds
    for op in OPS:
        impl = "triton" if use_triton(torch.empty(0, device=bench.device), "auto") else "torch"
        drawn = op == "dropout_add" and impl == "torch"         # by torch's generator, so no formula says the mask
        if drawn or time.monotonic() > deadline:
            rows.append({"op": op, "impl": impl, "right": None, "worst": None})
            continue
        worst = max(differences(bench, op, impl, [SHAPE]).values())
        rows.append({"op": op, "impl": impl, "right": worst <= 1.0, "worst": worst})
    return rows


def between_processes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The collectives between processes of this machine: copies of this script, as torchrun would start them."""
    port = free_port()
    words = [sys.executable, __file__, "--worker", "--seconds", str(args.seconds)]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(args.ranks)}
    started = [
        subprocess.Popen(
            words, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(args.ranks)
    ]  # fmt: skip
    said, _ = started[0].communicate()
    for process in started:
        process.wait()
    lines = [line for line in said.splitlines() if line.startswith("{")]
    if not lines:
        return [{"collective": "meeting", "bytes": 0, "seconds": 0.0, "bus_bytes_per_second": 0.0, "right": False}]
    return json.loads(lines[-1])["collectives"]


def take_part(args: argparse.Namespace, world: World) -> int:
    """One rank of the test of collectives. Rank 0 tells, for people where a launcher started it."""
    chosen, backend = choose_device("auto", world.local_rank)
    report = machine() if world.rank == 0 and not args.worker else {}
    if report:
        show(report)
    connect(world, chosen, backend, timeout_minutes=2)
    try:
        rows = [] if args.no_self_test else try_collectives(world.size, chosen, args.seconds / 2)
    finally:
        disconnect()
    if world.rank != 0:
        return 0
    if args.worker:
        print(json.dumps({"collectives": rows}))
        return 0
    if not args.no_self_test:
        report |= {"kernels": try_kernels(args.seconds / 2), "collectives": rows}
        show_tests(report)
    return finish(args, report)


def try_collectives(ranks: int, on: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Each collective at each size, as often as the time allows; the same rows on all ranks, the slowest one's time."""
    mesh = open_mesh(Topology(pipeline=ranks), on)
    neighbours = Wires(mesh.pipeline, {(rank, (rank + 1) % ranks) for rank in range(ranks)})
    tests, rows = collectives(mesh.pipeline, neighbours), []
    for test in tests:
        for size in SIZES:
            x = torch.full((size // 4 // ranks * ranks,), float(mesh.rank + 1), device=on)
            y = test.run(x.clone())
            right = bool(((y.view(ranks, -1).sum(0) if test.parts else y) == test.wanted).all())
            took = mean_seconds(test.run, x, seconds / len(tests) / len(SIZES), mesh.world)
            told = torch.tensor([took, float(not right)], dtype=torch.float64, device=on)
            took, faulty = all_reduce(told, mesh.world, "max").tolist()
            moved = max(x.nbytes, y.nbytes)
            rows.append({
                "collective": test.kind, "bytes": moved, "seconds": took, "right": not faulty,
                "bus_bytes_per_second": bus_factor(test.kind, ranks) * moved / took,
            })  # fmt: skip
    return rows


class Test(NamedTuple):
    """What is done with rank r's [n] of the number r + 1, and what must come of it: in each element, or in the sum of
    equal `parts`, one from each rank."""

    kind: str
    run: Callable[[Tensor], Tensor]
    wanted: float
    parts: bool = False


def collectives(group: Group, neighbours: Wires) -> list[Test]:
    """All that a run uses, as this rank sees it."""
    ranks, before, after = group.size, (group.index - 1) % group.size, (group.index + 1) % group.size
    total = ranks * (ranks + 1) / 2

    def pass_on(x: Tensor) -> Tensor:
        got = torch.empty_like(x)
        for work in (neighbours.receive([got], before), neighbours.send([x], after)):
            work.wait()
        return got

    def exchange(x: Tensor) -> Tensor:
        share = [len(x) // ranks] * ranks
        return all_to_all(x, group, share, share)

    return [
        Test("all-reduce", lambda x: all_reduce(x, group), total),
        Test("reduce-scatter", lambda x: reduce_scatter(x, group), total),
        Test("all-gather", lambda x: all_gather(x, group), total, parts=True),
        Test("all-to-all", exchange, total, parts=True),
        Test("broadcast", lambda x: broadcast(x, group), 1.0),
        Test("send and receive", pass_on, before + 1.0),
    ]


def mean_seconds(run: Callable[[Tensor], Tensor], x: Tensor, seconds: float, group: Group) -> float:
    """Of as many runs as fit into the time, but at least three: a number that the ranks agree on after a first one."""
    def timed(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            run(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        return time.perf_counter() - start

    first = torch.tensor(timed(1), dtype=torch.float64, device=x.device)
    times = int(min(max(seconds / max(all_reduce(first, group, "max").item(), 1e-6), 3), 1000))
    return timed(times) / times


def show_tests(report: Mapping[str, Any]) -> None:
    words = {True: "right", False: "WRONG", None: "not tried"}
    for row in report["kernels"]:
        worst = "" if row["worst"] is None else f", {row['worst']:.2f} of the tolerance"
        print(f"{row['op']:<18}{row['impl']:<8}{words[row['right']]}{worst}")
    for row in report["collectives"]:
        print(
            f"{row['collective']:<18}{row['bytes'] / 2**20:10.3f} MiB {1e6 * row['seconds']:12.1f} us "
            f"{row['bus_bytes_per_second'] / 1e9:9.3f} GB/s of the bus  {words[row['right']]}"
        )


if __name__ == "__main__":
    sys.exit(main())
