"""Schedules: in which order each pipeline rank runs its forwards and backwards. Integers in, lists out.

A schedule knows nothing of communication: `lower.add_communication` puts that in. To add a schedule, write
one function with the signature (ranks, micros, chunks) and give it a line in SCHEDULES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .instructions import Backward, Compute, Forward, Orders
from .zero_bubble import zb_h1, zb_v

CHUNK_FLAGS = "--num-virtual-stages-per-pipeline-rank, --num-layers-per-virtual-pipeline-stage"


@dataclass(frozen=True)
class Placement:
    """Where the stages of a pipeline live, and how micro-batches best pass through them where nothing comes back.

    rank      (stage, ranks) -> the rank that holds the stage
    forwards  (ranks, micros, chunks) -> the forwards of each rank, in order
    """

    rank: Callable[[int, int], int]
    forwards: Callable[[int, int, int], Orders]

    def homes(self, ranks: int, chunks: int) -> list[int]:
        """The rank of each stage of a pipeline whose ranks hold `chunks` stages each."""
        return [self.rank(stage, ranks) for stage in range(ranks * chunks)]


def gpipe(ranks: int, micros: int, chunks: int = 1) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965). Stage r lives on rank r."""
    return [[Forward(m, r) for m in range(micros)] + [Backward(m, r) for m in range(micros)] for r in range(ranks)]


def one_f_one_b(ranks: int, micros: int, chunks: int = 1) -> Orders:
    """Fill, then one forward and one backward in turn, then drain (PipeDream-Flush; arXiv 2104.04473, figure 4).

    Rank r holds at most min(ranks - r, micros) activations. Stage r lives on rank r.
    """
    orders = []
    for r in range(ranks):
        forwards: list[Compute] = [Forward(m, r) for m in range(micros)]
        backwards: list[Compute] = [Backward(m, r) for m in range(micros)]
        orders.append(_in_turn(forwards, backwards, ranks - 1 - r))
    return orders


def interleaved(ranks: int, micros: int, chunks: int, group: int | None = None) -> Orders:
    """1F1B over `chunks` stages per rank, with a bubble smaller by that factor (arXiv 2104.04473, section 2.2).

    Stage s lives on rank s % ranks. A rank takes a group of micro-batches through one of its stages before it turns
    to the next (see `group_sizes`, which takes `group`). So the bubble is (ranks - 1) forwards and backwards of one
    stage for any micros >= ranks, and rank r holds at most 2 (ranks - r) - 1 + (chunks - 1) x the largest group
    micro-batches of one stage. One chunk is 1F1B.
    """
    if chunks == 1:
        return one_f_one_b(ranks, micros)
    sizes = group_sizes(ranks, micros, group)
    table = order_table(sizes, chunks)
    orders = []
    for r in range(ranks):
        forwards: list[Compute] = [Forward(m, chunk * ranks + r) for m, chunk in table]
        backwards: list[Compute] = [Backward(m, (chunks - 1 - chunk) * ranks + r) for m, chunk in table]
        orders.append(_in_turn(forwards, backwards, 2 * (ranks - 1 - r) + (chunks - 1) * max(sizes)))
    return orders


def group_sizes(ranks: int, micros: int, group: int | None = None) -> list[int]:
    """The micro-batches of each group of an interleaved schedule, in order.

    Groups of `group` (default: `ranks`), the last one smaller, as in Megatron. A last group below `ranks` would stall
    the pipeline, or hang it; then as many groups as are full share all micro-batches evenly. Raises ValueError for a
    group below `ranks`, which leaves ranks without work.
    """
    group = ranks if group is None else group
    if group < ranks:
        raise ValueError(f"interleaved: a group of {group} micro-batches is too small for {ranks} pipeline ranks")
    full, rest = divmod(micros, group)
    if rest >= ranks or not full:
        return [group] * full + [rest]
    share, more = divmod(micros, full)
    return [share + 1] * more + [share] * (full - more)


def order_table(sizes: list[int], chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of each forward of a rank in an interleaved schedule; backwards count chunks from the last.

    Each group runs through chunk 0, then through chunk 1, and so on.
    """
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        (m, chunk)
        for first, size in zip(firsts, sizes, strict=True)
        for chunk in range(chunks)
        for m in range(first, first + size)
    ]


def _rounds(ranks: int, micros: int, chunks: int) -> Orders:
    """A rank takes a group of micro-batches through one of its stages before it turns to the next."""
    table = order_table(group_sizes(ranks, micros), chunks)
    return [[Forward(m, chunk * ranks + r) for m, chunk in table] for r in range(ranks)]


def _down_and_up(ranks: int, micros: int, chunks: int) -> Orders:
    """Stage s runs micro-batch m at 2m + s: a rank's two stages take turns, as one is even and the other odd."""
    orders = []
    for r in range(ranks):
        order: list[Compute] = [Forward(m, stage) for stage in (r, 2 * ranks - 1 - r) for m in range(micros)]
        orders.append(sorted(order, key=lambda op: 2 * op.micro + op.stage))
    return orders


# Stage s on rank s % ranks: the model runs down the ranks `chunks` times.
ROUND_ROBIN = Placement(lambda stage, ranks: stage % ranks, _rounds)

# The model runs down the ranks and up again, two stages on each, so that the first rank holds both ends.
V_SHAPE = Placement(lambda stage, ranks: min(stage, 2 * ranks - 1 - stage), _down_and_up)


def forward_only(ranks: int, micros: int, chunks: int = 1, placement: Placement = ROUND_ROBIN) -> Orders:
    """Evaluation and generation: nothing but forwards, on stages that live as `placement` says."""
    _check_sizes("forward_only", ranks, micros, chunks)
    return placement.forwards(ranks, micros, chunks)


def _in_turn(forwards: list[Compute], backwards: list[Compute], fill: int) -> list[Compute]:
    """`fill` forwards, then one forward and one backward in turn, then the rest of the backwards."""
    fill = min(fill, len(forwards))
    pairs = zip(forwards[fill:], backwards, strict=False)
    return forwards[:fill] + [op for pair in pairs for op in pair] + backwards[len(forwards) - fill :]


def _check_sizes(name: str, ranks: int, micros: int, chunks: int) -> None:
    if ranks < 1 or micros < 1 or chunks < 1:
        raise ValueError(f"{name}: ranks ({ranks}), micro-batches ({micros}) and chunks ({chunks}) must be at least 1")


@dataclass(frozen=True)
class Schedule:
    """An order of training and what belongs to it. Called, it gives the order of each rank.

    orders     (ranks, micros, chunks) -> Orders
    placement  where its stages live
    chunks     the least and the most stages of one rank; None: any number
    grouped    the order with groups of a given size, where micro-batches go in groups: (ranks, micros, chunks, group)
    """

    name: str
    orders: Callable[[int, int, int], Orders]
    placement: Placement = ROUND_ROBIN
    chunks: tuple[int, int | None] = (1, 1)
    grouped: Callable[[int, int, int, int], Orders] | None = None

    def __call__(self, ranks: int, micros: int, chunks: int) -> Orders:
        """The order of each rank. Raises ValueError for sizes below 1, or stages per rank that it does not run."""
        self.check(ranks, micros, chunks)
        return self.orders(ranks, micros, chunks)

    def in_groups(self, group: int | None) -> Schedule:
        """The same in groups of so many micro-batches, where it has any; None: of as many as there are ranks."""
        if group is None or self.grouped is None:
            return self
        grouped = self.grouped
        return replace(self, orders=lambda ranks, micros, chunks: grouped(ranks, micros, chunks, group))

    def forward_only(self, ranks: int, micros: int, chunks: int) -> Orders:
        """Evaluation on the stages where training has put them."""
        self.check(ranks, micros, chunks)
        return forward_only(ranks, micros, chunks, self.placement)

    def homes(self, ranks: int, chunks: int) -> list[int]:
        """The rank that holds each stage."""
        self.check(ranks, 1, chunks)
        return self.placement.homes(ranks, chunks)

    def check(self, ranks: int, micros: int, chunks: int) -> None:
        """Raises ValueError for sizes below 1, or stages per rank that this schedule does not run."""
        _check_sizes(self.name, ranks, micros, chunks)
        least, most = self.chunks
        if chunks < least or most is not None and chunks > most:
            amount = f"{least}" if least == most else f"at least {least}" if most is None else f"{least} to {most}"
            raise ValueError(
                f"--pipeline-schedule {self.name} runs {amount} stage{'s' if amount != '1' else ''} on each pipeline "
                f"rank, not {chunks} ({CHUNK_FLAGS}, --pipeline-model-parallel-layout)"
            )


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", gpipe),
        Schedule("1f1b", one_f_one_b),
        Schedule("interleaved", interleaved, chunks=(1, None), grouped=interleaved),
        Schedule("zb-h1", zb_h1),
        Schedule("zb-v", zb_v, V_SHAPE, chunks=(2, 2)),
    )
}
