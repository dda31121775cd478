"""Which test shows what each field of the configuration does; test_flag_effects.py has the rest, and checks it."""

# File and test -> fields.
SHOWN = {
    "data/test_corpora.py::test_blend_takes_corpora_by_weight": "data_path",
    "data/test_corpora.py::test_data_of_another_vocabulary_is_refused_c016": "vocab_size",
    "data/test_corpora.py::test_mock_parts_differ": "mock_data",
    "data/test_corpora.py::test_named_validation_sets_stand_between_valid_and_test": "valid_set",
    "data/test_corpora.py::test_parts_may_have_paths_of_their_own": "train_data_path valid_data_path test_data_path",
    "data/test_corpora.py::test_parts_read_their_own_documents": "split",
    "data/test_legacy.py::test_a_corpus_is_split_by_sequences_and_read_in_cores_order": "sample_order",
    "data/test_loader.py::test_global_batch_is_the_same_set_in_every_layout": "micro_batch_size",
    "data/test_loader.py::test_growing_batch_takes_every_sample_once_in_every_layout": "num_workers",
    "data/test_samples.py::test_each_epoch_is_a_full_pass_with_its_own_order_c022": "seq_length seed",
    "data/test_tokenizer.py::test_all_names_of_both_families_are_known": "tokenizer_type tokenizer_model",
    "data/test_tokenizer.py::test_gpt2_reads_vocabulary_and_merges": "vocab_file",
    "data/test_tokenizer.py::test_gpt2_reference_ids": "merge_file",
    "data/test_tokenizer.py::test_tiktoken_patterns_differ_where_the_case_changes": "tiktoken_pattern",
    "kernels/test_dispatch.py::test_one_choice_for_all_and_exceptions_for_some": "kernels kernel",
    "moe/test_pyramid.py::test_active_operations_of_an_moe_are_those_of_the_dense_model_and_the_routers": "mlp_type",
    "moe/test_pyramid.py::test_operations_of_a_layer_count_every_expert_of_a_token":
        "num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate",
    "moe/test_pyramid.py::test_the_count_is_that_of_the_declared_parameters":
        "num_layers hidden_size num_attention_heads ffn_hidden_size num_query_groups normalization",
    "moe/test_router.py::test_c099_ties_are_decided_alike_every_time": "disable_moe_top2_2nd_expert_sampling",
    "moe/test_router.py::test_c100_capacity_holds_without_random_selection": "moe_family",
    "moe/test_router.py::test_c101_a_capacity_above_the_tokens_drops_nothing": "moe_train_capacity_factor",
    "moe/test_router.py::test_golden_megatron_losses": "moe_router_pre_softmax moe_z_loss_coeff",
    "moe/test_router.py::test_golden_top1": "moe_min_capacity",
    "moe/test_router.py::test_jitter_multiplies_the_input_in_training": "moe_input_jitter_eps",
    "moe/test_router.py::test_memory_is_linear_in_tokens_times_experts": "moe_expert_capacity_factor",
    "moe/test_router.py::test_random_token_selection_is_another_one_in_each_draw_and_the_same_in_the_same":
        "moe_use_rts",
    "moe/test_router.py::test_rsample_draws_from_the_softmax_and_weighs_without_noise": "moe_noisy_gate_policy",
    "moe/test_router.py::test_sinkhorn_is_even_and_chooses_only_in_training": "moe_router_topk",
    "moe/test_router.py::test_the_bias_balances_and_leaves_the_weights_alone":
        "moe_router_score_function moe_router_enable_expert_bias",
    "moe/test_router.py::test_the_factor_is_the_decimal_number_that_was_written": "moe_eval_capacity_factor",
    "moe/test_router.py::test_the_gate_of_deepspeed": "moe_token_drop_policy",
    "moe/test_router.py::test_the_gate_of_megatron":
        "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk",
    "moe/test_router.py::test_the_sequence_level_loss_is_the_mean_over_sequences": "moe_router_load_balancing_type",
    "moe/test_router.py::test_without_dropping_every_choice_is_kept":
        "disable_moe_token_dropping disable_moe_token_dropping_in_eval",
    "parallel/test_buckets.py::test_every_copy_of_a_weight_has_the_same_bits_after_training": "hidden_dropout",
    "parallel/test_random.py::test_a_history_of_draws_would_be_seen":
        "recompute_granularity recompute_method recompute_num_layers",
    "parallel/test_random.py::test_training_with_dropout_is_the_same_over_any_pipeline_and_data_ranks":
        "attention_dropout",
    "parallel/test_reducer.py::test_sums_can_be_read_more_than_once": "bucket_size",
    "pipe/test_schedules_run.py::test_an_interleaved_run_goes_in_the_groups_that_are_asked_for":
        "microbatch_group_size_per_virtual_pipeline_stage",
    "pipe/test_schedules_run.py::test_every_schedule_trains_the_same_model_as_one_rank":
        "pipeline_schedule num_virtual_stages_per_pipeline_rank",
    "pipe/test_split.py::test_first_and_last_rank_may_hold_other_numbers_of_layers":
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
    "pipe/test_trace.py::test_every_rank_writes_its_program_with_times": "trace_pipeline",
    "test_attention.py::test_attention_equals_explicit_heads":
        "kv_channels disable_bias_linear add_qkv_bias qk_layernorm",
    "test_attention.py::test_llama_3_scaling_follows_the_published_rule":
        """use_rope_scaling rope_scaling_factor rope_low_freq_factor rope_high_freq_factor
        rope_original_max_positions""",
    "test_attention.py::test_rotary_gradients": "rotary_percent rotary_interleaved",
    "test_attention.py::test_rotary_turns_queries_and_keys_and_leaves_values": "rotary_base",
    "test_attention_core.py::test_a_model_computes_the_same_with_either": "apply_query_key_layer_scaling",
    "test_batch_sizes.py::test_a_batch_is_rounded_down_to_whole_micro_batches_where_that_is_asked_for":
        "decrease_batch_size_if_needed",
    "test_batch_sizes.py::test_every_size_on_the_way_must_be_filled_c137": "global_batch_size",
    "test_batch_sizes.py::test_sizes_do_not_depend_on_micro_batch_or_data_size": "rampup_batch_size",
    "test_compiled.py::test_compiled_formulas_train_the_same_model": "compile",
    "test_config.py::test_unset_fields_follow_from_others": "group_query_attention",
    "test_config_moe.py::test_c107_the_degree_fits_the_ranks_of_a_stage": "expert_model_parallel_size",
    "test_config_moe.py::test_experts_are_cut_over_tensor_ranks_or_shared_by_them":
        "expert_tensor_parallel_size enable_expert_tensor_parallelism",
    "test_config_moe.py::test_several_kinds_of_balancing_have_a_coefficient_each": "moe_aux_loss_coeff",
    "test_config_moe.py::test_the_families_place_experts_at_opposite_layers": "moe_layer_freq expert_interval",
    "test_curriculum.py::test_any_layout_trains_the_same_with_samples_that_grow":
        "curriculum_schedule_type curriculum_min_difficulty curriculum_total_step curriculum_difficulty_step",
    "test_curriculum.py::test_discrete_lengths_are_those_of_deepspeeds_scheduler":
        "curriculum_difficulty curriculum_max_step",
    "test_curriculum.py::test_lengths_are_those_of_deepspeeds_scheduler":
        "curriculum_max_difficulty curriculum_root_degree",
    "test_data_runs.py::test_a_staircase_counts_tokens": "step_batch_size_schedule",
    "test_ds_config.py::test_a_file_is_read_alike_by_the_run_and_by_its_flags": "deepspeed deepspeed_config",
    "test_ds_config.py::test_sizes_of_batches_must_be_one_equation": "gradient_accumulation_steps",
    "test_eval_sizes.py::test_evaluation_disturbs_no_bit_of_training": "eval_micro_batch_size",
    "test_eval_sizes.py::test_skip_train_evaluates_what_was_saved_and_leaves": "skip_train",
    "test_eval_sizes.py::test_the_loss_is_of_as_many_samples_as_were_asked_for":
        "eval_interval eval_iters eval_global_batch_size",
    "test_evaluate.py::test_documents_kept_apart_in_one_window_score_as_each_for_itself":
        "reset_position_ids reset_attention_mask eod_mask_loss",
    "test_front_door.py::test_a_finished_run_does_nothing_when_relaunched_and_goes_on_to_a_larger_target":
        "train_iters save load save_interval",
    "test_front_door.py::test_a_model_that_does_not_fit_is_said_not_to": "device_memory_gb",
    "test_front_door.py::test_a_run_is_left_at_an_interval_or_after_a_time_with_a_save": "exit_interval",
    "test_stopping.py::test_interrupted_twice_a_run_leaves_at_once_and_a_file_stops_it_too": "kill_switch_path",
    "test_stopping.py::test_signals_are_left_to_the_system_on_request_and_after_the_run": "exit_signal_handler",
    "test_failing.py::test_a_job_that_hangs_says_which_rank_waits_for_whom_and_where": "hang_timeout_minutes",
    "test_bad_numbers.py::test_the_step_the_rank_and_the_layer_are_named_and_nothing_is_saved":
        "check_for_nan_in_loss_and_grad",
    "test_bad_numbers.py::test_a_step_with_bad_numbers_is_passed_over_on_request_and_leaves_no_trace":
        "nonfinite_action",
    "test_bad_numbers.py::test_a_loss_that_jumps_is_told_skipped_or_ends_the_run": "spike_action",
    "test_bad_numbers.py::test_the_flags_of_spikes_reach_the_rule": "spike_threshold spike_window",
    "test_bad_numbers.py::test_replicas_that_are_no_longer_alike_are_named": "check_replicas",
    "test_front_door.py::test_all_ranks_leave_together_when_the_time_of_one_is_up": "exit_duration_in_mins",
    "test_front_door.py::test_auto_resume_starts_anew_where_there_is_nothing_and_says_so": "auto_resume",
    "test_front_door.py::test_the_attention_that_is_asked_for_runs": "attention_backend",
    "test_front_door.py::test_the_configuration_is_printed_whole": "print_config",
    "test_front_door.py::test_the_layout_of_a_large_world_is_told_in_seconds": "json",
    "test_front_door.py::test_the_layout_of_a_world_is_printed_without_the_world":
        "tensor_model_parallel_size pipeline_model_parallel_size print_layout world_size",
    "test_loss_scale.py::test_a_clean_step_leaves_the_floor_behind": "loss_scale_floor",
    "test_loss_scale.py::test_a_scale_never_grows_to_infinity": "initial_scale_power loss_scale_window",
    "test_loss_scale.py::test_c090_a_run_of_skips_ends_naming_scale_and_parameter": "max_consecutive_skips",
    "test_loss_scale.py::test_c090_by_default_a_run_comes_down_to_the_smallest_scale_before_it_ends": "min_loss_scale",
    "test_loss_scale.py::test_each_rule_gives_its_familys_scales": "hysteresis consecutive_hysteresis",
    "test_loss_scale.py::test_initial_scales_are_the_families_or_the_flags":
        "loss_scaler loss_scale initial_loss_scale",
    "test_lr_curves.py::test_a_cycle_rises_to_its_top_and_ends_at_its_bottom_whatever_its_sizes":
        "cycle_min_lr cycle_max_lr cycle_first_step_size cycle_second_step_size",
    "test_lr_curves.py::test_each_schedule_gives_deepspeeds_rates":
        "lr_scheduler lr_range_test_staircase warmup_max_lr warmup_type",
    "test_lr_curves.py::test_golden_range_test_reaches_its_rates_when_published":
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate",
    "test_lr_curves.py::test_only_one_cycle_with_momentum_has_a_momentum": "cycle_momentum",
    "test_lr_curves.py::test_printed_tokens_are_those_of_the_samples": "print_lr",
    "test_lr_curves.py::test_rates_that_are_not_given_follow_from_lr": "warmup_num_steps",
    "test_lr_curves.py::test_stairs_hold_the_rate_between_two_steps_of_a_cycle":
        "cycle_first_stair_count cycle_second_stair_count",
    "test_lr_curves.py::test_the_last_step_is_the_runs_where_it_is_not_given": "total_num_steps",
    "test_lr_curves.py::test_the_momentum_of_one_cycle_is_deepspeeds_below_one": "decay_lr_rate decay_step_size",
    "test_lr_schedule.py::test_a_run_ends_at_its_tokens_or_before": "train_samples train_tokens",
    "test_lr_schedule.py::test_a_schedule_in_tokens_has_megatrons_rates_at_as_many_tokens": "lr_warmup_fraction",
    "test_lr_schedule.py::test_a_warmup_in_samples_counts_samples_before_a_decay_in_tokens": "lr_warmup_samples",
    "test_lr_schedule.py::test_constant_weight_decay_is_the_flag": "weight_decay",
    "test_lr_schedule.py::test_decoupled_rates_have_the_shape_of_the_others": "min_lr decoupled_min_lr",
    "test_lr_schedule.py::test_each_style_gives_megatrons_rates": "lr lr_decay_style",
    "test_lr_schedule.py::test_each_tail_of_wsd_gives_megatrons_rates": "lr_wsd_decay_style lr_wsd_decay_samples",
    "test_lr_schedule.py::test_iterations_are_samples_times_the_global_batch": "lr_decay_samples",
    "test_lr_schedule.py::test_rates_go_from_largest_to_smallest_and_stay_there": "lr_wsd_decay_iters",
    "test_lr_schedule.py::test_tokens_are_counted_as_they_were_not_as_samples": "lr_decay_tokens lr_warmup_tokens",
    "test_lr_schedule.py::test_warmup_by_fraction_is_a_share_of_the_decay": "lr_decay_iters",
    "test_lr_schedule.py::test_warmup_starts_at_its_initial_rate": "lr_warmup_init",
    "test_lr_schedule.py::test_weight_decay_grows_as_megatrons":
        "start_weight_decay end_weight_decay weight_decay_incr_style",
    "test_metrics.py::test_json_lines_have_every_iteration_at_full_precision": "metrics_jsonl",
    "test_metrics.py::test_one_line_per_interval_and_after_the_last_iteration": "log_interval",
    "test_metrics.py::test_tensorboard_has_the_listed_tags":
        """tensorboard_dir log_memory_to_tensorboard log_validation_ppl_to_tensorboard
        log_timers_to_tensorboard log_batch_size_to_tensorboard log_throughput""",
    "test_metrics.py::test_a_terminal_shows_a_bar_with_the_time_left_and_whole_lines_above_it": "progress_bar",
    "test_metrics.py::test_tensorboard_has_every_nth_iteration_where_that_is_asked_for": "tensorboard_log_interval",
    "test_metrics.py::test_weights_and_biases_gets_the_figures_of_tensorboard":
        "wandb_project wandb_exp_name wandb_entity wandb_save_dir",
    "test_moe_runs.py::test_one_expert_takes_every_token_and_three_ranks_receive_none": "moe_router_bias_update_rate",
    "test_overflow_runs.py::test_c090_a_run_from_2_to_the_32_skips_some_steps_and_then_trains": "fp16",
    "test_parity.py::test_any_layout_trains_the_same_model_as_one_rank":
        "fp64 loss_chunk_size",
    "test_precision_runs.py::test_a_residual_stream_in_fp32_is_nearer_to_a_run_in_fp32_and_travels_so":
        "fp32_residual_connection",
    "test_precision_runs.py::test_gradients_that_travel_in_bf16_train_the_model_of_one_rank_to_bf16":
        "bf16 grad_reduce_in_bf16",
    "test_profiling.py::test_a_rank_or_a_step_that_is_not_chosen_has_nothing_around_it": "profile profile_ranks",
    "test_profiling.py::test_the_window_is_traced_and_its_costliest_ops_are_told":
        "profile_dir profile_step_start profile_step_end",
    "test_products.py::test_a_run_multiplies_by_the_library_that_is_asked_for": "cpu_matmul",
    "test_resume.py::test_c121_a_schedule_goes_on_as_the_flag_says":
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
    "test_resume.py::test_c121_without_a_flag_two_schedules_must_be_one": "lr_warmup_iters",
    "test_resume.py::test_more_positions_are_another_model_only_as_a_table": "max_position_embeddings",
    "test_resume_runs.py::test_iterations_count_from_zero_again_and_all_else_goes_on": "reset_iteration",
    "test_saver.py::test_a_damaged_file_is_loaded_only_where_that_is_asked_for": "verify_checkpoint",
    "test_saver.py::test_a_run_begins_from_a_save_that_load_names": "ckpt_step",
    "test_saver.py::test_a_run_keeps_the_saves_that_it_is_asked_to": "keep_last save_retain_interval",
    "test_saver.py::test_a_save_in_the_background_holds_the_state_of_its_own_iteration": "async_save",
    "test_saver.py::test_the_shape_of_the_model_may_come_from_the_checkpoint": "use_checkpoint_args",
    "test_saver.py::test_weights_alone_are_saved_and_loaded_as_what_they_are": "no_save_optim finetune no_load_optim",
    "test_saver.py::test_what_is_read_from_any_layout_is_what_one_process_has": "checkpoint_file_mib",
    "test_schedule_runs.py::test_each_step_of_one_cycle_updates_with_its_own_momentum":
        "cycle_min_mom cycle_max_mom decay_mom_rate",
    "test_schedule_runs.py::test_embedding_and_head_learn_at_their_own_rate_in_any_layout":
        "untie_embeddings_and_output_weights",
    "test_students.py::test_a_resumed_distillation_goes_on": "kd_stop_tokens",
    "test_students.py::test_a_step_is_that_of_plain_torch": "label_smoothing kd kd_alpha_ce kd_beta_ce kd_temp",
    "test_students.py::test_a_teacher_of_the_shape_that_the_flags_say_is_taken":
        "mos num_layers_teacher hidden_size_teacher num_attention_heads_teacher",
    "test_students.py::test_distillation_ends_where_it_is_told_to": "kd_stop_iteration",
    "test_students.py::test_experts_teach_and_learn_in_any_layout": "load_teacher num_experts_teacher",
    "test_summary.py::test_groups_are_those_of_the_whole_model_in_any_layout": "decoupled_lr",
    "test_determinism.py::test_two_runs_are_equal_to_the_last_bit": "deterministic_mode",
    "test_watching.py::test_only_the_steps_before_a_telling_are_watched": "timing_log_level",
    "test_watching.py::test_rank_0_alone_prints_a_line_per_step_with_all_figures": "peak_tflops",
    "test_watching.py::test_ranks_meet_before_a_watched_step_where_that_is_asked_for": "barrier_with_level_1_timing",
    "test_watching.py::test_the_layers_operations_are_those_of_arithmetic": "flops_profiler",
    "test_watching.py::test_the_slow_rank_is_named": "straggler_interval",
    "test_watching.py::test_times_and_memory_have_lines": "log_memory",
    "test_watching.py::test_times_are_told_of_the_longest_of_both_ends_or_of_every_rank": "timing_log_option",
    "test_watching.py::test_traffic_is_what_the_layout_must_send": "log_comms",
    "test_zero_runs.py::test_any_optimizer_and_stage_trains_the_model_of_one_rank":
        "optimizer zero_stage overlap_param_gather",
    "test_zero_runs.py::test_collectives_do_not_grow_with_accumulation": "overlap_grad_reduce",
    "test_zero_runs.py::test_figures_of_a_step_are_those_of_the_model_in_any_layout":
        "log_optimizer_states_to_tensorboard log_params_norm log_num_zeros_in_grad",
}
