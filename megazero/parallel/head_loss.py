"""The head's product and the cross entropy in chunks of tokens, so that logits never exist as a whole.

With x [rows, hidden] of the whole sequence, the head's weight W [columns, hidden] and rows c of a chunk:
    forward     statistics of x_c W^T, which go; the ranks put those of all chunks together at once
    backward    g_c = d loss / d (x_c W^T), from logits that are computed again;  dx_c = g_c W;  dW += g_c^T x_c
Four products in place of three, five where weight gradients are put off, for then g_c is computed anew for them too.
Whole logits and their gradient share rows x columns elements of memory; here it is chunk x columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..products import Products
from .collectives import all_gather, reduce_scatter
from .loss import Vocabulary
from .weights import WeightQueue


class _HeadLoss(torch.autograd.Function):
    """Like _GatherLinear followed by _CrossEntropy; the weight's gradient is added by the stage's queue."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, labels: Tensor, vocabulary: Vocabulary, queue: WeightQueue,
        chunk: int,
    ) -> Tensor:
        rows, exact = all_gather(x, vocabulary.group).flatten(0, 1), torch.promote_types(x.dtype, torch.float32)
        statistics = rows.new_empty(4, len(labels), dtype=exact)
        for part, logits in _logits(rows, weight, len(labels), chunk, queue.products):
            statistics[:, part] = vocabulary.statistics(logits, labels[part])
        losses, log_normalizer = vocabulary.losses(statistics)
        ctx.save_for_backward(x, labels, log_normalizer)
        ctx.weight, ctx.vocabulary, ctx.queue, ctx.chunk = weight, vocabulary, queue, chunk
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (x, labels, log_normalizer), weight, queue = ctx.saved_tensors, ctx.weight, ctx.queue
        vocabulary, chunk = ctx.vocabulary, ctx.chunk

        def gradients(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
            """(rows of a chunk, the gradient of its logits), which is written over with the next."""
            for part, logits in _logits(rows, weight, len(labels), chunk, queue.products):
                yield part, vocabulary.gradient(logits, labels[part], log_normalizer[part], grad[part], in_place=True)

        whole = all_gather(x, vocabulary.group)
        rows, grad_x = whole.flatten(0, 1), torch.empty_like(whole)
        grad_rows = grad_x.flatten(0, 1)
        grad_rows[len(labels) :] = 0.0                              # of what pads the sequence

        def both() -> Iterator[tuple[Tensor, Tensor]]:
            for part, of_logits in gradients(rows):
                queue.products.into_(grad_rows[part], of_logits, weight)
                yield of_logits.T, rows[part]

        def add_weight_gradient() -> None:
            again = all_gather(x, vocabulary.group).flatten(0, 1)
            queue.add_sum_of_products_(weight, ((g.T, again[part]) for part, g in gradients(again)))

        if queue.is_deferring:
            for _ in both():
                pass
            queue.put(add_weight_gradient)
        else:
            queue.add_sum_of_products_(weight, both())
        return reduce_scatter(grad_x, vocabulary.group), None, None, None, None, None


def _logits(
    rows: Tensor, weight: Tensor, count: int, chunk: int, products: Products
) -> Iterator[tuple[slice, Tensor]]:
    """(rows of a chunk, their logits [chunk, columns]) of the first `count` rows; each overwrites the last."""
    memory = rows.new_empty(min(chunk, count), weight.shape[0])
    for start in range(0, count, chunk):
        part = slice(start, min(start + chunk, count))
        logits = memory[: part.stop - start]
        products.into_(logits, rows[part], weight.T)
        yield part, logits


def chunked_head_loss(
    x: Tensor, weight: nn.Parameter, labels: Tensor, vocabulary: Vocabulary, queue: WeightQueue, chunk: int
) -> Tensor:
    """[padded seq / tensor, batch, hidden], weight [padded vocab / tensor, hidden], labels [seq, batch] -> loss per
    token [seq, batch], fp32 or fp64. Logits of at most `chunk` tokens exist at once."""
    return _HeadLoss.apply(x, weight, labels.flatten(), vocabulary, queue, chunk).view(labels.shape)
