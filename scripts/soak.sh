#!/usr/bin/env bash
# What takes longer than a test may: layouts through torch.compile's C++ compiler, and 30 kills of a random rank during
# saves. Arguments go to the kill test.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
prepare_environment

FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT
echo "== --compile in three layouts"
"$PYTHON" -m pytest -q --timeout 3600 tests/soak_compiled.py
echo "== 30 kills during saves"
"$PYTHON" scripts/kill_saves.py --kills 30 --ranks 2 --save "$FOLDER/kills" "$@"
