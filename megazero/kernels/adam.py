"""One step of Adam on a flat shard, in place: everything that is done to a parameter, in one pass over memory.

    g  = grad * factor                                     unscales and clips
    w <- w - learning_rate * weight_decay * w              decoupled (AdamW), or else  g <- g + weight_decay * w
    m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
    w <- w - learning_rate * m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps)
    copy <- w, rounded to its dtype

There is no backward. All numbers of a step are run-time values, so no step compiles anything; the factor is read on
the device, so nothing waits for it. Not autotuned: trial runs would be steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw

from .dispatch import jit, tl, use_triton
from .rows import statistics_dtype

BLOCK = 1024            # elements of a program: 8 of each of the four tensors per thread


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step; `step` counts from 1."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    step: int


def adam_reference_(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamStep, *,
    factor: Tensor | None = None, copy: Tensor | None = None,
) -> None:
    """The op in plain formulas: what the kernel and torch's fused op must equal."""
    beta1, beta2 = numbers.betas
    grad = grad if factor is None else grad * factor.to(grad.dtype)
    if numbers.decoupled:
        weight -= numbers.learning_rate * numbers.weight_decay * weight
    else:
        grad = grad + numbers.weight_decay * weight
    exp_avg.mul_(beta1).add_((1 - beta1) * grad)
    exp_avg_sq.mul_(beta2).add_((1 - beta2) * grad.square())
    size = (exp_avg_sq / (1 - beta2**numbers.step)).sqrt() + numbers.eps
    weight -= numbers.learning_rate / (1 - beta1**numbers.step) * exp_avg / size
    if copy is not None:
        copy.copy_(weight)


@jit
def _update(
    weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, copy_ptr, factor_ptr, count,
    decay: tl.float64, l2: tl.float64, rest1: tl.float64, beta2: tl.float64, rest2: tl.float64,
    rate: tl.float64, root: tl.float64, eps: tl.float64,
    COPY: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """One block. `decay` = 1 - learning rate * decoupled decay, `rest` = 1 - beta, `rate` = learning rate over the
    bias correction of m, `root` = 1 / sqrt(that of v)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    g = tl.load(grad_ptr + at, mask=mask, other=0.0).to(STATISTICS)
    w = tl.load(weight_ptr + at, mask=mask, other=0.0).to(STATISTICS)
    m = tl.load(exp_avg_ptr + at, mask=mask, other=0.0).to(STATISTICS)
    v = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0).to(STATISTICS)
    if FACTOR:
        g *= tl.load(factor_ptr).to(STATISTICS)
    g += tl.full((BLOCK,), l2, STATISTICS) * w
    w *= tl.full((BLOCK,), decay, STATISTICS)
    m += tl.full((BLOCK,), rest1, STATISTICS) * (g - m)         # beta1 and 1 - beta1 would not add up to 1 in fp32
    v = tl.full((BLOCK,), beta2, STATISTICS) * v + tl.full((BLOCK,), rest2, STATISTICS) * g * g
    size = tl.sqrt(v) * tl.full((BLOCK,), root, STATISTICS) + tl.full((BLOCK,), eps, STATISTICS)
    w -= tl.full((BLOCK,), rate, STATISTICS) * (m / size)
    tl.store(weight_ptr + at, w, mask=mask)
    tl.store(exp_avg_ptr + at, m, mask=mask)
    tl.store(exp_avg_sq_ptr + at, v, mask=mask)
    if COPY:
        tl.store(copy_ptr + at, w, mask=mask)


def _update_(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamStep, factor: Tensor | None,
    copy: Tensor | None,
) -> None:
    """The kernel on flat tensors. L2 decay and decoupled decay are one kernel: the other's number does nothing."""
    assert all(t.dim() == 1 and t.is_contiguous() for t in (weight, grad, exp_avg, exp_avg_sq, copy) if t is not None)
    beta1, beta2 = numbers.betas
    decoupled, coupled = (numbers.weight_decay, 0.0) if numbers.decoupled else (0.0, numbers.weight_decay)
    rate = numbers.learning_rate / (1.0 - beta1**numbers.step)
    root = (1.0 - beta2**numbers.step) ** -0.5
    count = weight.numel()
    if count:
        _update[(-(-count // BLOCK),)](
            weight, grad, exp_avg, exp_avg_sq, weight if copy is None else copy, weight if factor is None else factor,
            count, 1.0 - numbers.learning_rate * decoupled, float(coupled), 1.0 - beta1, float(beta2), 1.0 - beta2,
            rate, root, float(numbers.eps), COPY=copy is not None, FACTOR=factor is not None, BLOCK=BLOCK,
            STATISTICS=tl.float64 if statistics_dtype(weight.dtype) == torch.float64 else tl.float32, num_warps=4,
        )  # fmt: skip


def adam_(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamStep, *,
    factor: Tensor | None = None, copy: Tensor | None = None, impl: str = "auto",
) -> None:
    """Change weight, exp_avg and exp_avg_sq [count], and `copy` [count] of any dtype; grad [count] may be spoiled.

    `factor` is a scalar on their device. `impl` as in dispatch.py; the torch path is torch's own fused op.
    """
    if use_triton(weight, impl):
        _update_(weight, grad, exp_avg, exp_avg_sq, numbers, factor, copy)
        return
    if factor is not None:
        grad.mul_(factor.to(grad.dtype))
    before = torch.full((), float(numbers.step - 1), device=grad.device)       # torch counts this step itself
    fused = torch_adamw if numbers.decoupled else torch_adam
    fused(
        [weight], [grad], [exp_avg], [exp_avg_sq], [], [before], fused=True, amsgrad=False, beta1=numbers.betas[0],
        beta2=numbers.betas[1], lr=numbers.learning_rate, weight_decay=numbers.weight_decay, eps=numbers.eps,
        maximize=False,
    )
    if copy is not None:
        copy.copy_(weight)
