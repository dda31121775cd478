#!/usr/bin/env bash
# 1.3B PR-MoE-64/128: 31.4 billion parameters, a residual MLP in every MoE layer, 64 experts in ten of them and 128 in
# the last two. The teacher of pretrain_moe_1.3b_pr_mos.sh. moe_pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/moe_pretraining.sh"

NAME=moe_1.3b_pr
LAYERS=24 HIDDEN=2048 HEADS=16 EXPERTS="64 64 64 64 64 64 64 64 64 64 128 128" MLP_TYPE=residual ZERO="${ZERO:-2}"
MICRO_BATCH="${MICRO_BATCH:-8}" GLOBAL_BATCH="${GLOBAL_BATCH:-512}"
LR="${LR:-1.2e-4}" MIN_LR="${MIN_LR:-1e-6}"
pretrain "$@"
