#!/usr/bin/env bash
# Llama 2 7B (Touvron et al., 2023): 32 layers of width 4096, 6,738,415,616 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-4}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-2}" PIPELINE="${PIPELINE:-1}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-1}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=llama_7b
LAYERS=32 HIDDEN=4096 HEADS=32
GLOBAL_BATCH="${GLOBAL_BATCH:-1024}" LR="${LR:-3e-4}" MIN_LR="${MIN_LR:-3e-5}"
llama 11008
pretrain "$@"
