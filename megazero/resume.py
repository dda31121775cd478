"""What a resumed run may change: the command line against the configuration saved in a checkpoint.

The command line counts. But whatever makes the model another one is refused, and so is another schedule unless the user
says which of the two is meant: before any rank waits for another.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from .config import Config, ModelConfig
from .config_moe import MoEConfig
from .settings import flag_name

# Fields that change which weights a model has, or what the same weights compute.
MODEL_FIELDS = frozenset(
    {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "ffn_hidden_size",
        "kv_channels",
        "num_query_groups",
        "vocab_size",
        "normalization",
        "norm_epsilon",
        "rotary_base",
        "use_rope_scaling",
        "rope_scaling_factor",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "rope_original_max_positions",
        "position_embedding_type",
        "rotary_percent",
        "rotary_interleaved",
        "activation",
        "disable_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "window_size",
        "softmax_type",
        "untie_embeddings_and_output_weights",
        "num_experts",
        "mlp_type",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_family",
        "moe_router_topk",
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_enable_expert_bias",
    }
)


SCHEDULE_SECTIONS = ("schedule", "deepspeed_schedule")
HOW_TO_RESUME = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")


@dataclass(frozen=True)
class Difference:
    """One field that is not what it was; `model` says that a checkpoint cannot be resumed with it."""

    section: str
    name: str
    old: Any
    new: Any
    model: bool

    def __str__(self) -> str:
        return f"{flag_name(self.name)}: {self.old} in the checkpoint, {self.new} now"


def effective_model(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model with defaults filled in, so that two spellings of one model are equal."""
    filled = {
        "ffn_hidden_size": model.ffn,
        "kv_channels": model.head_dim,
        "num_query_groups": model.query_groups,
        "group_query_attention": model.query_groups < model.num_attention_heads,
        "max_position_embeddings": model.positions,
        "add_qkv_bias": model.qkv_bias,
        "window_size": model.windows,
        "window_attn_skip_freq": None,
    }
    return asdict(model) | filled


def effective_moe(config: Config) -> dict[str, Any]:
    """The fields about experts as they act: `num_experts` says of every layer how many it has. Of a dense model no
    rule of a router makes another model, so it has the defaults."""
    moe = config.moe if config.moe.any else MoEConfig()
    filled = {
        "num_experts": config.experts,
        "moe_layer_freq": None,
        "expert_interval": None,
        "moe_family": moe.family,
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size or config.model.ffn,
        "moe_router_topk": moe.topk,
        "moe_router_load_balancing_type": tuple(moe.balancing),
        "moe_aux_loss_coeff": tuple(moe.balancing.values()),
    }
    return asdict(moe) | filled


def differences(old: Config, new: Config) -> list[Difference]:
    """Fields in which two configurations differ in effect, in the order of the sections.

    A vocabulary size that one side leaves to its tokenizer is no difference, and the number of positions makes
    another model only where they are a learned table.
    """
    before = asdict(old) | {"model": effective_model(old.model), "moe": effective_moe(old)}
    after = asdict(new) | {"model": effective_model(new.model), "moe": effective_moe(new)}
    learned = "learned_absolute" in (old.model.position_embedding_type, new.model.position_embedding_type)
    found = []
    for section, values in after.items():
        for name, value in values.items():
            was = before[section][name]
            if value == was or (name == "vocab_size" and None in (was, value)) or name in HOW_TO_RESUME:
                continue
            model = name in MODEL_FIELDS and (learned or name != "max_position_embeddings")
            found.append(Difference(section, name, was, value, model))
    return found


def check_same_model(saved: Config, config: Config) -> None:
    """ValueError with every field, old and new, that makes this run's model another one than the checkpoint's."""
    wrong = [str(difference) for difference in differences(saved, config) if difference.model]
    if wrong:
        raise ValueError(f"the checkpoint holds another model: {'; '.join(wrong)}")


def as_resumed(config: Config) -> Config:
    """`config` for a run that --auto-resume goes on with: --finetune and --no-load-optim were for its first start, from
    what --load names, and not for each time that the same command is given again."""
    return replace(config, checkpoint=replace(config.checkpoint, finetune=False, no_load_optim=False))


def with_agreed_schedule(saved: Config, config: Config) -> Config:
    """`config` with the schedule that a resumed run goes on with; the length of the run stays the new one.

    The command line's with --override-opt_param-scheduler, the checkpoint's with --use-checkpoint-opt_param-scheduler.
    With neither they must be equal: ValueError with all that is not, old and new.
    """
    asked = config.schedule
    if asked.override_opt_param_scheduler:
        return config
    if asked.use_checkpoint_opt_param_scheduler:
        how = {name: vars(asked)[name] for name in HOW_TO_RESUME}
        try:
            return replace(config, schedule=replace(saved.schedule, **how), deepspeed_schedule=saved.deepspeed_schedule)
        except ValueError as wrong:
            raise ValueError(f"{wrong} (in the checkpoint's schedule: see --override-opt_param-scheduler)") from wrong
    wrong = [str(found) for found in differences(saved, config) if found.section in SCHEDULE_SECTIONS]
    if wrong:
        raise ValueError(
            f"the checkpoint has another schedule: {'; '.join(wrong)}: give --override-opt_param-scheduler for this "
            "command line's, or --use-checkpoint-opt_param-scheduler for the checkpoint's"
        )
    return config
