#!/usr/bin/env bash
# Checks and measures the kernels and a GPT step on this machine's GPU, within five minutes: `bash scripts/gpu_check.sh`.
# Takes python3 as it is (torch >= 2.11, triton >= 3.6; or MEGAZERO_PYTHON) and installs nothing. Arguments go to
# benchmarks/gpu_check.py; all numbers are written to gpu_check.json unless --json names another file.
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${MEGAZERO_PYTHON:-python3}" "$ROOT/benchmarks/gpu_check.py" --json gpu_check.json "$@"
