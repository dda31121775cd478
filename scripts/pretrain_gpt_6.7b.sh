#!/usr/bin/env bash
# GPT-3 6.7B (Brown et al., 2020): 32 layers of width 4096, 6,658,596,864 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-4}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-2}" PIPELINE="${PIPELINE:-1}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-4}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=gpt_6.7b
LAYERS=32 HIDDEN=4096 HEADS=32
INIT_STD="${INIT_STD:-0.009}"             # sqrt(1 / (3 x width))
GLOBAL_BATCH="${GLOBAL_BATCH:-1024}" LR="${LR:-1.2e-4}" MIN_LR="${MIN_LR:-1.2e-5}"
gpt
pretrain "$@"
