"""Cross entropy and KL divergence over a vocabulary that is cut over the tensor axis: fp32 (fp64 for fp64), exact for
any cut.

Cross entropy per token, over the V real entries of the vocabulary, with m = max_i x_i and Z = sum_i exp(x_i - m):
    nll      = log Z - (x_target - m)
    smoothed = (1 - s) nll + s (log Z - mean_i (x_i - m)),   s = a V / (V - 1) for label smoothing a
    d/dx_i   = exp(x_i - m) / Z - (1 - s) [i = target] - s / V
Padding entries take no probability and get no gradient. The forward keeps the logits as they are and one
number per token; head_loss.py does not even keep them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.cross_entropy import logits_gradient, row_chunks, row_statistics
from .collectives import all_reduce
from .groups import Group


@dataclass(frozen=True)
class Vocabulary:
    """How rows of logits are scored: `size` real entries that are cut over `group`, label smoothing, and which
    implementation of kernels/cross_entropy.py does it."""

    size: int
    group: Group
    smoothing: float = 0.0
    impl: str = "auto"

    @property
    def share(self) -> float:
        """s of the formulas above."""
        return self.smoothing * self.size / (self.size - 1) if self.smoothing else 0.0

    def place(self, columns: int) -> dict[str, int]:
        """Where this rank's columns begin, and how many of them are not padding."""
        first = self.group.index * columns
        return {"first": first, "real": max(0, min(columns, self.size - first))}

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What this rank knows of rows [rows, columns]: [4, rows], as `row_statistics` has it."""
        return row_statistics(logits, labels, **self.place(logits.shape[1]), sums=self.share > 0, impl=self.impl)

    def losses(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row, and the logarithm of its normalizer, from what all ranks know. The sums of a rank move
        to the common maximum: Z = sum_r Z_r exp(m_r - m)."""
        own_top, total, target, sum_x = statistics
        top = all_reduce(own_top.clone(), self.group, "max")
        sums = all_reduce(torch.stack((total * (own_top - top).exp(), target, sum_x)), self.group)
        log_z, share = sums[0].log(), self.share
        loss = log_z - (1 - share) * (sums[1] - top)
        if share:
            loss -= share / self.size * (sums[2] - self.size * top)
        return loss, top + log_z

    def gradient(
        self, logits: Tensor, labels: Tensor, log_normalizer: Tensor, grad: Tensor, *, in_place: bool
    ) -> Tensor:
        """Of the logits [rows, columns], given that of the losses [rows]."""
        return logits_gradient(
            logits, labels, log_normalizer, grad, **self.place(logits.shape[1]), share=self.share, vocab=self.size,
            in_place=in_place, impl=self.impl,
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary, owned: bool) -> Tensor:
        loss, log_normalizer = vocabulary.losses(vocabulary.statistics(logits, labels))
        ctx.save_for_backward(logits, labels, log_normalizer)
        ctx.vocabulary, ctx.owned = vocabulary, owned
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.vocabulary.gradient(*ctx.saved_tensors, grad, in_place=ctx.owned), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: Vocabulary, *, owned: bool = False
) -> Tensor:
    """[seq, batch, padded vocab / tensor], labels [seq, batch] -> loss per token [seq, batch], fp32 or fp64.

    `owned`: nobody else reads the logits, and the backward writes their gradient in their place. Source: Shoeybi et
    al., 2019, section 3.
    """
    flat = _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), vocabulary, owned)
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
        for rows in row_chunks(student) if real else []:
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
        for rows in row_chunks(student) if ctx.real else []:
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
