"""The published models on paper, degrees of layers, and what a start says of them."""

from __future__ import annotations

import pytest
import torch

from megazero.config import ModelConfig
from megazero.config_moe import MoEConfig
from megazero.flags import parse
from megazero.flops import layer_flops, model_flops
from megazero.gpt import GPTSetup, gpt_layers
from megazero.moe.pyramid import count_parameters, describe_experts, layer_parameters, moe_plans
from megazero.parallel.topology import Topology
from megazero.plan import plan_stages

BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --vocab-size 97 "
    "--lr 1e-3 --train-iters 10 --mock-data"
)
VOCAB = 50304   # GPT-2's 50257, padded

# layers, hidden, experts, residual -> parameters
PUBLISHED = [
    (12, 768, (1,), 125_262_336), (24, 1024, (1,), 355_919_872), (24, 2048, (1,), 1_315_819_520),
    (32, 4096, (1,), 6_658_596_864),
    (12, 768, (64,), 1_910_636_544), (24, 1024, (128,), 13_149_534_208), (24, 2048, (128,), 52_471_525_376),
    (24, 1024, (32,) * 10 + (64,) * 2, 4_116_793_368), (24, 2048, (64,) * 10 + (128,) * 2, 31_391_649_816),
    (21, 1024, (32,) * 8 + (64,) * 2, 3_541_736_468), (21, 2048, (64,) * 8 + (128,) * 2, 26_944_026_644),
]  # fmt: skip


def published(layers, hidden, experts):
    model = ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=16, seq_length=2048)
    residual = "residual" if len(experts) > 1 else "standard"
    return model, MoEConfig(num_experts=experts, expert_interval=2, mlp_type=residual)


@pytest.mark.parametrize("layers, hidden, experts, parameters", PUBLISHED)
def test_the_published_sizes_come_out(layers, hidden, experts, parameters):
    model, moe = published(layers, hidden, experts)
    found = count_parameters(model, moe, vocab=VOCAB)
    assert found.total == parameters
    dense = count_parameters(model, vocab=VOCAB).total
    if experts == (1,):
        assert found.active == dense
    elif len(experts) == 1:  # top 1: as the dense model, and the routers
        assert found.active == dense + layers // 2 * hidden * experts[0]
    else:  # and a second MLP in every second layer
        one = 8 * hidden**2 + 5 * hidden
        assert found.active == dense + layers // 2 * (one + 2 * hidden + 2) + hidden * sum(experts)


def test_active_operations_of_an_moe_are_those_of_the_dense_model_and_the_routers():
    model, moe = published(24, 1024, (128,))
    s, more = 2048, 12 * 2 * 1024 * 128
    dense = model_flops(model, vocab=VOCAB, batch=256)
    assert model_flops(model, vocab=VOCAB, batch=256, moe=moe) == dense + 3.0 * 256 * s * more
    residual = MoEConfig(num_experts=(128,), expert_interval=2, mlp_type="residual")
    again = more + 12 * (4 * 1024 * 4096 + 4 * 1024)
    assert model_flops(model, vocab=VOCAB, batch=256, moe=residual) == dense + 3.0 * 256 * s * again


def test_operations_of_a_layer_count_every_expert_of_a_token():
    """Mixtral-like: top 2 of gated experts of another width, with a shared expert and its gate."""
    model = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=16, activation="swiglu", ffn_hidden_size=96
    )
    moe = MoEConfig(
        num_experts=(8,), moe_router_topk=3, moe_ffn_hidden_size=40, moe_shared_expert_intermediate_size=24,
        moe_shared_expert_gate=True,
    )  # fmt: skip
    experts = 3 * 6 * 64 * 40 + 6 * 64 * 24 + 2 * 64 + 2 * 64 * 8
    assert layer_flops(model, 8, moe) - layer_flops(model) == experts - 6 * 64 * 96
    count = layer_parameters(model, moe, 8)
    dense = layer_parameters(model, moe, 1).total - 3 * 64 * 96 - 2 * 96 - 64
    each = 3 * 64 * 40 + 2 * 40 + 64
    assert count.total - dense == 8 * each + 3 * 64 * 24 + 64 + 64 * 8
    assert count.active - dense == 3 * each + 3 * 64 * 24 + 64 + 64 * 8


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "swiglu", "disable_bias_linear": True, "normalization": "RMSNorm", "num_query_groups": 2,
         "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
        {"kv_channels": 16, "qk_layernorm": True, "disable_bias_linear": True, "add_qkv_bias": True,
         "ffn_hidden_size": 48},
    ],
)  # fmt: skip
def test_the_count_is_that_of_the_declared_parameters(changes):
    model = ModelConfig(**{"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16} | changes)
    declared = plan_stages(gpt_layers(GPTSetup(model, 97, torch.float32)), Topology())
    assert count_parameters(model, vocab=97).total == sum(stage.recorded for stage in declared)


def config(words):
    return parse(f"{BASE} {words}".split())[0]


def test_c107_c114_a_layers_degree_is_a_common_divisor_and_is_said_where_it_is_smaller():
    mixed = config("--num-experts 2 4 --moe-expert-parallel-size 4")
    assert [(p.layer, p.experts, p.degree) for p in moe_plans(mixed)] == [(1, 2, 2), (3, 4, 4)]
    lines = describe_experts(mixed)[1:]
    assert lines == [
        "experts: layer 1: 2 over 2 ranks, not over 4: each expert is held 2 times as often",
        "experts: layer 3: 4 over 4 ranks",
    ]
    six = describe_experts(config("--num-experts 4 --moe-expert-parallel-size 6"))[1:]
    assert six == ["experts: layers 1 3: 4 over 2 ranks, not over 6: each expert is held 3 times as often"]
    assert describe_experts(config("--num-experts 4 --moe-layer-freq 4"))[1:] == ["experts: layer 0: 4 on each rank"]
    assert describe_experts(config("")) == []


def test_the_start_says_whose_router_it_is():
    assert describe_experts(config("--num-experts 8"))[0] == (
        "router: Megatron-LM's gate (--moe-family), top 2, nothing dropped, balancing aux_loss x 0"
    )
    assert describe_experts(config("--num-experts 8 --topk 1 --moe-loss-coeff 0.01"))[0] == (
        "router: Megatron-DeepSpeed's gate (--moe-family), top 1, capacity factor 1, kept by random, in evaluation "
        "capacity factor 1, kept by position, balancing deepspeed x 0.01"
    )
