#!/usr/bin/env bash
# GPT-3 13B (Brown et al., 2020): 40 layers of width 5120, 12,853,626,880 parameters.
# pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/pretraining.sh"

NODES="${NODES:-8}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
TENSOR="${TENSOR:-4}" PIPELINE="${PIPELINE:-1}" ZERO="${ZERO:-1}"
MICRO_BATCH="${MICRO_BATCH:-4}" RECOMPUTE="${RECOMPUTE:-none}"

NAME=gpt_13b
LAYERS=40 HIDDEN=5120 HEADS=40
INIT_STD="${INIT_STD:-0.008}"             # sqrt(1 / (3 x width))
GLOBAL_BATCH="${GLOBAL_BATCH:-1024}" LR="${LR:-1e-4}" MIN_LR="${MIN_LR:-1e-5}"
gpt
pretrain "$@"
