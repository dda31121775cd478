#!/usr/bin/env bash
# 1.3B PR-MoE+MoS: a student of 21 layers and 26.9 billion parameters that learns from the 1.3B PR-MoE of 24 layers.
# TEACHER=FOLDER: its checkpoints (default: where pretrain_moe_1.3b_pr.sh puts them); TEACHER=none: without teacher.
# moe_pretraining.sh says what else the environment may set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/moe_pretraining.sh"

NAME=moe_1.3b_pr_mos
LAYERS=21 HIDDEN=2048 HEADS=16 EXPERTS="64 64 64 64 64 64 64 64 128 128" MLP_TYPE=residual ZERO="${ZERO:-2}"
MICRO_BATCH="${MICRO_BATCH:-8}" GLOBAL_BATCH="${GLOBAL_BATCH:-512}"
LR="${LR:-1.2e-4}" MIN_LR="${MIN_LR:-1e-6}"
KD_STOP="${KD_STOP:-200000}"        # of 286,000 steps: distilling to the end costs quality
distil_from moe_1.3b_pr 24 "64 64 64 64 64 64 64 64 64 64 128 128"
pretrain "$@"
