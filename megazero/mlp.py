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
from .kernels.bias_gelu import bias_gelu
from .kernels.dispatch import Kernels, use_compiled, use_triton
from .kernels.gelu_tanh import gelu_tanh
from .kernels.swiglu import swiglu
from .parallel.groups import Mesh
from .parallel.layers import ColumnParallelLinear, RowParallelLinear
from .parallel.params import Initial


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al., 2021)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "squared_relu": squared_relu,
    "swiglu": swiglu,
}
GELUS = {"gelu": "none", "gelu_tanh": "tanh"}       # which have a kernel that adds the bias too -> its approximation


def activation_of(model: ModelConfig, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """That of the model, in the implementation that was asked for."""
    if model.activation == "swiglu":
        return partial(swiglu, impl=kernels.impl("swiglu"))
    return ACTIVATIONS[model.activation]


class MLP(nn.Module):
    """[seq / tensor, batch, hidden] -> the same. With `adds_bias` false the last bias, `down.bias`, is left to the
    caller, who adds it together with the residual."""

    def __init__(
        self, model: ModelConfig, mesh: Mesh, *, dtype: torch.dtype, kernels: Kernels = Kernels(),
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation, self.gelu = activation_of(model, kernels), GELUS.get(model.activation)
        self.gelu_impl = kernels.impl("bias_gelu")
        out, cut = ((2, model.ffn), 1) if model.gated else ((model.ffn,), 0)
        initial = Initial(model.init_method_std)
        scaled = Initial(model.init_method_std / math.sqrt(2 * model.num_layers))
        self.up = ColumnParallelLinear(
            model.hidden_size, out, mesh, cut=cut, initial=initial, bias=model.bias, dtype=dtype
        )
        self.down = RowParallelLinear(
            model.ffn, model.hidden_size, mesh, initial=scaled, bias=model.bias, dtype=dtype, adds_bias=adds_bias
        )

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        impl = self.gelu_impl
        if self.gelu is not None and (use_triton(x, impl) or use_compiled(x, impl, has_own=True)):
            wide = self.up(x, adds_bias=False)      # the kernel sums the bias's gradient where it has it in registers
            return self.down(bias_gelu(wide, self.up.bias, self.gelu, impl))
        return self.down(self.activation(self.up(x)))
