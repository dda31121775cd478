"""A step of training on paper: its stages run through the schedule, then gradients, update and parameters.

docs/planner.md writes the model down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..flops import layer_flops, sc21_flops
from ..pipe.lower import add_communication
from ..pipe.simulate import Costs, simulate
from .devices import Axis, Device, collective_seconds, message_seconds
from .footprint import Footprint, footprints, parts_of
from .layout import Layout, StageSlice
from .seconds import Seconds, block_seconds, stage_seconds

UPDATED = 8         # wide elements moved for one by norm and Adam: its gradient twice, master and moments both ways


@dataclass(frozen=True)
class Pipelined:
    """A step's forwards and backwards in a pipeline: from the first to the last, in the unit of their costs, and the
    share of it in which ranks wait."""

    makespan: float
    bubble: float


def pipelined(layout: Layout, costs: Costs) -> Pipelined:
    """The layout's schedule, simulated with these costs of its stages."""

    def simulated(micro_batches: int) -> list[float]:
        orders = layout.order(layout.pipeline, micro_batches, layout.chunks)
        report = simulate(add_communication(orders, len(layout.stages)), costs)
        return [report.makespan, sum(report.busy) / layout.pipeline]

    makespan, busy = layout.over_micro_batches(simulated)
    return Pipelined(makespan, 1 - busy / makespan)


# ------------------------------------------------------------------------------------------------------- operations


def stage_flops(layout: Layout, stage: StageSlice) -> float:
    """Operations of the forward of one micro-batch through a stage, on all its tensor ranks."""
    return layout.tokens * (sum(_block_flops(layout, stage)) + 2 * layout.model.hidden_size * layout.vocab * stage.head)


def _block_flops(layout: Layout, stage: StageSlice) -> list[float]:
    """Of each block of a stage for one token, forward."""
    each = zip(stage.experts, stage.windows, strict=True)
    return [layer_flops(layout.model, experts, layout.moe, window=window) for experts, window in each]


def recomputed_flops(layout: Layout, stage: StageSlice) -> float:
    """Those that full recomputation of the stage's blocks adds. Of attention's core alone they do not count."""
    if layout.recompute != "full":
        return 0.0
    return layout.tokens * sum(_block_flops(layout, stage)[: None if layout.method == "uniform" else layout.group])


def step_flops(layout: Layout) -> tuple[float, float]:
    """Of a step on all ranks: what the model needs, and that with what is computed twice."""
    micro_batches = layout.micro_batches * layout.data
    needed = sum(3 * stage_flops(layout, stage) for stage in layout.stages)
    again = sum(recomputed_flops(layout, stage) for stage in layout.stages)
    return micro_batches * needed, micro_batches * (needed + again)


def counted_bubble(layout: Layout) -> float:
    """The share of a step in which pipeline ranks wait, where a step of a stage takes as long as its operations."""
    forward = [stage_flops(layout, stage) for stage in layout.stages]
    if not all(forward):                                    # a stage that has the embedding alone
        forward = [max(flops, 1e-9 * max(forward)) for flops in forward]
    again = [recomputed_flops(layout, stage) for stage in layout.stages]
    back = [a + b for a, b in zip(forward, again, strict=True)]
    return pipelined(layout, Costs(forward, back, forward)).bubble


# ------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Prediction:
    """A step of a layout on a device, in seconds, and what its fullest rank holds.

    exchange   on the busiest pipeline rank: tensor and expert collectives, which nothing runs beside
    reduction  gradients and parameters over the replicas, where nothing runs beside it
    update     of the optimizer
    bubble     share of the schedule in which ranks wait
    tflops     per rank, by operations that the model needs
    """

    layout: Layout
    device: Device
    seconds: float
    bubble: float
    exchange: float
    reduction: float
    update: float
    fullest: Footprint

    @property
    def tflops(self) -> float:
        layout = self.layout
        return step_flops(layout)[0] / self.seconds / layout.world / 1e12

    @property
    def mfu(self) -> float:
        return self.tflops * 1e12 / self.device.flops

    @property
    def fits(self) -> bool:
        return self.fullest.total <= self.device.usable

    @property
    def exposed(self) -> float:
        """Share of the step that communication takes, with nothing beside it, on the busiest rank."""
        return (self.exchange + self.reduction) / self.seconds


def seconds_of_stages(layout: Layout, device: Device) -> list[Seconds]:
    """Of each stage for one micro-batch."""
    kinds = {experts for stage in layout.stages for experts in stage.experts}
    blocks = {experts: block_seconds(layout, device, experts) for experts in kinds}
    return [stage_seconds(layout, device, stage, blocks) for stage in layout.stages]


def predict(layout: Layout, device: Device) -> Prediction:
    """The time of a step, and the bytes of the fullest rank."""
    stages = seconds_of_stages(layout, device)
    costs = Costs(
        [s.forward for s in stages], [s.backward_input for s in stages], [s.backward_weight for s in stages],
        sending_seconds(layout, device),
    )
    run = pipelined(layout, costs)
    reduction, update = after_seconds(layout, device, stages)
    busiest = max(
        sum(s.exchange for s, home in zip(stages, layout.homes, strict=True) if home == rank)
        for rank in range(layout.pipeline)
    )
    return Prediction(
        layout, device, run.makespan + reduction + update, run.bubble, busiest * layout.micro_batches, reduction,
        update, max(footprints(layout), key=lambda held: held.total),
    )


def sending_seconds(layout: Layout, device: Device) -> float:
    """Of a micro-batch from stage to stage."""
    if layout.pipeline == 1:
        return 0.0
    held = layout.residual * layout.rows * layout.model.hidden_size
    return message_seconds(device, layout.data * layout.tensor, held)


def after_seconds(layout: Layout, device: Device, stages: Sequence[Seconds]) -> tuple[float, float]:
    """Of what follows the last backward, on the slowest rank: reducing gradients and gathering parameters, as far as
    nothing runs beside it; and the update."""
    found = []
    for rank in range(layout.pipeline):
        own = [number for number, home in enumerate(layout.homes) if home == rank]
        parts = parts_of(layout, [layout.stages[number] for number in own])
        reduced = gathered = update = 0.0
        for part in parts:
            axis = Axis(part.copies, part.stride)
            each = collective_seconds(device, axis, layout.sent * part.elements)
            reduced += each * (layout.micro_batches if layout.zero == 2 else 1 if layout.zero else 2)
            gathered += collective_seconds(device, axis, layout.compute * part.elements) * (layout.zero > 0)
            owned = part.elements / (part.copies if layout.zero else 1)
            moved = layout.master * UPDATED + layout.compute
            update += device.pass_seconds(moved * owned)
        backward = layout.overlaps[0] * sum(stages[n].backward_input + stages[n].backward_weight for n in own)
        forward = layout.overlaps[1] * sum(stages[n].forward for n in own)
        found.append((max(0.0, reduced - backward) + max(0.0, gathered - forward), update))
    return max(found, key=sum)


def hardware_tflops(prediction: Prediction) -> float:
    """Per rank, counted as Narayanan et al. (SC'21, equation 3) do: with the forward that is computed twice."""
    layout = prediction.layout
    flops = sc21_flops(
        layout.model, vocab=layout.vocab, batch=layout.batch, recompute=layout.recompute == "full"
    )
    return flops / prediction.seconds / layout.world / 1e12
