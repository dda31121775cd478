#!/usr/bin/env bash
# Llama 2 13B (Touvron et al., 2023): 40 layers of width 5120, 13,015,864,320 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-8}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-4}" PIPELINE="${PIPELINE:-1}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-2}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=llama_13b
LAYERS=40 HIDDEN=5120 HEADS=40
GLOBAL_BATCH="${GLOBAL_BATCH:-1024}" LR="${LR:-3e-4}" MIN_LR="${MIN_LR:-3e-5}"
llama 13824
pretrain "$@"
