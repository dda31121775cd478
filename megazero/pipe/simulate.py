"""Programs on paper: whether they are complete, whether they can hang, how long they take, what they hold.

The channels are modelled as the engine uses them: a receive is posted where it stands and waited for where its
tensor is used; a message starts when both ends have reached it, in order on its directed edge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Program,
    Recv,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    Send,
    SendActivation,
    SendGrad,
)
from .lower import Result, needs

Edge = tuple[int, int]              # from rank, to rank

SENDS = (SendActivation, SendGrad)
RECVS = (RecvActivation, RecvGrad)
ENDS = SENDS + RECVS
STEPS = (Forward, Backward, BackwardInput, BackwardWeight)


@dataclass(frozen=True)
class Costs:
    """Times of one step in any unit, each the same for all stages or one number per stage.

    forward          F
    backward_input   B, the part of a backward that yields the gradient of a stage's input
    backward_weight  W, the part that yields the gradients of its weights; a whole backward takes both
    send             a message on the wire
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    send: float = 0.0

    def of(self, op: Compute) -> float:
        """The time that `op` takes."""
        match op:
            case Forward():
                return _at(self.forward, op.stage)
            case BackwardInput():
                return _at(self.backward_input, op.stage)
            case BackwardWeight():
                return _at(self.backward_weight, op.stage)
        return _at(self.backward_input, op.stage) + _at(self.backward_weight, op.stage)


@dataclass(frozen=True)
class Taken:
    """Costs step by step, as a run took them; `send` is that of a message."""

    seconds: Mapping[Compute, float]
    send: float = 0.0

    def of(self, op: Compute) -> float:
        """The time that `op` takes."""
        return self.seconds[op]


def _at(cost: float | Sequence[float], stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


@dataclass(frozen=True, slots=True)
class Step:
    """When a step ran on paper."""

    op: Compute
    start: float
    end: float


@dataclass(frozen=True)
class Report:
    """What a simulation found; the tuples have one entry per rank.

    busy         time in which the rank computes
    peak_live    forwards, of one stage each, whose input gradient is still to come: at most
    peak_held    forwards whose weight gradients are still to come: at most
    peak_posted  receives posted and not yet used: at most
    """

    makespan: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]
    peak_held: tuple[int, ...]
    peak_posted: tuple[int, ...]
    timeline: tuple[tuple[Step, ...], ...]

    @property
    def bubble(self) -> float:
        """Idle share of the whole time, over all ranks."""
        return 1.0 - sum(self.busy) / (self.makespan * len(self.busy)) if self.makespan else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Time of the whole in which the rank does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Idle time between the rank's first and last step: without the start until work reaches it, and the end."""
        return tuple(
            steps[-1].end - steps[0].start - busy if steps else 0.0
            for steps, busy in zip(self.timeline, self.busy, strict=True)
        )


def check_programs(programs: list[Program], stages: int) -> None:
    """Raises ValueError if a step is missing or double, lacks its input, or a message lacks its other end.

    Two ranks must see the messages of one direction between them in one order, and all backwards of a stage stand
    before its reduction.
    """
    edges: dict[Edge, tuple[list[Result], list[Result]]] = {}
    for rank, program in enumerate(programs):
        here: set[Result] = set()
        closed: set[int] = set()
        for op in program:
            kind, stage = type(op), op.stage
            if kind is ReduceGrads:
                closed.add(stage)
                continue
            if stage in closed and kind in STEPS:
                raise ValueError(f"rank {rank}: {op} stands after the reduction of its stage")
            carried = _carried(op)
            if not here.issuperset(needs(op, stages) if kind in STEPS else (carried,) if kind in SENDS else ()):
                raise ValueError(f"rank {rank}: {op} lacks what it uses")
            if kind not in SENDS:
                here.add(carried)
            if kind not in STEPS:
                ends = edges.setdefault(_edge(op, rank), ([], []))
                ends[kind in RECVS].append(carried)
    for (sender, receiver), (sent, received) in edges.items():
        if sent != received:
            raise ValueError(f"rank {sender} sends {sent}, but rank {receiver} receives {received}")
    _check_steps(programs, stages)


def _check_steps(programs: list[Program], stages: int) -> None:
    """Every micro-batch once per stage and way, and one reduction per stage where there are backwards."""
    seen: dict[type, set[tuple[int, int]]] = {kind: set() for kind in (*STEPS, ReduceGrads)}
    wrong = set()
    for program in programs:
        for op in program:
            kind = type(op)
            if kind in seen:
                place = (0, op.stage) if kind is ReduceGrads else (op.micro, op.stage)
                if place in seen[kind]:
                    wrong.add(str(op))
                seen[kind].add(place)
    micros = {micro for micro, _ in seen[Forward]}
    places = {(micro, stage) for micro in micros for stage in range(stages)}
    trains = any(seen[kind] for kind in seen if kind is not Forward)
    split = seen[BackwardInput] & places
    wanted = {
        Forward: places,
        Backward: places - split if trains else set(),
        BackwardInput: split,
        BackwardWeight: split,
        ReduceGrads: {(0, stage) for stage in range(stages)} if trains else set(),
    }
    for kind, these in wanted.items():
        wrong |= {str(kind(stage) if kind is ReduceGrads else kind(m, stage)) for m, stage in these ^ seen[kind]}
    if wrong:
        raise ValueError(f"missing, unknown or double steps: {sorted(wrong)}")


def check_blocking(programs: list[Program]) -> None:
    """Raises ValueError if the programs hang where every send and receive blocks until the other end is reached."""
    at = [0] * len(programs)
    awake = deque(range(len(programs)))
    while awake:
        rank = awake.popleft()
        program = programs[rank]
        while at[rank] < len(program):
            op = program[at[rank]]
            if type(op) in ENDS:
                other = programs[op.peer][at[op.peer] : at[op.peer] + 1]
                if not other or not _meet(op, rank, other[0], op.peer):
                    break                       # the peer wakes this rank when it comes to the other end
                at[op.peer] += 1
                awake.append(op.peer)
            at[rank] += 1
    _check_finished(programs, at)


def _check_finished(programs: list[Program], at: list[int]) -> None:
    stuck = [f"rank {r} at {p[i]}" for r, (i, p) in enumerate(zip(at, programs, strict=True)) if i < len(p)]
    if stuck:
        raise ValueError(f"the programs hang: {'; '.join(stuck)}")


def _meet(op: Send | Recv, rank: int, other: Instruction, peer: int) -> bool:
    """Whether the two instructions are the two ends of one message."""
    if type(other) not in ENDS or (type(op) in RECVS) == (type(other) in RECVS):
        return False
    return _edge(op, rank) == _edge(other, peer) and _carried(op) == _carried(other)


def _edge(op: Send | Recv, rank: int) -> Edge:
    return (op.peer, rank) if type(op) in RECVS else (rank, op.peer)


def _carried(op: Compute | Send | Recv) -> Result:
    """What a step yields or a message carries: one name for both ends."""
    kind = type(op)
    if kind is RecvActivation:
        return False, op.micro, op.stage - 1
    if kind is RecvGrad:
        return True, op.micro, op.stage + 1
    return kind is not Forward and kind is not SendActivation, op.micro, op.stage


@dataclass
class _Channel:
    """One directed edge: when its messages were sent and posted, and how many have gone through."""

    sent: list[float] = field(default_factory=list)
    posted: list[tuple[float, Result]] = field(default_factory=list)
    done: int = 0
    free: float = 0.0

    def match(self, cost: float) -> tuple[Result, float] | None:
        """The next message in order, if both ends have reached it, and when it arrives."""
        if self.done >= min(len(self.sent), len(self.posted)):
            return None
        posted, message = self.posted[self.done]
        self.free = max(self.free, self.sent[self.done], posted) + cost
        self.done += 1
        return message, self.free


@dataclass
class _Rank:
    """One rank in the course of a simulation."""

    at: int = 0
    clock: float = 0.0
    posted: set[Result] = field(default_factory=set)
    sends: deque[Result] = field(default_factory=deque)
    live: int = 0
    held: int = 0
    peak_live: int = 0
    peak_held: int = 0
    peak_posted: int = 0
    steps: list[Step] = field(default_factory=list)

    def run(self, op: Compute, start: float, cost: float) -> None:
        self.clock = start + cost
        self.steps.append(Step(op, start, self.clock))
        kind = type(op)
        if kind is Forward:
            self.live, self.held = self.live + 1, self.held + 1
            self.peak_live, self.peak_held = max(self.peak_live, self.live), max(self.peak_held, self.held)
        self.live -= kind is Backward or kind is BackwardInput
        self.held -= kind is Backward or kind is BackwardWeight


class _Paper:
    """All ranks in the course of a simulation."""

    def __init__(self, programs: list[Program], costs: Costs | Taken, unfinished_sends: int | None) -> None:
        self.programs, self.costs, self.limit = programs, costs, unfinished_sends
        self.ranks = [_Rank() for _ in programs]
        self.channels: dict[Edge, _Channel] = {}
        self.arrived: dict[Result, float] = {}
        self.waiting: dict[Result, list[int]] = {}
        self.awake = deque(range(len(programs)))

    def advance(self, me: int) -> None:
        """Runs the rank until it has to wait for a message."""
        rank, program = self.ranks[me], self.programs[me]
        while rank.at < len(program) and self._settle(me):
            op = program[rank.at]
            kind = type(op)
            if kind in ENDS:
                self._start(op, me)
            elif kind is not ReduceGrads:
                awaited = (False, op.micro, op.stage - 1) if kind is Forward else (True, op.micro, op.stage + 1)
                if awaited in rank.posted:
                    if not self._is_here(awaited, me):
                        return
                    rank.posted.discard(awaited)
                    rank.clock = max(rank.clock, self.arrived[awaited])
                rank.run(op, rank.clock, self.costs.of(op))
            rank.at += 1

    def _is_here(self, message: Result, me: int) -> bool:
        """Whether the message has arrived; if not, the rank is woken when it does."""
        if message not in self.arrived:
            self.waiting.setdefault(message, []).append(me)
            return False
        return True

    def _settle(self, me: int) -> bool:
        """Waits for the oldest sends until no more than the limit are under way; False: one has not arrived yet."""
        rank = self.ranks[me]
        while self.limit is not None and len(rank.sends) > self.limit:
            if not self._is_here(rank.sends[0], me):
                return False
            rank.clock = max(rank.clock, self.arrived[rank.sends.popleft()])
        return True

    def _start(self, op: Send | Recv, me: int) -> None:
        rank, edge, message = self.ranks[me], _edge(op, me), _carried(op)
        channel = self.channels.get(edge)
        if channel is None:
            channel = self.channels[edge] = _Channel()
        if type(op) in RECVS:
            channel.posted.append((rank.clock, message))
            rank.posted.add(message)
            rank.peak_posted = max(rank.peak_posted, len(rank.posted))
        else:
            channel.sent.append(rank.clock)
            if self.limit is not None:
                rank.sends.append(message)
        while (hit := channel.match(self.costs.send)) is not None:
            self.arrived[hit[0]] = hit[1]
            self.awake.extend(self.waiting.pop(hit[0], ()))


def simulate(
    programs: list[Program], costs: Costs | Taken = Costs(), *, unfinished_sends: int | None = None
) -> Report:
    """Runs the programs with the given costs. Raises ValueError where they cannot proceed.

    With `unfinished_sends` a rank that has more of them under way waits for the oldest; None: it never waits.
    """
    paper = _Paper(programs, costs, unfinished_sends)
    while paper.awake:
        paper.advance(paper.awake.popleft())
    ranks = paper.ranks
    _check_finished(programs, [rank.at for rank in ranks])
    trains = any(isinstance(op, ReduceGrads) for program in programs for op in program)
    return Report(
        makespan=max(rank.clock for rank in ranks),
        busy=tuple(sum(step.end - step.start for step in rank.steps) for rank in ranks),
        peak_live=tuple(rank.peak_live if trains else 0 for rank in ranks),
        peak_held=tuple(rank.peak_held if trains else 0 for rank in ranks),
        peak_posted=tuple(rank.peak_posted for rank in ranks),
        timeline=tuple(tuple(rank.steps) for rank in ranks),
    )
