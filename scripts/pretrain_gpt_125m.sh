#!/usr/bin/env bash
# GPT-3 125M (Brown et al., 2020): 12 layers of width 768, 125,262,336 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-1}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-1}" PIPELINE="${PIPELINE:-1}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-16}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=gpt_125m
LAYERS=12 HIDDEN=768 HEADS=12
INIT_STD="${INIT_STD:-0.021}"             # sqrt(1 / (3 x width))
GLOBAL_BATCH="${GLOBAL_BATCH:-256}" LR="${LR:-6e-4}" MIN_LR="${MIN_LR:-6e-5}"
gpt
pretrain "$@"
