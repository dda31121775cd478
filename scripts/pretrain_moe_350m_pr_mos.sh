#!/usr/bin/env bash
# 350M PR-MoE+MoS: a student of 21 layers and 3.5 billion parameters that learns from the 350M PR-MoE of 24 layers.
# TEACHER=FOLDER: its checkpoints (default: where pretrain_moe_350m_pr.sh puts them); TEACHER=none: without teacher.
# moe_pretraining.sh says what else the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/moe_pretraining.sh"

NAME=moe_350m_pr_mos
LAYERS=21 HIDDEN=1024 HEADS=16 EXPERTS="32 32 32 32 32 32 32 32 64 64" MLP_TYPE=residual
MICRO_BATCH="${MICRO_BATCH:-4}" GLOBAL_BATCH="${GLOBAL_BATCH:-256}"
LR="${LR:-3e-4}" MIN_LR="${MIN_LR:-1e-6}"
KD_STOP="${KD_STOP:-400000}"        # of 572,000 steps: distilling to the end costs quality
distil_from moe_350m_pr 24 "32 32 32 32 32 32 32 32 32 32 64 64"
pretrain "$@"
