#!/usr/bin/env bash
# GPT-3 1.3B (Brown et al., 2020): 24 layers of width 2048, 1,315,819,520 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-1}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-1}" PIPELINE="${PIPELINE:-1}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-8}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=gpt_1.3b
LAYERS=24 HIDDEN=2048 HEADS=16
INIT_STD="${INIT_STD:-0.013}"             # sqrt(1 / (3 x width))
GLOBAL_BATCH="${GLOBAL_BATCH:-512}" LR="${LR:-2e-4}" MIN_LR="${MIN_LR:-2e-5}"
gpt
pretrain "$@"
