#!/usr/bin/env bash
# 350M PR-MoE-32/64: 4.1 billion parameters, a residual MLP in every MoE layer, 32 experts in ten of them and 64 in the
# last two. The teacher of pretrain_moe_350m_pr_mos.sh. moe_pretraining.sh says what the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/moe_pretraining.sh"

NAME=moe_350m_pr
LAYERS=24 HIDDEN=1024 HEADS=16 EXPERTS="32 32 32 32 32 32 32 32 32 32 64 64" MLP_TYPE=residual
MICRO_BATCH="${MICRO_BATCH:-4}" GLOBAL_BATCH="${GLOBAL_BATCH:-256}"
LR="${LR:-3e-4}" MIN_LR="${MIN_LR:-1e-6}"       # published as not heavily tuned
pretrain "$@"
