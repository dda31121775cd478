"""Programs on paper: whether they are complete, whether they can hang, how long they take, what they hold.

The channels are modelled as the engine uses them: a receive is posted where it stands and waited for where its
tensor is used; a message starts when both ends have reached it, in order on its directed edge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .instructions import (
    Backward,
    Compute,
    Forward,
    Instruction,
    Recv,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    Send,
    SendActivation,
    SendGrad,
)
from .lower import Program

Message = tuple[type, int, int]     # class of its receive, micro-batch, receiving stage
Edge = tuple[int, int]              # from rank, to rank


@dataclass(frozen=True)
class Costs:
    """Time of one step, the same for all stages or one number per stage; `send` is the time on the wire."""

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    send: float = 0.0

    def of(self, op: Compute) -> float:
        cost = self.forward if isinstance(op, Forward) else self.backward
        return cost[op.stage] if isinstance(cost, Sequence) else cost


@dataclass(frozen=True)
class Step:
    """When a step ran on paper."""

    op: Compute
    start: float
    end: float


@dataclass(frozen=True)
class Report:
    """What a simulation found; the tuples have one entry per rank."""

    makespan: float
    busy: tuple[float, ...]           # time in which the rank computes
    peak_live: tuple[int, ...]        # forwards that wait for their backward, at most
    peak_posted: tuple[int, ...]      # receives posted and not yet used, at most
    timeline: tuple[tuple[Step, ...], ...]

    @property
    def bubble(self) -> float:
        """Idle share of the whole time, over all ranks."""
        return 1.0 - sum(self.busy) / (self.makespan * len(self.busy))


def check_programs(programs: list[Program], stages: int) -> None:
    """Raises ValueError if a step is missing or double, lacks its input, or a message lacks its other end.

    Two ranks must see the messages of one direction between them in one order.
    """
    edges: dict[Edge, tuple[list[Message], list[Message]]] = {}
    steps: list[Instruction] = []
    for rank, program in enumerate(programs):
        held: set[Message] = set()
        for op in program:
            need = _needs(op, stages)
            if need and held.isdisjoint(need):
                raise ValueError(f"rank {rank}: {op} lacks what it uses")
            if isinstance(op, ReduceGrads):
                steps.append(op)
                continue
            held.add((type(op), op.micro, op.stage))
            if isinstance(op, Send | Recv):
                ends = edges.setdefault(_edge(op, rank), ([], []))
                ends[isinstance(op, Recv)].append(_message(op))
            else:
                steps.append(op)
    for (sender, receiver), (sent, received) in edges.items():
        if sent != received:
            raise ValueError(f"rank {sender} sends {sent}, but rank {receiver} receives {received}")
    _check_steps(steps, programs, stages)


def _needs(op: Instruction, stages: int) -> tuple[Message, ...]:
    """What may stand before `op` on its rank to give it its input: one of these suffices."""
    match op:
        case Forward() if op.stage:
            return (RecvActivation, op.micro, op.stage), (Forward, op.micro, op.stage - 1)
        case Backward() if op.stage < stages - 1:
            return (RecvGrad, op.micro, op.stage), (Backward, op.micro, op.stage + 1)
        case Backward() | SendActivation():
            return ((Forward, op.micro, op.stage),)
        case SendGrad():
            return ((Backward, op.micro, op.stage),)
    return ()


def _check_steps(steps: list[Instruction], programs: list[Program], stages: int) -> None:
    """Every micro-batch once per stage and way, forward before backward, then one reduction per stage."""
    seen = set(steps)
    micros = {op.micro for op in steps if isinstance(op, Forward)}
    wanted: set[Instruction] = {Forward(m, s) for m in micros for s in range(stages)}
    if any(isinstance(op, Backward) for op in steps):
        wanted |= {Backward(m, s) for m in micros for s in range(stages)} | {ReduceGrads(s) for s in range(stages)}
    if len(steps) != len(seen) or seen != wanted:
        twice = {op for op in seen if steps.count(op) > 1} if len(steps) != len(seen) else set()
        raise ValueError(f"missing, unknown or double steps: {sorted(map(str, (seen ^ wanted) | twice))}")
    for rank, program in enumerate(programs):
        begun: set[Forward] = set()
        closed: set[int] = set()
        for op in program:
            if isinstance(op, Forward):
                begun.add(op)
            elif isinstance(op, ReduceGrads):
                closed.add(op.stage)
            elif isinstance(op, Backward) and (op.stage in closed or Forward(op.micro, op.stage) not in begun):
                raise ValueError(f"rank {rank}: {op} stands before its forward or after its reduction")


def check_blocking(programs: list[Program]) -> None:
    """Raises ValueError if the programs hang where every send and receive blocks until the other end is reached."""
    at = [0] * len(programs)
    awake = deque(range(len(programs)))
    while awake:
        rank = awake.popleft()
        program = programs[rank]
        while at[rank] < len(program):
            op = program[at[rank]]
            if isinstance(op, Send | Recv):
                other = programs[op.peer][at[op.peer] : at[op.peer] + 1]
                if not other or not _meet(op, rank, other[0], op.peer):
                    break                       # the peer wakes this rank when it comes to the other end
                at[op.peer] += 1
                awake.append(op.peer)
            at[rank] += 1
    stuck = [f"rank {r} at {p[i]}" for r, (i, p) in enumerate(zip(at, programs, strict=True)) if i < len(p)]
    if stuck:
        raise ValueError(f"the programs hang: {'; '.join(stuck)}")


def _meet(op: Send | Recv, rank: int, other: Instruction, peer: int) -> bool:
    """Whether the two instructions are the two ends of one message."""
    if not isinstance(other, Send | Recv) or isinstance(op, Send) == isinstance(other, Send):
        return False
    return _edge(op, rank) == _edge(other, peer) and _message(op) == _message(other)


def _edge(op: Send | Recv, rank: int) -> Edge:
    return (rank, op.peer) if isinstance(op, Send) else (op.peer, rank)


def _message(op: Send | Recv) -> Message:
    """One name for both ends."""
    match op:
        case SendActivation():
            return RecvActivation, op.micro, op.stage + 1
        case SendGrad():
            return RecvGrad, op.micro, op.stage - 1
    return type(op), op.micro, op.stage


@dataclass
class _Channel:
    """One directed edge: when its messages were posted at each end, and when each arrived."""

    sent: list[float] = field(default_factory=list)
    posted: list[tuple[float, Message]] = field(default_factory=list)
    free: float = 0.0

    def match(self, done: int, cost: float) -> tuple[Message, float] | None:
        """The next message in order, if both ends have reached it, and when it arrives."""
        if done >= min(len(self.sent), len(self.posted)):
            return None
        posted, message = self.posted[done]
        self.free = max(self.free, self.sent[done], posted) + cost
        return message, self.free


@dataclass
class _Rank:
    """One rank in the course of a simulation."""

    at: int = 0
    clock: float = 0.0
    posted: set[Message] = field(default_factory=set)
    live: int = 0
    peak_live: int = 0
    peak_posted: int = 0
    steps: list[Step] = field(default_factory=list)

    def run(self, op: Compute, start: float, cost: float) -> None:
        self.clock = start + cost
        self.steps.append(Step(op, start, self.clock))
        self.live += 1 if isinstance(op, Forward) else -1
        self.peak_live = max(self.peak_live, self.live)


def simulate(programs: list[Program], costs: Costs = Costs()) -> Report:
    """Runs the programs with the given costs. Raises ValueError where they cannot proceed."""
    ranks = [_Rank() for _ in programs]
    channels: dict[Edge, _Channel] = {}
    matched: dict[Edge, int] = {}
    arrived: dict[Message, float] = {}
    awake = deque(range(len(programs)))

    def flow(edge: Edge) -> None:
        """Lets messages through as far as both ends have come, and wakes their receiver."""
        while (hit := channels[edge].match(matched.get(edge, 0), costs.send)) is not None:
            matched[edge] = matched.get(edge, 0) + 1
            arrived[hit[0]] = hit[1]
            awake.append(edge[1])

    while awake:
        me = awake.popleft()
        rank, program = ranks[me], programs[me]
        while rank.at < len(program):
            op = program[rank.at]
            if isinstance(op, Send | Recv):
                edge = _edge(op, me)
                channel = channels.setdefault(edge, _Channel())
                if isinstance(op, Send):
                    channel.sent.append(rank.clock)
                else:
                    channel.posted.append((rank.clock, _message(op)))
                    rank.posted.add(_message(op))
                    rank.peak_posted = max(rank.peak_posted, len(rank.posted))
                flow(edge)
            elif isinstance(op, Compute):
                awaited = (RecvActivation if isinstance(op, Forward) else RecvGrad, op.micro, op.stage)
                if awaited in rank.posted and awaited not in arrived:
                    break
                rank.posted.discard(awaited)
                rank.run(op, max(rank.clock, arrived.get(awaited, 0.0)), costs.of(op))
            rank.at += 1
    return _report(programs, ranks)


def _report(programs: list[Program], ranks: list[_Rank]) -> Report:
    stuck = [f"rank {i} at {p[r.at]}" for i, (p, r) in enumerate(zip(programs, ranks, strict=True)) if r.at < len(p)]
    if stuck:
        raise ValueError(f"the programs hang: {'; '.join(stuck)}")
    return Report(
        makespan=max(rank.clock for rank in ranks),
        busy=tuple(sum(step.end - step.start for step in rank.steps) for rank in ranks),
        peak_live=tuple(rank.peak_live for rank in ranks),
        peak_posted=tuple(rank.peak_posted for rank in ranks),
        timeline=tuple(tuple(rank.steps) for rank in ranks),
    )
