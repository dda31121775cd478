"""Layers that are cut over the tensor axis. Between layers the sequence is cut: [seq / tensor, batch, hidden].

A column-parallel layer gathers the sequence and keeps only its own part for the backward (Korthikanti et al.,
2022); a row-parallel layer sums its partial results and scatters the sequence again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.layer_norm import add_layer_norm, layer_norm
from ..kernels.rms_norm import add_rms_norm, rms_norm
from .collectives import all_gather, reduce_scatter, scatter_sequence, start_all_gather, start_reduce_scatter
from .groups import Group, Mesh
from .params import ONES, ZEROS, Initial, declare
from .shard import ShardSpec
from .weights import WeightQueue


class _GatherLinear(torch.autograd.Function):
    """y = gather(x) w^T + b. Backward gathers x again, so that the whole sequence is never kept.

    The weight is held by reference and its gradient added by the stage's queue: autograd is told of none.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, queue: WeightQueue
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.group, ctx.queue = weight, bias, group, queue
        rows = all_gather(x, group)                                # [seq, batch, in]
        return queue.products.linear(rows, weight.flatten(0, -2), None if bias is None else bias.flatten())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,), weight, bias, group, queue = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.group, ctx.queue
        gathering = None if queue.is_deferring else start_all_gather(x, group)
        scattering = start_reduce_scatter(queue.products.of(grad, weight.flatten(0, -2)), group)
        rows = grad.flatten(0, -2)                                 # [seq * batch, out / tensor]

        def add_weight_gradient() -> None:
            whole = (gathering or start_all_gather(x, group)).wait()
            queue.add_product_(weight, rows.T, whole.flatten(0, -2))
            if bias is not None:
                queue.add_(bias, rows.sum(0))

        queue.put(add_weight_gradient)                         # at once, it runs while the scatter is under way
        return scattering.wait(), None, None, None, None


def gather_linear(
    x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, queue: WeightQueue
) -> Tensor:
    """[seq / tensor, batch, in] -> [seq, batch, out / tensor]; weight [..., in], bias [...] of out / tensor rows."""
    return _GatherLinear.apply(x, weight, bias, group, queue)


class _LinearScatter(torch.autograd.Function):
    """y = scatter(x w^T), summed over the group. Backward gathers the gradient; the weight as in _GatherLinear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, group: Group, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.group, ctx.queue = weight, group, queue
        # Attention leaves its result batch-first in memory; multiplied as it lies it needs no copy.
        ctx.batch_first = x.stride(0) < x.stride(1)
        product = queue.products.linear
        y = product(x.transpose(0, 1), weight).transpose(0, 1) if ctx.batch_first else product(x, weight)
        return reduce_scatter(y, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,), weight, queue = ctx.saved_tensors, ctx.weight, ctx.queue
        grad = all_gather(grad, ctx.group)
        if ctx.batch_first:
            x, grad = x.transpose(0, 1), grad.transpose(0, 1)
        rows = grad.flatten(0, -2)
        queue.put(lambda: queue.add_product_(weight, rows.T, x.flatten(0, -2)))
        grad_x = queue.products.of(grad, weight)
        return grad_x.transpose(0, 1) if ctx.batch_first else grad_x, None, None, None


class ColumnParallelLinear(nn.Module):
    """Linear layer whose outputs are cut over tensor: [seq / tensor, batch, in] -> [seq, batch, out / tensor].

    `out` gives the logical output dims, of which number `cut` is cut: a fused qkv is (groups, q + 2, head_dim)
    cut on 0, a gate and up projection (2, ffn) cut on 1. The result flattens this rank's part of them.
    """

    def __init__(
        self, size_in: int, out: tuple[int, ...], mesh: Mesh, *,
        cut: int, initial: Initial, bias: bool, dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.group, self.queue = mesh.tensor, mesh.weights
        axes = tuple("tensor" if dim == cut else None for dim in range(len(out)))
        spec = ShardSpec((*out, size_in), (*axes, None))
        self.weight = declare(self, "weight", spec, mesh.topology, initial=initial, dtype=dtype)
        spec = ShardSpec(out, axes)
        self.bias = declare(self, "bias", spec, mesh.topology, initial=ZEROS, dtype=dtype) if bias else None

    def forward(self, x: Tensor, *, adds_bias: bool = True) -> Tensor:
        return gather_linear(x, self.weight, self.bias if adds_bias else None, self.group, self.queue)


class RowParallelLinear(nn.Module):
    """Linear layer whose inputs are cut over tensor: [seq, batch, in / tensor] -> [seq / tensor, batch, out].

    The bias is added after the sum, once; each rank sees other tokens, so its gradient is summed over tensor. With
    `adds_bias` false that is left to the caller.
    """

    def __init__(
        self, size_in: int, size_out: int, mesh: Mesh, *, initial: Initial, bias: bool, dtype: torch.dtype,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.adds_bias = adds_bias
        self.group, self.queue = mesh.tensor, mesh.weights
        spec = ShardSpec((size_out, size_in), (None, "tensor"))
        self.weight = declare(self, "weight", spec, mesh.topology, initial=initial, dtype=dtype)
        whole = ShardSpec((size_out,), (None,), grad_sum=("tensor",))
        self.bias = declare(self, "bias", whole, mesh.topology, initial=ZEROS, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = _LinearScatter.apply(x, self.weight, self.group, self.queue)
        return y + self.bias if self.adds_bias and self.bias is not None else y


class _Lookup(torch.autograd.Function):
    """Rows of a table: ids [...] -> [..., hidden]. The table's gradient is added by the stage's queue."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: nn.Parameter, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table, ctx.queue = table, queue
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (ids,), table, queue = ctx.saved_tensors, ctx.table, ctx.queue
        queue.put(lambda: queue.add_rows_(table, ids.flatten(), grad.flatten(0, -2)))
        return None, None, None


def lookup(ids: Tensor, table: nn.Parameter, queue: WeightQueue) -> Tensor:
    """Rows of a table [rows, hidden]: ids [...] -> [..., hidden]."""
    return _Lookup.apply(ids, table, queue)


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose rows are cut over tensor: ids [seq, batch] -> [seq / tensor, batch, hidden].

    Padding rows of the table are zero and are never read.
    """

    def __init__(
        self, table: ShardSpec, mesh: Mesh, *, initial: Initial, dtype: torch.dtype, known_as: str | None = None
    ) -> None:
        super().__init__()
        self.group, self.queue = mesh.tensor, mesh.weights
        self.weight = declare(
            self, "weight", table, mesh.topology, initial=initial, dtype=dtype, known_as=known_as
        )

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        if self.group.size == 1:                                   # nothing to look for elsewhere, and nothing to mask
            return lookup(tokens, self.weight, self.queue)
        local = tokens - rows * self.group.index
        elsewhere = (local < 0) | (local >= rows)
        x = lookup(local.masked_fill(elsewhere, 0), self.weight, self.queue)
        return scatter_sequence(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim. It works on this rank's part of the sequence (or of the heads), so its
    gradients are partial sums over tensor."""

    def __init__(
        self, size: int, mesh: Mesh, *, kind: str, epsilon: float, dtype: torch.dtype, impl: str
    ) -> None:
        super().__init__()
        self.epsilon, self.impl = epsilon, impl
        spec = ShardSpec((size,), (None,), grad_sum=("tensor",))
        self.weight = declare(self, "weight", spec, mesh.topology, initial=ONES, dtype=dtype)
        biased = kind == "LayerNorm"
        self.bias = declare(self, "bias", spec, mesh.topology, initial=ZEROS, dtype=dtype) if biased else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """In the dtype of x, which is wider than the weights' where the residual stream is; the result in theirs.

        With a residual: (the norm of h, h) of h = residual + x, which is as wide as the residual stream.
        """
        weight = self.weight.to(x.dtype if residual is None else residual.dtype)
        parameters = (weight,) if self.bias is None else (weight, self.bias.to(weight.dtype))
        norm, add = (rms_norm, add_rms_norm) if self.bias is None else (layer_norm, add_layer_norm)
        if residual is None:
            return norm(x, *parameters, self.epsilon, impl=self.impl).to(self.weight.dtype)
        y, h = add(x, residual, *parameters, self.epsilon, impl=self.impl)
        return y.to(self.weight.dtype), h
