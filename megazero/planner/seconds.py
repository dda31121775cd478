"""How long a block, an embedding, a head take on one rank: their matrix products, passes over memory, and collectives.

Each is split as a schedule sees it: the forward, the backward that yields the input's gradient, and the one that
yields the weights' gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ModelConfig
from .devices import ATTENTION_SHARE, KERNEL_SECONDS, MATMUL_SHARE, Axis, Device, collective_seconds, exchange_seconds
from .footprint import expert_rows
from .layout import Layout, StageSlice

BLOCK_KERNELS = 12          # of a block's forward beside its matrix products
ATTENTION_BACKWARD = 2.5    # times the operations of the forward: five products for two
WIDE = 4                    # bytes of an element of a gradient that is accumulated


@dataclass(frozen=True)
class Seconds:
    """Of one micro-batch. `exchange`: what of all three is spent on collectives."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    exchange: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.forward + other.forward, self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight, self.exchange + other.exchange,
        )

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


def stage_seconds(layout: Layout, device: Device, stage: StageSlice, blocks: dict[int, Seconds]) -> Seconds:
    """Of a stage, with `blocks` the seconds of a block by its experts, without recomputation."""
    total = Seconds()
    for number, experts in enumerate(stage.experts):
        block = blocks[experts]
        total += block
        if layout.recompute == "full" and (layout.method == "uniform" or number < layout.group):
            share = block.exchange * block.forward / block.total
            total += Seconds(backward_input=block.forward, exchange=share)
    h, c = layout.model.hidden_size, layout.compute
    if stage.embedding:
        moved = 3 * c * layout.rows * h
        total += Seconds(device.pass_seconds(moved), 0.0, device.pass_seconds(moved + WIDE * layout.rows * h))
        total += _exchanged(collective_seconds(device, Axis(layout.tensor), c * layout.tokens * h), 1, 1)
    if stage.head:
        total += head_seconds(layout, device)
    return total


def head_seconds(layout: Layout, device: Device) -> Seconds:
    """Of the last norm, the product with the table and the loss."""
    h, c = layout.model.hidden_size, layout.compute
    columns = layout.table / h
    moved = 3 * c * layout.tokens * columns + 2 * c * layout.rows * h
    gathered = collective_seconds(device, Axis(layout.tensor), c * layout.tokens * h)
    return (
        _product(layout, device, layout.tokens, columns, h)
        + Seconds(device.pass_seconds(moved), device.pass_seconds(moved))
        + _exchanged(gathered, 1, 2)
    )


def block_seconds(layout: Layout, device: Device, experts: int) -> Seconds:
    """Of one block."""
    model, c, n = layout.model, layout.compute, layout.tokens
    h, t = model.hidden_size, layout.tensor
    inner = (model.num_attention_heads + 2 * model.query_groups) * model.head_dim / t
    heads = model.num_attention_heads * model.head_dim / t
    total = _product(layout, device, n, inner, h) + _product(layout, device, n, h, heads)
    total += core_seconds(layout, device)
    moved = c * layout.rows * h * 10 + layout.rows * h * 2 * bool(model.hidden_dropout)
    passes = device.pass_seconds(moved) + BLOCK_KERNELS * KERNEL_SECONDS
    total += Seconds(passes, 2 * passes)
    gathered = collective_seconds(device, Axis(t), c * n * h)
    total += _exchanged(gathered, 2, 3)                     # gather and scatter; back, and gathered again for weights
    if experts == 1:
        return total + mlp_seconds(layout, device, n, model.ffn / t) + _exchanged(gathered, 2, 3)
    return total + moe_seconds(layout, device, experts)


def mlp_seconds(layout: Layout, device: Device, rows: float, ffn: float, *, experts: float = 1) -> Seconds:
    """Of so many feed-forwards of inner width `ffn`, each with `rows` rows."""
    h, wide = layout.model.hidden_size, ffn * (2 if layout.model.gated else 1)
    passes = device.pass_seconds(layout.compute * experts * rows * (wide + ffn))
    up, down = ((wide, h), (h, ffn))
    return (
        _product(layout, device, rows, *up, count=experts)
        + _product(layout, device, rows, *down, count=experts)
        + Seconds(passes, 2 * passes)
    )


def moe_seconds(layout: Layout, device: Device, experts: int) -> Seconds:
    """Of routed experts, their router, and what stands beside them."""
    model, moe, c = layout.model, layout.moe, layout.compute
    h, rows, cut = model.hidden_size, expert_rows(layout), layout.expert_tensor
    degree = layout.degree(experts)
    held = experts / degree
    ffn = (moe.moe_ffn_hidden_size or model.ffn) / cut
    total = mlp_seconds(layout, device, rows * cut / held, ffn, experts=held)
    sorted_rows = device.pass_seconds(c * h * (4 * rows + 2 * layout.rows) + 8 * layout.tokens * experts)
    total += Seconds(sorted_rows + BLOCK_KERNELS * KERNEL_SECONDS, sorted_rows)
    away = exchange_seconds(device, Axis(degree, cut), c * rows * h)
    shared = collective_seconds(device, Axis(cut), c * rows * cut * h)
    total += _exchanged(away + shared, 2, 2)
    gathered = collective_seconds(device, Axis(layout.tensor), c * layout.tokens * h)
    if moe.mlp_type == "residual":
        total += mlp_seconds(layout, device, layout.tokens, model.ffn / layout.tensor) + _exchanged(gathered, 2, 3)
    if (width := moe.moe_shared_expert_intermediate_size) is not None:
        total += mlp_seconds(layout, device, layout.tokens, width / layout.tensor) + _exchanged(gathered, 2, 3)
    return total


def core_seconds(layout: Layout, device: Device) -> Seconds:
    """Of attention between its projections, forward and back; with selective recomputation it is run twice."""
    model = layout.model
    heads = layout.micro_batch * model.num_attention_heads / layout.tensor
    if layout.fused:
        forward = fused_core_seconds(model, device, heads, layout.compute)
        back = ATTENTION_BACKWARD * forward
    else:
        scores, c = heads * model.seq_length**2, layout.compute
        dropped = (2 * c + 1) * bool(model.attention_dropout)           # read, write, and a mask
        sizes = (model.seq_length, model.seq_length, model.head_dim)
        products = 2 * device.matmul_seconds(*sizes, size=c, count=heads)
        forward = products + device.pass_seconds(scores * (2 * c + dropped))
        back = 2 * products + device.pass_seconds(scores * (3 * c + dropped))
    return Seconds(forward, back + forward * (layout.recompute == "selective"))


def fused_core_seconds(model: ModelConfig, device: Device, heads: float, size: int) -> float:
    """Of fused attention over so many heads, forward: the lower half of two products, and nothing of it in memory."""
    flops = 2 * heads * model.seq_length**2 * model.head_dim
    return KERNEL_SECONDS + flops / (device.flops * MATMUL_SHARE * ATTENTION_SHARE * 2 / size)


def _product(
    layout: Layout, device: Device, rows: float, columns: float, inner: float, *, count: float = 1
) -> Seconds:
    """Of `count` linear layers from `inner` to `columns` elements, each for so many rows. Their weights' gradients are
    added to what earlier micro-batches gave, which is read and written."""
    c = layout.compute
    added = device.pass_seconds(2 * WIDE * count * columns * inner)
    return Seconds(
        device.matmul_seconds(rows, columns, inner, size=c, count=count),
        device.matmul_seconds(rows, inner, columns, size=c, count=count),
        device.matmul_seconds(columns, inner, rows, size=c, count=count) + added,
    )


def _exchanged(seconds: float, forward: int, backward: int) -> Seconds:
    """Collectives that nothing runs beside: so many in the forward and in the backward."""
    return Seconds(forward * seconds, backward * seconds, 0.0, (forward + backward) * seconds)
