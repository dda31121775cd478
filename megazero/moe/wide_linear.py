"""A linear layer with few outputs for each token, computed in fp32 or wider: routers, and gates beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..parallel.groups import Mesh
from ..parallel.params import ZEROS, Initial, declare
from ..parallel.shard import ShardSpec
from ..parallel.weights import WeightQueue


class _WideLinear(torch.autograd.Function):
    """y = x w^T + b in a wider dtype than that of x; the input is kept as it came, gradients of weights stay wide.

    Weights are held by reference and their gradients added by the stage's queue, as in parallel/layers.py.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, dtype: torch.dtype, queue: WeightQueue
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,), weight, bias, queue = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.queue

        def add_weight_gradients() -> None:
            rows = grad.flatten(0, -2)
            queue.add_product_(weight, rows.T, x.to(grad.dtype).flatten(0, -2))
            if bias is not None:
                queue.add_(bias, rows.sum(0))

        queue.put(add_weight_gradients)
        return (grad @ weight.to(grad.dtype)).to(x.dtype), None, None, None, None


def wide_linear(
    x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, precision: torch.dtype, queue: WeightQueue
) -> Tensor:
    """[..., hidden] -> [..., out] in `precision`, or in the dtype of x where that is wider."""
    return _WideLinear.apply(x, weight, bias, torch.promote_types(x.dtype, precision), queue)


def declare_wide(module: nn.Module, mesh: Mesh, out: int, hidden: int, *, std: float, dtype: torch.dtype) -> None:
    """Make `module.weight` [out, hidden]. Every tensor rank sees its own tokens, so its gradient is a partial sum."""
    spec = ShardSpec((out, hidden), (None, None), grad_sum=("tensor",))
    declare(module, "weight", spec, mesh.topology, initial=Initial(std), dtype=dtype)


class WideLinear(nn.Module):
    """[..., hidden] -> [..., out], in fp32 or wider."""

    def __init__(self, hidden: int, out: int, mesh: Mesh, *, std: float, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.queue = mesh.weights
        declare_wide(self, mesh, out, hidden, std=std, dtype=dtype)
        spec = ShardSpec((out,), (None,), grad_sum=("tensor",))
        self.bias = declare(self, "bias", spec, mesh.topology, initial=ZEROS, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return wide_linear(x, self.weight, self.bias, torch.float32, self.queue)
