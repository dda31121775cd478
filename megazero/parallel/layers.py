"""Layers that are cut over the tensor axis. Between layers the sequence is cut: [seq / tensor, batch, hidden].

A column-parallel layer gathers the sequence and keeps only its own part for the backward (Korthikanti et al.,
2022); a row-parallel layer sums its partial results and scatters the sequence again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.layer_norm import layer_norm
from ..kernels.rms_norm import rms_norm
from .collectives import all_gather, scatter_sequence, start_all_gather, start_reduce_scatter
from .groups import Mesh
from .params import ONES, ZEROS, Initial, declare
from .shard import ShardSpec


class _GatherLinear(torch.autograd.Function):
    """y = gather(x) w^T + b. Backward gathers x again, so that the whole sequence is never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.has_bias = group, bias is not None
        rows = all_gather(x, group)                                # [seq, batch, in]
        out = rows.new_empty(*rows.shape[:-1], weight.shape[0])    # not a view, so that it may be changed in place
        flat, rows = out.flatten(0, -2), rows.flatten(0, -2)
        torch.mm(rows, weight.T, out=flat) if bias is None else torch.addmm(bias, rows, weight.T, out=flat)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gathering = start_all_gather(x, ctx.group)                 # runs under the product for the input's gradient
        scattering = start_reduce_scatter(grad @ weight, ctx.group)
        rows = grad.flatten(0, -2)                                 # [seq * batch, out / tensor]
        grad_weight = rows.T @ gathering.wait().flatten(0, -2)
        grad_bias = rows.sum(0) if ctx.has_bias else None
        return scattering.wait(), grad_weight, grad_bias, None


def gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
    """[seq / tensor, batch, in], [out / tensor, in] -> [seq, batch, out / tensor]."""
    return _GatherLinear.apply(x, weight, bias, group)


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
        self.group = mesh.tensor
        axes = tuple("tensor" if dim == cut else None for dim in range(len(out)))
        spec = ShardSpec((*out, size_in), (*axes, None))
        self.weight = declare(self, "weight", spec, mesh.topology, initial=initial, dtype=dtype)
        spec = ShardSpec(out, axes)
        self.bias = declare(self, "bias", spec, mesh.topology, initial=ZEROS, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        return gather_linear(x, self.weight.flatten(0, -2), bias, self.group)


class RowParallelLinear(nn.Module):
    """Linear layer whose inputs are cut over tensor: [seq, batch, in / tensor] -> [seq / tensor, batch, out].

    The bias is added after the sum, once; each rank sees other tokens, so its gradient is summed over tensor.
    """

    def __init__(
        self, size_in: int, size_out: int, mesh: Mesh, *, initial: Initial, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.group = mesh.tensor
        spec = ShardSpec((size_out, size_in), (None, "tensor"))
        self.weight = declare(self, "weight", spec, mesh.topology, initial=initial, dtype=dtype)
        whole = ShardSpec((size_out,), (None,), grad_sum=("tensor",))
        self.bias = declare(self, "bias", whole, mesh.topology, initial=ZEROS, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        # Attention leaves its result batch-first in memory; multiplied as it lies it needs no copy for the backward.
        batch_first = x.stride(0) < x.stride(1)
        y = F.linear(x.transpose(0, 1), self.weight).transpose(0, 1) if batch_first else F.linear(x, self.weight)
        y = scatter_sequence(y, self.group)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose rows are cut over tensor: ids [seq, batch] -> [seq / tensor, batch, hidden].

    Padding rows of the table are zero and are never read.
    """

    def __init__(
        self, table: ShardSpec, mesh: Mesh, *, initial: Initial, dtype: torch.dtype, known_as: str | None = None
    ) -> None:
        super().__init__()
        self.group = mesh.tensor
        self.weight = declare(
            self, "weight", table, mesh.topology, initial=initial, dtype=dtype, known_as=known_as
        )

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = tokens - rows * self.group.index
        elsewhere = (local < 0) | (local >= rows)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
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

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.epsilon, impl=self.impl)
        return layer_norm(x, self.weight, self.bias, self.epsilon, impl=self.impl)
