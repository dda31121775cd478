"""Hosts on one machine: network namespaces joined by a cable of two virtual interfaces. As root, with `ip`."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed.run

from tests.harness import ROOT, _server

CABLE = "cable"         # the name of a host's end of it
PLACE = {"GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}      # the environment of a host's processes
SOON = "last_call_timeout=10"           # seconds that hosts are waited for when there are enough; 30 by default
PORT = 29511
STORE = (                               # as in docs/clusters.md
    "import time; from torch.distributed import TCPStore; "
    f"store = TCPStore('0.0.0.0', {PORT}, is_master=True, wait_for_workers=False); time.sleep(1e9)"
)
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """A namespace and its address on the cable."""

    name: str
    address: str

    def start(self, words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen:
        """`torchrun WORDS` there; what it and its processes say goes to a file."""
        return self.run(["-m", "torch.distributed.run", *words], log, **environment)

    def run(self, words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen:
        """`python WORDS` there."""
        command = ["ip", "netns", "exec", self.name, sys.executable, *words]
        with log.open("ab") as out:
            return subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **PLACE, **environment}, stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, start_new_session=True,
            )  # fmt: skip

    def fork(self, words: Sequence[str], log: Path) -> BaseProcess:
        """The same with torchrun forked from the fork server of the tests, and its processes from torchrun: none has
        torch to load."""
        launcher = _server().Process(target=_torchrun, args=(self.name, list(words), str(log)))
        launcher.start()
        return launcher

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, *, spare: int | None = None) -> None:
        """End all processes there at once, but for one."""
        for pid in self.processes():
            if pid != spare:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def die(self) -> None:
        """Lose the cable and then all processes, so that nobody hears of their end."""
        self.plug("down")
        self.kill()

    def plug(self, state: str) -> None:
        """The cable: "up" or "down"."""
        subprocess.run(["ip", "-n", self.name, "link", "set", CABLE, state], check=True, capture_output=True)


def _torchrun(host: str, words: list[str], log: str) -> None:
    """In a process of its own."""
    os.chdir(ROOT)
    os.environ.update(PLACE)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    with open(f"/run/netns/{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {host}")
    torch.distributed.run.main(["--run-path", "--start-method", "fork", *words])


def launch_words(
    hosts: Sequence[Host], number: int, nnodes: str, processes: int, *, store: int = 0, apart: bool = False
) -> list[str]:
    """What torchrun is told on host `number`, but for the script: hosts meet at the store on host `store`, which the
    torchrun there holds, or where it is apart a process of its own."""
    holds = int(number == store and not apart)
    return [
        "--nnodes", nnodes, "--nproc-per-node", str(processes), "--rdzv-backend", "c10d", "--rdzv-id", "job",
        "--rdzv-endpoint", f"{hosts[store].address}:{PORT}", "--rdzv-conf", f"is_host={holds},{SOON}",
        "--local-addr", hosts[number].address, "--max-restarts", "3",
    ]  # fmt: skip


def why_no_hosts() -> str | None:
    """What is missing to make hosts, if anything."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and iproute2"
    tried = subprocess.run(["ip", "netns", "add", f"try{os.getpid()}"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", f"try{os.getpid()}"], capture_output=True)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Two hosts and the cable between them, gone afterwards with all that runs there."""
    hosts = [Host(f"host{os.getpid()}{letter}", f"10.77.0.{n}") for n, letter in enumerate("ab", 1)]

    def ip(*argv: str) -> None:
        subprocess.run(["ip", *argv], check=True, capture_output=True)

    try:
        for host in hosts:
            ip("netns", "add", host.name)
        ip("link", "add", CABLE, "netns", hosts[0].name, "type", "veth", "peer", "name", CABLE, "netns", hosts[1].name)
        for host in hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                ip("-n", host.name, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
