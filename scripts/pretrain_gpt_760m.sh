#!/usr/bin/env bash
# GPT-3 760M (Brown et al., 2020): 24 layers of width 1536, 760,372,224 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-1}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-1}" PIPELINE="${PIPELINE:-1}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-8}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=gpt_760m
LAYERS=24 HIDDEN=1536 HEADS=16
INIT_STD="${INIT_STD:-0.015}"             # sqrt(1 / (3 x width))
GLOBAL_BATCH="${GLOBAL_BATCH:-256}" LR="${LR:-2.5e-4}" MIN_LR="${MIN_LR:-2.5e-5}"
gpt
pretrain "$@"
