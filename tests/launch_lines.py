"""Command lines in the manner of people's launch scripts, and what becomes of each: it trains, it fits, or the reason.

All are of our own making. Words in braces stand for what many lines have in common, in PARTS, or for a file that the
test makes: corpus, vocab, merges, tmp.
"""

from __future__ import annotations

from typing import NamedTuple

TRAINS, FITS = "it trains", "it fits"      # three steps; or all is checked and laid out on paper


class Line(NamedTuple):
    """A command line of a world of so many ranks, and what becomes of it: TRAINS, FITS, or what an error says."""

    name: str
    world: int
    words: str
    ends: str


PARTS = {
    "tiny": "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16",
    "125m": "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 2048 "
            "--max-position-embeddings 2048",
    "large": "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
            "--max-position-embeddings 2048",
    "175b": "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
            "--max-position-embeddings 2048",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
             "--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0",
    "llama-md": "--swiglu --normalization rmsnorm --use-rotary-position-embeddings --disable-bias-linear "
                "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0",
    "8b": "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192 "
          "--max-position-embeddings 8192",
    "mixtral": "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
               "--group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768",
    "steps": "--train-iters 500000 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-fraction .001 "
             "--lr-decay-iters 430000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 "
             "--init-method-std 0.006",
    "samples": "--train-samples 73242188 --lr 1.5e-4 --min-lr 1.0e-5 --lr-decay-style cosine "
               "--lr-decay-samples 73241210 --lr-warmup-samples 162761 --weight-decay 0.1 --clip-grad 1.0",
    "tokens": "--train-tokens 300000000000 --lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine "
              "--lr-decay-tokens 260000000000 --lr-warmup-tokens 375000000 --train-samples 200000000 "
              "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --override-opt_param-scheduler",
    "short": "--train-iters 3 --lr 1e-3 --lr-decay-style constant --eval-iters 1 --num-workers 0",
    "mock": "--mock-data --tokenizer-type NullTokenizer --vocab-size 131 --split '99,1,0'",
    "files": "--data-path {corpus} --vocab-file {vocab} --merge-file {merges} --split 949,50,1",
    "core": "--use-mcore-models --transformer-impl transformer_engine --bf16 --no-masked-softmax-fusion "
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel "
            "--ckpt-format torch_dist --dist-ckpt-strictness log_all --data-cache-path {tmp}/cache "
            "--no-mmap-bin-files --no-create-attention-mask-in-dataloader --calculate-per-token-loss "
            "--manual-gc --empty-unused-memory-level 1 --no-check-for-nan-in-loss-and-grad --num-workers 1",
    "older": "--DDP-impl local --data-impl mmap --fp16 --loss-scale 0 --loss-scale-window 500 --hysteresis 2 "
            "--min-loss-scale 1.0 --no-async-tensor-model-parallel-allreduce --eval-iters 10 --eval-interval 1000",
    "fp16": "--fp16 --hysteresis 2 --initial-loss-scale 4096 --loss-scale-window 500 --min-loss-scale 1",
    "md": "--no-pipeline-parallel --data-impl mmap --checkpoint-activations --deepspeed-activation-checkpointing "
          "--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard "
          "--log-optimizer-states-to-tensorboard --tensorboard-queue-size 1 --tensorboard-dir {tmp}/tb "
          "--eval-iters 1 --exit-duration-in-mins 30000000 --num-workers 0",
    "mixed": "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
             "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-router-dtype fp32",
    "moe-md": "--moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 "
              "--moe-min-capacity 4 --create-moe-param-group --topk 1",
}  # fmt: skip

DENSE = [
    Line("gpt2 on one host", 8, "{125m} {steps} {core} {files} --micro-batch-size 4 --global-batch-size 512", FITS),
    Line("gpt2 of 2021", 8, "{125m} {steps} {older} {files} --micro-batch-size 4 --global-batch-size 512", FITS),
    Line("gpt3 of 2021, interleaved", 1536,
         "{175b} {steps} {older} {mock} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 12 "
         "--num-layers-per-virtual-pipeline-stage 2 --micro-batch-size 1 --global-batch-size 1536 "
         "--activations-checkpoint-method uniform", FITS),
    Line("gpt3 with a ramp", 1536,
         "{175b} {samples} {core} {mock} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 12 "
         "--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 32 32 5859375", FITS),
    Line("a ramp that does not fill its ranks", 1536,
         "{175b} {samples} {core} {mock} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 "
         "--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size '16 16 5859375'",
         "a growing global batch of 16 must be --micro-batch-size 1 x accumulation x data size 24"),
    Line("a ramp that is rounded down", 192,
         "{large} {samples} {mock} --micro-batch-size 1 --global-batch-size 1536 --bf16 "
         "--rampup-batch-size 224 32 5859375 --decrease-batch-size-if-needed", FITS),
    Line("batches by tokens", 64, "{large} {steps} {mock} --bf16 --micro-batch-size 2 --step-batch-size-schedule "
         "'0:256 10B:512 50B:1024'", FITS),
    Line("batches by tokens and by a number", 64, "{large} {steps} {mock} --micro-batch-size 2 --global-batch-size 64 "
         "--step-batch-size-schedule '0:256'", "--step-batch-size-schedule 0:256 and --global-batch-size 64: give one"),
    Line("selective recomputation", 8, "{large} {steps} {core} {files} --tensor-model-parallel-size 8 "
         "--micro-batch-size 2 --recompute-activations --recompute-modules core_attn", FITS),
    Line("recomputation of other parts", 8, "{large} {steps} {core} {files} --micro-batch-size 2 "
         "--recompute-granularity selective --recompute-modules core_attn moe_act",
         "--recompute-modules core_attn moe_act: not available yet"),
    Line("gpt2 of 2020", 512, "--num-layers 72 --hidden-size 3072 --num-attention-heads 24 --seq-length 1024 "
         "--max-position-embeddings 1024 --model-parallel-size 8 --batch-size 4 --train-iters 500000 --lr 1.5e-4 "
         "--lr-decay-iters 320000 --min-lr 1e-5 --warmup 0.01 --checkpoint-activations --fp16 {files}", FITS),
    Line("bert", 8, "{large} {steps} {files} --micro-batch-size 4 --mask-prob 0.15 --short-seq-prob 0.1 "
         "--bert-no-binary-head", "--mask-prob 0.15, --short-seq-prob 0.1, --bert-no-binary-head: not available yet: "
         "BERT and T5 (pretrain_gpt.py trains decoders)"),
    Line("mamba", 8, "{large} {steps} {core} {files} --micro-batch-size 4 --hybrid-override-pattern M-M*- "
         "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
         "--hybrid-override-pattern M-M*-: not available yet: Mamba and its hybrids; --spec megatron.core.models"),
    Line("full recomputation", 1, "{tiny} {short} {mock} --micro-batch-size 2 --recompute-granularity full "
         "--recompute-method block --recompute-num-layers 2 --fp16 --initial-loss-scale 1024", TRAINS),
    Line("recomputation without a method", 8, "{large} {steps} {mock} --micro-batch-size 2 "
         "--recompute-granularity full", "--recompute-granularity full needs --recompute-method"),
    Line("old recomputation", 1, "{tiny} {short} {files} --micro-batch-size 2 --checkpoint-activations "
         "--checkpoint-num-layers 2 --distribute-saved-activations", TRAINS),
    Line("a small gpt from token files", 1, "{tiny} {short} {older} {files} --micro-batch-size 2 "
         "--global-batch-size 4 --initial-loss-scale 1024 --loss-scale 1024", TRAINS),
    Line("a small gpt of today", 1, "{tiny} {short} {core} {mock} --num_workers=0 --micro-batch-size=2 "
         "--log-memory-to-tensorboard --tensorboard-dir {tmp}/tb --logging-level 40", TRAINS),
    Line("evaluation on the way", 1, "{tiny} {short} {files} --micro-batch-size 2 --eval-interval 2 --eval-iters 1 "
         "--eod-mask-loss --reset-position-ids --reset-attention-mask", TRAINS),
    Line("in a pipeline, interleaved", 2, "{tiny} {short} {mock} --micro-batch-size 1 --global-batch-size 4 --bf16 "
         "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", TRAINS),
    Line("layers that do not come out even", 16, "--num-layers 30 --hidden-size 1024 --num-attention-heads 16 "
         "--seq-length 1024 --max-position-embeddings 1024 {steps} {mock} --micro-batch-size 1 "
         "--pipeline-model-parallel-size 4", FITS),
    Line("chunks that do not come out even", 16, "--num-layers 30 --hidden-size 1024 --num-attention-heads 16 "
         "--seq-length 1024 --max-position-embeddings 1024 {steps} {mock} --micro-batch-size 1 "
         "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
         "--num-layers 30 is not divisible by --pipeline-model-parallel-size 4 x"),
    Line("embedding and loss count", 4, "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
         "--max-position-embeddings 32 {short} {mock} --micro-batch-size 1 --pipeline-model-parallel-size 4 "
         "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", FITS),
    Line("stages letter by letter", 4, "{tiny} {short} {mock} --micro-batch-size 1 --pipeline-model-parallel-size 4 "
         "--pipeline-model-parallel-layout 'E|(tt|)*2L'", FITS),
    Line("zero bubble", 8, "{large} {tokens} {mock} --micro-batch-size 1 --global-batch-size 64 --bf16 "
         "--pipeline-model-parallel-size 8 --enable-zbh1-pipeline --enable-zbh1-exact-semantics", FITS),
    Line("zero bubble and a cut sequence", 4, "{tiny} {short} {mock} --micro-batch-size 1 --global-batch-size 4 "
         "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --enable-zbh1-pipeline "
         "--sequence-parallel", TRAINS),
    Line("more tensor ranks than ranks", 2, "{tiny} {short} {mock} --micro-batch-size 1 "
         "--tensor-model-parallel-size 4", "world size 2 is not a multiple of --tensor-model-parallel-size 4"),
    Line("heads that tensor ranks do not cut", 8, "{125m} {steps} {mock} --micro-batch-size 1 "
         "--tensor-model-parallel-size 8", "--num-attention-heads 12 is not divisible by --tensor-model-parallel"),
    Line("a batch that ranks do not fill", 6, "{125m} {steps} {mock} --micro-batch-size 4 --global-batch-size 64",
         "--global-batch-size 64 must be --micro-batch-size 4 x accumulation x data size 6, but 64 / (4 x 6) = 2.66"),
    Line("evaluation that ranks do not fill", 8, "{125m} {steps} {mock} --micro-batch-size 4 --global-batch-size 64 "
         "--eval-global-batch-size 40", "--eval-global-batch-size 40 must be --micro-batch-size 4 x micro-batches"),
    Line("a sequence above the positions", 8, "{125m} {steps} {mock} --micro-batch-size 4 --seq-length 4096",
         "--seq-length 4096 is above --max-position-embeddings 2048"),
    Line("iterations and samples", 8, "{125m} {steps} {mock} --micro-batch-size 4 --train-samples 9000",
         "--train-iters 500000 and --train-samples 9000: give one of them"),
    Line("rates in another unit", 8, "{125m} {samples} {mock} --micro-batch-size 4 --lr-warmup-iters 20",
         "--lr-warmup-iters 20 and --lr-warmup-samples 162761"),
    Line("a warm-up as long as all", 8, "{125m} {mock} --micro-batch-size 4 --train-iters 100 --lr 1e-3 "
         "--lr-warmup-iters 100", "--lr-warmup-iters 100 must be below --train-iters 100"),
    Line("a tail in another unit", 8, "{125m} {mock} --micro-batch-size 4 --train-iters 100 --lr 1e-3 "
         "--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    Line("warm-up, stay, cool down", 1, "{tiny} {short} {mock} --micro-batch-size 4 --lr-decay-style WSD "
         "--lr-wsd-decay-iters 1 --lr-wsd-decay-style minus_sqrt --lr-warmup-iters 1", TRAINS),
    Line("weight decay that grows", 8, "{125m} {mock} --micro-batch-size 4 --train-iters 100 --lr 1e-3 "
         "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style cosine", FITS),
    Line("fp16 and bf16", 8, "{125m} {steps} {older} {mock} --micro-batch-size 4 --bf16",
         "--fp16 and --bf16: give one of them, not both"),
    Line("a misspelt flag", 8, "{125m} {steps} {core} {mock} --micro-batchsize 4",
         "unknown flag --micro-batchsize; did you mean --micro-batch-size?"),
    Line("a save without an interval", 8, "{125m} {steps} {mock} --micro-batch-size 4 --save {tmp}/new",
         "--save {tmp}/new needs --save-interval"),
    Line("corpora by weight", 1, "{125m} {steps} --micro-batch-size 4 --vocab-file {vocab} --merge-file {merges} "
         "--data-path 0.7 {corpus} 0.3 {corpus} --tokenizer-type GPT2BPETokenizer --split 969, 30, 1", FITS),
    Line("two kinds of data", 1, "{125m} {steps} {files} {mock} --micro-batch-size 4",
         "--mock-data and --data-path"),
]  # fmt: skip

LLAMA = [
    Line("llama 3 of 8b", 8, "{8b} {llama} {steps} {core} {mock} --group-query-attention --num-query-groups 8 "
         "--rotary-base 500000 --rotary-percent 1.0 --micro-batch-size 1 --global-batch-size 128 "
         "--tensor-model-parallel-size 2 --attention-backend fused --cross-entropy-loss-fusion "
         "--apply-layernorm-1p --attention-softmax-in-fp32 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-6 "
         "--no-rope-fusion", FITS),
    Line("llama 3 with fp8", 8, "{8b} {llama} {samples} {core} {mock} --micro-batch-size 1 --fp8-format hybrid "
         "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather",
         "--fp8-format hybrid, --fp8-amax-history-len 1024, --fp8-amax-compute-algo max, --fp8-param-gather: not "),
    Line("llama 3 over contexts", 16, "{8b} {llama} {samples} {core} {mock} --micro-batch-size 1 "
         "--context-parallel-size 2", "--context-parallel-size 2: not available yet: context parallelism"),
    Line("llama 3 over no contexts", 16, "{8b} {llama} {samples} {core} {mock} --micro-batch-size 1 "
         "--context-parallel-size 1 --cp-comm-type p2p --fp8-amax-history-len 16", FITS),
    Line("llama 3 by fsdp", 16, "{8b} {llama} {samples} {mock} --bf16 --micro-batch-size 1 --use-megatron-fsdp "
         "--data-parallel-sharding-strategy optim_grads_params --init-model-with-meta-device --use-nccl-ub "
         "--fsdp-double-buffer", "optim_grads_params: not available yet: cutting parameters over the data ranks"),
    Line("llama 3 by fsdp's second stage", 16, "{8b} {llama} {samples} {mock} --bf16 --micro-batch-size 1 "
         "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --init-model-with-meta-device", FITS),
    Line("llama 2 in the manner of megatron-deepspeed", 8, "{8b} {llama-md} {tokens} {fp16} {md} {files} "
         "--num-key-value-heads 8 --layernorm-epsilon 1e-5 --rotary-position-embeddings-theta 10000 "
         "--no-query-key-layer-scaling --use-flash-attn-v2 --micro-batch-size 1 --global-batch-size 32", FITS),
    Line("a small llama in either manner", 1, "{tiny} {llama-md} {short} {fp16} {md} {files} --num-key-value-heads 2 "
         "--layernorm-epsilon 1e-6 --rotary-position-embeddings-theta 500000 --no-query-key-layer-scaling "
         "--micro-batch-size 2", TRAINS),
    Line("key heads that do not divide", 8, "{8b} {llama-md} {tokens} {mock} --num-key-value-heads 5 "
         "--micro-batch-size 1", "--num-attention-heads 32 is not divisible by --num-key-value-heads 5"),
    Line("ulysses", 8, "{8b} {llama-md} {tokens} {mock} --micro-batch-size 1 --ds-sequence-parallel-size 4 "
         "--force-ds-sequence-parallel",
         "--ds-sequence-parallel-size 4, --force-ds-sequence-parallel: not available yet: context parallelism"),
    Line("latent attention", 8, "{8b} {llama} {samples} {mock} --micro-batch-size 1 --multi-latent-attention "
         "--q-lora-rank 1536 --kv-lora-rank 512 --mscale 1.0", "not available yet: multi-head latent attention"),
    Line("several tokens ahead", 8, "{8b} {llama} {samples} {mock} --micro-batch-size 1 --mtp-num-layers 1 "
         "--mtp-loss-scaling-factor 0.1", "--mtp-num-layers 1, --mtp-loss-scaling-factor 0.1: not available yet"),
]  # fmt: skip

EXPERTS = [
    Line("mixtral", 64, "{mixtral} {llama} {samples} {core} {mock} --num-experts 8 {mixed} "
         "--expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 "
         "--micro-batch-size 1 --global-batch-size 256", FITS),
    Line("mixtral on too few ranks", 8, "{mixtral} {llama} {samples} {core} {mock} --num-experts 8 {mixed} "
         "--expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --micro-batch-size 1",
         "--expert-model-parallel-size 8 does not divide the 2 ranks of a stage that can share experts"),
    Line("experts of deepspeed", 128, "{125m} {tokens} {fp16} {md} {mock} --num-experts 128 "
         "--moe-expert-parallel-size 128 {moe-md} --micro-batch-size 2 --global-batch-size 256", FITS),
    Line("experts of deepspeed on too few ranks", 12, "{125m} {tokens} {fp16} {md} {mock} --num-experts 128 "
         "--moe-expert-parallel-size 8 {moe-md} --micro-batch-size 1",
         "--moe-expert-parallel-size 8 does not divide the 12 ranks of a stage"),
    Line("expert ranks without experts", 8, "{125m} {tokens} {md} {mock} --moe-expert-parallel-size 8 "
         "--micro-batch-size 1", "--moe-expert-parallel-size 8 needs --num-experts above 1"),
    Line("experts that say nothing", 8, "{125m} {tokens} {md} {mock} --num-experts 1 {moe-md} --micro-batch-size 1",
         FITS),
    Line("a pyramid", 64, "{large} {tokens} {fp16} {md} {mock} --num-experts 64 64 64 64 64 64 64 64 64 64 128 128 "
         "--moe-expert-parallel-size 64 {moe-md} --mlp-type residual --micro-batch-size 4 --global-batch-size 512",
         FITS),
    Line("a pyramid as one word", 64, "{large} {tokens} {md} {mock} --num-experts '64 64 64 64 64 64 64 64 64 64 128 "
         "128' --moe-expert-parallel-size 64 {moe-md} --mlp-type residual --micro-batch-size 4", FITS),
    Line("a pyramid of other height", 64, "{large} {tokens} {md} {mock} --num-experts 64 128 {moe-md} "
         "--micro-batch-size 4", "--num-experts 64 128 has 2 numbers, and 12 of 24 layers have experts"),
    Line("a small pyramid", 1, "{tiny} {short} {md} {mock} --num-experts 2 4 --mlp-type residual {moe-md} "
         "--micro-batch-size 2", TRAINS),
    Line("small experts on two ranks", 2, "{tiny} {llama} {short} {mock} --num-experts 4 {mixed} --micro-batch-size 2 "
         "--expert-model-parallel-size 2 --moe-z-loss-coeff 1e-3", TRAINS),
    Line("one choice", 8, "{tiny} {steps} {mock} --num-experts 4 --moe-router-topk 1 --micro-batch-size 2",
         "--moe-router-topk 1 with --moe-router-score-function softmax needs --moe-router-pre-softmax"),
    Line("experts in some layers", 8, "{tiny} {steps} {mock} --num-experts 4 --moe-router-topk 2 "
         "--moe-layer-freq '([0]*1+[1]*1)*2' --moe-shared-expert-intermediate-size 64 --micro-batch-size 2", FITS),
    Line("deepseek's router", 8, "{tiny} {llama} {steps} {mock} --num-experts 8 --moe-router-topk 4 "
         "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 "
         "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-bias-update-rate 1e-3 "
         "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --micro-batch-size 2", FITS),
    Line("megablocks", 8, "{tiny} {steps} {mock} --moe-num-experts=8 --moe-top-k=2 --moe-loss-weight=0.1 "
         "--moe-capacity-factor=1 --micro-batch-size 2", FITS),
    Line("megablocks, cut", 8, "{tiny} {steps} {mock} --moe-num-experts=8 --moe-expert-model-parallelism "
         "--micro-batch-size 2", "choosing the number of expert ranks by itself (see --expert-model-parallel-size)"),
    Line("a student of students", 8, "{125m} {tokens} {md} {mock} --num-experts 32 {moe-md} --mos --micro-batch-size 2 "
         "--kd-beta-ce 1 --num-layers-teacher 12 --hidden-size-teacher 768 --num-attention-heads-teacher 12 "
         "--num-experts-teacher 32", "--mos needs --load-teacher"),
    Line("a student whose teacher is gone", 8, "{125m} {tokens} {md} {mock} --num-experts 32 {moe-md} --mos "
         "--micro-batch-size 2 --load-teacher {tmp}/gone", "--load-teacher {tmp}/gone"),
]  # fmt: skip

DEEPSPEED = [
    Line("bloom", 384, "--num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --bf16 "
         "--max-position-embeddings 2048 --micro-batch-size 2 --rampup-batch-size 192 16 9_765_625 "
         "--global-batch-size 2048 --train-samples 220_000_000 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine "
         "--lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 --pad-vocab-size-to 250880 {md} {files} "
         "--valid-num-workers 0 --embed-layernorm --pp-partition-method 'type:transformer|embedding'",
         "--embed-layernorm: not available yet: other norms or attention; --pp-partition-method type:transformer|emb"),
    Line("bloom without its own norm", 384, "--num-layers 70 --hidden-size 14336 --num-attention-heads 112 "
         "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --rampup-batch-size 192 16 9_765_625 "
         "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 --global-batch-size 2048 --bf16 "
         "--train-samples 220_000_000 --lr 6e-5 --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 {mock}",
         FITS),
    Line("random layers", 8, "{125m} {tokens} {md} {mock} --micro-batch-size 4 --random-ltd "
         "--data-efficiency-curriculum-learning", "--random-ltd, --data-efficiency-curriculum-learning: not available"),
    Line("an optimizer on the host", 8, "{125m} {tokens} {md} {mock} --micro-batch-size 4 --cpu-optimizer "
         "--checkpoint-in-cpu", "--cpu-optimizer: not available yet: an optimizer on the host; --checkpoint-in-cpu"),
    Line("the third stage", 8, "{125m} {tokens} {md} {mock} --micro-batch-size 4 --zero-stage 3",
         "--zero-stage 3: must be 0, 1 or 2"),
    Line("the second stage", 8, "{125m} {tokens} {md} {mock} --micro-batch-size 4 --zero-stage 2 --bf16 "
         "--remote-device none", FITS),
    Line("no pipeline, and one", 8, "{125m} {tokens} {md} {mock} --micro-batch-size 4 "
         "--pipeline-model-parallel-size 2", "--no-pipeline-parallel and --pipeline-model-parallel-size 2 contradict"),
    Line("another run's schedule", 8, "{125m} {tokens} {md} {mock} --micro-batch-size 4 --load {tmp} "
         "--no-load-lr-state --reset-iteration", "--no-load-lr-state: not available yet: starting the schedule again"),
    Line("tokens alone", 1, "{tiny} {mock} {fp16} --num-workers 0 --micro-batch-size 2 --train-tokens 96 "
         "--lr 1e-3 --lr-decay-tokens 96 --lr-warmup-tokens 32 --log_interval=1", TRAINS),
    Line("a range test", 1, "{tiny} {mock} --train-iters 3 --micro-batch-size 2 --lr-schedule LRRangeTest "
         "--lr-range-test-min-lr 1e-4 --lr-range-test-step-size 2 --num-workers 0", TRAINS),
]  # fmt: skip

LINES = [*DENSE, *LLAMA, *EXPERTS, *DEEPSPEED]
