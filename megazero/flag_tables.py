"""What the command line knows beside the fields of the configuration, as tables: a new flag is a word in one of them.

A flag is one of four kinds. Honoured: every field of the configuration's sections, by its name. Alias: another spelling
that sets fields (RENAMED, SETS). Accepted: it changes nothing here, for a stated reason (ACCEPTED). Refused: a
capability that is missing (REFUSED), unless its value asks for nothing or for what there is (VALUES), or it says
something only beside a flag that is not given (BESIDE). How they are read is in flags.py.
"""

from __future__ import annotations

from typing import Any

# Another family's or an older name of a field.
RENAMED = {
    "num-key-value-heads": "num_query_groups",
    "layernorm-epsilon": "norm_epsilon",
    "rotary-position-embeddings-theta": "rotary_base",
    "moe-expert-parallel-size": "expert_model_parallel_size",
    "topk": "moe_router_topk",
    "moe-loss-coeff": "moe_aux_loss_coeff",
    "moe-num-experts": "num_experts",
    "moe-top-k": "moe_router_topk",
    "moe-loss-weight": "moe_aux_loss_coeff",
    "moe-capacity-factor": "moe_expert_capacity_factor",
    "checkpoint-num-layers": "recompute_num_layers",
    "activations-checkpoint-num-layers": "recompute_num_layers",
    "activations-checkpoint-method": "recompute_method",
    "lr-schedule": "lr_scheduler",
    "ddp-bucket-size": "bucket_size",
    "zero-reduce-bucket-size": "bucket_size",
    "deepscale": "deepspeed",
    "deepscale-config": "deepspeed_config",
    "check-weight-hash-across-dp-replicas-interval": "check_replicas",
}

# MegaBlocks' spellings, whose router weights the choices by a softmax over all experts.
MEGABLOCKS = ("moe-num-experts", "moe-top-k", "moe-loss-weight", "moe-capacity-factor")

# Flags that set fields: those of the first dict always, those of the second where no other flag does.
SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "use-rotary-position-embeddings": ({"position_embedding_type": "rope"}, {}),
    "no-position-embedding": ({}, {"position_embedding_type": "none"}),
    "swiglu": ({"activation": "swiglu"}, {}),
    "squared-relu": ({"activation": "squared_relu"}, {}),
    "openai-gelu": ({"activation": "gelu_tanh"}, {}),
    "no-bias-gelu-fusion": ({}, {"activation": "gelu"}),  # unfused, both families compute the exact GELU
    "checkpoint-activations": (
        {"recompute_granularity": "full"},
        {"recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "activations-checkpoint-method": ({}, {"recompute_granularity": "full", "recompute_num_layers": 1}),
    "enable-zbh1-pipeline": ({"pipeline_schedule": "zb-h1"}, {}),
    "use-flash-attn": ({}, {"attention_backend": "sdpa"}),
    "use-flash-attn-v2": ({}, {"attention_backend": "sdpa"}),
    "use-flash-attn-triton": ({}, {"attention_backend": "sdpa"}),
    "no-query-key-layer-scaling": ({"apply_query_key_layer_scaling": False}, {}),
    "recompute-activations": ({"recompute_granularity": "selective"}, {}),
    **dict.fromkeys(
        ("topk", "moe-loss-coeff", "moe-expert-parallel-size"), ({}, {"moe_family": "megatron-deepspeed"})
    ),
    **dict.fromkeys(MEGABLOCKS, ({}, {"moe_family": "megatron-lm", "moe_router_pre_softmax": True})),
}

# Fields whose flag may come several times, each time adding its words.
REPEATABLE = ("kernel", "valid_set")

# Reason -> flags that change nothing. "name=" takes one value, "name*" any number of them.
ACCEPTED = {
    "there is one implementation of each part": """use-mcore-models transformer-impl= DDP-impl= data-impl=
        no-mmap-bin-files dataloader-num-threads= no-create-attention-mask-in-dataloader
        deepspeed-activation-checkpointing contigious-checkpointing synchronize-each-layer""",
    "fusing or not changes speed only": """no-bias-dropout-fusion no-bias-swiglu-fusion
        no-rope-fusion no-gradient-accumulation-fusion no-persist-layer-norm cross-entropy-loss-fusion
        cross-entropy-fusion-impl= bias-gelu-fusion bias-dropout-fusion bias-swiglu-fusion apply-rope-fusion
        enable-cuda-graph external-cuda-graph""",
    "overlap changes speed only": """tp-comm-overlap no-async-tensor-model-parallel-allreduce
        overlap-p2p-communication no-overlap-p2p-communication overlap-param-gather-with-optimizer-step
        align-grad-reduce no-align-grad-reduce align-param-gather no-align-param-gather tp-comm-overlap-cfg=
        defer-embedding-wgrad-compute wgrad-deferral-limit= use-ring-exchange-p2p nccl-communicator-config-path=""",
    "the sequence is always cut over the tensor ranks between layers": """sequence-parallel
        distribute-saved-activations distribute-checkpointed-activations partition-activations
        no-scatter-gather-tensors-in-pipeline""",
    "optimizer states are cut over the data ranks, but with --zero-stage 0": "use-distributed-optimizer",
    "gradients are always accumulated in fp32 or wider": "accumulate-allreduce-grads-in-fp32",
    "softmax and loss are always computed in fp32 or wider": "attention-softmax-in-fp32 fp16-lm-cross-entropy",
    "a stored scale minus one trains alike": "apply-layernorm-1p",
    "the loss is always the mean over all tokens of the global batch": "calculate-per-token-loss",
    "weights never depend on the layout": "use-cpu-initialization",
    "every rank makes no more than its own part of the model": "init-model-with-meta-device",
    "it tunes Megatron's FSDP": "fsdp-double-buffer use-nccl-ub fsdp-manual-registration",
    "there is no index to cache or build": "data-cache-path= num-dataset-builder-threads=",
    "there is no generator state to save": "no-load-rng no-save-rng te-rng-tracker inference-rng-tracker",
    "there is one checkpoint format, which any layout reads": """ckpt-format= dist-ckpt-format= use-dist-ckpt
        auto-detect-ckpt-format dist-ckpt-strictness= ckpt-fully-parallel-save ckpt-fully-parallel-load
        no-ckpt-fully-parallel-save universal-checkpoint ckpt-assume-constant-structure""",
    "a save in the background has a thread of its own": "use-persistent-ckpt-worker",
    "a checkpoint that is asked for and missing is always an error": "exit-on-missing-checkpoint",
    "all that a run says is said": "logging-level= log-progress",
    "loss scale and learning rate are always shown": """log-learning-rate-to-tensorboard
        log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard no-log-learnig-rate-to-tensorboard""",
    "there is no such logger": "enable-one-logger no-one-logger",
    "it says nothing without --context-parallel-size above 1": "cp-comm-type* hierarchical-context-parallel-sizes*",
    "memory is left to Python and torch": "manual-gc manual-gc-interval= empty-unused-memory-level=",
    "the launcher's environment says it": "local-rank= rank= deepspeed-mpi",
    "there is one engine for any pipeline size": "no-pipeline-parallel",
    "the profiler is torch's": "use-pytorch-profiler",
    "every schedule computes exactly the same": "enable-zbh1-exact-semantics",
    "experts are always multiplied as a group, and their rows moved by an uneven all-to-all": """moe-grouped-gemm
        moe-token-dispatcher-type= moe-flex-dispatcher-backend= moe-permute-fusion use-tutel moe-router-fusion
        moe-use-legacy-grouped-gemm moe-pad-expert-input-to-capacity moe-enable-deepep""",
    "what every token passes is always computed while rows travel": "moe-shared-expert-overlap",
    "experts always have optimizer states of their own": "create-moe-param-group",
    "every layer's balance is always reported": "moe-per-layer-logging",
}

# Missing capability -> flags that ask for it.
REFUSED = {
    "fp8 and fp4": """fp8-format fp8 fp4-format fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather fp8-margin
        fp8-recipe""",
    "products of bf16 without its own rounding of partial sums": "disable-bf16-reduced-precision-matmul",
    "starting the schedule again at a loaded checkpoint": "no-load-lr-state",
    "choosing a checkpoint by DeepSpeed's tag (see --ckpt-step)": "load-tag",
    "context parallelism": """context-parallel-size ds-sequence-parallel-size ds-sequence-parallel-fpdt
        ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading""",
    "cutting parameters over the data ranks": """use-megatron-fsdp use-torch-fsdp2 data-parallel-sharding-strategy
        remote-device""",
    "gradients in another type than fp32, or sums of them than fp32 and bf16": """megatron-fsdp-grad-comm-dtype
        megatron-fsdp-main-grads-dtype""",
    "another order of ranks": "use-tp-pp-dp-mapping num-distributed-optimizer-instances",
    "choosing the number of expert ranks by itself (see --expert-model-parallel-size)": "moe-expert-model-parallelism",
    "random routing for benchmarks": "moe-router-force-load-balancing",
    "Megatron's old Switch layers": "num-experts-switch",
    "multi-head latent attention": """multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim
        v-head-dim rotary-scaling-factor mscale mscale-all-dim rope-type""",
    "other feed-forward layers": "quick-geglu glu-linear-offset activation-func-clamp-value",
    "cutting a layer into tiles or parts": "memory-centric-tiled-linear split-transformers",
    "multi-token prediction": "mtp-num-layers mtp-loss-scaling-factor",
    "another initialisation": "init-method-xavier-uniform",
    "an optimizer on the host": "cpu-optimizer cpu-torch-adam",
    "keeping activations on the host, or recomputing other parts": "checkpoint-in-cpu recompute-modules",
    "other orders of samples": """dataloader-type data-efficiency-curriculum-learning random-ltd
        train-data-exact-num-epochs return-data-index train-doc-idx-path train-sample-idx-path
        train-shuffle-idx-path""",
    "fetching data from a cloud": "aml-data-download-path",
}

# Flag -> flags that say something only beside it: without it they are accepted.
BESIDE = {
    "fp8-format": "fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather fp8-margin fp8-recipe",
    "multi-latent-attention": """q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
        rotary-scaling-factor mscale mscale-all-dim""",
    "mtp-num-layers": "mtp-loss-scaling-factor",
    "ds-sequence-parallel-fpdt": "ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading",
}

# Flags of REFUSED whose meaning another one gives: refused only without that one.
ANSWERED = {"use-megatron-fsdp": "data-parallel-sharding-strategy"}

# Values of flags of REFUSED that can be had: what they set, {} where they ask for nothing. Numbers compare as such.
VALUES: dict[str, dict[str, dict[str, Any]]] = {
    "context-parallel-size": {"1": {}},
    "ds-sequence-parallel-size": {"1": {}},
    "num-distributed-optimizer-instances": {"1": {}},
    "data-parallel-sharding-strategy": {
        "no_shard": {"zero_stage": 0}, "optim": {"zero_stage": 1}, "optim_grads": {"zero_stage": 2}
    },
    "megatron-fsdp-grad-comm-dtype": {"auto": {}, "fp32": {}, "bf16": {"grad_reduce_in_bf16": True}},
    "megatron-fsdp-main-grads-dtype": {"auto": {}, "fp32": {}},
    "rope-type": {"rope": {}},
    "glu-linear-offset": {"0": {}},
    "mtp-num-layers": {"0": {}},
    "recompute-modules": {"core_attn": {}},
    "dataloader-type": {"single": {}},
    "remote-device": {"none": {}},
}  # fmt: skip

# Switches that one family follows by a word, which changes nothing.
WORDS_OF_SWITCHES = {"profile": (["pt"], ["pt-full"])}

def flags_of(table: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Flag -> (reason, "" or "=" or "*") of a table written by reasons."""
    found = {}
    for reason, words in table.items():
        for word in words.split():
            name = word.rstrip("=*")
            found[name] = (reason, word[len(name) :])
    return found


ACCEPTED_FLAGS = flags_of(ACCEPTED)
REFUSED_FLAGS = flags_of(REFUSED)
LEADERS = {name: leader for leader, words in BESIDE.items() for name in words.split()}
