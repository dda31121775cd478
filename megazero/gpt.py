"""GPT: embedding, blocks, final norm, head, as a list of layers. GPT-2/3 and Llama are two settings of one model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention
from .config import ModelConfig
from .config_moe import MoEConfig
from .data.batch import KD_LOSS, MicroBatch
from .kernels.dispatch import Kernels
from .kernels.dropout_add import dropout_add
from .mlp import MLP
from .moe.layer import MoELayer, MoESetup
from .moe.pyramid import layer_parameters
from .parallel.groups import Mesh
from .parallel.head_loss import chunked_head_loss
from .parallel.layers import Norm, VocabParallelEmbedding, gather_linear, lookup
from .parallel.loss import Vocabulary, vocab_parallel_cross_entropy, vocab_parallel_divergence
from .parallel.params import Initial, declare
from .parallel.random import dropout, seed_draw
from .parallel.shard import ShardSpec
from .pipe.output import Output, WithLoss, hidden_of, with_losses_of
from .pipe.stage import LayerSpec

WORD_TABLE = "embedding.word.weight"        # global name of the token table; a tied head holds the same parameter


@dataclass(frozen=True)
class GPTSetup:
    """What the layers of one GPT have in common, besides the mesh.

    vocab      real entries of the vocabulary
    dtype      of declared parameters before the optimizer takes them: fp32, or fp64 for proofs
    selective  whether the attention core is recomputed
    kernels    which implementation each op has
    residual   dtype of the residual stream; None: that of the parameters
    apart      whether embedding and head live on different pipeline ranks, so that a tied table has two holders
    moe        the rules of layers with experts
    loss_chunk tokens whose logits exist at once while the loss is taken; None: those of all
    experts    how many each layer has, 1: it is dense; none: all layers are
    """

    model: ModelConfig
    vocab: int
    dtype: torch.dtype = torch.float32
    selective: bool = False
    kernels: Kernels = Kernels()
    apart: bool = True
    residual: torch.dtype | None = None
    moe: MoEConfig = MoEConfig()
    loss_chunk: int | None = None
    experts: tuple[int, ...] = ()

    def experts_of(self, layer: int) -> int:
        """How many experts a block has, 1: it is dense."""
        return self.experts[layer] if self.experts else 1

    def cost(self, layer: int) -> float:
        """Of a block over that of a dense one, by the parameters that work on a token."""
        blocks = (layer_parameters(self.model, self.moe, experts) for experts in (self.experts_of(layer), 1))
        mine, dense = (count.active for count in blocks)
        return mine / dense

    def table(self, tensor: int) -> ShardSpec:
        """The spec of a table with one row per token, padded so that every tensor rank holds equally many rows."""
        padded = self.model.padded_vocab(self.vocab, tensor)
        tied = self.model.tied and self.apart
        return ShardSpec((self.vocab, self.model.hidden_size), ("tensor", None), tied=tied, padded=padded, table=True)


def gpt_layers(setup: GPTSetup) -> list[LayerSpec]:
    """The model, bottom up."""
    blocks = [
        LayerSpec(f"layers.{i}", partial(Block, setup, i), cost=setup.cost(i), recomputable=True)
        for i in range(setup.model.num_layers)
    ]
    return [
        LayerSpec("embedding", partial(Embedding, setup), cost=0.0),
        *blocks,
        LayerSpec("final_norm", partial(FinalNorm, setup), cost=0.0),
        LayerSpec("head", partial(Head, setup), cost=0.0),
    ]


class Embedding(nn.Module):
    """Ids [seq, batch] -> [padded seq / tensor, batch, hidden]: tokens, learned positions where asked, dropout.

    The sequence is padded on the right to a multiple of the tensor size; causal attention never sees the padding.
    """

    def __init__(self, setup: GPTSetup, mesh: Mesh) -> None:
        super().__init__()
        model, self.group, self.queue = setup.model, mesh.tensor, mesh.weights
        self.dropout, self.residual = model.hidden_dropout, setup.residual
        initial = Initial(model.init_method_std)
        self.word = VocabParallelEmbedding(
            setup.table(mesh.tensor.size), mesh,
            initial=initial, dtype=setup.dtype, known_as=WORD_TABLE,
        )
        spec = ShardSpec((model.positions, model.hidden_size), (None, None), grad_sum=("tensor",), table=True)
        learned = model.position_embedding_type == "learned_absolute"
        self.position = (
            declare(self, "position", spec, mesh.topology, initial=initial, dtype=setup.dtype) if learned else None
        )

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        seq = batch.tokens.shape[0]
        padding = -seq % self.group.size
        x = self.word(F.pad(batch.tokens, (0, 0, 0, padding)))
        if self.position is not None:
            mine = x.shape[0]
            at = torch.arange(seq, device=x.device).unsqueeze(1) if batch.positions is None else batch.positions
            at = F.pad(at, (0, 0, 0, padding))[self.group.index * mine : (self.group.index + 1) * mine]
            x = x + lookup(at, self.position, self.queue)
        x = x if self.residual is None else x.to(self.residual)
        return dropout(x, self.dropout, batch.draw, layer=-1, purpose="embedding", index=self.group.index)


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + ffn(norm(x)), [seq / tensor, batch, hidden]."""

    def __init__(self, setup: GPTSetup, layer: int, mesh: Mesh) -> None:
        super().__init__()
        model, self.layer, self.group = setup.model, layer, mesh.tensor
        self.dropout, self.add_impl = model.hidden_dropout, setup.kernels.impl("dropout_add")
        norm = partial(
            Norm, model.hidden_size, mesh, kind=model.normalization, epsilon=model.norm_epsilon, dtype=setup.dtype,
            impl=setup.kernels.norm(model.normalization),
        )
        self.attention_norm = norm()
        self.attention = Attention(
            model, mesh, layer, dtype=setup.dtype, kernels=setup.kernels, selective=setup.selective, adds_bias=False
        )
        self.ffn_norm = norm()
        self.experts = setup.experts_of(layer)
        if self.experts > 1:
            self.ffn = MoELayer(MoESetup(model, setup.moe, layer, self.experts, setup.dtype, setup.kernels), mesh)
        else:
            self.ffn = MLP(model, mesh, dtype=setup.dtype, kernels=setup.kernels, adds_bias=False)

    def forward(self, x: Tensor, batch: MicroBatch) -> Output:
        y = self.attention(self.attention_norm(x), batch)
        if self.attention.out.bias is None and not (self.dropout and batch.draw is not None):
            z, x = self.ffn_norm(y, x)
        else:
            x = self._add(x, y, self.attention.out.bias, batch, "attention output")
            z = self.ffn_norm(x)
        y = self.ffn(z, batch)
        bias = self.ffn.down.bias if self.experts == 1 else None
        return with_losses_of(self._add(x, hidden_of(y), bias, batch, "ffn output"), y)

    def _add(self, x: Tensor, y: Tensor, bias: Tensor | None, batch: MicroBatch, purpose: str) -> Tensor:
        """x + dropout(y + bias)."""
        if batch.draw is None or not self.dropout:
            return dropout_add(y, x, bias, impl=self.add_impl)
        seed = seed_draw(x.device, batch.draw, self.layer, purpose, self.group.index)
        return dropout_add(y, x, bias, self.dropout, seed, self.add_impl)


class FinalNorm(nn.Module):
    """The norm before the head."""

    def __init__(self, setup: GPTSetup, mesh: Mesh) -> None:
        super().__init__()
        model = setup.model
        self.norm = Norm(
            model.hidden_size, mesh, kind=model.normalization, epsilon=model.norm_epsilon, dtype=setup.dtype,
            impl=setup.kernels.norm(model.normalization),
        )

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        return self.norm(x)


class Head(nn.Module):
    """[padded seq / tensor, batch, hidden] -> the scaled loss of the micro-batch (scalar, fp32 or fp64), or, where
    it has no labels, logits [seq, batch, padded vocab / tensor].

    A teacher's lesson adds beta T^2 KL to alpha times that loss; what is told beside it is the term that was added.
    """

    def __init__(self, setup: GPTSetup, mesh: Mesh) -> None:
        super().__init__()
        model, self.group, self.queue, self.chunk = setup.model, mesh.tensor, mesh.weights, setup.loss_chunk
        self.vocabulary = Vocabulary(
            setup.vocab, mesh.tensor, model.label_smoothing, setup.kernels.impl("cross_entropy")
        )
        self.weight = declare(
            self, "weight", setup.table(mesh.tensor.size), mesh.topology, dtype=setup.dtype,
            initial=Initial(model.init_method_std), known_as=WORD_TABLE if model.tied else None,
        )

    def forward(self, x: Tensor, batch: MicroBatch) -> Output:
        if self.chunk and batch.labels is not None and batch.lesson is None:
            losses = chunked_head_loss(x, self.weight, batch.labels, self.vocabulary, self.queue, self.chunk)
            return scaled_sum(losses, batch)
        logits = gather_linear(x, self.weight, None, self.group, self.queue)
        if logits.shape[0] != batch.tokens.shape[0]:        # the backward of a cut copies the gradient of all logits
            logits = logits[: batch.tokens.shape[0]]
        if batch.labels is None:
            return logits
        losses = vocab_parallel_cross_entropy(logits, batch.labels, self.vocabulary, owned=batch.lesson is None)
        loss = scaled_sum(losses, batch)
        if batch.lesson is None:
            return loss
        alpha, beta, temperature = batch.lesson.alpha, batch.lesson.beta, batch.lesson.temperature
        apart = vocab_parallel_divergence(
            logits, batch.lesson.logits, vocab=self.vocabulary.size, temperature=temperature, group=self.group
        )
        added = beta * temperature**2 * scaled_sum(apart, batch)
        return WithLoss(loss, (alpha - 1) * loss + added, {KD_LOSS: added.detach().double()})


def scaled_sum(losses: Tensor, batch: MicroBatch) -> Tensor:
    """The part that a micro-batch has in the mean over the unmasked tokens of the global batch; [seq, batch] ->
    scalar."""
    if batch.loss_mask is not None:
        losses = losses * batch.loss_mask
    return losses.sum() * batch.scale
