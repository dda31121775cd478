#!/usr/bin/env bash
# Llama 2 70B (Touvron et al., 2023): 80 layers of width 8192, 68,976,648,192 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-16}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-8}" PIPELINE="${PIPELINE:-4}" CHUNKS="${CHUNKS:-2}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-1}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=llama_70b
LAYERS=80 HIDDEN=8192 HEADS=64
GLOBAL_BATCH="${GLOBAL_BATCH:-1024}" LR="${LR:-1.5e-4}" MIN_LR="${MIN_LR:-1.5e-5}"
llama 28672
MODEL+=(--group-query-attention --num-query-groups 8)
pretrain "$@"
