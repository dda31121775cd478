"""Floating-point operations of training, by arithmetic: what a model needs, whatever a machine spends on it.

A multiply and an add are two operations, and only matrix products count.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from .config import Config, ModelConfig
from .config_moe import MoEConfig

# A word of a device's name -> its dense TFLOP/s in bf16 or fp16, and in fp32 without shorter products, as its maker's
# data sheet has them. The first that fits counts.
PEAK_TFLOPS = (
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("B100", 1750.0, 60.0),
    ("H200", 989.0, 67.0),
    ("H800", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A10", 125.0, 31.2),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("MI300X", 1307.0, 163.4),
    ("MI325X", 1307.0, 163.4),
    ("MI250X", 191.5, 47.9),            # of one of its two dies, which are two devices
)


def device_peak(name: str, *, half: bool) -> float | None:
    """FLOP/s that the device of this name could do, with 16-bit operands (`half`) or with fp32; None: not known."""
    for word, short, full in PEAK_TFLOPS:
        if re.search(rf"\b{word}\b", name):
            return 1e12 * (short if half else full)
    return None


class Flops(NamedTuple):
    """Of one token of training, all ranks together.

    model     what the model needs, from its real shapes: over the machine's peak this gives MFU
    hardware  by the formula of SC'21, with what recomputation adds; None where layers have experts, of which it says
              nothing
    """

    model: float
    hardware: float | None = None


def flops_per_token(config: Config, vocab: int, seq_length: int | None = None) -> Flops:
    """Both counts for the model and recomputation of a run; `vocab` without padding. `seq_length`: tokens of a sample
    where they are not --seq-length, for attention's share depends on it."""
    model, shape = replace(config.model, seq_length=seq_length or config.model.seq_length), {"vocab": vocab, "batch": 1}
    recompute = config.recompute.recompute_granularity == "full"
    hardware = None if config.moe.any else sc21_flops(model, **shape, recompute=recompute) / model.seq_length
    return Flops(model_flops(model, **shape, moe=config.moe) / model.seq_length, hardware)


def attention_flops(model: ModelConfig, window: int | None = None) -> float:
    """Of the attention of one layer for one token, forward, under the causal mask: on average half of the sequence, in
    a window of w keys with the own one w (1 - w / 2 s)."""
    h, d = model.hidden_size, model.head_dim
    queries, groups = model.num_attention_heads, model.query_groups
    projections = 2 * h * d * (queries + 2 * groups) + 2 * queries * d * h
    s = model.seq_length
    w = s if window is None else min(window + 1, s)
    return projections + 2 * 2 * queries * d * w * (1 - w / (2 * s))


def mlp_flops(model: ModelConfig, ffn: int) -> float:
    """Of a feed-forward of inner width `ffn` for one token, forward."""
    return 2.0 * model.hidden_size * ffn * (3 if model.gated else 2)


def moe_flops(model: ModelConfig, moe: MoEConfig, experts: int) -> float:
    """Of what stands in the place of the feed-forward where a layer has `experts`, for one token, forward."""
    h = model.hidden_size
    beside = 0.0
    if moe.mlp_type == "residual":
        beside += mlp_flops(model, model.ffn) + 2 * 2 * h
    if moe.moe_shared_expert_intermediate_size is not None:
        beside += mlp_flops(model, moe.moe_shared_expert_intermediate_size) + 2 * h * moe.moe_shared_expert_gate
    return moe.topk * mlp_flops(model, moe.moe_ffn_hidden_size or model.ffn) + 2 * h * experts + beside


def layer_flops(
    model: ModelConfig, experts: int = 1, moe: MoEConfig = MoEConfig(), *, window: int | None = None
) -> float:
    """Of one transformer layer for one token, forward."""
    ffn = mlp_flops(model, model.ffn) if experts == 1 else moe_flops(model, moe, experts)
    return attention_flops(model, window) + ffn


def model_flops(model: ModelConfig, *, vocab: int, batch: int, moe: MoEConfig = MoEConfig()) -> float:
    """That training needs for a global batch of `batch` samples: forward, and twice that for backward.

    Recomputation is not counted, so this gives MFU. For a GPT it is 72 B s l h^2 (1 + s/(12 h) + V/(12 l h)). An MoE
    layer counts its topk experts, its router, and what stands beside them; tokens that are dropped count as if not.
    """
    each = zip(moe.experts_of_layers(model.num_layers), model.windows, strict=True)
    layers = sum(layer_flops(model, experts, moe, window=window) for experts, window in each)
    return 3.0 * batch * model.seq_length * (layers + 2 * model.hidden_size * vocab)


def sc21_flops(model: ModelConfig, *, vocab: int, batch: int, recompute: bool) -> float:
    """Operations of a global batch as Narayanan et al. (SC'21, arXiv 2104.04473, equation 3) count them.

    For a GPT with a feed-forward of 4 h; attention without regard to the causal mask; `recompute` adds a forward
    of the layers, as full recomputation does.
    """
    h, s, layers = model.hidden_size, model.seq_length, model.num_layers
    passes = 4 if recompute else 3
    return 24.0 * passes * batch * s * layers * h**2 * (1 + s / (6 * h)) + 6.0 * batch * s * h * vocab
