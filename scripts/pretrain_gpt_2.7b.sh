#!/usr/bin/env bash
# GPT-3 2.7B (Brown et al., 2020): 32 layers of width 2560, 2,651,673,600 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-2}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-1}" PIPELINE="${PIPELINE:-1}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-4}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=gpt_2.7b
LAYERS=32 HIDDEN=2560 HEADS=32
INIT_STD="${INIT_STD:-0.011}"             # sqrt(1 / (3 x width))
GLOBAL_BATCH="${GLOBAL_BATCH:-512}" LR="${LR:-1.6e-4}" MIN_LR="${MIN_LR:-1.6e-5}"
gpt
pretrain "$@"
