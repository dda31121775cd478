"""Group and Mesh: the topology made live. The only place where processes meet and process groups are made.

A rank makes its own group of each axis and no other, axis by axis in one fixed order; the groups of one axis
are disjoint, so nobody waits for a rank that is busy elsewhere. A group of one needs no process group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..products import Products
from .activity import Activity, Waiting
from .meeting import agree_on_meeting, check_same_backend
from .shared_memory import SharedMemory
from .topology import Topology
from .watch import Call, DeviceClock, HostClock, Unwatched, Watch
from .weights import WeightQueue

# Axes that live in a run's process groups, beside those of layers with few experts; the others exist for arithmetic.
LIVE_AXES = ("tensor", "pipeline", "data", "tied_data", "world", "expert", "expert_data", "expert_tensor")

FIRST_SECONDS = 2.0     # in which the first process of a host says that it cannot start either

# What gloo says where the other end of a connection is gone.
LOST_PEER = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Connection refused",
)


@dataclass(frozen=True)
class World:
    """What the launcher (torchrun, Slurm through torchrun, or nobody) says about this process.

    local_size  ranks on this host
    launched    by torchrun, which stops all processes and starts them anew where hosts come or go
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @staticmethod
    def from_environment() -> World:
        """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them; a single process where they are
        missing, and one host where only the last is."""
        env, size = os.environ, int(os.environ.get("WORLD_SIZE", 1))
        local_size, launched = int(env.get("LOCAL_WORLD_SIZE", size)), "TORCHELASTIC_RUN_ID" in env
        return World(int(env.get("RANK", 0)), size, int(env.get("LOCAL_RANK", 0)), local_size, launched)


class Exchange:
    """A collective or message that has begun: whoever looks for hangs sees who is waited for, and the watch what that
    costs. As a context it blocks until it is over; else `runs_on` follows at once, and `wait` later.
    """

    def __init__(self, waiting: Waiting, call: Call | Unwatched) -> None:
        self._waiting, self._call = waiting, call
        self._works: Sequence[Any] = ()

    def __enter__(self) -> None:
        self._waiting.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waiting.__exit__(kind, error, traceback)
        if error is None:
            self._call.over()

    def runs_on(self, works: Sequence[Any]) -> Exchange:
        """It goes on beside what follows, as these works of torch.distributed."""
        self._works = self._call.underway(works)
        return self

    def wait(self) -> None:
        """Wait until it is over."""
        with self._waiting:
            for work in self._works:
                work.wait()


@dataclass(frozen=True)
class Group:
    """Some ranks in order, and this rank's place among them.

    memory    through which they hand each other tensors where they are on one host; None: by messages alone
    patience  seconds for which two of them that share memory wait for each other; None: no two are to share any
    """

    axis: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: Any = None          # None for a group of one, and on paper
    memory: SharedMemory | None = field(default=None, compare=False)
    patience: float | None = field(default=None, compare=False)
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)     # of this process
    watch: Watch = field(default_factory=Watch, compare=False, repr=False)              # what it costs is noted there

    @property
    def size(self) -> int:
        return len(self.ranks)

    def begin(self, kind: str, nbytes: int = 0) -> Exchange:
        """A collective of this kind and size begins."""
        self.activity.begin(self.axis)
        return Exchange(self.activity.waits(kind, self.axis, self.ranks), self.watch.call(self.axis, kind, nbytes))

    def begin_message(self, kind: str, peer: int, nbytes: int) -> Exchange:
        """A "send" to the rank `peer` or a "receive" from it begins."""
        return Exchange(self.activity.waits(kind, self.axis, (peer,)), self.watch.call(self.axis, kind, nbytes))


@dataclass(frozen=True)
class Mesh:
    """One rank's groups, one attribute per axis. Built once and handed down; a layer gets the one group it uses.

    few   the groups along "expert.n" and "expert_data.n" of layers that cut their experts n ways only
    """

    topology: Topology
    rank: int
    device: torch.device
    tensor: Group
    pipeline: Group
    data: Group
    tied_data: Group
    world: Group
    expert: Group
    expert_data: Group
    expert_tensor: Group
    few: tuple[Group, ...] = field(compare=False)
    weights: WeightQueue = field(compare=False)         # of the stage that is being built
    watch: Watch = field(compare=False)                 # where this rank's time goes

    def along(self, axis: str) -> Group:
        """The group of an axis that is known by name, as a ShardSpec knows it."""
        groups = (
            self.tensor, self.pipeline, self.data, self.tied_data, self.world, self.expert, self.expert_data,
            self.expert_tensor, *self.few,
        )
        return next(g for g in groups if g.axis == axis)

    @property
    def stage(self) -> int:
        """This rank's place along the pipeline."""
        return self.pipeline.index

    @property
    def activity(self) -> Activity:
        """What this rank is doing with others."""
        return self.world.activity


def choose_device(backend: str, local_rank: int) -> tuple[torch.device, str]:
    """(device, backend) of this process: NCCL with one GPU per process where there are GPUs, else gloo on the CPU."""
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "gloo":
        return torch.device("cpu"), backend
    if not torch.cuda.is_available():
        raise ValueError("--distributed-backend nccl needs a GPU and none is visible; use gloo")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} are visible on this host")
    return torch.device("cuda", local_rank), backend


def connect(world: World, device: torch.device, backend: str, *, timeout_minutes: float = 10) -> Any:
    """Meet the other processes. Returns a store for what lookouts tell each other, on a connection of its own; None in
    a world of one, and where the processes have met before."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size == 1 or dist.is_initialized():
        return None
    limit = timedelta(minutes=timeout_minutes)
    store, rank, size = next(dist.rendezvous("env://", timeout=limit))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        while isinstance(store, dist.PrefixStore):          # of the restarts that this host has counted
            store = store.underlying_store
        store = dist.PrefixStore(agree_on_meeting(store, rank, size, limit), store)
    check_same_backend(store, rank, backend)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return dist.PrefixStore("lookout", store.clone())


def speaks_for_host(world: World) -> bool:
    """Whether this process is to tell of an error that came before the processes met: the first one of each host, and
    another only where the first one has none to tell of, which only torchrun's store can say."""
    env = os.environ
    if world.local_rank == 0 and world.size == 1 or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return world.local_rank == 0
    key = f"wrong start/{env.get('GROUP_RANK')}/{env.get('TORCHELASTIC_RESTART_COUNT')}"
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=FIRST_SECONDS)))
        end = time.monotonic() + FIRST_SECONDS * (world.local_rank > 0)
        while time.monotonic() < end and not store.check([key]):
            time.sleep(0.05)
        return int(store.compare_set(key, "", str(world.local_rank))) == world.local_rank
    except RuntimeError:                                    # there is no store any more
        return world.local_rank == 0


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says that another process has gone, or does not answer, and nothing else."""
    if isinstance(error, RuntimeError):
        return isinstance(error, dist.DistError) or any(words in str(error) for words in LOST_PEER)
    return isinstance(error, ConnectionError)


def disconnect() -> None:
    """Leave the process groups in good order, so that no peer is left waiting."""
    if dist.is_initialized():
        dist.destroy_process_group()


def open_mesh(
    topology: Topology, device: torch.device = torch.device("cpu"), products: Products = Products(), *,
    timeout_minutes: float = 10,
) -> Mesh:
    """Make this rank's groups. With one rank nothing is made and no rendezvous is needed. `products` is how the layers
    that are built for the mesh multiply. Tensor ranks and neighbours in a pipeline share memory where they compute on
    CPUs of one host; for so long one waits there for another.

    Raises ValueError where the number of started processes is not the topology's.
    """
    if topology.world == 1:
        return _mesh(topology, 0, device, lambda ranks: None, products)
    rank = dist.get_rank()
    if dist.get_world_size() != topology.world:
        raise ValueError(f"{topology} needs {topology.world} ranks, {dist.get_world_size()} were started")
    mesh = _mesh(topology, rank, device, new_group, products)
    if device.type != "cpu":
        return mesh
    seconds, tensor = 60 * timeout_minutes, mesh.tensor
    if topology.tensor > 1:
        tensor = replace(tensor, memory=SharedMemory(tensor.index, seconds))
    return replace(mesh, tensor=tensor, pipeline=replace(mesh.pipeline, patience=seconds))


def _mesh(
    topology: Topology, rank: int, device: torch.device, make: Callable[[tuple[int, ...]], Any],
    products: Products = Products(),
) -> Mesh:
    """The mesh whose handles `make` makes, axis by axis in one order; an axis of experts that has the ranks of a dense
    one shares its handle."""
    twins = {"expert_tensor": "tensor", "expert_data": "data"}
    watch = Watch(DeviceClock() if device.type == "cuda" else HostClock())
    few = [f"{axis}.{degree}" for degree in topology.degrees for axis in ("expert", "expert_data")]
    groups, activity = {}, Activity()
    for axis in (*LIVE_AXES, *few):
        ranks = topology.ranks_along(axis, rank)
        if axis in twins and groups[twins[axis]].ranks == ranks:
            handle = groups[twins[axis]].handle
        else:
            handle = make(ranks) if topology.size(axis) > 1 else None
        groups[axis] = Group(axis, ranks, ranks.index(rank), handle, activity=activity, watch=watch)
    named = {axis: groups[axis] for axis in LIVE_AXES}
    few_groups = tuple(groups[axis] for axis in few)
    return Mesh(topology, rank, device, **named, few=few_groups, weights=WeightQueue(products), watch=watch)


def new_group(ranks: tuple[int, ...]) -> Any:
    """A process group that only its members make.

    Every rank of the world must have made equally many groups before, for torch names a group after its ranks and
    that count: a rank that has no part in a round of groups makes one of itself alone.
    """
    return dist.new_group(list(ranks), use_local_synchronization=True)


def mesh_on_paper(
    topology: Topology, rank: int, device: torch.device = torch.device("cpu"), products: Products = Products()
) -> Mesh:
    """The mesh as `rank` would see it, without a process group: for planning, printing, and a world of one."""
    if not 0 <= rank < topology.world:
        raise ValueError(f"rank {rank} is not one of the {topology.world} ranks of {topology}")
    return _mesh(topology, rank, device, lambda ranks: None, products)
