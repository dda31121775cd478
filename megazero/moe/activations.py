"""Activations of experts with their derivatives, for those who go through them block by block without autograd.

Each is a pair: x -> y, and (gradient of y, x) -> (gradient of x, y), where the second computes y again. Those that gate
take [rows, 2 ffn], gate and up side by side, and give [rows, ffn].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mlp import ACTIVATIONS


class Activation(NamedTuple):
    """An activation of mlp.py, and its way back."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate), F.gelu(x, approximate=approximate)


def _squared_relu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """d relu(x)^2 = 2 relu(x) dx."""
    positive = F.relu(x)
    return grad * positive * 2, positive.square()


def _swiglu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """d gate = up * grad * silu'(gate), d up = grad * silu(gate), written side by side."""
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty_like(x)
    of_gate, of_up = out.chunk(2, dim=-1)
    silu = F.silu(gate)
    torch.mul(grad, silu, out=of_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
    return out, silu.mul_(up)


_BACKWARDS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "gelu": partial(_gelu_backward, approximate="none"),
    "gelu_tanh": partial(_gelu_backward, approximate="tanh"),
    "squared_relu": _squared_relu_backward,
    "swiglu": _swiglu_backward,
}
TWO_WAY = {name: Activation(forward, _BACKWARDS[name]) for name, forward in ACTIVATIONS.items()}
