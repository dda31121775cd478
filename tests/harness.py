"""Runs a test's function on several ranks: gloo workers from a fork server, or whole scripts as torchrun would.

Workers are forked from a server that has imported torch and megazero and never computed (0.1 s a rank instead of
2 s). Every wait has a limit: a rank past it is killed, its Python stack is shown, and the test fails.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankFailed(AssertionError):
    """A rank raised, died or hung; the message carries its traceback or its stack."""


class Finished(NamedTuple):
    """How one rank of a script ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


# ---------------------------------------------------------------------------------------------- functions on ranks


def on_ranks(n: int, fn: Callable, *args: Any, timeout: float = 60) -> list:
    """fn(*args) on n ranks of one gloo world; what every rank returned, in the order of ranks.

    `fn` is module-level (or a functools.partial of such); arguments and results are whatever pickle carries: plain
    values, numpy arrays, CPU tensors. One rank runs right here, without a process group. RankFailed holds the
    traceback of the rank that failed first, or the stacks of those that did not finish within `timeout` seconds.
    """
    if n == 1:
        torch.set_num_threads(1)
        return [fn(*args)]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        context = _server()
        payload = pickle.dumps((fn, args))
        workers, pipes = [], []
        try:
            for rank in range(n):
                here, there = context.Pipe()
                worker = context.Process(target=_work, args=(rank, n, folder, payload, timeout, there), daemon=True)
                worker.start()
                there.close()
                workers.append(worker)
                pipes.append(here)
            return _collect(workers, pipes, Path(folder), timeout)
        finally:  # results are in, or the test has failed: nobody has anything left to do
            for worker in workers:
                worker.kill()
            for worker, pipe in zip(workers, pipes, strict=True):
                worker.join()
                pipe.close()


@functools.cache
def _server() -> multiprocessing.context.BaseContext:
    """The fork server's context; the server is started on first use, with one thread and the repository's root."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    wanted = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    multiprocessing.forkserver.ensure_running()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return context


def _work(rank: int, n: int, folder: str, payload: bytes, timeout: float, pipe: Any) -> None:
    """One rank: open the world, run, report, and stay until killed, so that no peer sees a closed connection."""
    stack = open(f"{folder}/stack{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", n)
        limit = timedelta(seconds=timeout + 60)  # ours comes first, and shows where a rank hangs
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
        fn, args = pickle.loads(payload)
        message = pickle.dumps((True, time.monotonic(), fn(*args)))
    except BaseException as error:
        kept = error  # noqa: F841  (its frames hold connections, whose end a peer could tell of first)
        message = pickle.dumps((False, time.monotonic(), traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(message)
    pipe.poll(None)


def _collect(workers: list, pipes: list, folder: Path, timeout: float) -> list:
    """The result of every rank, or RankFailed."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(workers):
        waiting = [rank for rank in range(len(workers)) if rank not in results]
        ready = multiprocessing.connection.wait([pipes[rank] for rank in waiting], deadline - time.monotonic())
        if not ready:
            raise RankFailed(_hang(workers, waiting, folder, timeout))
        failed = []
        for rank in waiting:
            if pipes[rank] not in ready:
                continue
            try:
                good, when, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                workers[rank].join(1)
                good, when, value = False, time.monotonic(), f"it died with exit code {workers[rank].exitcode}"
            if good:
                results[rank] = value
            else:
                failed.append((when, rank, value))
        if failed:
            _, rank, text = min(failed)
            raise RankFailed(f"rank {rank} of {len(workers)} failed:\n{text}")
    return [results[rank] for rank in range(len(workers))]


def _hang(workers: list, waiting: list[int], folder: Path, timeout: float) -> str:
    """What to say of ranks past the limit: their Python stacks, written by their own fault handlers."""
    for rank in waiting:
        if workers[rank].is_alive() and (folder / f"stack{rank}").exists():
            os.kill(workers[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)
    lines = []
    for rank in waiting:
        stack = folder / f"stack{rank}"
        text = stack.read_text() if stack.exists() else ""
        lines.append(f"rank {rank} hangs: no result after {timeout} s\n{text or '(it has no stack to show)'}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ the front door on ranks


class Job:
    """`pretrain_gpt.py` ARGV as n processes with the variables torchrun sets, forked as workers are; or another `main`.
    `plant`, where it is given, is called in each of them before, with its rank. As a context it kills what is left at
    its end."""

    def __init__(
        self, argv: Sequence[str], n: int, folder: Path, *, plant: Callable[[int], None] | None = None,
        main: Callable[[list[str]], int | None] | None = None,
    ) -> None:
        self.folder, port = folder, _free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.processes = [
            _server().Process(target=_run_main, args=(list(argv), rank, n, port, str(folder), plant, main), daemon=True)
            for rank in range(n)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks, or all."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            os.kill(self.processes[rank].pid, number)

    def wait(self, timeout: float = 60) -> list[int]:
        """The exit codes of all ranks; RankFailed where one does not end in time."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
        codes = [process.exitcode for process in self.processes]
        if None in codes:
            raise RankFailed(f"exit codes {codes} after {timeout} s:\n{self.said()}{self.erred()}")
        return codes

    def wait_for(self, path: Path, words: str = "", timeout: float = 60) -> None:
        """Wait until a file is there and has some words in it."""
        end = time.monotonic() + timeout
        while not (path.exists() and words in path.read_text(errors="replace")):
            if time.monotonic() > end or all(process.exitcode is not None for process in self.processes):
                raise RankFailed(f"{path} has not come to have {words!r}:\n{self.said()}{self.erred()}")
            time.sleep(0.01)

    def said(self) -> str:
        """What all ranks wrote to stdout, one after the other."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("out*")))

    def erred(self) -> str:
        """What all ranks wrote to stderr, in the order in which they did."""
        path = self.folder / "err"
        return path.read_text(errors="replace") if path.exists() else ""


def _run_main(
    argv: list[str], rank: int, n: int, port: int, folder: str, plant: Callable[[int], None] | None,
    main: Callable[[list[str]], int | None] | None,
) -> None:
    import pretrain_gpt

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(f"{folder}/out{rank}", append), 1)
    os.dup2(os.open(f"{folder}/err", append), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)   # as Python's own
    torch.set_num_threads(1)
    if plant is not None:
        plant(rank)
    sys.exit((main or pretrain_gpt.main)(argv))


# ------------------------------------------------------------------------------------------------ scripts on ranks


def run_script(
    argv: Sequence[str | Path],
    n: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    cwd: Path = ROOT,
) -> list[Finished]:
    """`python ARGV` as n processes with the variables torchrun sets; how each rank ended, in the order of ranks.

    With n == 1 it is the plain command, without torchrun's variables. An exit code is the caller's to judge; a
    rank past `timeout` seconds is a RankFailed with the output and the Python stacks of all.
    """
    shared = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}  # SIGABRT then prints the Python stacks
    if n > 1:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        shared |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        start = time.monotonic()
        processes = []
        for rank in range(n):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if n > 1 else {}
            with open(f"{folder}/out{rank}", "wb") as out, open(f"{folder}/err{rank}", "wb") as err:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, argv)],
                        env={**shared, **own, **(env or {})},
                        cwd=cwd,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,  # so that its own children can be ended with it
                    )
                )
        seconds = _wait(processes, start, timeout)
        ended = [
            Finished(
                processes[rank].returncode,
                Path(f"{folder}/out{rank}").read_text(errors="replace"),
                Path(f"{folder}/err{rank}").read_text(errors="replace"),
                seconds.get(rank, timeout),
            )
            for rank in range(n)
        ]
    late = [rank for rank in range(n) if rank not in seconds]
    if late:
        said = "\n".join(
            f"--- rank {rank}, exit code {end.code}\n{end.stdout[-4000:]}{end.stderr[-8000:]}"
            for rank, end in enumerate(ended)
        )
        raise RankFailed(f"ranks {late} of {argv[0]} hang after {timeout} s\n{said}")
    return ended


def _wait(processes: list[subprocess.Popen], start: float, timeout: float) -> dict[int, float]:
    """Seconds each process took; those missing from the answer ran past the limit and have been killed."""
    seconds: dict[int, float] = {}
    try:
        while len(seconds) < len(processes) and time.monotonic() - start < timeout:
            for rank, process in enumerate(processes):
                if rank not in seconds and process.poll() is not None:
                    seconds[rank] = time.monotonic() - start
            time.sleep(0.01)
        late = [process for process in processes if process.poll() is None]
        for process in late:
            process.send_signal(signal.SIGABRT)
        if late:
            time.sleep(0.5)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return seconds


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
