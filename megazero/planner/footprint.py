"""The bytes of a layout on each pipeline rank, by class: parameters, gradients, optimizer states, activations.

Parameters are counted as they are declared. States follow Rajbhandari et al. (2020), with gradients in the master
dtype; activations Korthikanti et al. (2022): 34 s b h / t bytes for a block of GPT in bf16, part by part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..config import ModelConfig
from ..moe.pyramid import norm_parameters
from .layout import Layout, StageSlice

MOMENTS = {"adam": 2, "lamb": 2, "sgd": 1, "muon": 1}        # elements of optimizer state beside a master weight


@dataclass(frozen=True)
class Part:
    """Parameters that a rank holds.

    copies, stride   how many ranks hold the same, over which ZeRO cuts, and how far apart they are
    table            embeddings and head, which muon treats as Adam would
    """

    elements: int
    copies: int
    stride: int
    table: bool = False


@dataclass(frozen=True)
class Footprint:
    """Bytes on each rank of a pipeline rank. `elements`: its parameters; `published`: its states by the 16 bytes of the
    paper, which has gradients of 2 bytes."""

    elements: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    published: float

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations

    @property
    def classes(self) -> dict[str, float]:
        """Bytes by class, and their sums."""
        return {
            "parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer,
            "states": self.states, "activations": self.activations, "in all": self.total,
        }


def footprints(layout: Layout) -> list[Footprint]:
    """What a rank of each pipeline rank holds."""
    kept = layout.peaks([kept_bytes(layout, stage) for stage in layout.stages])
    found = []
    for rank in range(layout.pipeline):
        own = [stage for stage in layout.stages if stage.home == rank]
        working = max(working_bytes(layout, stage) for stage in own)
        found.append(_footprint(layout, parts_of(layout, own), kept[rank] + working))
    return found


def _footprint(layout: Layout, parts: Iterable[Part], activations: float) -> Footprint:
    elements = parameters = gradients = optimizer = published = 0.0
    for part in parts:
        moments = 2 if layout.optimizer == "muon" and part.table else MOMENTS[layout.optimizer]
        state = layout.master * (moments + (layout.compute != layout.master))
        elements += part.elements
        parameters += layout.compute * part.elements
        gradients += layout.master * part.elements / (part.copies if layout.zero == 2 else 1)
        optimizer += state * part.elements / (part.copies if layout.zero else 1)
        published += part.elements * published_bytes(layout.zero, part.copies)
    return Footprint(int(elements), parameters, gradients, optimizer, activations, published)


def published_bytes(zero: int, copies: int) -> float:
    """Of a parameter in mixed precision with Adam (Rajbhandari et al., 2020): 16, 4 + 12/N, 2 + 14/N, 16/N."""
    cut = (0, 12, 14, 16)[zero]
    return 16 - cut + cut / copies


# ------------------------------------------------------------------------------------------------------- parameters


def parts_of(layout: Layout, stages: Iterable[StageSlice]) -> list[Part]:
    """The parameters of one rank that holds these stages."""
    model, stages = layout.model, list(stages)
    h, blocks = model.hidden_size, [experts for stage in stages for experts in stage.experts]
    dense = sum(block_elements(layout, experts) for experts in blocks)
    dense += sum(stage.norm for stage in stages) * norm_parameters(model, h)
    first, last = any(stage.embedding for stage in stages), any(stage.head for stage in stages)
    parts = [Part(dense, layout.data, layout.tensor)]
    if first and model.position_embedding_type == "learned_absolute":
        parts.append(Part(model.positions * h, layout.data, layout.tensor, table=True))
    tables = max(first, last) if model.tied else first + last
    if tables:
        holders = 2 if layout.tied_apart else 1
        parts.append(Part(tables * layout.table, holders * layout.data, layout.tensor, table=True))
    for experts in sorted({n for n in blocks if n > 1}):
        width = layout.moe.moe_ffn_hidden_size or model.ffn
        each = mlp_elements(model, width, layout.expert_tensor, bias=model.bias)
        held = experts // layout.degree(experts) * blocks.count(experts)
        stride = layout.expert_tensor * layout.degree(experts)
        parts.append(Part(held * each, layout.data * layout.tensor // stride, stride))
    return parts


def block_elements(layout: Layout, experts: int) -> int:
    """Of a block on a rank, without its routed experts."""
    model, moe, t = layout.model, layout.moe, layout.tensor
    h, d, queries = model.hidden_size, model.head_dim, model.num_attention_heads
    inner = (queries + 2 * model.query_groups) * d
    attention = (inner * h + queries * d * h + inner * model.qkv_bias) // t + h * model.bias
    attention += queries // t * (model.softmax_type == "learnable")
    attention += 2 * norm_parameters(model, d) * model.qk_layernorm + 2 * norm_parameters(model, h)
    if experts == 1:
        return attention + mlp_elements(model, model.ffn, t, bias=model.bias)
    beside = h * experts + experts * moe.moe_router_enable_expert_bias
    if moe.mlp_type == "residual":
        beside += mlp_elements(model, model.ffn, t, bias=model.bias) + 2 * h + 2
    if moe.moe_shared_expert_intermediate_size is not None:
        beside += mlp_elements(model, moe.moe_shared_expert_intermediate_size, t, bias=False)
        beside += h * moe.moe_shared_expert_gate
    return attention + beside


def mlp_elements(model: ModelConfig, ffn: int, ranks: int, *, bias: bool) -> int:
    """Of a feed-forward whose inner width is cut over so many ranks, on one of them."""
    up = ffn * (2 if model.gated else 1)
    return ((up + ffn) * model.hidden_size + up * bias) // ranks + model.hidden_size * bias


# ------------------------------------------------------------------------------------------------------ activations


def kept_bytes(layout: Layout, stage: StageSlice) -> float:
    """What a forward of one micro-batch through a stage keeps for its backward."""
    model = layout.model
    h, rows = model.hidden_size, layout.rows
    kept = rows * h * bool(model.hidden_dropout) * stage.embedding
    kept += layout.residual * rows * h * stage.norm
    if stage.head:
        logits = 0 if layout.loss_chunk else layout.tokens * layout.table / h       # in chunks they are computed again
        kept += layout.compute * (rows * h + logits)
    again, plain = _recomputed(layout, stage)
    kept += sum(block_kept(layout, experts) for experts in plain)
    return kept + layout.residual * rows * h * len(again)


def working_bytes(layout: Layout, stage: StageSlice) -> float:
    """What a recomputation keeps in addition, until its blocks' backward has ended."""
    again, _ = _recomputed(layout, stage)
    return max((sum(block_kept(layout, experts) for experts in group) for group in again), default=0.0)


def _recomputed(layout: Layout, stage: StageSlice) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The blocks of a stage (their experts) that are recomputed, in groups, and those that are not."""
    blocks, count = stage.experts, layout.group
    if layout.recompute != "full":
        return [], blocks
    if layout.method == "block":
        return [(experts,) for experts in blocks[:count]], blocks[count:]
    return [blocks[i : i + count] for i in range(0, len(blocks), count)], ()


def block_kept(layout: Layout, experts: int) -> float:
    """What a block keeps of one micro-batch."""
    model, c, rows = layout.model, layout.compute, layout.rows
    h, d, queries, groups = model.hidden_size, model.head_dim, model.num_attention_heads, model.query_groups
    kept = 2 * layout.residual * rows * h                                   # inputs of both norms
    kept += c * rows * h                                                    # input of the projections
    kept += c * rows * (queries + 2 * groups) * d                           # queries, keys and values
    kept += c * rows * queries * d                                          # output of attention
    kept += rows * h * bool(model.hidden_dropout) * 2
    if layout.recompute != "selective":
        kept += core_kept(layout)
    if experts == 1:
        return kept + c * rows * h + mlp_kept(layout, model.ffn)
    return kept + c * rows * h + moe_kept(layout, experts)


def core_kept(layout: Layout) -> float:
    """Of attention's core: a number for each query, or its probabilities, with dropout what it leaves too."""
    model = layout.model
    heads = layout.rows * model.num_attention_heads
    if layout.fused:
        return 4 * heads
    c = layout.compute
    return heads * model.seq_length * (2 * c + 1 if model.attention_dropout else c)


def mlp_kept(layout: Layout, ffn: int) -> float:
    """Of a feed-forward behind its input: what goes into the activation and what comes out."""
    wide = (2 if layout.model.gated else 1) + 1
    return layout.compute * layout.rows * ffn * wide


def expert_rows(layout: Layout) -> float:
    """Choices of a rank's tokens that are not dropped, where the router is balanced."""
    rule = layout.moe.capacity(training=True)
    return layout.rows * layout.moe.topk * min(1.0, rule.factor or 1.0)


def moe_kept(layout: Layout, experts: int) -> float:
    """Of routed experts and what stands beside them, behind their input."""
    model, moe, c = layout.model, layout.moe, layout.compute
    rows, ffn = expert_rows(layout), moe.moe_ffn_hidden_size or model.ffn
    wide = ffn * ((2 if model.gated else 1) + 1)
    kept = 4 * layout.tokens * experts                                      # scores, whole on every rank
    kept += c * rows * (layout.expert_tensor * model.hidden_size + wide)    # what experts take, and their inner widths
    kept += c * rows * model.hidden_size                                    # what comes back to be weighted
    if moe.mlp_type == "residual":
        kept += mlp_kept(layout, model.ffn) + 2 * c * layout.rows * model.hidden_size
    if moe.moe_shared_expert_intermediate_size is not None:
        kept += mlp_kept(layout, moe.moe_shared_expert_intermediate_size)
    return kept
