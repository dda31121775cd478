#!/usr/bin/env bash
# What takes longer than a test may: layouts through torch.compile's C++ compiler, the tiny runs of all launch scripts
# (the suite has those of gpt_125m, gpt_175b, llama_70b, mixtral_8x7b and the MoE family), kills that torchrun restarts
# from, hosts that die and come back (as root), and an hour of random faults with a table at the end. Arguments go to the
# last: --faults, --ranks, --seed, --json (see docs/operations.md).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
prepare_environment

FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT
echo "== --compile in three layouts"
"$PYTHON" -m pytest -q --timeout 3600 tests/soak_compiled.py
for script in scripts/pretrain_*.sh; do
    name="$(basename "$script" .sh)"
    echo "== TINY=1 $script"
    TINY=1 MEGAZERO_PYTHON="$PYTHON" TEACHER="$FOLDER/${name%_mos}/checkpoints" OUT="$FOLDER/$name" bash "$script"
done
echo "== kills that torchrun restarts from, then on half the ranks"
"$PYTHON" scripts/restart_runs.py --kills 2 --save "$FOLDER/restarts"
echo "== hosts that die and come back"
"$PYTHON" -m pytest -q -rs --timeout 3600 tests/soak_hosts.py
echo "== random faults"
"$PYTHON" scripts/soak_faults.py --faults 1000 --ranks 2 --seed 1 --save "$FOLDER/faults" "$@"
