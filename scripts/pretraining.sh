# Sourced by the pretrain_gpt_*.sh, pretrain_llama_*.sh and pretrain_mixtral_*.sh: what their runs have in common.
#
#   pretrain "$@"     further arguments go to pretrain_gpt.py
#
# The caller sets the shape (NAME LAYERS HIDDEN HEADS, MODEL with the flags of its family), VOCAB, SEQUENCE and STEPS,
# and defaults for LR MIN_LR GLOBAL_BATCH and the layout. The environment may set those and
#
#   DATA=my_text_document TOKENIZER="--tokenizer-type ... --tokenizer-model ..." OUT=runs/my_gpt
#   NODES=8 GPUS_PER_NODE=8 ...                   see launch.sh
#   TENSOR=8 PIPELINE=8 CHUNKS=2 EXPERT=1 ZERO=1 MICRO_BATCH=1 RECOMPUTE=none|selective|full: the layout
#   TINY=1      three steps of the same model in small, on 2 to 8 CPU processes with made-up data
#   DRY_RUN=1   the layout and its memory, without starting it; DRY_RUN=command: the command
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

pretrain() {
    local out="${OUT:-runs/$NAME}" data recompute=() precision=(--bf16)
    read -ra data <<< "--data-path ${DATA:-data/corpus_text_document} --split ${SPLIT:-98,2,0} $TOKENIZER"
    if [ "${TINY:-0}" = 1 ]; then tiny; fi
    case "${RECOMPUTE:-none}" in
        full) recompute=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
        selective) recompute=(--recompute-granularity selective) ;;
    esac
    FLAGS=(
        --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS" --seq-length "$SEQUENCE"
        "${MODEL[@]}"
        --tensor-model-parallel-size "$TENSOR" --pipeline-model-parallel-size "$PIPELINE"
        --zero-stage "${ZERO:-1}" "${recompute[@]}"
        --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH"
        --lr "$LR" --min-lr "$MIN_LR" --lr-decay-style cosine "${STEPS[@]}"
        --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 "${precision[@]}" "${data[@]}"
        --save "$out/checkpoints" --save-interval "${SAVE_INTERVAL:-1000}" --auto-resume
        --tensorboard-dir "$out/tensorboard" --metrics-jsonl "$out/metrics.jsonl" --log-interval "${LOG_INTERVAL:-10}"
    )
    if [ "${CHUNKS:-1}" -gt 1 ]; then FLAGS+=(--num-virtual-stages-per-pipeline-rank "$CHUNKS"); fi
    if [ "${EXPERT:-1}" -gt 1 ]; then FLAGS+=(--expert-model-parallel-size "$EXPERT"); fi
    FLAGS+=("$@")
    launch "$out"
}

tiny() { # the same architecture, with every axis of its layout that is cut in two: 2 to 8 processes
    local groups=() axis
    LAYERS=4 HIDDEN=64 HEADS=4 SEQUENCE=32 VOCAB=97 MICRO_BATCH=1 GLOBAL_BATCH=8 SAVE_INTERVAL=3 LOG_INTERVAL=1 NODES=1
    for axis in TENSOR PIPELINE CHUNKS EXPERT; do
        if [ "${!axis:-1}" -gt 1 ]; then printf -v "$axis" 2; fi
    done
    GPUS_PER_NODE=$((TENSOR * PIPELINE * ${EXPERT:-1}))
    if [ "$GPUS_PER_NODE" = 1 ]; then GPUS_PER_NODE=2; fi
    MODEL=($(in_small "${MODEL[@]}"))
    STEPS=(--train-iters 3 --lr-decay-iters 3)
    data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$VOCAB")
    precision=()
    export OMP_NUM_THREADS=1            # threads cost more than they bring
}

in_small() { # widths and counts among the flags of a family, at the size of `tiny`
    local word
    while [ $# -gt 0 ]; do
        case "$1" in
            --ffn-hidden-size) echo "$1 176" && shift ;;
            --num-query-groups) echo "$1 2" && shift ;;
            --num-experts) echo "$1 4" && shift ;;
            --max-position-embeddings) shift ;;
            *) echo "$1" ;;
        esac
        shift
    done
}

gpt() { # what GPT-3's sizes share (Brown et al., 2020): 300 billion tokens, the rate falling over 260
    VOCAB=50257 SEQUENCE="${SEQUENCE:-2048}"
    TOKENIZER="${TOKENIZER:---vocab-file data/gpt2-vocab.json --merge-file data/gpt2-merges.txt}"
    MODEL=(--init-method-std "$INIT_STD")
    STEPS=(--train-tokens 300000000000 --lr-warmup-tokens 375000000 --lr-decay-tokens 260000000000)
}

llama() { # FFN: what the sizes of Llama 2 share (Touvron et al., 2023): 2 trillion tokens, 4 million a step
    VOCAB=32000 SEQUENCE="${SEQUENCE:-4096}"
    TOKENIZER="${TOKENIZER:---tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model}"
    MODEL=(
        --swiglu --ffn-hidden-size "$1" --normalization RMSNorm --norm-epsilon 1e-5 --position-embedding-type rope
        --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --adam-eps 1e-5
    )
    STEPS=(--train-iters 476837 --lr-warmup-iters 2000 --lr-decay-iters 476837)
}
