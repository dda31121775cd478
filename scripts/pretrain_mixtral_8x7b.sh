#!/usr/bin/env bash
# Mixtral 8x7B (Jiang et al., 2024): 32 layers of width 4096 with 8 experts each, 2 of them for a token; 46,702,792,704
# parameters. Its authors told the model and not its training: batch and rate are those in use for its size.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-8}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-2}" PIPELINE="${PIPELINE:-2}" EXPERT="${EXPERT:-8}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-1}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=mixtral_8x7b
LAYERS=32 HIDDEN=4096 HEADS=32
GLOBAL_BATCH="${GLOBAL_BATCH:-1024}" LR="${LR:-1e-4}" MIN_LR="${MIN_LR:-1e-5}"
llama 14336
MODEL+=(
    --group-query-attention --num-query-groups 8 --rotary-base 1000000 --max-position-embeddings 32768
    --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01
)
pretrain "$@"
