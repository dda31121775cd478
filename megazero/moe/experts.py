"""The experts of one layer that a rank holds: feed-forwards over rows that lie expert by expert, without padding.

A matrix product of each group of rows with its own weight. On a CPU that is one product per expert into its part of
the result; on a GPU one grouped product of all. An expert without rows multiplies none and its gradient is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..mlp import ACTIVATIONS
from ..parallel.groups import Mesh
from ..parallel.params import ZEROS, Initial, declare
from ..parallel.shard import ShardSpec
from ..parallel.weights import WeightQueue

# torch 2.11 knows only the old name, and neither for all types of numbers.
_GROUPED_MM = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
GROUPED_WIDTH = 8       # elements of bf16 in the 16 bytes to which the rows of a grouped product must be aligned


def grouped_mm(
    rows: Tensor, matrices: Tensor, counts: Sequence[int], *, bias: Tensor | None = None, grouped: bool | None = None
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
        if bias is None:
            torch.mm(mine, matrices[number], out=to)
        else:
            torch.addmm(bias[number], mine, matrices[number], out=to)
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
        return grouped_mm(rows, weight.flatten(1, -2).transpose(1, 2), counts, bias=own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (rows,), weight, bias, counts, queue = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.counts, ctx.queue

        def add_weight_gradients() -> None:
            queue.add_products_(weight, grad.T, rows, counts)
            if bias is not None:
                queue.add_(bias, torch.stack([part.sum(0) for part in grad.split(counts)]))

        queue.put(add_weight_gradients)
        return grouped_mm(grad, weight.flatten(1, -2), counts), None, None, None, None


def grouped_linear(
    rows: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, counts: Sequence[int], queue: WeightQueue
) -> Tensor:
    """rows [rows, in], weight [experts, ..., in], bias [experts, ...] -> [rows, out]; counts[e] rows of expert e."""
    return _GroupedLinear.apply(rows, weight, bias, counts, queue)


class Experts(nn.Module):
    """Rows [rows, hidden] of this rank's experts -> the same, as a partial sum over the expert-tensor axis.

    All experts of a layer are one parameter by kind, dealt out on dim 0 along `axis`; the inner width is cut over
    the expert-tensor axis. The second bias is added on its first rank only.
    """

    def __init__(
        self, model: ModelConfig, mesh: Mesh, *, experts: int, ffn: int, axis: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation, self.queue = ACTIVATIONS[model.activation], mesh.weights
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
        inner = self.activation(grouped_linear(rows, self.up, self.up_bias, counts, self.queue))
        bias = self.down_bias if self.adds_bias else None
        return grouped_linear(inner, self.down, bias, counts, self.queue)
