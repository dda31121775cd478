#!/usr/bin/env bash
# 1.3B+MoE-128: 52.5 billion parameters, 128 experts in every second layer.
# moe_pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/moe_pretraining.sh"

NAME=moe_1.3b_128
LAYERS=24 HIDDEN=2048 HEADS=16 EXPERTS=128
MICRO_BATCH="${MICRO_BATCH:-8}" GLOBAL_BATCH="${GLOBAL_BATCH:-512}"
LR="${LR:-1.2e-4}" MIN_LR="${MIN_LR:-1e-6}"
pretrain "$@"
