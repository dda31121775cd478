#!/usr/bin/env bash
# GPT-3 175B (Brown et al., 2020): 96 layers of width 12288, 174,604,836,864 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-16}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-8}" PIPELINE="${PIPELINE:-8}" CHUNKS="${CHUNKS:-3}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-2}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=gpt_175b
LAYERS=96 HIDDEN=12288 HEADS=96
INIT_STD="${INIT_STD:-0.005}"             # sqrt(1 / (3 x width))
GLOBAL_BATCH="${GLOBAL_BATCH:-1536}" LR="${LR:-6e-5}" MIN_LR="${MIN_LR:-6e-6}"
gpt
pretrain "$@"
