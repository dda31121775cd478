"""megazero/hf_config.py: a config.json becomes settings and settings a config.json, or a key or a flag says why not."""

from __future__ import annotations

import pytest

from megazero.config import Config, ModelConfig
from megazero.config_data import BatchConfig
from megazero.config_moe import MoEConfig
from megazero.hf_config import Experts, describe, experts_of, family_of, moe_of, to_values

PLACE = "somewhere/config.json"
# As older versions of the transformers library wrote them.
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008], "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 131072, "mlp_bias": False,
    "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "transformers_version": "4.45.0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
SMALL = {key: value for key, value in LLAMA.items() if key not in ("mlp_bias", "rope_scaling")}
QWEN2 = SMALL | {"model_type": "qwen2", "max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 128}
MIXTRAL = {key: value for key, value in SMALL.items() if key != "attention_bias"} | {
    "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False,
    "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3], "moe_intermediate_size": 48,
    "norm_topk_prob": True, "num_experts": 16, "num_experts_per_tok": 8, "num_hidden_layers": 6,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
QWEN2_MOE = QWEN2 | {
    "model_type": "qwen2_moe", "decoder_sparse_step": 1, "moe_intermediate_size": 48, "norm_topk_prob": False,
    "num_experts": 16, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 80,
}  # fmt: skip
FAMILIES = {
    "gpt2": GPT2, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE,
    "qwen2_moe": QWEN2_MOE,
}  # fmt: skip


def test_published_configurations_are_read() -> None:
    assert describe(GPT2, PLACE).model == ModelConfig(
        num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, max_position_embeddings=1024,
        vocab_size=50257,
    )
    llama = describe(LLAMA, PLACE).model
    assert (llama.use_rope_scaling, llama.rope_scaling_factor, llama.rope_original_max_positions) == (True, 32.0, 8192)
    assert (llama.rotary_base, llama.query_groups, llama.head_dim, llama.tied, llama.bias) == (5e5, 2, 8, True, False)
    assert (llama.seq_length, llama.positions) == (4096, 131072)
    qwen3 = describe({key: value for key, value in QWEN3.items() if key != "head_dim"}, PLACE).model
    assert qwen3.head_dim == 128 and qwen3.qk_layernorm, "that family's own default"
    assert describe(QWEN2, PLACE).model.qkv_bias
    assert describe(MIXTRAL, PLACE).experts == Experts(8, 2, 96, True, frozenset((0, 1)), None, 0.02)
    assert describe(QWEN3_MOE, PLACE).experts == Experts(16, 8, 48, True, frozenset((1, 5)), None, 0.001)
    assert describe(QWEN2_MOE, PLACE).experts == Experts(16, 4, 48, False, frozenset((0, 1)), 80, 0.001)


def test_what_is_written_says_what_was_read() -> None:
    for family, values in FAMILIES.items():
        told = describe(values, PLACE)
        assert told.family == family == family_of(told.model, told.experts)
        written = to_values(told.model, told.model.vocab_size, told.experts, "BF16")
        assert describe(written, PLACE) == told and written["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"model_type": "bloom"}, 'model_type "bloom" is none of gpt2, llama'),
        ("llama", {"model_type": None}, "model_type null is none of"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_scaling.rope_type "yarn": '),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 'rope_scaling.rope_type "linear": '),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: lacks factor"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2]}}, "mrope_section [2]: is not known"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5: in this family"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: in this family"),
        ("llama", {"rope_scaling": "yarn"}, 'rope_scaling "yarn": must be an object'),
        ("llama", {"hidden_act": "relu"}, 'hidden_act "relu": no such activation'),
        ("llama", {"mlp_bias": True}, "attention_bias false: must be as mlp_bias, true"),
        ("llama", {"mlp_bias": 1}, "mlp_bias 1: must be true or false"),
        ("llama", {"sliding_window": 8}, "sliding_window 8: sliding windows are not read"),
        ("llama", {"v_head_dim": 4}, "v_head_dim 4: is not known here"),
        ("llama", {"quantization_config": {"bits": 4}}, 'quantization_config {"bits": 4}: is not known here'),
        ("llama", {"num_attention_heads": 7, "head_dim": 8}, "is not divisible by --num-query-groups 2"),
        ("llama", {"hidden_size": None}, "lacks hidden_size"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers 0: must be at least 1"),
        ("llama", {"vocab_size": "many"}, 'vocab_size "many": must be a whole number'),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window true: sliding windows"),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types ["),
        ("qwen3", {"attention_bias": True}, "attention_bias true: a bias in attention alone"),
        ("gpt2", {"activation_function": "relu"}, 'activation_function "relu": no such activation'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true: "),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights false: "),
        ("gpt2", {"embd_pdrop": 0.2}, "embd_pdrop 0.2: must be that of resid_pdrop, 0.1"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1: "),
        ("mixtral", {"sliding_window": 4096}, "sliding_window 4096: "),
    ],
)
def test_a_configuration_that_cannot_be_had_is_refused_by_its_key(name: str, changes: dict, words: str) -> None:
    with pytest.raises(ValueError) as wrong:
        describe(FAMILIES[name] | changes, PLACE)
    assert words in str(wrong.value) and "\n" not in str(wrong.value) and str(wrong.value).startswith(PLACE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "none"}, "--position-embedding-type none"),
        ({"rotary_interleaved": True}, "--rotary-interleaved True"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ({"activation": "gelu"}, "--activation gelu"),
        ({"window_size": "4,0"}, "--window-size 4,0"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable"),
        ({"qk_layernorm": True, "disable_bias_linear": False}, "--disable-bias-linear False"),
        ({"position_embedding_type": "learned_absolute"}, "--normalization RMSNorm"),
    ],
)
def test_a_model_that_hugging_face_cannot_have_is_refused_by_its_flag(changes: dict, words: str) -> None:
    llama = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8, "normalization": "RMSNorm",
             "position_embedding_type": "rope", "activation": "swiglu", "disable_bias_linear": True}
    assert family_of(ModelConfig(**llama)) == "llama"
    with pytest.raises(ValueError, match=words):
        family_of(ModelConfig(**(llama | changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_type": "residual"}, "--mlp-type residual"),
        ({"moe_shared_expert_intermediate_size": 8}, "--moe-shared-expert-gate False"),
        ({"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid"),
        ({"num_experts": (2, 4)}, "one number of experts for all layers"),
        ({"moe_expert_capacity_factor": 1.0}, "capacity cannot be said"),
        ({"moe_router_load_balancing_type": ("sinkhorn",)}, "sinkhorn"),
    ],
)
def test_a_mixture_that_hugging_face_cannot_have_is_refused_by_its_flag(changes: dict, words: str) -> None:
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=8)
    settings = {"num_experts": (4,), "moe_family": "megatron-lm"} | changes
    config = Config(model=model, batch=BatchConfig(micro_batch_size=1), moe=MoEConfig(**settings))
    with pytest.raises(ValueError, match=words):
        experts_of(config)


def test_router_rules_of_both_houses_say_the_same() -> None:
    """Softmax over the chosen experts is softmax over all, made to sum to 1, as DeepSpeed's gate makes it."""
    model = ModelConfig(num_layers=6, hidden_size=32, num_attention_heads=4, seq_length=8)
    wanted = ((MIXTRAL, True, None), (QWEN3_MOE, True, "[0,1,0,0,0,1]"), (QWEN2_MOE, False, None))
    for family, normalized, layers in wanted:
        told = describe(family, PLACE)
        moe = moe_of(told.experts, told.model)
        assert (moe.moe_router_pre_softmax, moe.moe_layer_freq) == (not normalized, layers)
        assert experts_of(Config(model=told.model, batch=BatchConfig(micro_batch_size=1), moe=moe)) == told.experts
    free = {"num_experts": (4,), "moe_family": "megatron-deepspeed", "disable_moe_token_dropping": True}
    for topk, normalized in ((1, False), (2, True)):
        moe = MoEConfig(moe_router_topk=topk, **free)
        assert experts_of(Config(model=model, batch=BatchConfig(micro_batch_size=1), moe=moe)).normalized == normalized
    with pytest.raises(ValueError, match="--moe-router-topk 9 is above the 8 experts"):
        told = describe(MIXTRAL | {"num_experts_per_tok": 9}, PLACE)
        moe_of(told.experts, told.model)
