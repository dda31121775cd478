#!/usr/bin/env bash
# Lints, then runs all tests on two workers. Arguments go to pytest: `bash scripts/test.sh -k checkpoint`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
prepare_environment
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE           # or every worker and every rank compiles all files anew

echo "== ruff"
"$PYTHON" -m ruff check .
echo "== pytest"
exec "$PYTHON" -m pytest -q -n 2 --dist worksteal --durations=10 "$@"
