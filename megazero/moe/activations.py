"""Activations of experts with their derivatives, for those who go through them block by block without autograd.

Those that gate take [rows, 2 ffn], gate and up side by side, and give [rows, ffn].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import gelu_tanh, swiglu
from ..kernels.cached import keeps_slope
from ..mlp import ACTIVATIONS


class Activation(NamedTuple):
    """An activation of mlp.py: with autograd; x -> (y, what its way back needs); and (gradient of y, that) -> gradient
    of x."""

    forward: Callable[[Tensor], Tensor]
    keep: Callable[[Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor], Tensor]


def _keep_x(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    return activation(x), x


def _keep_gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    return gelu_tanh.value_and_slope(x) if keeps_slope(x) else (F.gelu(x, approximate="tanh"), x)


def _gelu_tanh_backward(grad: Tensor, kept: Tensor) -> Tensor:
    return grad * kept if keeps_slope(kept) else torch.ops.aten.gelu_backward(grad, kept, approximate="tanh")


def _squared_relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """d relu(x)^2 = 2 relu(x) dx."""
    return F.relu(x).mul_(grad).mul_(2)


def _keep_swiglu(x: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu.value_and_slopes(x) if keeps_slope(x) else (swiglu.swiglu(x), x)


def _swiglu_backward(grad: Tensor, kept: Tensor) -> Tensor:
    """d gate = up * grad * silu'(gate), d up = grad * silu(gate), written side by side."""
    if keeps_slope(kept):
        return swiglu.times_slopes(grad, kept)
    gate, up = kept.chunk(2, dim=-1)
    out = torch.empty_like(kept)
    of_gate, of_up = out.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=of_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
    return out


_BACK = {
    "gelu": (partial(_keep_x, F.gelu), torch.ops.aten.gelu_backward),
    "gelu_tanh": (_keep_gelu_tanh, _gelu_tanh_backward),
    "squared_relu": (partial(_keep_x, ACTIVATIONS["squared_relu"]), _squared_relu_backward),
    "swiglu": (_keep_swiglu, _swiglu_backward),
}
TWO_WAY = {name: Activation(forward, *_BACK[name]) for name, forward in ACTIVATIONS.items()}
