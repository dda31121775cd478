"""Which settings say nothing beside others, and why: a run tells of the flags that were given in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .config import SECTIONS, Config
from .settings import section_settings

LOSS_SCALE_MOVES = (
    "initial_loss_scale", "initial_scale_power", "min_loss_scale", "loss_scale_window", "hysteresis",
    "consecutive_hysteresis", "loss_scale_floor",
)  # fmt: skip
TEACHER = (
    "load_teacher", "num_layers_teacher", "hidden_size_teacher", "num_attention_heads_teacher", "num_experts_teacher",
    "kd_alpha_ce", "kd_beta_ce", "kd_temp", "kd_stop_iteration", "kd_stop_tokens",
)  # fmt: skip
BOARDS = (
    "tensorboard_queue_size", "tensorboard_log_interval", "log_memory_to_tensorboard",
    "log_validation_ppl_to_tensorboard", "log_timers_to_tensorboard", "log_batch_size_to_tensorboard",
)  # fmt: skip
EXPERTS = tuple(setting.name for setting in section_settings("moe", SECTIONS["moe"]) if setting.name != "num_experts")
WORD_LISTS = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
WITHOUT_MODEL = (*WORD_LISTS, "NullTokenizer", "NullMultimodalTokenizer", "ByteTokenizer")

# Why, when that is so, and the fields that say nothing then.
IDLE: tuple[tuple[str, Callable[[Config], bool], tuple[str, ...]], ...] = (
    ("the loss is scaled only with --fp16", lambda c: not c.precision.fp16,
     ("loss_scaler", "loss_scale", *LOSS_SCALE_MOVES)),
    ("a constant --loss-scale does not move", lambda c: c.precision.fp16 and bool(c.precision.loss_scale),
     LOSS_SCALE_MOVES),
    ("nothing is profiled without --profile", lambda c: not c.logging.profile,
     ("profile_step_start", "profile_step_end", "profile_ranks", "profile_dir")),
    ("there is no teacher without --mos or --kd", lambda c: not c.distill.asked, TEACHER),
    ("no layer has experts without --num-experts above 1", lambda c: not c.moe.any,
     (*EXPERTS, "expert_tensor_parallel_size", "enable_expert_tensor_parallelism")),
    ("nothing is saved without --save", lambda c: c.checkpoint.save is None,
     ("save_interval", "async_save", "no_save_optim", "save_retain_interval", "checkpoint_file_mib")),
    ("nothing is loaded without --load", lambda c: c.checkpoint.load is None and not c.checkpoint.auto_resume,
     ("no_load_optim", "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "verify_checkpoint")),
    ("nothing is evaluated without --eval-interval", lambda c: not (c.batch.eval_interval or c.batch.skip_train),
     ("eval_iters", "eval_global_batch_size", "eval_micro_batch_size", "valid_set")),
    ("there are no boards without --tensorboard-dir",
     lambda c: c.logging.tensorboard_dir is None and c.watching.wandb_project is None, BOARDS),
    ("there is no such run without --wandb-project", lambda c: c.watching.wandb_project is None,
     ("wandb_exp_name", "wandb_entity", "wandb_save_dir")),
    ("nothing is timed at --timing-log-level 0", lambda c: not c.watching.timing_log_level,
     ("timing_log_option", "barrier_with_level_1_timing")),
    ("no spike is looked for at --spike-action off", lambda c: c.operations.spike_action == "off",
     ("spike_threshold", "spike_window")),
    ("positions are not rotary", lambda c: c.model.position_embedding_type != "rope",
     ("rotary_base", "rotary_percent", "rotary_interleaved")),
    ("frequencies are not stretched without --use-rope-scaling", lambda c: not c.model.use_rope_scaling,
     ("rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_positions")),
    ("--optimizer is another one", lambda c: c.optimizer.optimizer != "sgd", ("sgd_momentum",)),
    ("--optimizer is another one", lambda c: c.optimizer.optimizer == "sgd", ("adam_beta1", "adam_beta2", "adam_eps")),
    ("--optimizer is another one", lambda c: c.optimizer.optimizer != "lamb", ("lamb_min_coeff", "lamb_max_coeff")),
    ("--optimizer is another one", lambda c: c.optimizer.optimizer != "muon",
     ("muon_momentum", "muon_num_ns_steps", "muon_bf16")),
    ("--lr-decay-style is not WSD", lambda c: c.schedule.lr_decay_style != "WSD",
     ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")),
    ("no parameter is gathered at --zero-stage 0", lambda c: c.optimizer.zero_stage == 0, ("overlap_param_gather",)),
    ("micro-batches go in groups only where --pipeline-schedule is interleaved",
     lambda c: c.parallel.schedule(c.model.num_layers) != "interleaved",
     ("microbatch_group_size_per_virtual_pipeline_stage",)),
    ("only --data-path is split", lambda c: not c.data.data_path, ("split",)),
    ("the tokenizer reads no such file", lambda c: kind_of_tokenizer(c) not in WORD_LISTS, ("vocab_file",)),
    ("the tokenizer reads no such file", lambda c: kind_of_tokenizer(c) != "GPT2BPETokenizer", ("merge_file",)),
    ("the tokenizer reads no such file", lambda c: kind_of_tokenizer(c) in WITHOUT_MODEL, ("tokenizer_model",)),
    ("it is for TikTokenizer", lambda c: kind_of_tokenizer(c) != "TikTokenizer", ("tiktoken_pattern",)),
)  # fmt: skip


def kind_of_tokenizer(config: Config) -> str | None:
    """Its name; None: it is not said."""
    return config.data.tokenizer_type or ("GPT2BPETokenizer" if config.data.vocab_file else None)


def idle_fields(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Why, and the fields that say nothing in this configuration."""
    return ((reason, fields) for reason, holds, fields in IDLE if holds(config))
