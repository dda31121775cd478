"""Cross entropy and KL divergence over a vocabulary that is cut over the tensor axis: fp32 (fp64 for fp64), exact for
any cut.

Cross entropy per token, over the V real entries of the vocabulary, with m = max_i x_i and Z = sum_i exp(x_i - m):
    nll      = log Z - (x_target - m)
    smoothed = (1 - s) nll + s (log Z - mean_i (x_i - m)),   s = a V / (V - 1) for label smoothing a
    d/dx_i   = exp(x_i - m) / Z - (1 - s) [i = target] - s / V
Padding entries take no probability and get no gradient. The forward keeps the logits as they are and one
number per token; the kernel (kernels/cross_entropy.py) makes no copy in fp32, torch one of a chunk of rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.cross_entropy import logits_gradient, row_statistics
from ..kernels.dispatch import use_triton
from .collectives import all_reduce
from .groups import Group

CHUNK_ELEMENTS = 1 << 22          # of an fp32 temporary: 16 MiB
CACHED_ELEMENTS = 1 << 17         # the same on a CPU: 512 KiB, which stay in its cache from one operation to the next


def _chunks(logits: Tensor) -> list[slice]:
    """Ranges of rows whose fp32 copy stays small."""
    most = CHUNK_ELEMENTS if logits.is_cuda else CACHED_ELEMENTS
    rows, step = logits.shape[0], max(1, most // logits.shape[1])
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab: int, smoothing: float, group: Group, owned: bool
    ) -> Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        first = group.index * logits.shape[1]
        real = max(0, min(logits.shape[1], vocab - first))                # columns that are not padding
        local = labels - first
        here = (local >= 0) & (local < real)
        local = local.masked_fill(~here, 0)
        top = logits.new_full(labels.shape, -torch.inf, dtype=exact)
        sums = logits.new_zeros(3, labels.shape[0], dtype=exact)          # Z, target - m, sum of x - m
        if real:
            top.copy_(logits[:, :real].amax(1))
        all_reduce(top, group, "max")
        for rows in _chunks(logits) if real else []:
            x = logits[rows, :real].to(exact) - top[rows].unsqueeze(1)
            sums[1, rows] = x.gather(1, local[rows].unsqueeze(1)).squeeze(1).masked_fill(~here[rows], 0.0)
            sums[2, rows] = x.sum(1) if smoothing else 0.0
            sums[0, rows] = x.exp_().sum(1)
        all_reduce(sums, group)
        log_z = sums[0].log()
        share = smoothing * vocab / (vocab - 1) if smoothing else 0.0
        loss = log_z - (1 - share) * sums[1] - share / vocab * sums[2]
        ctx.save_for_backward(logits, local, here, top + log_z)
        ctx.real, ctx.share, ctx.vocab, ctx.owned = real, share, vocab, owned
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, local, here, log_normalizer = ctx.saved_tensors
        out = logits if ctx.owned else torch.empty_like(logits)
        out[:, ctx.real :] = 0.0
        wide = logits.dtype != log_normalizer.dtype
        for rows in _chunks(logits) if ctx.real else []:
            to = out[rows, : ctx.real]
            x = torch.empty_like(to, dtype=log_normalizer.dtype) if wide else to      # else in its own place
            torch.sub(logits[rows, : ctx.real], log_normalizer[rows].unsqueeze(1), out=x).exp_()
            if ctx.share:
                x -= ctx.share / ctx.vocab
            target = -(1 - ctx.share) * here[rows].to(x.dtype)
            x.scatter_add_(1, local[rows].unsqueeze(1), target.unsqueeze(1))
            x *= grad[rows].unsqueeze(1)
            if wide:
                to.copy_(x)
        return out, None, None, None, None, None


class _KernelCrossEntropy(torch.autograd.Function):
    """The same by Triton, which takes maximum and sum in one pass: the sums of ranks then move to the common maximum,
    Z = sum_r Z_r exp(m_r - m)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab: int, smoothing: float, group: Group, owned: bool
    ) -> Tensor:
        first = group.index * logits.shape[1]
        place = {"first": first, "real": max(0, min(logits.shape[1], vocab - first))}
        own_top, total, target, sum_x = row_statistics(logits, labels, **place)
        top = all_reduce(own_top.clone(), group, "max")
        sums = torch.stack((total * (own_top - top).exp(), target, sum_x))
        all_reduce(sums, group)
        log_z = sums[0].log()
        share = smoothing * vocab / (vocab - 1) if smoothing else 0.0
        loss = log_z - (1 - share) * (sums[1] - top)
        if share:
            loss -= share / vocab * (sums[2] - vocab * top)
        ctx.save_for_backward(logits, labels, top + log_z)
        ctx.rest = {**place, "share": share, "vocab": vocab, "in_place": owned}
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return logits_gradient(*ctx.saved_tensors, grad, **ctx.rest), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab: int, smoothing: float, group: Group, owned: bool = False,
    impl: str = "auto",
) -> Tensor:
    """[seq, batch, padded vocab / tensor], labels [seq, batch] -> loss per token [seq, batch], fp32 or fp64.

    `vocab` is the number of real entries. `owned`: nobody else reads the logits, and the backward writes their gradient
    in their place; `impl` as in kernels/dispatch.py. Source: Shoeybi et al., 2019, section 3.
    """
    function = _KernelCrossEntropy if use_triton(logits, impl) else _VocabParallelCrossEntropy
    flat = function.apply(logits.flatten(0, 1), labels.flatten(), vocab, smoothing, group, owned)
    return flat.view(labels.shape)


class _VocabParallelDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, vocab: int, temperature: float, group: Group
    ) -> Tensor:
        exact = torch.promote_types(student.dtype, torch.float32)
        real = max(0, min(student.shape[1], vocab - group.index * student.shape[1]))
        tops = student.new_full((2, student.shape[0]), -torch.inf, dtype=exact)
        sums = student.new_zeros(3, student.shape[0], dtype=exact)        # both Z, sum of exp(a - top) (a - b)
        if real:
            tops[0], tops[1] = student[:, :real].amax(1), teacher[:, :real].amax(1)
        tops = all_reduce(tops, group, "max") / temperature
        for rows in _chunks(student) if real else []:
            b = student[rows, :real].to(exact) / temperature - tops[0, rows].unsqueeze(1)
            a = teacher[rows, :real].to(exact) / temperature - tops[1, rows].unsqueeze(1)
            apart = a - b
            sums[0, rows] = b.exp_().sum(1)
            sums[1, rows] = a.exp_().sum(1)
            sums[2, rows] = (a * apart).sum(1)
        all_reduce(sums, group)
        log_z = sums[:2].log()
        ctx.save_for_backward(student, teacher, tops + log_z)
        ctx.real, ctx.temperature = real, temperature
        return sums[2] / sums[1] + log_z[0] - log_z[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        student, teacher, log_normalizers = ctx.saved_tensors
        out = torch.zeros_like(student)
        for rows in _chunks(student) if ctx.real else []:
            q, p = (
                (x[rows, : ctx.real].to(log.dtype) / ctx.temperature - log[rows].unsqueeze(1)).exp_()
                for x, log in zip((student, teacher), log_normalizers, strict=True)
            )
            out[rows, : ctx.real] = q.sub_(p).mul_((grad[rows] / ctx.temperature).unsqueeze(1))
        return out, None, None, None, None


def vocab_parallel_divergence(
    student: Tensor, teacher: Tensor, *, vocab: int, temperature: float, group: Group
) -> Tensor:
    """KL(softmax(teacher / T) || softmax(student / T)) per token [seq, batch], fp32 or fp64, over the `vocab` real
    entries, with a gradient for the student alone. Both logits are [seq, batch, padded vocab / tensor].

    With a = teacher / T and b = student / T, each less its maximum, and Z their sums of exponentials:
        KL     = sum_i exp(a_i) (a_i - b_i) / Z_a + log Z_b - log Z_a
        d/dz_i = (exp(b_i) / Z_b - exp(a_i) / Z_a) / T for the student's logits z

    Source: Hinton et al., 2015 (arXiv 1503.02531), section 2, for softened probabilities.
    """
    flat = _VocabParallelDivergence.apply(student.flatten(0, 1), teacher.flatten(0, 1), vocab, temperature, group)
    return flat.view(student.shape[:2])
