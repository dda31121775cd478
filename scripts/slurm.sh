#!/usr/bin/env bash
# Any of the launch scripts as a Slurm job: one call per node, each with its rank. A job that is requeued goes on from
# its newest checkpoint.
#
#   sbatch --nodes 16 scripts/slurm.sh scripts/pretrain_gpt_175b.sh                further arguments go to the script
#   DRY_RUN=1 NODES=16 bash scripts/slurm.sh scripts/pretrain_gpt_175b.sh          also TINY=1: here, without Slurm
#SBATCH --job-name=megazero
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if [ $# = 0 ]; then
    echo "slurm.sh: which script? sbatch --nodes N scripts/slurm.sh scripts/pretrain_gpt_13b.sh" >&2
    exit 2
fi
if [ "${DRY_RUN:-0}" != 0 ] || [ "${TINY:-0}" = 1 ]; then
    exec bash "$@"
fi
export NODES="${SLURM_JOB_NUM_NODES:?slurm.sh is for sbatch}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"        # whole: a reader that ends early would be its end too
MASTER_ADDR="${MASTER_ADDR:-${hosts%%$'\n'*}}"
export MASTER_ADDR
srun bash -c 'NODE_RANK="$SLURM_PROCID" exec bash "$@"' launch "$@"
