"""Schedules: in which order each pipeline rank runs its forwards and backwards. Integers in, lists out.

A schedule knows nothing of communication: `lower.add_communication` puts that in. To add a schedule, write
one function with the signature (ranks, micros, chunks) and give it a line in SCHEDULES.
"""

from __future__ import annotations

from .instructions import Backward, Compute, Forward

Orders = list[list[Compute]]


def gpipe(ranks: int, micros: int, chunks: int = 1) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965). Stage r lives on rank r."""
    _check("gpipe", ranks, micros, chunks, most_chunks=1)
    forwards = [[Forward(m, r) for m in range(micros)] for r in range(ranks)]
    return [order + [Backward(op.micro, op.stage) for op in order] for order in forwards]


def one_f_one_b(ranks: int, micros: int, chunks: int = 1) -> Orders:
    """Fill, then one forward and one backward in turn, then drain (PipeDream-Flush; arXiv 2104.04473, figure 4).

    Rank r holds at most min(ranks - r, micros) activations. Stage r lives on rank r.
    """
    _check("1f1b", ranks, micros, chunks, most_chunks=1)
    orders = []
    for r in range(ranks):
        fill = min(ranks - 1 - r, micros)
        order: list[Compute] = [Forward(m, r) for m in range(fill)]
        for m in range(micros - fill):
            order += [Forward(m + fill, r), Backward(m, r)]
        order += [Backward(m, r) for m in range(micros - fill, micros)]
        orders.append(order)
    return orders


def forward_only(ranks: int, micros: int, chunks: int = 1) -> Orders:
    """Evaluation and generation: nothing but forwards. Stage s lives on rank s % ranks.

    With several chunks a rank takes `ranks` micro-batches through one of its stages before it turns to the
    next, so that the ranks behind it are never short of work.
    """
    _check("forward_only", ranks, micros, chunks, most_chunks=None)
    return [
        [
            Forward(m, chunk * ranks + r)
            for first in range(0, micros, ranks)
            for chunk in range(chunks)
            for m in range(first, min(first + ranks, micros))
        ]
        for r in range(ranks)
    ]


def _check(name: str, ranks: int, micros: int, chunks: int, *, most_chunks: int | None) -> None:
    if ranks < 1 or micros < 1 or chunks < 1:
        raise ValueError(f"{name}: ranks ({ranks}), micro-batches ({micros}) and chunks ({chunks}) must be at least 1")
    if most_chunks is not None and chunks > most_chunks:
        raise ValueError(f"{name}: a rank holds at most {most_chunks} stage, not {chunks}")


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "forward_only": forward_only}
