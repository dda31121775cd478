"""The flags of both families that launch scripts pass, by name: all of them must be answered."""

KNOWN = """
    DDP-impl account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
    accumulate-allreduce-grads-in-fp32 activation-func-clamp-value activations-checkpoint-method adam-beta1 adam-beta2
    adam-eps aml-data-download-path apply-layernorm-1p apply-query-key-layer-scaling async-save attention-backend
    attention-dropout attention-softmax-in-fp32 auto-detect-ckpt-format bf16 calculate-per-token-loss
    checkpoint-activations checkpoint-in-cpu checkpoint-num-layers ckpt-format ckpt-fully-parallel-load clip-grad
    context-parallel-size cp-comm-type cpu-optimizer create-moe-param-group cross-entropy-loss-fusion data-cache-path
    data-efficiency-curriculum-learning data-impl data-parallel-sharding-strategy data-path dataloader-type
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers decoupled-lr decoupled-min-lr
    decrease-batch-size-if-needed deepspeed deepspeed-activation-checkpointing deepspeed_config
    disable-bf16-reduced-precision-matmul disable-bias-linear disable-moe-token-dropping
    disable-moe-top2-2nd-expert-sampling dist-ckpt-strictness distribute-saved-activations distributed-backend
    distributed-timeout-minutes ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size
    ds-sequence-parallel-fpdt-offloading ds-sequence-parallel-size empty-unused-memory-level
    enable-expert-tensor-parallelism enable-zbh1-exact-semantics enable-zbh1-pipeline end-weight-decay eod-mask-loss
    eval-global-batch-size eval-interval eval-iters exit-duration-in-mins exit-interval exit-on-missing-checkpoint
    exit-signal-handler expert-interval expert-model-parallel-size expert-tensor-parallel-size ffn-hidden-size finetune
    fp16 fp16-lm-cross-entropy fp32-residual-connection fp8-amax-compute-algo fp8-amax-history-len fp8-format
    fp8-param-gather fsdp-double-buffer fsdp-manual-registration global-batch-size glu-linear-offset grad-reduce-in-bf16
    group-query-attention hidden-dropout hidden-size hidden-size-teacher hysteresis init-method-std
    init-method-xavier-uniform init-model-with-meta-device initial-loss-scale kd kd-alpha-ce kd-beta-ce kd-temp
    kv-channels kv-lora-rank layernorm-epsilon load load-tag load-teacher local-rank log-batch-size-to-tensorboard
    log-interval log-memory-to-tensorboard log-num-zeros-in-grad log-optimizer-states-to-tensorboard log-params-norm
    log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard logging-level loss-scale
    loss-scale-window lr lr-decay-iters lr-decay-samples lr-decay-style lr-decay-tokens lr-warmup-fraction
    lr-warmup-init lr-warmup-iters lr-warmup-samples lr-warmup-tokens lr-wsd-decay-iters lr-wsd-decay-style
    make-vocab-size-divisible-by manual-gc manual-gc-interval max-position-embeddings megatron-fsdp-grad-comm-dtype
    megatron-fsdp-main-grads-dtype memory-centric-tiled-linear merge-file micro-batch-size min-loss-scale min-lr
    mlp-type mock-data moe-aux-loss-coeff moe-capacity-factor moe-eval-capacity-factor moe-expert-capacity-factor
    moe-expert-model-parallelism moe-expert-parallel-size moe-ffn-hidden-size moe-flex-dispatcher-backend
    moe-grouped-gemm moe-layer-freq moe-loss-coeff moe-loss-weight moe-min-capacity moe-num-experts
    moe-per-layer-logging moe-permute-fusion moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias
    moe-router-force-load-balancing moe-router-group-topk moe-router-load-balancing-type moe-router-num-groups
    moe-router-pre-softmax moe-router-score-function moe-router-topk moe-router-topk-scaling-factor
    moe-shared-expert-intermediate-size moe-token-dispatcher-type moe-top-k moe-train-capacity-factor moe-z-loss-coeff
    mos mscale mscale-all-dim mtp-loss-scaling-factor mtp-num-layers multi-latent-attention
    no-async-tensor-model-parallel-allreduce no-barrier-with-level-1-timing no-bias-dropout-fusion no-bias-gelu-fusion
    no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save no-create-attention-mask-in-dataloader
    no-gradient-accumulation-fusion no-load-lr-state no-load-optim no-load-rng no-masked-softmax-fusion
    no-mmap-bin-files no-persist-layer-norm no-pipeline-parallel no-position-embedding no-query-key-layer-scaling
    no-rope-fusion no-save-optim no-save-rng norm-epsilon normalization num-attention-heads num-attention-heads-teacher
    num-distributed-optimizer-instances num-experts num-experts-teacher num-key-value-heads num-layers
    num-layers-per-virtual-pipeline-stage num-layers-teacher num-query-groups num-virtual-stages-per-pipeline-rank
    num-workers optimizer overlap-grad-reduce overlap-param-gather override-opt_param-scheduler partition-activations
    pipeline-model-parallel-layout pipeline-model-parallel-size position-embedding-type profile profile-ranks
    profile-step-end profile-step-start q-lora-rank qk-head-dim qk-layernorm qk-pos-emb-head-dim quick-geglu
    rampup-batch-size random-ltd recompute-activations recompute-granularity recompute-method recompute-modules
    recompute-num-layers remote-device reset-attention-mask reset-iteration reset-position-ids return-data-index
    rope-type rotary-base rotary-percent rotary-position-embeddings-theta rotary-scaling-factor save save-interval
    save-retain-interval seed seq-length sequence-parallel sgd-momentum skip-train softmax-type split split-transformers
    squared-relu start-weight-decay step-batch-size-schedule swiglu tensor-model-parallel-size tensorboard-dir
    tensorboard-log-interval tensorboard-queue-size test-data-path tiktoken-pattern timing-log-level tokenizer-model
    tokenizer-type topk train-data-exact-num-epochs train-data-path train-doc-idx-path train-iters train-sample-idx-path
    train-samples train-shuffle-idx-path train-tokens transformer-impl universal-checkpoint
    untie-embeddings-and-output-weights use-checkpoint-args use-checkpoint-opt_param-scheduler use-cpu-initialization
    use-distributed-optimizer use-flash-attn use-flash-attn-triton use-flash-attn-v2 use-mcore-models use-megatron-fsdp
    use-nccl-ub use-persistent-ckpt-worker use-rotary-position-embeddings use-torch-fsdp2 use-tp-pp-dp-mapping use-tutel
    v-head-dim valid-data-path vocab-file vocab-size wandb-exp-name wandb-project wandb-save-dir weight-decay
    weight-decay-incr-style window-attn-skip-freq window-size zero-stage
""".split()
