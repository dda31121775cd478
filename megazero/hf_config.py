"""What a model is, in Hugging Face's words and in ours: config.json -> ModelConfig, and back.

A key that would change the model and has no counterpart here is refused by name, with its value; so is a key that is
not known at all. Arithmetic and JSON: files and tensors are the business of hf.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .config import Config, ModelConfig
from .config_moe import MoEConfig
from .settings import flag_name, section_settings

GPT2, LLAMA, QWEN2, QWEN3 = "gpt2", "llama", "qwen2", "qwen3"
MIXTRAL, QWEN2_MOE, QWEN3_MOE = "mixtral", "qwen2_moe", "qwen3_moe"
LONGEST_SAMPLE = 4096       # tokens; an imported model is asked to train on no longer ones unless told otherwise
GPT2_ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "squared_relu",
}  # fmt: skip

# Keys that say nothing of what the weights compute.
HARMLESS = frozenset(
    """architectures model_type transformers_version use_cache dtype torch_dtype bos_token_id eos_token_id pad_token_id
    initializer_range pretraining_tp tokenizer_class task_specific_params summary_type summary_use_proj
    summary_activation summary_proj_to_labels summary_first_dropout reorder_and_upcast_attn n_ctx id2label label2id
    attn_implementation torchscript return_dict output_attentions output_hidden_states output_router_logits
    max_window_layers gradient_checkpointing""".split()
)
DTYPE_WORDS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Experts:
    """The mixture of a model.

    count       experts of a layer, of which each token sees `top_k`
    ffn         inner width of one of them
    normalized  whether the weights of a token's experts are made to sum to 1; else they are softmax over all experts
    layers      numbers of the layers that have experts; the others are dense
    shared_ffn  inner width of the expert that all tokens see through a sigmoid gate; None: there is none
    aux_loss    coefficient of the balancing loss
    """

    count: int
    top_k: int
    ffn: int
    normalized: bool
    layers: frozenset[int]
    shared_ffn: int | None = None
    aux_loss: float = 0.0


@dataclass(frozen=True)
class Described:
    """A model as config.json describes it."""

    family: str
    model: ModelConfig              # with its vocab_size
    experts: Experts | None = None


class Keys:
    """The keys of a config.json, each taken at most once; what is left in the end is looked at by `close`."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place, self.taken = values, place, set(HARMLESS)

    def refuse(self, key: str, reason: str) -> ValueError:
        return ValueError(f"{self.place}: {key} {json.dumps(self.values.get(key))}: {reason}")

    def number(self, key: str, default: float | None = None, kind: type = float) -> Any:
        """A number; absent or null: the default, and without one ValueError."""
        self.taken.add(key)
        value = self.values.get(key)
        if value is None and default is None:
            raise ValueError(f"{self.place}: lacks {key}")
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and value != int(value)):
            raise self.refuse(key, "must be a number" if kind is float else "must be a whole number")
        return kind(value)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.number(key, default, int)
        if value < 1:
            raise self.refuse(key, "must be at least 1")
        return value

    def switch(self, key: str, default: bool = False) -> bool:
        self.taken.add(key)
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def expect(self, key: str, *values: Any, reason: str) -> Any:
        """The value of a key that can have only these; absent, the first of them."""
        self.taken.add(key)
        value = self.values.get(key, values[0])
        if value not in values:
            raise self.refuse(key, reason)
        return value

    def close(self) -> None:
        """Refuse the first key that is not known and says something."""
        for key, value in self.values.items():
            if key not in self.taken and not key.startswith("_") and value not in (None, False, [], {}):
                raise self.refuse(key, "is not known here, and may change what the weights compute")


# ------------------------------------------------------------------------------------------------------- to our words


def describe(values: Mapping[str, Any], place: str) -> Described:
    """The model of a config.json, read from `place`. Raises ValueError with its key and value for what cannot be."""
    family = values.get("model_type")
    if family not in READERS:
        raise ValueError(f"{place}: model_type {json.dumps(family)} is none of {', '.join(READERS)}")
    keys = Keys(values, place)
    try:
        described = READERS[family](keys)
    except ValueError as wrong:
        if str(wrong).startswith(place):
            raise
        raise ValueError(f"{place}: {wrong}") from wrong
    keys.close()
    return described


def _gpt2(keys: Keys) -> Described:
    keys.expect("scale_attn_weights", True, reason="scores are always divided by the root of the head's size")
    keys.expect("scale_attn_by_inverse_layer_idx", False, None, reason="scores are scaled alike in all layers")
    keys.expect("add_cross_attention", False, None, reason="there is no attention to another sequence")
    activation = keys.expect("activation_function", *GPT2_ACTIVATIONS, reason="no such activation")
    hidden, heads = keys.size("n_embd"), keys.size("n_head")
    ffn = keys.size("n_inner", 4 * hidden)
    dropout = keys.number("resid_pdrop", 0.1)
    if keys.number("embd_pdrop", 0.1) != dropout:
        raise keys.refuse("embd_pdrop", f"must be that of resid_pdrop, {dropout}: there is one dropout for both")
    positions = keys.size("n_positions")
    model = ModelConfig(
        num_layers=keys.size("n_layer"), hidden_size=hidden, num_attention_heads=heads,
        seq_length=min(positions, LONGEST_SAMPLE), max_position_embeddings=positions,
        ffn_hidden_size=None if ffn == 4 * hidden else ffn, vocab_size=keys.size("vocab_size"),
        norm_epsilon=keys.number("layer_norm_epsilon", 1e-5), activation=GPT2_ACTIVATIONS[activation],
        untie_embeddings_and_output_weights=not keys.switch("tie_word_embeddings", True),
        attention_dropout=keys.number("attn_pdrop", 0.1), hidden_dropout=dropout,
        init_method_std=keys.number("initializer_range", 0.02),
    )
    return Described(GPT2, model)


def _llama(keys: Keys) -> Described:
    attention, mlp = keys.switch("attention_bias"), keys.switch("mlp_bias")
    if attention != mlp:
        raise keys.refuse("attention_bias", f"must be as mlp_bias, {json.dumps(mlp)}: all layers have a bias or none")
    return Described(LLAMA, _rotary_model(keys, disable_bias_linear=not attention))


def _qwen2(keys: Keys) -> Described:
    keys.expect("qkv_bias", True, reason="queries, keys and values of this family have a bias")
    return Described(QWEN2, _rotary_model(keys, disable_bias_linear=True, add_qkv_bias=True))


def _qwen3(keys: Keys) -> Described:
    return Described(QWEN3, _qwen3_model(keys, head_dim=128))


def _qwen3_model(keys: Keys, **more: Any) -> ModelConfig:
    keys.expect("attention_bias", False, None, reason="a bias in attention alone cannot be had")
    return _rotary_model(keys, disable_bias_linear=True, qk_layernorm=True, **more)


def _mixtral(keys: Keys) -> Described:
    keys.expect("router_jitter_noise", 0.0, None, reason="the router draws no noise")
    model = _rotary_model(keys, theta=1e6, disable_bias_linear=True)
    experts = Experts(
        keys.size("num_local_experts"), keys.size("num_experts_per_tok"), model.ffn, True,
        frozenset(range(model.num_layers)), aux_loss=keys.number("router_aux_loss_coef", 0.001),
    )
    return Described(MIXTRAL, model, experts)


def _qwen2_moe(keys: Keys) -> Described:
    bias = keys.switch("qkv_bias", True)
    model = _rotary_model(keys, disable_bias_linear=True, add_qkv_bias=bias)
    return Described(QWEN2_MOE, model, _qwen_experts(keys, model, keys.size("shared_expert_intermediate_size")))


def _qwen3_moe(keys: Keys) -> Described:
    model = _qwen3_model(keys)
    return Described(QWEN3_MOE, model, _qwen_experts(keys, model))


def _qwen_experts(keys: Keys, model: ModelConfig, shared_ffn: int | None = None) -> Experts:
    step = keys.size("decoder_sparse_step", 1)
    keys.taken |= {"mlp_only_layers", "num_experts"}
    dense = set(keys.values.get("mlp_only_layers") or ())
    sparse = frozenset(i for i in range(model.num_layers) if i not in dense and (i + 1) % step == 0)
    name = "num_experts" if keys.values.get("num_experts") is not None else "num_local_experts"
    return Experts(
        keys.size(name), keys.size("num_experts_per_tok"), keys.size("moe_intermediate_size"),
        keys.switch("norm_topk_prob"), sparse, shared_ffn, keys.number("router_aux_loss_coef", 0.001),
    )


def _rotary_model(keys: Keys, *, theta: float = 10000.0, head_dim: int | None = None, **fixed: Any) -> ModelConfig:
    """What Llama and its relatives have in common. `theta` and `head_dim` are the family's defaults."""
    keys.expect("hidden_act", "silu", "swish", reason="no such activation")
    _no_window(keys)
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    groups, positions = keys.size("num_key_value_heads", heads), keys.size("max_position_embeddings")
    even = hidden // heads if hidden % heads == 0 else None
    size = keys.size("head_dim", head_dim or even)
    return ModelConfig(
        num_layers=keys.size("num_hidden_layers"), hidden_size=hidden, num_attention_heads=heads,
        seq_length=min(positions, LONGEST_SAMPLE), max_position_embeddings=positions,
        ffn_hidden_size=keys.size("intermediate_size"), kv_channels=None if size == even else size,
        num_query_groups=None if groups == heads else groups, vocab_size=keys.size("vocab_size"),
        normalization="RMSNorm", norm_epsilon=keys.number("rms_norm_eps", 1e-6), activation="swiglu",
        untie_embeddings_and_output_weights=not keys.switch("tie_word_embeddings"),
        attention_dropout=keys.number("attention_dropout", 0.0), hidden_dropout=0.0,
        init_method_std=keys.number("initializer_range", 0.02), position_embedding_type="rope",
        **_rotary(keys, theta), **fixed,
    )


def _no_window(keys: Keys) -> None:
    """Refuse windows, which are trained with (--window-size) but neither read nor written."""
    reason = "sliding windows are not read from Hugging Face folders"
    keys.taken |= {"sliding_window", "layer_types"}
    windows = keys.values.get("use_sliding_window")
    keys.expect("use_sliding_window", False, None, reason=reason)
    if windows is None and keys.values.get("sliding_window") is not None:
        raise keys.refuse("sliding_window", reason)
    if any(kind != "full_attention" for kind in keys.values.get("layer_types") or ()):
        raise keys.refuse("layer_types", reason)


def _rotary(keys: Keys, theta: float) -> dict[str, Any]:
    """Fields of the rotary positions, from either spelling: rope_theta and rope_scaling, or rope_parameters."""
    keys.taken |= {"rope_parameters", "rope_scaling", "rope_theta"}
    key = "rope_parameters" if keys.values.get("rope_parameters") else "rope_scaling"
    given = keys.values.get(key) or {}
    if not isinstance(given, dict):
        raise keys.refuse(key, "must be an object")
    rope = Keys({"rope_theta": keys.values.get("rope_theta")} | given, f"{keys.place}: {key}")
    for part in (rope, keys):
        part.expect("partial_rotary_factor", 1.0, None, reason="in this family whole heads are rotated")
    kind = [given[name] for name in ("rope_type", "type") if name in given] or ["default"]
    rope.taken |= {"rope_type", "type"}
    fields: dict[str, Any] = {"rotary_base": rope.number("rope_theta", theta)}
    if kind[0] == "llama3":
        fields |= {
            "use_rope_scaling": True, "rope_scaling_factor": rope.number("factor"),
            "rope_low_freq_factor": rope.number("low_freq_factor"),
            "rope_high_freq_factor": rope.number("high_freq_factor"),
            "rope_original_max_positions": rope.size("original_max_position_embeddings"),
        }
    elif kind[0] != "default":
        raise ValueError(f"{rope.place}.rope_type {json.dumps(kind[0])}: frequencies are plain or scaled as llama3")
    rope.close()
    return fields


READERS: dict[str, Callable[[Keys], Described]] = {
    GPT2: _gpt2, LLAMA: _llama, QWEN2: _qwen2, QWEN3: _qwen3, MIXTRAL: _mixtral, QWEN2_MOE: _qwen2_moe,
    QWEN3_MOE: _qwen3_moe,
}  # fmt: skip
ARCHITECTURES = {
    GPT2: "GPT2LMHeadModel", LLAMA: "LlamaForCausalLM", QWEN2: "Qwen2ForCausalLM", QWEN3: "Qwen3ForCausalLM",
    MIXTRAL: "MixtralForCausalLM", QWEN2_MOE: "Qwen2MoeForCausalLM", QWEN3_MOE: "Qwen3MoeForCausalLM",
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------- to their words


def family_of(model: ModelConfig, experts: Experts | None = None) -> str:
    """The family that can hold this model. ValueError with the flag that none of them knows."""
    _check(model, {"window_size": None, "softmax_type": "vanilla"}, "every family that is written")
    if model.position_embedding_type == "learned_absolute":
        wanted = {
            "normalization": "LayerNorm", "disable_bias_linear": False, "qk_layernorm": False,
            "num_query_groups": (None, model.num_attention_heads), "activation": tuple(GPT2_ACTIVATIONS.values()),
            "group_query_attention": (False, model.query_groups == model.num_attention_heads),
            "kv_channels": (None, model.hidden_size // model.num_attention_heads),
        }
        _check(model, wanted, "GPT-2, the family with learned positions,")
        if experts is not None:
            raise ValueError("no family of Hugging Face has experts and --position-embedding-type learned_absolute")
        return GPT2
    wanted = {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "swiglu", "rotary_percent": 1.0,
        "rotary_interleaved": False,
    }
    bare = wanted | {"disable_bias_linear": True, "add_qkv_bias": False}
    if experts is not None and experts.shared_ffn is not None:
        _check(model, wanted | {"disable_bias_linear": True, "qk_layernorm": False}, "Qwen2-MoE")
        return QWEN2_MOE
    if model.qk_layernorm:
        _check(model, bare, "Qwen3, the family with q/k norm,")
        return QWEN3 if experts is None else QWEN3_MOE
    if experts is not None:
        _check(model, bare, "Mixtral")
        if not experts.normalized or len(experts.layers) != model.num_layers or model.ffn != experts.ffn:
            raise ValueError("Mixtral has experts of --ffn-hidden-size in all layers, their weights summing to 1")
        return MIXTRAL
    _check(model, wanted, "Llama and its relatives")
    return QWEN2 if model.add_qkv_bias and not model.bias else LLAMA


def _check(section: ModelConfig | MoEConfig, wanted: Mapping[str, Any], family: str) -> None:
    """ValueError for the first field that has none of the wanted values."""
    for name, values in wanted.items():
        value, values = vars(section)[name], values if isinstance(values, tuple) else (values,)
        if value not in values:
            shown = " or ".join(str(v) for v in dict.fromkeys(values))
            raise ValueError(f"{flag_name(name)} {value} cannot be said to Hugging Face: {family} wants {shown}")


def to_values(model: ModelConfig, vocab: int, experts: Experts | None, dtype: str) -> dict[str, Any]:
    """The config.json of a model whose weights are of a `dtype` as safetensors name it; no token ids.

    Written in the older spelling (rope_theta, torch_dtype), which old and new versions read. Raises as family_of does.
    """
    family = family_of(model, experts)
    told = {
        "architectures": [ARCHITECTURES[family]], "model_type": family, "torch_dtype": DTYPE_WORDS[dtype],
        "vocab_size": vocab, "tie_word_embeddings": model.tied, "initializer_range": model.init_method_std,
        "use_cache": True,
    }
    if family == GPT2:
        activation = next(theirs for theirs, ours in GPT2_ACTIVATIONS.items() if ours == model.activation)
        return told | {
            "n_positions": model.positions, "n_embd": model.hidden_size, "n_layer": model.num_layers,
            "n_head": model.num_attention_heads, "n_inner": model.ffn, "activation_function": activation,
            "layer_norm_epsilon": model.norm_epsilon, "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout, "attn_pdrop": model.attention_dropout,
        }
    scaling = {
        "rope_type": "llama3", "factor": model.rope_scaling_factor, "low_freq_factor": model.rope_low_freq_factor,
        "high_freq_factor": model.rope_high_freq_factor,
        "original_max_position_embeddings": model.rope_original_max_positions,
    }
    told |= {
        "hidden_size": model.hidden_size, "intermediate_size": model.ffn, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads, "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim, "hidden_act": "silu", "max_position_embeddings": model.positions,
        "rms_norm_eps": model.norm_epsilon, "attention_dropout": model.attention_dropout,
        "rope_theta": model.rotary_base, "rope_scaling": scaling if model.use_rope_scaling else None,
    }
    if family == LLAMA:
        told |= {"attention_bias": model.bias, "mlp_bias": model.bias}
    if family in (QWEN3, QWEN3_MOE):
        told |= {"attention_bias": False}
    told |= {"sliding_window": None} if family == MIXTRAL else {}
    told |= {"use_sliding_window": False} if family in (QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE) else {}
    return told | ({} if experts is None else _expert_values(family, model, experts))


def _expert_values(family: str, model: ModelConfig, experts: Experts) -> dict[str, Any]:
    told = {"num_experts_per_tok": experts.top_k, "router_aux_loss_coef": experts.aux_loss}
    if family == MIXTRAL:
        return told | {"num_local_experts": experts.count}
    if family == QWEN2_MOE:
        told |= {"shared_expert_intermediate_size": experts.shared_ffn, "qkv_bias": model.qkv_bias}
    return told | {
        "num_experts": experts.count, "moe_intermediate_size": experts.ffn, "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1, "mlp_only_layers": sorted(set(range(model.num_layers)) - experts.layers),
    }


# --------------------------------------------------------------------------------------------------- experts and flags


def moe_of(experts: Experts | None, model: ModelConfig) -> MoEConfig:
    """The settings of a mixture. Softmax over the chosen experts equals softmax over all, made to sum to 1."""
    if experts is None:
        return MoEConfig()
    pattern = ",".join(str(int(i in experts.layers)) for i in range(model.num_layers))
    return MoEConfig(
        moe_family="megatron-lm", num_experts=(experts.count,), moe_router_topk=experts.top_k,
        moe_layer_freq=None if len(experts.layers) == model.num_layers else f"[{pattern}]",
        moe_ffn_hidden_size=None if experts.ffn == model.ffn else experts.ffn,
        moe_shared_expert_intermediate_size=experts.shared_ffn, moe_shared_expert_gate=experts.shared_ffn is not None,
        moe_router_pre_softmax=not experts.normalized,
        moe_aux_loss_coeff=(experts.aux_loss,) if experts.aux_loss else (),
    )


def experts_of(config: Config) -> Experts | None:
    """The mixture of a run as Hugging Face can have it. ValueError with the flag that it cannot."""
    moe = config.moe
    if not moe.any:
        return None
    wanted = {
        "mlp_type": "standard", "moe_router_score_function": "softmax", "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None, "moe_router_enable_expert_bias": False,
        "moe_shared_expert_gate": moe.moe_shared_expert_intermediate_size is not None,
    }
    _check(moe, wanted, "a mixture of experts")
    counts = {count for count in config.experts if count > 1}
    if len(counts) > 1:
        raise ValueError(f"--num-experts {moe.num_experts}: Hugging Face wants one number of experts for all layers")
    if "sinkhorn" in moe.balancing:
        raise ValueError("--moe-router-load-balancing-type sinkhorn cannot be said to Hugging Face")
    if moe.capacity(training=False).factor is not None:
        raise ValueError("an expert's capacity cannot be said to Hugging Face: --disable-moe-token-dropping-in-eval")
    return Experts(
        counts.pop(), moe.topk, moe.moe_ffn_hidden_size or config.model.ffn,
        moe.topk > 1 if moe.deepspeed else not moe.moe_router_pre_softmax,
        frozenset(i for i, count in enumerate(config.experts) if count > 1), moe.moe_shared_expert_intermediate_size,
        sum(moe.balancing.values()),
    )


def flags_of(config: Config) -> list[str]:
    """The flags that ask pretrain_gpt.py for this model."""
    words = []
    for section, kind in (("model", ModelConfig), ("moe", MoEConfig)):
        for setting in section_settings(section, kind):
            value = vars(vars(config)[section])[setting.name]
            if value == "swiglu" and setting.name == "activation":
                words += ["--swiglu"]
            elif value == setting.default or value is None:
                continue
            elif setting.kind is bool:
                words += [flag_name(setting.name if value else f"no_{setting.name}")]
            else:
                words += [flag_name(setting.name), *map(str, value if setting.many else (value,))]
    return words
