#!/usr/bin/env bash
# Learning-rate range test of a small model: the rate grows from step to step until the loss turns; the loss is drawn
# against the rate, and the bounds of a cycle (1Cycle) are suggested. By default on one CPU process, with Python's own
# standard library as text.
#
#   bash scripts/lr_range_test.sh                     # one or two minutes
#   MIN_LR=1e-5 STEP_RATE=10 TRAIN_ITERS=20000 DATA=my_text_document bash scripts/lr_range_test.sh --bf16
#   TINY=1 bash scripts/lr_range_test.sh              # a few seconds, to see that it works
#
# Further arguments go to pretrain_gpt.py. The rate of a step is MIN_LR * (1 + STEP_RATE * steps before it / STEP_SIZE).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
prepare_environment

TINY="${TINY:-0}"                       # 1: a model and a test of seconds
MIN_LR="${MIN_LR:-1e-4}"                # rate of the first step
STEP_SIZE="${STEP_SIZE:-20}"            # steps in which the rate grows once
STEP_RATE="${STEP_RATE:-30}"            # times MIN_LR that it grows by
STEPS="${STEPS:-300}"                   # steps of the test: with the values above up to a rate of 0.045
TRAIN_ITERS="${TRAIN_ITERS:-}"          # steps of the training to come; empty: unknown
PROCESSES="${PROCESSES:-1}"
LAYERS="${LAYERS:-4}" HIDDEN="${HIDDEN:-128}" HEADS="${HEADS:-4}" SEQUENCE="${SEQUENCE:-128}"
MICRO_BATCH="${MICRO_BATCH:-4}" GLOBAL_BATCH="${GLOBAL_BATCH:-16}"
DATA="${DATA:-}"                        # prefix of token files with TOKENIZER's ids; empty: made here, of bytes
TOKENIZER="${TOKENIZER:---tokenizer-type ByteTokenizer}"
OUT="${OUT:-runs/lr_range_test}"        # folder of the results
MEGABYTES=8
if [ "$TINY" = 1 ]; then
    LAYERS=2 HIDDEN=32 HEADS=2 SEQUENCE=32 MICRO_BATCH=4 GLOBAL_BATCH=4
    MIN_LR=1e-3 STEP_SIZE=4 STEP_RATE=4 STEPS=48 MEGABYTES=0.2
    export OMP_NUM_THREADS=1            # threads cost more than they bring
fi

mkdir -p "$OUT"
METRICS="$OUT/metrics.jsonl"
rm -f "$METRICS"
if [ -z "$DATA" ]; then
    DATA="$OUT/corpus_text_document"
    if [ ! -e "$DATA.idx" ]; then
        "$PYTHON" data_tools/make_corpus.py --output "$OUT/corpus.jsonl" --max-megabytes "$MEGABYTES"
        "$PYTHON" data_tools/preprocess_data.py --input "$OUT/corpus.jsonl" --output-prefix "$OUT/corpus" \
            --tokenizer-type ByteTokenizer --append-eod --workers 1
    fi
fi

FLAGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS" --seq-length "$SEQUENCE"
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH"
    --data-path "$DATA" --split 100,0,0 $TOKENIZER
    --train-iters "$STEPS" --log-interval "$(((STEPS + 9) / 10))" --metrics-jsonl "$METRICS"
    --lr-scheduler LRRangeTest --lr-range-test-min-lr "$MIN_LR" --lr-range-test-step-size "$STEP_SIZE"
    --lr-range-test-step-rate "$STEP_RATE"
)
if [ "$PROCESSES" = 1 ]; then
    START=("$PYTHON")
else
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    START=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES")
fi
# A rate that is far too large ends training with a loss that is no number: then, too, the test has its answer.
if ! "${START[@]}" pretrain_gpt.py "${FLAGS[@]}" "$@"; then
    [ -s "$METRICS" ] || exit 1
    echo "== training ended early; the steps before are evaluated"
fi

"$PYTHON" scripts/plot_lr_test.py "$METRICS" --out "$OUT/lr_range_test.png" ${TRAIN_ITERS:+--train-iters "$TRAIN_ITERS"}
