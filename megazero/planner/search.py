"""All layouts of a model on a cluster, weighed; and, where one does not fit, the steps that make it smaller.

A layout is weighed by formulas of its schedule first; the most promising ones are then simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from .devices import Device
from .footprint import footprints, kept_bytes, working_bytes
from .layout import Layout, StageSlice
from .seconds import Seconds, block_seconds, stage_seconds
from .step import Prediction, after_seconds, predict, seconds_of_stages, sending_seconds

LARGEST_MICRO_BATCH = 32
SIMULATED = 2           # layouts whose schedule is simulated at a time, the best by formulas first
NEAR = 1.04             # how much slower by formulas a layout may be than those found, and still be simulated
SLACK = 1.1             # how far the bytes by formula may be above the memory before a layout is left out
CHUNKS = (2, 3, 4, 6, 8)
SCHEDULES = (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), *(("interleaved", chunks) for chunks in CHUNKS))


def best_layouts(
    start: Layout, device: Device, settled: Collection[str] = (), *, world: int | None = None, batch: int | None = None,
    count: int = 10,
) -> list[Prediction]:
    """The fastest layouts of a model on `world` ranks with `batch` samples (None: those of `start`) that fit into the
    device, the fastest first.

    `settled` names fields of Layout that stay as they are in `start`.
    """
    weigh = scales(device)
    open_ones = candidates(start, device, settled, world=world or start.world, batch=batch or start.batch)
    weighed = [(*weigh(layout), layout) for layout in open_ones]
    hopeful = sorted((w for w in weighed if w[1] <= SLACK * device.usable), key=lambda w: w[0])
    found: list[Prediction] = []
    for first in range(0, len(hopeful), SIMULATED):
        if len(found) >= count and hopeful[first][0] > NEAR * found[count - 1].seconds:
            break
        simulated = (predict(layout, device) for _, _, layout in hopeful[first : first + SIMULATED])
        found = sorted((*found, *(one for one in simulated if one.fits)), key=lambda one: one.seconds)
    return found[:count]


def candidates(
    start: Layout, device: Device, settled: Collection[str] = (), *, world: int, batch: int
) -> Iterator[Layout]:
    """Every layout that the model and the batch allow. gpipe is left out: 1f1b takes as long and keeps less."""

    def options(name: str, values: Iterable) -> list:
        return [vars(start)[name]] if name in settled else list(values)

    model, layers = start.model, start.model.num_layers
    sizes = (model.num_attention_heads, model.query_groups, model.ffn, model.seq_length)
    for tensor in options("tensor", (t for t in divisors(world) if t <= device.per_node)):
        if any(size % tensor for size in sizes) or world % tensor:
            continue
        for pipeline in options("pipeline", (p for p in divisors(world // tensor) if p <= layers)):
            data, rest = divmod(world, tensor * pipeline)
            if rest or batch % data:
                continue
            cut = replace(start, tensor=tensor, pipeline=pipeline, data=data)
            for expert in options("expert", expert_sizes(cut)):
                for micro in options("micro_batch", divisors(batch // data, LARGEST_MICRO_BATCH)):
                    count, left = divmod(batch // data, micro)
                    for recompute in () if left else options("recompute", recomputations(start)):
                        one = replace(
                            cut, expert=expert, micro_batch=micro, micro_batches=count, recompute=recompute,
                        )
                        for schedule, chunks in schedules_of(one):
                            allowed = ("schedule", schedule), ("chunks", chunks)
                            if all(value in options(name, [value]) for name, value in allowed):
                                yield replace(one, schedule=schedule, chunks=chunks)


def divisors(number: int, most: int | None = None) -> list[int]:
    """In rising order, up to `most`."""
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def expert_sizes(layout: Layout) -> list[int]:
    """Expert axes that every layer with experts can use."""
    experts = {n for n in layout.moe.experts_of_layers(layout.model.num_layers) if n > 1}
    sharing = layout.data * layout.tensor // layout.expert_tensor
    sizes = divisors(sharing, max(experts, default=1))
    return [size for size in sizes if size == 1 or all(replace(layout, expert=size).degree(n) > 1 for n in experts)]


def recomputations(layout: Layout) -> list[str | None]:
    """Attention that keeps no probabilities gains nothing by being recomputed alone."""
    return [None, "full"] if layout.fused else [None, "selective", "full"]


def schedules_of(layout: Layout) -> list[tuple[str, int]]:
    """Schedules and stages per rank that the depth and the micro-batches allow."""
    ranks, layers = layout.pipeline, layout.model.num_layers
    if ranks == 1:
        return [("1f1b", 1)]
    return [
        (name, chunks) for name, chunks in SCHEDULES
        if ranks * chunks <= layers and (name != "interleaved" or layout.micro_batches >= ranks)
    ]


# ---------------------------------------------------------------------------------------------------------- weighing


@dataclass(frozen=True)
class _Unit:
    """Of one micro-batch: a block on average with what is recomputed, and the head; their seconds and kept bytes, and
    what a recomputation needs once."""

    block: Seconds
    head: Seconds
    block_kept: float
    head_kept: float
    working: float


def scales(device: Device) -> Callable[[Layout], tuple[float, float]]:
    """Layout -> about how many seconds a step takes, and bytes its fullest rank holds. What layouts have in common is
    computed once."""

    @cache
    def unit(layout: Layout) -> _Unit:
        layers = layout.model.num_layers
        blocks, head = layout.stages[0], StageSlice(0, False, (), True, True)
        blocks = replace(blocks, embedding=False, norm=False, head=False)
        times = {experts: block_seconds(layout, device, experts) for experts in set(blocks.experts)}
        whole = stage_seconds(layout, device, blocks, times)
        block = Seconds(*(seconds / layers for seconds in vars(whole).values()))
        kept = kept_bytes(layout, blocks) / layers, kept_bytes(layout, head)
        return _Unit(block, stage_seconds(layout, device, head, {}), *kept, working_bytes(layout, blocks))

    @cache
    def rest(layout: Layout) -> tuple[float, float]:
        states = max(held.states for held in footprints(layout))
        return sum(after_seconds(layout, device, seconds_of_stages(layout, device))), states

    def weigh(layout: Layout) -> tuple[float, float]:
        count = layout.micro_batches if layout.zero == 2 else 1
        plain = replace(layout, schedule="1f1b", chunks=1, micro_batches=count)
        of = unit(replace(plain, pipeline=1, micro_batches=1))
        after, states = rest(replace(plain, micro_batch=1, recompute=None))
        blocks = -(-layout.model.num_layers // (layout.pipeline * layout.chunks)) * layout.chunks
        fill, in_flight = filling(layout, of.block)
        sent = 2 * layout.pipeline * sending_seconds(layout, device)
        seconds = layout.micro_batches * (blocks * of.block.total + of.head.total) + blocks * fill + sent + after
        return seconds, states + in_flight * blocks * of.block_kept + of.head_kept + of.working

    return weigh


def filling(layout: Layout, block: Seconds) -> tuple[float, float]:
    """The bubble of a schedule (pipe/schedule.py, pipe/zero_bubble.py) where each rank has one such block, and how many
    micro-batches the fullest rank holds."""
    ranks, chunks, micro_batches = layout.pipeline, layout.chunks, layout.micro_batches
    forward, back, weight = block.forward, block.backward_input, block.backward_weight
    match layout.schedule:
        case "gpipe":
            return (ranks - 1) * block.total, micro_batches
        case "zb-h1":
            return (ranks - 1) * max(0.0, forward + back - weight), min(ranks, micro_batches)
        case "zb-v":
            return (ranks - 1) * max(0.0, forward + back - 2 * weight), min(ranks, micro_batches)
    held = 2 * (ranks - 1) + (chunks - 1) * ranks + 1 if chunks > 1 else ranks
    return (ranks - 1) * block.total / chunks, min(held / chunks, micro_batches)


# ----------------------------------------------------------------------------------------------- where it does not fit


@dataclass(frozen=True)
class Rung:
    """One step down: what is changed, in words and flags, the layout then, and the bytes of its fullest rank before and
    after."""

    words: str
    layout: Layout
    before: float
    after: float


def ladder(layout: Layout, device: Device) -> list[Rung]:
    """Steps that make a rank hold less, each on top of those before it, the cheapest first, until it fits."""
    rungs: list[Rung] = []
    held = largest(layout)
    for words, change in STEPS:
        while held > device.usable and (smaller := change(layout, device)) is not None:
            after = largest(smaller)
            if after >= held:
                break
            rungs.append(Rung(words(smaller), smaller, held, after))
            layout, held = smaller, after
    return rungs


def largest(layout: Layout) -> float:
    """Bytes of the fullest rank."""
    return max(held.total for held in footprints(layout))


def _more_zero(layout: Layout, device: Device) -> Layout | None:
    return replace(layout, zero=layout.zero + 1) if layout.zero < 2 and layout.data > 1 else None


def _recompute(layout: Layout, device: Device) -> Layout | None:
    ways = recomputations(layout)
    at = ways.index(layout.recompute) + 1 if layout.recompute in ways else len(ways) - 1
    return replace(layout, recompute=ways[at]) if at < len(ways) and layout.recompute != "full" else None


def _smaller_micro_batch(layout: Layout, device: Device) -> Layout | None:
    if layout.micro_batch % 2:
        return None
    return replace(layout, micro_batch=layout.micro_batch // 2, micro_batches=layout.micro_batches * 2)


def _more_tensor(layout: Layout, device: Device) -> Layout | None:
    model, size = layout.model, 2 * layout.tensor
    sizes = (model.num_attention_heads, model.query_groups, model.ffn, model.seq_length)
    fits = size <= device.per_node and not any(n % size for n in sizes)
    return _from_replicas(replace(layout, tensor=size)) if fits else None


def _more_pipeline(layout: Layout, device: Device) -> Layout | None:
    size = 2 * layout.pipeline
    fits = size * layout.chunks <= layout.model.num_layers
    return _from_replicas(replace(layout, pipeline=size)) if fits else None


def _from_replicas(layout: Layout) -> Layout:
    """With ranks taken from the data axis where there are enough, else with more ranks."""
    if layout.data % 2 or layout.expert > layout.data // 2 * layout.tensor // layout.expert_tensor:
        return layout
    return replace(layout, data=layout.data // 2, micro_batches=layout.micro_batches * 2)


def _shorter(layout: Layout, device: Device) -> Layout | None:
    model, half = layout.model, layout.model.seq_length // 2
    if layout.model.seq_length % (2 * layout.tensor) or half < 128:
        return None
    return replace(layout, model=replace(model, seq_length=half, max_position_embeddings=model.positions))


STEPS = (
    (lambda to: f"--zero-stage {to.zero}", _more_zero),
    (lambda to: f"recompute {to.recompute}", _recompute),
    (lambda to: f"--micro-batch-size {to.micro_batch}", _smaller_micro_batch),
    (lambda to: f"--tensor-model-parallel-size {to.tensor}, data {to.data}, {to.world} ranks", _more_tensor),
    (lambda to: f"--pipeline-model-parallel-size {to.pipeline}, data {to.data}, {to.world} ranks", _more_pipeline),
    (lambda to: f"--seq-length {to.model.seq_length}", _shorter),
)
