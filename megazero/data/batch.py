"""MicroBatch: what the layers of a model see of one micro-batch, besides the hidden states.

It is made by the loader of one data rank and handed unchanged through every layer of a stage, so that labels,
masks and random draws always belong to the micro-batch that they came with.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

KD_LOSS = "kd_loss"     # what the head reports of a lesson: beta T^2 KL, scaled and summed as the loss is


@dataclass(frozen=True)
class Lesson:
    """What a teacher says of a micro-batch: its loss becomes alpha LM + beta T^2 KL(teacher || student).

    logits       of the teacher, [seq, micro-batch, padded vocab / tensor], without gradient
    temperature  T, what both logits are divided by
    """

    logits: Tensor
    alpha: float
    beta: float
    temperature: float


@dataclass(frozen=True)
class MicroBatch:
    """Tensors are [seq, micro-batch]; None where there is nothing to say.

    tokens     int64 ids
    labels     int64 ids of the next token; None: logits are wanted, not a loss
    loss_mask  fp32, 1 where a token counts in the loss; None: all count
    positions  int64 position of each token; None: 0 .. seq - 1
    documents  int64 number of the document that a token belongs to, for attention; None: plain causal attention
    used       bool, False for what only fills up the batch and takes no place at experts; None: all are used
    draw       (seed, iteration, global micro-batch), the root of all random draws; None: evaluation, nothing is drawn
    scale      what the summed loss is multiplied by: 1 / unmasked tokens of the global batch
    lesson     what the head of a student compares itself with; None: there is no teacher
    auxiliary  what losses of a layer's own are multiplied by: 1 / micro-batches of the global batch
    kept       what layers leave here in the forward for its recomputation; None: it is not recomputed
    """

    tokens: Tensor
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    used: Tensor | None = None
    draw: tuple[int, int, int] | None = None
    scale: float = 1.0
    lesson: Lesson | None = None
    auxiliary: float = 0.0
    kept: dict[Hashable, Any] | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on `device`."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := self.__dict__[f.name], Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})

    @property
    def counted_tokens(self) -> int:
        """Tokens that count in the loss."""
        return self.tokens.numel() if self.loss_mask is None else int(self.loss_mask.sum())
