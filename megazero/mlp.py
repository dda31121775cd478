"""The dense feed-forward of a block: up (or gate and up), activation, down. The inner width is cut over tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .data.batch import MicroBatch
from .parallel.groups import Mesh
from .parallel.layers import ColumnParallelLinear, RowParallelLinear
from .parallel.params import Initial


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al., 2021)."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up for x = [gate, up] along the last dim (Shazeer, 2020): [..., 2 ffn] -> [..., ffn]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "squared_relu": squared_relu,
    "swiglu": swiglu,
}


class MLP(nn.Module):
    """[seq / tensor, batch, hidden] -> the same."""

    def __init__(self, model: ModelConfig, mesh: Mesh, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[model.activation]
        out, cut = ((2, model.ffn), 1) if model.gated else ((model.ffn,), 0)
        initial = Initial(model.init_method_std)
        scaled = Initial(model.init_method_std / math.sqrt(2 * model.num_layers))
        self.up = ColumnParallelLinear(
            model.hidden_size, out, mesh, cut=cut, initial=initial, bias=model.bias, dtype=dtype
        )
        self.down = RowParallelLinear(model.ffn, model.hidden_size, mesh, initial=scaled, bias=model.bias, dtype=dtype)

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return self.down(self.activation(self.up(x)))
