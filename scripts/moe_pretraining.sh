# Sourced by the pretrain_moe_*.sh: what the published DeepSpeed-MoE models have in common, and how a run starts.
#
#   pretrain "$@"     further arguments go to pretrain_gpt.py
#
# The caller sets the shape (NAME LAYERS HIDDEN HEADS EXPERTS) and the published GLOBAL_BATCH MICRO_BATCH LR MIN_LR. But
# for the shape, the environment may set these and every other name in capitals below; paths are relative to the
# repository:
#
#   DATA=my_text_document TOKENIZER="--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt" OUT=runs/my_moe
#   NODES=8 NODE_RANK=0 MASTER_ADDR=node0 GPUS_PER_NODE=8      one call per node; see launch.sh
#   TENSOR=2 PIPELINE=4 EXPERT=16 ZERO=2                       the layout; EXPERT: by default as many as there can be
#   TINY=1      seconds on a CPU with made-up data, to see that it works
#   DRY_RUN=1   the layout and its memory, without starting it; DRY_RUN=command: the command, one word per line
#
# With --print-layout --world-size N one process shows the layout on N ranks.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

pretrain() {
    GPUS_PER_NODE="${GPUS_PER_NODE:-1}" VOCAB=50257
    local asked="" word nodes="${NODES:-1}" world largest=0 count data precision steps
    local tensor="${TENSOR:-1}" pipeline="${PIPELINE:-1}" out="${OUT:-runs/$NAME}"
    local tokens="${TRAIN_TOKENS:-300000000000}" sequence="${SEQUENCE:-2048}" std="${INIT_STD:-0.014}"
    read -ra data <<< "--data-path ${DATA:-data/corpus_text_document} --split ${SPLIT:-98,2,0} \
        ${TOKENIZER:---vocab-file data/gpt2-vocab.json --merge-file data/gpt2-merges.txt}"
    precision=(--fp16 --initial-scale-power 11 --loss-scale-window 500 --hysteresis 2 --min-loss-scale 1)
    steps=(
        --train-tokens "$tokens" --lr-decay-style cosine --lr-decay-tokens "${DECAY_TOKENS:-$tokens}"
        --lr-warmup-tokens "${WARMUP_TOKENS:-375000000}" --save-interval "${SAVE_INTERVAL:-10000}"
        --eval-interval 100 --eval-iters 10 --log-interval 10
    )
    world=$((${nodes%%:*} * GPUS_PER_NODE))         # the fewest, where hosts come and go
    if [ "${TINY:-0}" = 1 ]; then
        tiny_model
        VOCAB=97 data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 97)
        precision=()
        steps=(--train-iters 4 --lr-decay-style cosine --lr-decay-iters 4 --save-interval 4 --log-interval 1)
        export OMP_NUM_THREADS=1
    fi
    for word in "$@"; do
        if [ "$asked" = --world-size ]; then world="$word"; fi
        asked="$word"
    done
    # Experts are cut over all ranks of a stage, as far as the largest layer can be.
    for count in $EXPERTS; do largest=$((count > largest ? count : largest)); done
    local expert="${EXPERT:-$(common_divisor "$largest" $((world / pipeline)))}"
    FLAGS=(
        --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS" --seq-length "$sequence"
        --num-experts $EXPERTS --expert-interval "${INTERVAL:-2}" --topk 1 --mlp-type "${MLP_TYPE:-standard}"
        --moe-loss-coeff "${MOE_LOSS_COEFF:-0.01}" --moe-train-capacity-factor "${TRAIN_CAPACITY:-1.0}"
        --moe-eval-capacity-factor "${EVAL_CAPACITY:-1.0}" --moe-min-capacity "${MIN_CAPACITY:-4}"
        --moe-expert-parallel-size "$expert" --tensor-model-parallel-size "$tensor"
        --pipeline-model-parallel-size "$pipeline" --zero-stage "${ZERO:-1}" --checkpoint-activations
        --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --lr "$LR" --min-lr "$MIN_LR"
        --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --init-method-std "$std"
        "${steps[@]}" "${precision[@]}" "${data[@]}" --save "$out/checkpoints" --auto-resume
        --tensorboard-dir "$out/tensorboard" --metrics-jsonl "$out/metrics.jsonl"
        ${TEACHER_FLAGS[@]+"${TEACHER_FLAGS[@]}"} "$@"
    )
    launch "$out"
}

common_divisor() { # A B
    if [ "$2" = 0 ]; then echo "$1"; else common_divisor "$2" $(($1 % $2)); fi
}

tiny_model() { # the same kind of model in small: a pyramid stays one, two experts in its first MoE layer and four on top
    LAYERS=$((LAYERS < 24 ? 5 : 6)) HIDDEN=32 HEADS=4 MICRO_BATCH=1 GLOBAL_BATCH=8 sequence=16
    case "$EXPERTS" in
        *" "*) EXPERTS="$([ "$LAYERS" = 5 ] && echo 2 4 || echo 2 2 4)" ;;
        *) EXPERTS=4 ;;
    esac
}

distil_from() { # NAME LAYERS EXPERTS of the teacher: sets TEACHER_FLAGS, unless TEACHER=none
    local layers="$2" experts="$3" hidden="$HIDDEN" heads="$HEADS" stop="$KD_STOP"
    TEACHER="${TEACHER:-runs/$1/checkpoints}"
    TEACHER_FLAGS=()
    if [ "$TEACHER" = none ]; then return; fi
    if [ "${TINY:-0}" = 1 ]; then layers=6 experts="2 2 4" hidden=32 heads=4 stop=2; fi
    TEACHER_FLAGS=(
        --mos --load-teacher "$TEACHER" --num-layers-teacher "$layers" --hidden-size-teacher "$hidden"
        --num-attention-heads-teacher "$heads" --num-experts-teacher $experts
        --kd-beta-ce "${KD_BETA:-1}" --kd-temp "${KD_TEMP:-1}" --kd-stop-iteration "$stop"
    )
}
