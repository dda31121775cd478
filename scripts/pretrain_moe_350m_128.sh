#!/usr/bin/env bash
# 350M+MoE-128: 13.1 billion parameters, 128 experts in every second layer; published on 64 GPUs.
# moe_pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/moe_pretraining.sh"

NAME=moe_350m_128
LAYERS=24 HIDDEN=1024 HEADS=16 EXPERTS=128
MICRO_BATCH="${MICRO_BATCH:-4}" GLOBAL_BATCH="${GLOBAL_BATCH:-256}"
LR="${LR:-2e-4}" MIN_LR="${MIN_LR:-2e-6}"
pretrain "$@"
