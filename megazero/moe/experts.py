"""The experts of one layer that a rank holds: feed-forwards over rows that lie expert by expert, without padding.

On a GPU each of the two layers is one grouped matrix product of all experts. On a CPU they are gone through expert by
expert, up and down at once and in blocks of rows, so that what lies between the two stays in the cache.
An expert without rows multiplies none and its gradient is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..kernels.dispatch import Kernels
from ..mlp import activation_of
from ..parallel.groups import Mesh
from ..parallel.params import ZEROS, Initial, declare
from ..parallel.shard import ShardSpec
from ..parallel.weights import WeightQueue
from ..products import Products
from .activations import TWO_WAY, Activation

# torch 2.11 knows only the old name, and neither for all types of numbers.
_GROUPED_MM = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
BLOCK = 1024            # rows of an expert that a CPU takes at once
GROUPED_WIDTH = 8       # elements of bf16 in the 16 bytes to which the rows of a grouped product must be aligned


def grouped_mm(
    rows: Tensor, matrices: Tensor, counts: Sequence[int], *, bias: Tensor | None = None, grouped: bool | None = None,
    products: Products = Products(),
) -> Tensor:
    """rows [rows, in], the first counts[0] of which meet matrices[0] [in, out] and bias[0] [out], and so on -> [rows,
    out].

    `grouped` asks for torch's grouped product; None: where a GPU has it for these sizes.
    """
    if grouped is None:
        even = not rows.shape[1] % GROUPED_WIDTH and not matrices.shape[2] % GROUPED_WIDTH
        grouped = rows.is_cuda and rows.dtype == torch.bfloat16 and even
    if grouped and len(rows):
        ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
        out = _GROUPED_MM(rows, matrices, offs=ends)
        if bias is not None:
            out += bias.repeat_interleave(torch.tensor(counts, device=rows.device), 0, output_size=len(rows))
        return out
    out = rows.new_empty(len(rows), matrices.shape[2])
    for number, (mine, to) in enumerate(zip(rows.split(counts), out.split(counts), strict=True)):
        products.into_(to, mine, matrices[number], None if bias is None else bias[number])
    return out


class _GroupedLinear(torch.autograd.Function):
    """y = x w_e^T + b_e for the rows of expert e. The weights' gradients are added by the stage's queue."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, counts: Sequence[int],
        queue: WeightQueue,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.bias, ctx.counts, ctx.queue = weight, bias, counts, queue
        own = None if bias is None else bias.flatten(1)
        return grouped_mm(rows, weight.flatten(1, -2).transpose(1, 2), counts, bias=own, products=queue.products)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (rows,), weight, bias, counts, queue = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.counts, ctx.queue

        def add_weight_gradients() -> None:
            queue.add_products_(weight, grad.T, rows, counts)
            if bias is not None:
                queue.add_(bias, torch.stack([part.sum(0) for part in grad.split(counts)]))

        queue.put(add_weight_gradients)
        return grouped_mm(grad, weight.flatten(1, -2), counts, products=queue.products), None, None, None, None


def grouped_linear(
    rows: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, counts: Sequence[int], queue: WeightQueue
) -> Tensor:
    """rows [rows, in], weight [experts, ..., in], bias [experts, ...] -> [rows, out]; counts[e] rows of expert e."""
    return _GroupedLinear.apply(rows, weight, bias, counts, queue)


class Weights(NamedTuple):
    """Of all experts that a rank holds: up [experts, ..., hidden], down [experts, hidden, ffn], and their biases."""

    up: nn.Parameter
    up_bias: nn.Parameter | None
    down: nn.Parameter
    down_bias: nn.Parameter | None


class _Block(NamedTuple):
    """Some rows of one expert on their way back."""

    expert: int
    rows: slice
    inner: Tensor               # what went into the second layer
    inner_grad: Tensor          # the gradient of what came out of the first


class _BlockedExperts(torch.autograd.Function):
    """down_e activation(up_e x + b_e) + c_e for the rows of expert e, expert by expert."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Weights, activation: Activation, counts: Sequence[int], queue: WeightQueue
    ) -> Tensor:
        up, down = weights.up.flatten(1, -2), weights.down
        out = torch.empty_like(rows)
        kept = []           # one by one: memory of this size is used again, a large piece comes anew from the system
        for e, own in _blocks(counts):
            inner = queue.products.linear(rows[own], up[e], _bias_of(weights.up_bias, e))
            after, slope = activation.keep(inner)
            queue.products.into_(out[own], after, down[e].T, _bias_of(weights.down_bias, e))
            kept += [after, slope]
        ctx.save_for_backward(rows, *kept)
        ctx.weights, ctx.activation, ctx.counts, ctx.queue = weights, activation, counts, queue
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (rows, *kept), weights, queue = ctx.saved_tensors, ctx.weights, ctx.queue
        grad_rows = torch.empty_like(rows)
        up, down, activation, counts = weights.up.flatten(1, -2), weights.down, ctx.activation, ctx.counts

        def blocks() -> Iterator[_Block]:
            for (e, own), after, slope in zip(_blocks(counts), kept[::2], kept[1::2], strict=True):
                inner_grad = activation.backward(queue.products.of(grad[own], down[e]), slope)
                queue.products.into_(grad_rows[own], inner_grad, up[e])
                yield _Block(e, own, after, inner_grad)

        # Weights take their gradients from each block as it is made, while it is in the cache, or later from all.
        made = list(blocks()) if queue.is_deferring else blocks()
        queue.put(lambda: _add_weight_gradients(weights, made, rows, grad, queue))
        return grad_rows, None, None, None, None


def _blocks(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), at most BLOCK at once, in parts as even as they can be."""
    start = 0
    for e, count in enumerate(counts):
        parts = -(-count // BLOCK)
        for part in range(parts):
            yield e, slice(start + count * part // parts, start + count * (part + 1) // parts)
        start += count


def _bias_of(bias: Tensor | None, expert: int) -> Tensor | None:
    """[out] of one expert."""
    return None if bias is None else bias[expert].flatten()


def _add_weight_gradients(
    weights: Weights, blocks: Iterable[_Block], rows: Tensor, grad: Tensor, queue: WeightQueue
) -> None:
    """Take what each block [rows of one expert] adds to the gradients of its expert."""
    trained = [p if p is not None and p.requires_grad else None for p in weights]
    sums = Weights(*(None if p is None else queue.gradient(p) for p in trained))
    for e, own, after, inner_grad in blocks:
        if sums.up is not None:
            queue.products.add_(sums.up[e].flatten(0, -2), inner_grad.T, rows[own])
        if sums.down is not None:
            queue.products.add_(sums.down[e], grad[own].T, after)
        if sums.up_bias is not None:
            sums.up_bias[e].view(-1).add_(inner_grad.sum(0))
        if sums.down_bias is not None:
            sums.down_bias[e].add_(grad[own].sum(0))
    for parameter in trained:
        if parameter is not None:
            queue.arrived(parameter)


def feed_forward(
    rows: Tensor, weights: Weights, activation: Activation, counts: Sequence[int], queue: WeightQueue, *,
    blocked: bool | None = None,
) -> Tensor:
    """rows [rows, hidden], the first counts[0] of expert 0 and so on -> [rows, hidden].

    `blocked`: expert by expert, or layer by layer; None: as suits the device.
    """
    if not rows.is_cuda if blocked is None else blocked:
        return _BlockedExperts.apply(rows, weights, activation, counts, queue)
    inner = activation.forward(grouped_linear(rows, weights.up, weights.up_bias, counts, queue))
    return grouped_linear(inner, weights.down, weights.down_bias, counts, queue)


class Experts(nn.Module):
    """Rows [rows, hidden] of this rank's experts -> the same, as a partial sum over the expert-tensor axis.

    All experts of a layer are one parameter by kind, dealt out on dim 0 along `axis`; the inner width is cut over
    the expert-tensor axis. The second bias is added on its first rank only.
    """

    def __init__(
        self, model: ModelConfig, mesh: Mesh, *, experts: int, ffn: int, axis: str, dtype: torch.dtype,
        kernels: Kernels = Kernels(),
    ) -> None:
        super().__init__()
        self.queue = mesh.weights
        self.activation = TWO_WAY[model.activation]._replace(forward=activation_of(model, kernels))
        self.adds_bias = mesh.expert_tensor.index == 0
        inner, cut = ((2, ffn), (None, "expert_tensor")) if model.gated else ((ffn,), ("expert_tensor",))
        initial = Initial(model.init_method_std)
        scaled = Initial(model.init_method_std / math.sqrt(2 * model.num_layers))

        def own(name: str, shape: tuple[int, ...], cut: tuple[str | None, ...], how: Initial) -> nn.Parameter:
            whole = ("expert_tensor",) if "expert_tensor" not in cut else ()
            spec = ShardSpec((experts, *shape), (axis, *cut), grad_sum=whole)
            return declare(self, name, spec, mesh.topology, initial=how, dtype=dtype)

        self.up = own("up", (*inner, model.hidden_size), (*cut, None), initial)
        self.up_bias = own("up_bias", inner, cut, ZEROS) if model.bias else None
        self.down = own("down", (model.hidden_size, ffn), (None, "expert_tensor"), scaled)
        self.down_bias = own("down_bias", (model.hidden_size,), (None,), ZEROS) if model.bias else None

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        weights = Weights(self.up, self.up_bias, self.down, self.down_bias if self.adds_bias else None)
        return feed_forward(rows, weights, self.activation, counts, self.queue)
