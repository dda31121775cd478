"""Text from a model: run it on all tokens so far, choose the next one, and again.

A choice is a pure function of the logits and of (seed, sample, place), so it depends neither on the layout nor on how
many samples are written at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .data.batch import MicroBatch
from .data.loader import DocumentRules
from .data.samples import hash_words
from .forward import ForwardModel
from .parallel.collectives import all_gather, broadcast
from .parallel.groups import Mesh
from .pipe.stage import LayerSpec


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the likeliest one (`greedy`), or by chance among those that top-k and top-p leave.

    Raises ValueError for a value out of its range, naming the flag.
    """

    temperature: float = 1.0            # logits are divided by it
    top_k: int | None = None            # only so many of the likeliest tokens
    top_p: float = 1.0                  # only the likeliest tokens that reach this probability together
    greedy: bool = False
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature}: must be above 0 (see --greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"--top-k {self.top_k}: must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must be above 0 and at most 1")

    def draw(self, sample: int, place: int) -> float:
        """The number in [0, 1) that decides token `place` of a sample."""
        return (hash_words(self.seed, sample, place) >> 11) * 2.0**-53


@dataclass(frozen=True)
class Shape:
    """What generation has to know of a model.

    vocab      entries that may be chosen: without padding, and none that the tokenizer lacks
    positions  tokens that the model can look back on, the newest included
    """

    vocab: int
    positions: int


class Writer:
    """This rank's part of a model that continues texts. All ranks call its methods together, with equal arguments."""

    def __init__(self, layers: Sequence[LayerSpec], mesh: Mesh, shape: Shape, rules: DocumentRules) -> None:
        self.mesh, self.shape, self.rules = mesh, shape, rules
        self.model = ForwardModel(layers, mesh)
        self.load = self.model.load

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Ids [seq, batch] -> logits of the token after them [batch, vocab] on the last stage, None on the others."""
        ids = tokens.cpu().numpy()
        micro = MicroBatch(tokens, positions=self.rules.positions(ids), documents=self.rules.documents(ids))
        outputs = self.model.run([micro.to(self.mesh.device)], tuple(tokens.shape))
        if not outputs:
            return None
        return all_gather(outputs[0][-1].T, self.mesh.tensor)[: self.shape.vocab].T

    def next_tokens(self, tokens: Tensor, how: Sampling, place: int) -> Tensor:
        """Ids [seq, batch] -> the chosen ids [batch], equal on all ranks: one rank chooses, the others are told."""
        samples = tokens.shape[1]
        logits = self.logits(tokens)
        if logits is None:
            chosen = tokens.new_zeros(samples)
        else:
            chosen = choose(logits, how, [how.draw(sample, place) for sample in range(samples)])
        broadcast(chosen, self.mesh.tensor)
        return broadcast(chosen, self.mesh.pipeline, self.mesh.pipeline.size - 1)

    def write(
        self, prompt: Sequence[int], how: Sampling, *, tokens: int, samples: int = 1, stop: int | None = None
    ) -> list[list[int]]:
        """`samples` continuations of a prompt of at least one id: up to `tokens` ids each, ending before `stop`.

        The model looks at the last `shape.positions` ids only.
        """
        text = torch.tensor(prompt, device=self.mesh.device).unsqueeze(1).repeat(1, samples)       # [seq, samples]
        for place in range(tokens):
            chosen = self.next_tokens(text[-self.shape.positions :], how, place)
            text = torch.cat((text, chosen.unsqueeze(0)))
            if stop is not None and bool((text[len(prompt) :] == stop).any(0).all()):
                break
        rows = text[len(prompt) :].T.tolist()
        return [row[: row.index(stop)] if stop in row else row for row in rows]


def choose(logits: Tensor, how: Sampling, draws: Sequence[float]) -> Tensor:
    """One id for each row of logits [batch, vocab] -> int64 [batch]; draws[row] in [0, 1) decides where chance does.

    Top-k cuts first, top-p (Holtzman et al., 2020) cuts what is left after rescaling; at least one token stays.
    """
    if how.greedy:
        return logits.argmax(-1)
    below_top = logits.double() - logits.max(-1, keepdim=True).values       # so that no temperature overflows
    scaled, ids = torch.sort(below_top / how.temperature, dim=-1, descending=True, stable=True)
    weights = scaled[:, : how.top_k].softmax(-1)
    before = weights.cumsum(-1) - weights                   # of the likelier ones
    weights = weights.masked_fill(before >= how.top_p, 0.0)
    reached = weights.cumsum(-1)
    wanted = torch.tensor(draws, dtype=torch.float64, device=logits.device).unsqueeze(1) * reached[:, -1:]
    last = (weights > 0).sum(-1, keepdim=True) - 1
    at = (reached <= wanted).sum(-1, keepdim=True).minimum(last)    # rounding may lead past the last one that stays
    return ids.gather(1, at).squeeze(1)
