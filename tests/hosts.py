"""Hosts on one machine: network namespaces joined by a cable of two virtual interfaces. As root, with `ip`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.harness import ROOT

CABLE = "cable"         # the name of a host's end of it


@dataclass(frozen=True)
class Host:
    """A namespace and its address on the cable."""

    name: str
    address: str

    def start(self, argv: Sequence[str], log: Path) -> subprocess.Popen:
        """`python ARGV` there; what it says goes to a file."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}
        with log.open("ab") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, *argv], cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, *, launcher: bool) -> None:
        """End all processes there at once; without the launcher, those that it started."""
        for pid in self.processes():
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if launcher or b"torch.distributed.run" not in argv:
                os.kill(pid, signal.SIGKILL)


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
            host.kill(launcher=True)
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
