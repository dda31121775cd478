"""From the order of computation to full programs: puts in sends, receives and gradient reductions.

The orders are run on paper, and a send and its receive enter both programs at the same moment. So two ranks
see the messages between them in one order, and no two ranks can wait for each other.
"""

from __future__ import annotations

import heapq

from .instructions import (
    Backward,
    Compute,
    Forward,
    Instruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from .schedule import Orders

Program = list[Instruction]

# How long a step takes on paper. It decides only where a receive stands among the receiver's own steps;
# a backward costs two forwards, as it does for matrix products.
PAPER_TIME = {Forward: 1, Backward: 2}


def placement(orders: Orders, stages: int) -> list[int]:
    """The rank that holds each stage. Raises ValueError where a stage is nowhere or on two ranks."""
    home: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for op in order:
            if home.setdefault(op.stage, rank) != rank:
                raise ValueError(f"{op} stands on rank {rank}, but rank {home[op.stage]} holds stage {op.stage}")
    wrong = set(range(stages)) ^ home.keys()
    if wrong:
        raise ValueError(f"the schedule must run the stages 0..{stages - 1}: {sorted(wrong)} are missing or unknown")
    return [home[stage] for stage in range(stages)]


def add_communication(orders: Orders, stages: int) -> list[Program]:
    """The program of each rank.

    `ReduceGrads(stage)` follows the last backward of its stage; orders without backward get none. Raises
    ValueError where a step is missing, stands twice, or where the orders cannot proceed, naming the step.
    """
    home = placement(orders, stages)
    backwards_left = _count(orders, stages)
    programs: list[Program] = [[] for _ in orders]
    todo = [iter(order) for order in orders]
    clock = [0] * len(orders)
    end: dict[Compute, int] = {}
    waiting: dict[Compute, list[tuple[Compute, int]]] = {}   # a step that is awaited -> who waits, on which rank
    ready: list[tuple[int, int, Compute]] = []               # (start, rank, step): at most one of each rank

    def consider(op: Compute | None, rank: int) -> None:
        if op is None:
            return
        needs = _needs(op, stages)
        missing = next((need for need in needs if need not in end), None)
        if missing is None:
            start = max([clock[rank]] + [end[need] for need in needs])
            heapq.heappush(ready, (start, rank, op))
        else:
            waiting.setdefault(missing, []).append((op, rank))

    for rank in range(len(orders)):
        consider(next(todo[rank], None), rank)
    while ready:
        start, rank, op = heapq.heappop(ready)
        clock[rank] = end[op] = start + PAPER_TIME[type(op)]
        programs[rank].append(op)
        _add_message(programs, op, home)
        if isinstance(op, Backward):
            backwards_left[op.stage] -= 1
            if not backwards_left[op.stage]:
                programs[rank].append(ReduceGrads(op.stage))
        for later, holder in waiting.pop(op, ()):
            consider(later, holder)
        consider(next(todo[rank], None), rank)
    if waiting:
        stuck = "; ".join(f"rank {rank}: {op} waits for {need}" for need, they in waiting.items() for op, rank in they)
        raise ValueError(f"the schedule cannot proceed: {stuck}")
    return programs


def _needs(op: Compute, stages: int) -> tuple[Compute, ...]:
    """The steps that must end before `op` may start."""
    if isinstance(op, Forward):
        return (Forward(op.micro, op.stage - 1),) if op.stage else ()
    own = Forward(op.micro, op.stage)
    return (own, Backward(op.micro, op.stage + 1)) if op.stage < stages - 1 else (own,)


def _add_message(programs: list[Program], op: Compute, home: list[int]) -> None:
    """The message that `op` causes, if the stage it goes to lives on another rank."""
    forward = isinstance(op, Forward)
    to = op.stage + 1 if forward else op.stage - 1
    if not 0 <= to < len(home) or home[to] == home[op.stage]:
        return
    send, recv = (SendActivation, RecvActivation) if forward else (SendGrad, RecvGrad)
    programs[home[op.stage]].append(send(op.micro, op.stage, home[to]))
    programs[home[to]].append(recv(op.micro, to, home[op.stage]))


def _count(orders: Orders, stages: int) -> list[int]:
    """Backwards of each stage, after checking that every stage runs the same micro-batches once each way."""
    seen: set[Compute] = set()
    for order in orders:
        for op in order:
            if op in seen:
                raise ValueError(f"{op} stands twice in the schedule")
            seen.add(op)
    backwards = [0] * stages
    micros = {op.micro for op in seen}
    both_ways = any(isinstance(op, Backward) for op in seen)
    for stage in range(stages):
        for micro in sorted(micros):
            for op in (Forward(micro, stage), Backward(micro, stage))[: 2 if both_ways else 1]:
                if op not in seen:
                    raise ValueError(f"{op} is missing in the schedule")
        backwards[stage] = len(micros) if both_ways else 0
    return backwards
