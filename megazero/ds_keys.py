"""Every key of a DeepSpeed configuration file that is known, as dotted paths, and what becomes of it.

A key sets a flag (SETS), is worked out by a rule of ds_config.py (WORKED_OUT), is accepted and changes nothing for a
stated reason (ACCEPTED), or asks for a capability that is missing (REFUSED, SECTIONS), unless its value asks for none.
"""

from __future__ import annotations

from typing import Any

# Key -> flag and the JSON type of its value. A null says nothing.
SETS: dict[str, tuple[str, type]] = {
    "train_batch_size": ("global-batch-size", int),
    "train_micro_batch_size_per_gpu": ("micro-batch-size", int),
    "gradient_accumulation_steps": ("gradient-accumulation-steps", int),
    "gradient_clipping": ("clip-grad", float),
    "zero_optimization.stage": ("zero-stage", int),
    "zero_optimization.reduce_bucket_size": ("bucket-size", int),
    "zero_optimization.overlap_comm": ("overlap-grad-reduce", bool),
    "memory_breakdown": ("log-memory", bool),
    "comms_logger.enabled": ("log-comms", bool),
    "fp16.enabled": ("fp16", bool),
    "fp16.loss_scale": ("loss-scale", float),
    "fp16.initial_scale_power": ("initial-scale-power", int),
    "fp16.loss_scale_window": ("loss-scale-window", int),
    "fp16.hysteresis": ("hysteresis", int),
    "fp16.consecutive_hysteresis": ("consecutive-hysteresis", bool),
    "fp16.min_loss_scale": ("min-loss-scale", float),
    "bf16.enabled": ("bf16", bool),
    "bfloat16.enabled": ("bf16", bool),
    "optimizer.params.lr": ("lr", float),
    "optimizer.params.eps": ("adam-eps", float),
    "optimizer.params.weight_decay": ("weight-decay", float),
    "optimizer.params.min_coeff": ("lamb-min-coeff", float),
    "optimizer.params.max_coeff": ("lamb-max-coeff", float),
    "scheduler.type": ("lr-scheduler", str),
    "scheduler.params.lr_range_test_min_lr": ("lr-range-test-min-lr", float),
    "scheduler.params.lr_range_test_step_size": ("lr-range-test-step-size", int),
    "scheduler.params.lr_range_test_step_rate": ("lr-range-test-step-rate", float),
    "scheduler.params.lr_range_test_staircase": ("lr-range-test-staircase", bool),
    "scheduler.params.cycle_min_lr": ("cycle-min-lr", float),
    "scheduler.params.cycle_max_lr": ("cycle-max-lr", float),
    "scheduler.params.decay_lr_rate": ("decay-lr-rate", float),
    "scheduler.params.cycle_first_step_size": ("cycle-first-step-size", int),
    "scheduler.params.cycle_second_step_size": ("cycle-second-step-size", int),
    "scheduler.params.cycle_first_stair_count": ("cycle-first-stair-count", int),
    "scheduler.params.cycle_second_stair_count": ("cycle-second-stair-count", int),
    "scheduler.params.decay_step_size": ("decay-step-size", int),
    "scheduler.params.cycle_momentum": ("cycle-momentum", bool),
    "scheduler.params.cycle_min_mom": ("cycle-min-mom", float),
    "scheduler.params.cycle_max_mom": ("cycle-max-mom", float),
    "scheduler.params.decay_mom_rate": ("decay-mom-rate", float),
    "scheduler.params.warmup_min_lr": ("warmup-min-lr", float),
    "scheduler.params.warmup_max_lr": ("warmup-max-lr", float),
    "scheduler.params.warmup_num_steps": ("warmup-num-steps", int),
    "scheduler.params.warmup_type": ("warmup-type", str),
    "scheduler.params.total_num_steps": ("total-num-steps", int),
    "scheduler.params.warmup_min_ratio": ("warmup-min-ratio", float),
    "scheduler.params.cos_min_ratio": ("cos-min-ratio", float),
    "curriculum_learning.schedule_type": ("curriculum-schedule-type", str),
    "curriculum_learning.min_difficulty": ("curriculum-min-difficulty", int),
    "curriculum_learning.max_difficulty": ("curriculum-max-difficulty", int),
    "curriculum_learning.schedule_config.total_curriculum_step": ("curriculum-total-step", int),
    "curriculum_learning.schedule_config.difficulty_step": ("curriculum-difficulty-step", int),
    "curriculum_learning.schedule_config.root_degree": ("curriculum-root-degree", float),
    "curriculum_learning.schedule_config.difficulty": ("curriculum-difficulty", list),
    "curriculum_learning.schedule_config.max_step": ("curriculum-max-step", list),
    "pipeline.stages": ("pipeline-model-parallel-size", int),
    "moe.num_experts": ("num-experts", list),
    "moe.ep_size": ("expert-model-parallel-size", int),
    "moe.k": ("moe-router-topk", int),
    "moe.capacity_factor": ("moe-train-capacity-factor", float),
    "moe.eval_capacity_factor": ("moe-eval-capacity-factor", float),
    "moe.min_capacity": ("moe-min-capacity", int),
    "moe.noisy_gate_policy": ("moe-noisy-gate-policy", str),
    "moe.use_rts": ("moe-use-rts", bool),
    "moe.enable_expert_tensor_parallelism": ("enable-expert-tensor-parallelism", bool),
    "steps_per_print": ("log-interval", int),
    "wandb.team": ("wandb-entity", str),
}  # fmt: skip

# Of these the flag counts where it is given too: two interpreters of one file, or two places of one kind of output.
WEAK = ("steps_per_print", "wandb.team")

# Keys that one rule of ds_config.py turns into flags, and the flags.
WORKED_OUT: dict[str, tuple[str, ...]] = {
    "communication_data_type": ("grad-reduce-in-bf16",),
    "optimizer.type": ("optimizer", "decoupled-weight-decay"),
    "optimizer.params.adam_w_mode": ("decoupled-weight-decay",),
    "optimizer.params.betas": ("adam-beta1", "adam-beta2"),
    "optimizer.params.momentum": ("sgd-momentum", "muon-momentum"),
    "curriculum_learning.enabled": (),
    "curriculum_learning.curriculum_type": (),
    "wall_clock_breakdown": ("timing-log-level",),
    "flops_profiler.enabled": ("flops-profiler",),
    "flops_profiler.profile_step": ("flops-profiler",),
    "pipeline.partition": ("pipeline-split",),
    "pipeline.activation_checkpoint_interval": ("recompute-granularity", "recompute-method", "recompute-num-layers"),
    "tensor_parallel.autotp_size": ("tensor-model-parallel-size",),
    "tensor_parallel.tp_size": ("tensor-model-parallel-size",),
    "tensor_parallel.tp.tp_size": ("tensor-model-parallel-size",),
    "moe.enabled": (),
    "moe.type": ("mlp-type",),
    "moe.use_residual": ("mlp-type",),
    "moe.drop_tokens": ("disable-moe-token-dropping",),
    "moe.top2_2nd_expert_sampling": ("disable-moe-top2-2nd-expert-sampling",),
    "tensorboard.enabled": (),
    "tensorboard.output_path": ("tensorboard-dir",),
    "tensorboard.job_name": ("tensorboard-dir",),
    "wandb.enabled": (),
    "wandb.project": ("wandb-project",),
}

# Reason -> keys that change nothing.
ACCEPTED = {
    "gradients are divided once, in fp32 or wider": "prescale_gradients gradient_predivide_factor",
    "gradients are always accumulated in fp32 or wider": """data_types.grad_accum_dtype fp32_allreduce
        bf16.immediate_grad_update bfloat16.immediate_grad_update""",
    "parameters are gathered in the buckets that gradients are reduced in": "zero_optimization.allgather_bucket_size",
    "changes speed only": """zero_optimization.reduce_scatter zero_optimization.allgather_partitions
        zero_optimization.round_robin_gradients zero_optimization.use_multi_rank_bucket_allreduce
        zero_optimization.legacy_stage1 sparse_gradients disable_allgather graph_harvesting
        pipeline.pipe_partitioned pipeline.grad_partitioned pipeline.use_reentrant tensor_parallel.tp_overlap_comm
        tensor_parallel.tp_grain_size tensor_parallel.tp.tp_grain_size moe.use_tutel""",
    "gradients always lie in flat buffers": "zero_optimization.contiguous_gradients",
    "an unused parameter has a gradient of zero": "zero_optimization.ignore_unused_parameters",
    "any layout reads any checkpoint": """zero_optimization.elastic_checkpoint zero_optimization.load_from_fp32_weights
        zero_optimization.pipeline_loading_checkpoint checkpoint.tag_validation checkpoint.parallel_write
        checkpoint.use_node_local_storage checkpoint.writer checkpoint.load_universal""",
    "only parameters that are cut have use for it": """zero_optimization.sub_group_size
        zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
        zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold
        zero_optimization.stage3_model_persistence_threshold zero_optimization.stage3_module_granularity_threshold
        zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.stage3_allgather_sequential
        zero_optimization.stage3_gather_16bit_weights_on_model_save
        zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.log_trace_cache_warnings
        zero_optimization.memory_efficient_linear zero_optimization.override_module_apply""",
    "only what is on a disk has use for it": """aio.block_size aio.queue_depth aio.single_submit aio.overlap_events
        aio.thread_count aio.intra_op_parallelism aio.use_gds""",
    "every optimizer goes with every stage": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "the sequence is always cut over the tensor ranks between layers": "activation_checkpointing.partition_activations",
    "memory is left to torch": """activation_checkpointing.contiguous_memory_optimization
        activation_checkpointing.number_checkpoints activation_checkpointing.synchronize_checkpoint_boundary""",
    "there is one implementation of each part": "optimizer.params.torch_adam optimizer.params.adam_w_kernel",
    "a resumed run goes on where it was": "scheduler.params.last_batch_iteration",
    "ids are never cast": "fp16.auto_cast",
    "every gradient is checked": "bf16.check_grad_overflow bfloat16.check_grad_overflow",
    "samples go on over epochs, so that no batch is left over": "dataloader_drop_last",
    "weights never depend on the layout": "pipeline.seed_layers",
    "no order of ranks changes what is trained": "use_data_before_expert_parallelism",
    "the seconds of each step are always logged, and --profile traces its parts": """activation_checkpointing.profile
        timers.throughput""",
    "--print-config prints it": "dump_state",
    "--flops-profiler prints every kind of layer": """flops_profiler.module_depth flops_profiler.top_modules
        flops_profiler.detailed flops_profiler.output_file flops_profiler.recompute_fwd_factor""",
    "--log-comms tells of every collective": """comms_logger.verbose comms_logger.prof_all comms_logger.debug
        comms_logger.prof_ops""",
    "there is no second cut of the sequence": "seq_parallel_communication_data_type",
}

# Missing capability -> keys that ask for it, and after = the value with which they do not, beside null and false.
REFUSED = {
    "states and parameters off the device": """zero_optimization.offload_optimizer=none
        zero_optimization.offload_param=none zero_optimization.cpu_offload zero_optimization.cpu_offload_params
        zero_optimization.cpu_offload_use_pin_memory zero_optimization.super_offload zero_optimization.zenflow""",
    "activations on the host": "activation_checkpointing.cpu_checkpointing",
    "ZeRO++ and MiCS": """zero_optimization.zero_hpz_partition_size=1 zero_optimization.zero_quantized_weights
        zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_gradients
        zero_optimization.mics_shard_size=-1 zero_optimization.mics_hierarchical_params_gather""",
    "training without fp32 masters": """fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads
        bf16.bf16_optimizer_states""",
    "another form of the optimizer's rule": """optimizer.params.amsgrad optimizer.params.nesterov
        optimizer.params.dampening=0 optimizer.params.max_grad_norm=0 optimizer.legacy_fusion""",
    "Adam without bias correction": "optimizer.params.bias_correction=true",
    "groups of Weights & Biases": "wandb.group",
    "another cut of the sequence": "sequence_parallel_size=1",
}

# Sections that are refused as a whole, unless nothing in them is enabled.
SECTIONS = {
    "amp": "mixed precision by apex", "torch_autocast": "autocast", "data_efficiency": "DeepSpeed's data efficiency",
    "compression_training": "compression", "sparse_attention": "sparse attention", "elasticity": "elastic batches",
    "autotuning": "autotuning", "progressive_layer_drop": "dropping layers", "eigenvalue": "eigenvalues",
    "quantize_training": "quantized training", "weight_quantization": "quantized weights",
    "hybrid_engine": "the hybrid engine", "nebula": "Nebula", "comet": "Comet",
    "csv_monitor": "CSV files (see --metrics-jsonl)", "compile": "another compiler (see --compile)",
}  # fmt: skip

# Sections of which nothing counts where their `enabled` is false, as it is without a word in all but moe.
SWITCHED = (
    "fp16", "bf16", "bfloat16", "curriculum_learning", "flops_profiler", "comms_logger", "tensorboard", "wandb", "moe",
)  # fmt: skip

# Sections that say where something lies, and what may stand in them.
PLACES = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
OF_A_PLACE = (
    "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline", "pipeline_read",
    "pipeline_write", "fast_init", "ratio",
)  # fmt: skip

# Flags without which "auto" means nothing: there is no default.
WITHOUT_DEFAULT = (
    "micro-batch-size", "lr", "cycle-min-lr", "cycle-max-lr", "curriculum-schedule-type", "curriculum-min-difficulty",
    "curriculum-total-step", "curriculum-root-degree", "curriculum-difficulty", "lr-scheduler",
)  # fmt: skip


def keys_of(table: dict[str, str]) -> dict[str, tuple[str, Any]]:
    """Key -> (reason, harmless value or None) of a table written by reasons."""
    values = {"none": "none", "true": True}
    found = {}
    for reason, words in table.items():
        for word in words.split():
            key, equals, value = word.partition("=")
            found[key] = (reason, (values[value] if value in values else int(value)) if equals else None)
    return found


ACCEPTED_KEYS = {key: reason for key, (reason, _) in keys_of(ACCEPTED).items()}
REFUSED_KEYS = keys_of(REFUSED)
KNOWN = {*SETS, *WORKED_OUT, *ACCEPTED_KEYS, *REFUSED_KEYS, *SECTIONS}
