"""PR-MoE on paper: which layer has how many experts over how many ranks, and how many parameters that makes.

A pyramid has more experts in its later layers (DeepSpeed-MoE, arXiv 2201.05596); residual layers keep an MLP beside
them. A layer whose experts are fewer than the ranks that share them is cut over the greatest common divisor of both,
and each of its experts is held that many times more often.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import gcd

from ..config import Config, ModelConfig
from ..config_moe import MoEConfig


@dataclass(frozen=True)
class MoEPlan:
    """One MoE layer: its number from 0, its experts, and the ranks over which they are cut."""

    layer: int
    experts: int
    degree: int


@dataclass(frozen=True)
class Count:
    """Parameters of a whole model without padding of a layout, and those of them that work on one token."""

    total: int
    active: int

    def __add__(self, other: Count) -> Count:
        return Count(self.total + other.total, self.active + other.active)


def moe_plans(config: Config) -> list[MoEPlan]:
    """The MoE layers, bottom up."""
    degree = config.parallel.expert_model_parallel_size
    return [MoEPlan(layer, n, gcd(n, degree)) for layer, n in enumerate(config.experts) if n > 1]


def describe_experts(config: Config) -> list[str]:
    """What a run says of its experts at its start: the rules of its router, and each layer's experts and ranks."""
    plans, asked = moe_plans(config), config.parallel.expert_model_parallel_size
    if not plans:
        return []
    lines = [describe_router(config.moe)]
    for (experts, degree), layers in groupby(plans, key=lambda plan: (plan.experts, plan.degree)):
        numbers = [str(plan.layer) for plan in layers]
        line = f"experts: layer{'s' * (len(numbers) > 1)} {' '.join(numbers)}: {experts} "
        line += f"over {degree} ranks" if degree > 1 else "on each rank"
        if degree < asked:
            line += f", not over {asked}: each expert is held {asked // degree} times as often"
        lines.append(line)
    return lines


def describe_router(moe: MoEConfig) -> str:
    """The rules in one line: much of it follows from whose flags were given."""
    def dropping(training: bool) -> str:
        rule = moe.capacity(training=training)
        return "nothing dropped" if rule.factor is None else f"capacity factor {rule.factor:g}, kept by {rule.order}"

    balancing = ", ".join(f"{kind} x {coefficient:g}" for kind, coefficient in moe.balancing.items())
    told = dropping(True) if dropping(True) == dropping(False) else f"{dropping(True)}, in evaluation {dropping(False)}"
    family = "Megatron-DeepSpeed" if moe.deepspeed else "Megatron-LM"
    return f"router: {family}'s gate (--moe-family), top {moe.topk}, {told}, balancing {balancing}"


def count_parameters(model: ModelConfig, moe: MoEConfig = MoEConfig(), *, vocab: int) -> Count:
    """Of a GPT with `vocab` rows in its token table."""
    h, layers = model.hidden_size, moe.experts_of_layers(model.num_layers)
    tables = vocab * h * (1 if model.tied else 2)
    positions = model.positions * h if model.position_embedding_type == "learned_absolute" else 0
    total = Count(*(tables + positions + norm_parameters(model, h),) * 2)
    for experts in layers:
        total += layer_parameters(model, moe, experts)
    return total


def layer_parameters(model: ModelConfig, moe: MoEConfig, experts: int) -> Count:
    """Of one transformer layer: attention, two norms, and a feed-forward or experts."""
    h = model.hidden_size
    rest = attention_parameters(model) + 2 * norm_parameters(model, h)
    if experts == 1:
        return Count(*(rest + mlp_parameters(model, model.ffn, bias=model.bias),) * 2)
    rest += h * experts
    if moe.mlp_type == "residual":
        rest += mlp_parameters(model, model.ffn, bias=model.bias) + 2 * h + 2
    if moe.moe_shared_expert_intermediate_size is not None:
        rest += mlp_parameters(model, moe.moe_shared_expert_intermediate_size, bias=False)
        rest += h * moe.moe_shared_expert_gate
    each = mlp_parameters(model, moe.moe_ffn_hidden_size or model.ffn, bias=model.bias)
    return Count(rest + experts * each, rest + moe.topk * each)


def attention_parameters(model: ModelConfig) -> int:
    """Of projections, and of the norms of query and key heads."""
    h, d, queries, groups = model.hidden_size, model.head_dim, model.num_attention_heads, model.query_groups
    inner = (queries + 2 * groups) * d
    biases = inner * model.qkv_bias + h * model.bias
    sinks = queries * (model.softmax_type == "learnable")
    return inner * h + queries * d * h + biases + sinks + 2 * norm_parameters(model, d) * model.qk_layernorm


def mlp_parameters(model: ModelConfig, ffn: int, *, bias: bool) -> int:
    """Of a feed-forward of inner width `ffn`."""
    up = ffn * (2 if model.gated else 1)
    return (up + ffn) * model.hidden_size + (up + model.hidden_size) * bias


def norm_parameters(model: ModelConfig, width: int) -> int:
    """Of a norm: a scale, and an offset where it centres."""
    return width * (2 if model.normalization == "LayerNorm" else 1)
