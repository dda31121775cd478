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
    "batch-size": "micro_batch_size",
    "model-parallel-size": "tensor_model_parallel_size",
    "warmup": "lr_warmup_fraction",
    "persistent-save-interval": "save_interval",
    "tokenizer-name-or-path": "tokenizer_model",
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
    "use-flash-attn-builder": ({}, {"attention_backend": "sdpa"}),
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
    "there is one implementation of each part": """use-mcore-models use-legacy-models transformer-impl= DDP-impl=
        data-impl= legacy-tokenizer tokenizer-hf-use-fast enable-experimental no-mmap-bin-files
        dataloader-num-threads= dataloader-fast-cache-load dataloader-defer-npy-index-mmap
        no-create-attention-mask-in-dataloader deepspeed-activation-checkpointing contigious-checkpointing
        synchronize-each-layer""",
    "fusing or not changes speed only": """no-bias-dropout-fusion no-bias-swiglu-fusion
        no-rope-fusion no-gradient-accumulation-fusion no-persist-layer-norm cross-entropy-loss-fusion
        cross-entropy-fusion-impl= bias-gelu-fusion bias-dropout-fusion bias-swiglu-fusion apply-rope-fusion
        use-fused-weighted-squared-relu use-te-activation-func disable-jit-fuser no-gradient-reduce-div-fusion
        abort-on-unmet-fused-kernel-constraints
        enable-cuda-graph external-cuda-graph cuda-graph-impl= cuda-graph-scope* cuda-graph-warmup-steps=""",
    "overlap changes speed only": """tp-comm-overlap no-async-tensor-model-parallel-allreduce
        overlap-p2p-communication no-overlap-p2p-communication overlap-p2p-communication-warmup-flush
        overlap-param-gather-with-optimizer-step
        align-grad-reduce no-align-grad-reduce align-param-gather no-align-param-gather tp-comm-overlap-cfg=
        disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad
        disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag disable-tp-comm-split-rs tp-comm-bootstrap-backend=
        defer-embedding-wgrad-compute wgrad-deferral-limit= delay-wgrad-compute train-sync-interval=""",
    "how messages travel is left to torch and its backend": """use-ring-exchange-p2p nccl-communicator-config-path=
        use-sharp sharp-enabled-group= disable-symmetric-registration high-priority-stream-groups*
        pipeline-model-parallel-comm-backend= disable-gloo-process-groups use-gloo-process-groups""",
    "gradients are divided once, and reduced in buckets by --bucket-size": """ddp-num-buckets=
        ddp-pad-buckets-for-high-nccl-busbw ddp-average-in-collective zero-reduce-scatter zero-contigious-gradients
        zero-allgather-bucket-size= use-contiguous-buffers-in-ddp use-contiguous-buffers-in-local-ddp
        no-contiguous-buffers-in-local-ddp""",
    "the sequence is always cut over the tensor ranks between layers": """sequence-parallel
        distribute-saved-activations distribute-checkpointed-activations partition-activations
        no-scatter-gather-tensors-in-pipeline scatter-gather-tensors-in-pipeline""",
    "optimizer states are cut over the data ranks, but with --zero-stage 0": "use-distributed-optimizer",
    "gradients are always accumulated in fp32 or wider": "accumulate-allreduce-grads-in-fp32",
    "masters, gradients and moments are always in fp32 or wider": "use-precision-aware-optimizer",
    "softmax and loss are always computed in fp32 or wider": "attention-softmax-in-fp32 fp16-lm-cross-entropy",
    "a stored scale minus one trains alike": "apply-layernorm-1p",
    "the loss is always the mean over all tokens of the global batch": "calculate-per-token-loss",
    "no token of a corpus counts as padding": "allow-ambiguous-pad-tokens",
    "what pads the vocabulary takes no part in the loss": "padded-vocab-size= pad-vocab-size-to=",
    "weights never depend on the layout": "use-cpu-initialization",
    "weights are those of the seed or of the checkpoint": "no-initialization",
    "copies of a weight have the same bits": "sync-tp-duplicated-parameters",
    "momentum of muon is always Nesterov's": "muon-use-nesterov",
    "every rank makes no more than its own part of the model": "init-model-with-meta-device",
    "it tunes Megatron's FSDP": """fsdp-double-buffer use-nccl-ub fsdp-manual-registration
        suggested-communication-unit-size= no-strict-fsdp-dtensor-load""",
    "there is no index to cache or build": """data-cache-path= num-dataset-builder-threads=
        mid-level-dataset-surplus=""",
    "samples go on over epochs": "repeated-dataloader",
    "--num-workers counts for all parts of the data": "valid-num-workers=",
    "a tokenizer's own code is never run": "trust-remote-code",
    "the tokenizer is always that of the flags": "no-use-tokenizer-model-from-checkpoint-args",
    "there is no generator state to save": "no-load-rng no-save-rng te-rng-tracker inference-rng-tracker",
    "there is one checkpoint format, which any layout reads": """ckpt-format= dist-ckpt-format= use-dist-ckpt
        auto-detect-ckpt-format dist-ckpt-strictness= ckpt-fully-parallel-save ckpt-fully-parallel-load
        no-ckpt-fully-parallel-save universal-checkpoint ckpt-assume-constant-structure load-model-opt-format
        dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
        ckpt-convert-update-legacy-dist-opt-format""",
    "a checkpoint holds the masters": "load-main-params-from-ckpt",
    "a save in the background has a thread of its own": "use-persistent-ckpt-worker",
    "a checkpoint that is asked for and missing is always an error": "exit-on-missing-checkpoint",
    "all that a run says is said": "logging-level= log-progress log-level= log-level-replica=",
    "the layout is told at the start": "log-world-size-to-tensorboard",
    "loss scale and learning rate are always shown": """log-learning-rate-to-tensorboard
        log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard no-log-learnig-rate-to-tensorboard""",
    "there is no such logger": """enable-one-logger no-one-logger one-logger-project= one-logger-run-name=
        one-logger-async app-tag-run-name= app-tag-run-version=""",
    "--print-config prints all settings": "config-logger-dir=",
    "a slow rank is named unasked, see --straggler-interval": """log-straggler disable-straggler-on-startup
        straggler-ctrlr-port= straggler-minmax-count=""",
    "a rank that hangs is named unasked, see --hang-timeout-minutes": "enable-ft-package calc-ft-timeouts",
    "a loss that jumps is told unasked, see --spike-action": "check-for-spiky-loss",
    "it says nothing without --context-parallel-size above 1": "cp-comm-type* hierarchical-context-parallel-sizes*",
    "it says nothing in training": """inference-batch-times-seqlen-threshold= max-tokens-to-oom=
        inference-max-seq-length= inference-max-batch-size= inference-max-requests= flash-decode
        use-legacy-static-engine""",
    "memory is left to Python and torch": """manual-gc manual-gc-interval= no-manual-gc-eval
        empty-unused-memory-level= no-clone-scatter-output-in-embedding use-pin-memory""",
    "the launcher's environment says it": "local-rank= rank= deepspeed-mpi",
    "there is one engine for any pipeline size": "no-pipeline-parallel",
    "the profiler is torch's": "use-pytorch-profiler profile-backward",
    "every schedule computes exactly the same": "enable-zbh1-exact-semantics",
    "experts are always multiplied as a group, and their rows moved by an uneven all-to-all": """moe-grouped-gemm
        moe-token-dispatcher-type= moe-flex-dispatcher-backend= moe-permute-fusion use-tutel moe-router-fusion
        moe-use-legacy-grouped-gemm moe-pad-expert-input-to-capacity moe-enable-deepep moe-deepep-num-sms=
        moe-hybridep-num-sms= overlap-moe-expert-parallel-comm""",
    "what every token passes is always computed while rows travel": "moe-shared-expert-overlap",
    "experts always have optimizer states of their own": "create-moe-param-group",
    "every layer's balance is always reported": "moe-per-layer-logging",
}

# Missing capability -> flags that ask for it.
REFUSED = {
    "fp8 and fp4": """fp8-format fp8 fp4-format fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather fp8-margin
        fp8-recipe fp8-interval no-fp8-wgrad fp4-recipe fp4-param-gather first-last-layers-bf16
        num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 fp8-quantizer-factory te-precision-config-file
        keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag moe-router-padding-for-fp8
        moe-router-padding-for-quantization use-kitchen kitchen-config-file kitchen-recipe-number""",
    "products of bf16 without its own rounding of partial sums": "disable-bf16-reduced-precision-matmul",
    "moments, masters or gradients in fewer bits": "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype",
    "another form of Muon": """muon-scale-mode muon-extra-scale-factor muon-tp-mode muon-no-split-qkv
        muon-fp32-matmul-prec""",
    "starting the schedule again at a loaded checkpoint": "no-load-lr-state",
    "choosing a checkpoint by DeepSpeed's tag (see --ckpt-step)": "load-tag",
    "the layout of a checkpoint (any layout reads it)": "use-mp-args-from-checkpoint-args",
    "weights to begin with where --load has none (see --load and --finetune)": "pretrained-checkpoint",
    "saves that do not stay, and copies of saves (see --keep-last)": """non-persistent-save-interval
        non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir
        non-persistent-local-ckpt-algo replication replication-jump replication-factor""",
    "Megatron's checkpoints (see scripts/convert_hf.py)": "ckpt-convert-format ckpt-convert-save",
    "context parallelism": """context-parallel-size ds-sequence-parallel-size ds-sequence-parallel-fpdt
        ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading force-ds-sequence-parallel
        hybrid-context-parallel""",
    "cutting parameters over the data ranks": """use-megatron-fsdp use-custom-fsdp use-torch-fsdp2
        data-parallel-sharding-strategy remote-device enable-full-sharding-in-hsdp outer-dp-sharding-strategy
        torch-fsdp2-no-reshard-after-forward""",
    "gradients in another type than fp32, or sums of them than fp32 and bf16": """megatron-fsdp-grad-comm-dtype
        megatron-fsdp-main-grads-dtype ddp-reduce-scatter-with-fp32-accumulation""",
    "another order of ranks": "use-tp-pp-dp-mapping",
    "optimizer states that are cut over some of the data ranks": "num-distributed-optimizer-instances",
    "choosing the number of expert ranks by itself (see --expert-model-parallel-size)":
        "moe-expert-model-parallelism moe-extended-tp",
    "random routing for benchmarks": "moe-router-force-load-balancing",
    "experts of another form": "moe-apply-probs-on-input moe-latent-size",
    "Megatron's old Switch layers": "num-experts-switch",
    "experts out of a dense model on the way (see scripts/upcycle.py)": "moe-use-upcycling moe-upcycling-granularity",
    "multi-head latent attention": """multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim
        v-head-dim rotary-scaling-factor mscale mscale-all-dim cache-mla-latents mla-down-proj-fusion""",
    "other positions": """rope-type rotary-seq-len-interpolation-factor no-rope-freq mrope-section
        relative-attention-num-buckets relative-attention-max-distance""",
    "other norms or attention": """embed-layernorm apply-residual-connection-post-layernorm qk-l2-norm
        attention-output-gate experimental-attention-variant""",
    "other feed-forward layers": "quick-geglu glu-linear-offset activation-func-clamp-value glu-activation",
    "BERT and T5 (pretrain_gpt.py trains decoders)": """encoder-num-layers decoder-num-layers encoder-seq-length
        decoder-seq-length vocab-extra-ids mask-prob short-seq-prob bert-no-binary-head bert-load
        pipeline-model-parallel-split-rank encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size""",
    "retrieval": """retro-project-dir retro-add-retriever retro-workdir retro-cyclic-train-iters retro-encoder-layers
        retro-encoder-hidden-dropout retro-encoder-attention-dropout retro-num-neighbors retro-num-retrieved-chunks
        retro-attention-gate retro-no-verify-neighbor-count retriever-seq-length ict-head-size ict-load
        biencoder-projection-dim biencoder-shared-query-context-model titles-data-path evidence-data-path""",
    "images": """img-h img-w num-channels num-classes patch-dim classes-fraction data-per-class-fraction
        no-data-sharding head-lr-mult vision-pretraining vision-pretraining-type vision-backbone-type
        swin-backbone-type mask-type mask-factor iter-per-epoch""",
    "Mamba and its hybrids": """hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern is-hybrid-model
        mamba-state-dim mamba-head-dim mamba-num-groups mamba-num-heads disable-mamba-mem-eff-path""",
    "layers by the name of a module (see examples/own_model.py)": "spec",
    "layers that differ in shape": "heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json",
    "settings in Megatron's form of YAML (see --config)": "yaml-cfg",
    "DeepSpeed's rule by the classes of layers (see --pipeline-split)": "pp-partition-method",
    "cutting a layer into tiles or parts": """memory-centric-tiled-linear tile-factor split-transformers
        scattered-embeddings""",
    "multi-token prediction": "mtp-num-layers mtp-loss-scaling-factor",
    "another initialisation": "init-method-xavier-uniform embedding-init-method-std data-parallel-random-init",
    "weight decay of norms": "apply-wd-to-qk-layernorm",
    "an optimizer on the host": """cpu-optimizer cpu-torch-adam optimizer-cpu-offload optimizer-offload-fraction
        use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params""",
    "keeping activations on the host, or recomputing other parts": """checkpoint-in-cpu recompute-modules
        cpu-offloading-num-layers fine-grained-activation-offloading offload-modules moe-layer-recompute""",
    "other orders of samples": """dataloader-type data-efficiency-curriculum-learning random-ltd
        train-data-exact-num-epochs return-data-index train-doc-idx-path train-sample-idx-path
        train-shuffle-idx-path iterations-to-skip skip-train-iteration-range""",
    "corpora from a file of paths (see --config)": """data-args-path per-split-data-args-path
        train-weighted-split-paths valid-weighted-split-paths test-weighted-split-paths
        train-weighted-split-paths-path valid-weighted-split-paths-path test-weighted-split-paths-path""",
    "evaluation of other amounts (see --eval-iters, --valid-set)": "full-validation multiple-validation-sets",
    "fine-tuning on conversations": "sft sft-tokenizer-prompt-format",
    "reinforcement learning": "perform-rl-step",
    "serving (see scripts/generate.py)": "inference ds-inference",
    "special tokens by a flag": """tiktoken-num-special-tokens tiktoken-special-tokens tokenizer-special-tokens
        tokenizer-metadata""",
    "fetching data from a cloud": "aml-data-download-path object-storage-cache-path s3-cache-path",
    "measuring energy": "log-energy codecarbon-dir",
    "records of memory's history (see --log-memory)": "record-memory-history memory-snapshot-path",
    "an alarm at large gradients": "check-for-large-grads",
    "computing a step twice to compare": """rerun-mode error-injection-rate error-injection-type
        result-rejected-tracker-filename""",
    "going on within the process (see --auto-resume)": "inprocess-restart adlr-autoresume adlr-autoresume-interval",
}

# Flag -> flags that say something only beside it: without it they are accepted.
BESIDE = {
    "fp8-format": """fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather fp8-margin fp8-recipe fp8-interval
        no-fp8-wgrad first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16
        keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag moe-router-padding-for-fp8
        moe-router-padding-for-quantization""",
    "multi-latent-attention": """q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
        rotary-scaling-factor mscale mscale-all-dim cache-mla-latents mla-down-proj-fusion""",
    "mtp-num-layers": "mtp-loss-scaling-factor",
    "ds-sequence-parallel-fpdt": "ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading",
    "use-megatron-fsdp": "enable-full-sharding-in-hsdp outer-dp-sharding-strategy",
    "use-torch-fsdp2": "torch-fsdp2-no-reshard-after-forward",
    "optimizer-cpu-offload": """optimizer-offload-fraction use-torch-optimizer-for-cpu-offload
        overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params""",
    "memory-centric-tiled-linear": "tile-factor",
    "moe-use-upcycling": "moe-upcycling-granularity",
    "record-memory-history": "memory-snapshot-path",
    "adlr-autoresume": "adlr-autoresume-interval",
    "replication": "replication-jump replication-factor",
    "sft": "sft-tokenizer-prompt-format",
}

# Flags of REFUSED whose meaning another one gives: refused only without that one.
ANSWERED = dict.fromkeys(("use-megatron-fsdp", "use-custom-fsdp"), "data-parallel-sharding-strategy")

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
    "main-grads-dtype": {"fp32": {}},
    "main-params-dtype": {"fp32": {}},
    "exp-avg-dtype": {"fp32": {}},
    "exp-avg-sq-dtype": {"fp32": {}},
    "muon-scale-mode": {"spectral": {}},
    "muon-extra-scale-factor": {"0.2": {}},
    "muon-tp-mode": {"duplicated": {}, "distributed": {}},
    "spec": {"local": {}},
    "vocab-extra-ids": {"0": {}},
    "cpu-offloading-num-layers": {"0": {}},
    "hybrid-attention-ratio": {"0": {}},
    "hybrid-mlp-ratio": {"0": {}},
    "tiktoken-num-special-tokens": {"1000": {}},
    "rerun-mode": {"disabled": {}},
    "error-injection-rate": {"0": {}},
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
