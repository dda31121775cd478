"""From the order of computation to full programs: puts in sends, receives and gradient reductions.

The orders are run on paper, and a send and its receive enter both programs at the same moment. So two ranks
see the messages between them in one order, and no two ranks can wait for each other.
"""

from __future__ import annotations

import heapq

from .instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Orders,
    Program,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)

# How long a step takes on paper. It decides only where a receive stands among the receiver's own steps;
# a backward costs two forwards, as it does for matrix products.
PAPER_TIME = {Forward: 1, Backward: 2, BackwardInput: 1, BackwardWeight: 1}

BACKWARDS = (Backward, BackwardInput, BackwardWeight)

# What a step yields for the next stage: (whether it is the gradient of a stage's input, or else the stage's output;
# micro-batch; stage)
Result = tuple[bool, int, int]


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

    The output of a stage is sent after its forward, the gradient of its input after its Backward or BackwardInput,
    and neither where the next stage lives on the same rank; the first stage sends no gradient. `ReduceGrads(stage)`
    follows the step that completes the gradients of its stage; orders without backward get none. Raises ValueError
    where a step is missing, stands twice, or where the orders cannot proceed, naming the step.
    """
    home = placement(orders, stages)
    left = _micro_batches(orders, stages)
    programs: list[Program] = [[] for _ in orders]
    todo = [iter(order) for order in orders]
    clock = [0] * len(orders)
    end: dict[Result, int] = {}
    waiting: dict[Result, list[tuple[Compute, int]]] = {}     # what is awaited -> who waits, on which rank
    ready: list[tuple[int, int, int, Compute]] = []           # (start, turn, rank, step): at most one of each rank

    def consider(op: Compute | None, rank: int) -> None:
        if op is None:
            return
        start = clock[rank]
        for need in needs(op, stages):
            if need not in end:
                waiting.setdefault(need, []).append((op, rank))
                return
            start = max(start, end[need])
        heapq.heappush(ready, (start, _turn(op, stages), rank, op))

    for rank in range(len(orders)):
        consider(next(todo[rank], None), rank)
    while ready:
        start, _, rank, op = heapq.heappop(ready)
        clock[rank] = start + PAPER_TIME[type(op)]
        programs[rank].append(op)
        kind = type(op)
        if kind is not BackwardWeight:
            result = (kind is not Forward, op.micro, op.stage)
            end[result] = clock[rank]
            _add_message(programs, result, home)
            for later, holder in waiting.pop(result, ()):
                consider(later, holder)
        if kind is Backward or kind is BackwardWeight:
            left[op.stage] -= 1
            if not left[op.stage]:
                programs[rank].append(ReduceGrads(op.stage))
        consider(next(todo[rank], None), rank)
    if waiting:
        raise ValueError(f"the schedule cannot proceed: {_stuck(waiting)}")
    return programs


def needs(op: Compute, stages: int) -> tuple[Result, ...]:
    """What must be there before `op` may start, in a pipeline of `stages`."""
    kind, micro, stage = type(op), op.micro, op.stage
    if kind is Forward:
        return ((False, micro, stage - 1),) if stage else ()
    if kind is BackwardWeight:
        return ((True, micro, stage),)
    own = (False, micro, stage)
    return (own, (True, micro, stage + 1)) if stage < stages - 1 else (own,)


def _turn(op: Compute, stages: int) -> int:
    """Of steps that start together a sender's comes first: so the receiver posts the receive before its own step.

    Forwards upwards, then backwards downwards, then what sends nothing. (Two neighbours that send to each other
    cannot both receive first: if sends waited for their receives, that would hang.)
    """
    kind = type(op)
    return op.stage if kind is Forward else 3 * stages if kind is BackwardWeight else 2 * stages - op.stage


def _add_message(programs: list[Program], result: Result, home: list[int]) -> None:
    """The message that carries a result, if the stage it goes to lives on another rank."""
    is_grad, micro, stage = result
    to = stage - 1 if is_grad else stage + 1
    if not 0 <= to < len(home) or home[to] == home[stage]:
        return
    send, recv = (SendGrad, RecvGrad) if is_grad else (SendActivation, RecvActivation)
    programs[home[stage]].append(send(micro, stage, home[to]))
    programs[home[to]].append(recv(micro, to, home[stage]))


def _stuck(waiting: dict[Result, list[tuple[Compute, int]]]) -> str:
    parts = []
    for (is_grad, micro, stage), they in waiting.items():
        what = f"the {'backward' if is_grad else 'forward'} of stage {stage} for micro-batch {micro}"
        parts += [f"rank {rank}: {op} waits for {what}" for op, rank in they]
    return "; ".join(parts)


def _micro_batches(orders: Orders, stages: int) -> list[int]:
    """Micro-batches that each stage trains on; 0 where there is no backward.

    Raises ValueError unless every stage runs the same micro-batches, once each way, whole or in two parts.
    """
    seen: dict[type, set[tuple[int, int]]] = {kind: set() for kind in PAPER_TIME}
    for order in orders:
        for op in order:
            at = (op.micro, op.stage)
            if at in seen[type(op)]:
                raise ValueError(f"{op} stands twice in the schedule")
            seen[type(op)].add(at)
    micros = sorted({micro for places in seen.values() for micro, _ in places})
    trains = any(seen[kind] for kind in BACKWARDS)
    for stage in range(stages):
        for micro in micros:
            if (micro, stage) not in seen[Forward]:
                raise ValueError(f"{Forward(micro, stage)} is missing in the schedule")
            if trains:
                _check_backward(tuple((micro, stage) in seen[kind] for kind in BACKWARDS), micro, stage)
    return [len(micros) if trains else 0] * stages


def _check_backward(there: tuple[bool, ...], micro: int, stage: int) -> None:
    """`there` says which of BACKWARDS the schedule has for a micro-batch on a stage."""
    if there in ((True, False, False), (False, True, True)):
        return
    whole, parts = BACKWARDS[0](micro, stage), [kind(micro, stage) for kind in BACKWARDS[1:]]
    if there[0]:
        raise ValueError(f"{parts[not there[1]]} stands beside {whole} in the schedule")
    missing = parts[there[1]] if any(there) else whole
    raise ValueError(f"{missing} is missing in the schedule")
