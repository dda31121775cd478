# Sourced by the other scripts: makes sure that .venv holds what requirements.txt names, and sets PYTHON.
#
#   prepare_environment        from any folder; the caller has `set -euo pipefail`
#
# Nothing is installed again while requirements.txt and setup.cfg stay as they are. To use a Python that has
# everything already (say, one with its own build of torch), set MEGAZERO_PYTHON to it: nothing is installed then.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

prepare_environment() {
    export PYTHONUNBUFFERED=1
    if [ -n "${MEGAZERO_PYTHON:-}" ]; then
        PYTHON="$MEGAZERO_PYTHON"
        export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    local venv="$ROOT/.venv" log wanted
    PYTHON="$venv/bin/python"
    if ! "$PYTHON" -c "" 2>/dev/null; then
        echo "== creating $venv"
        rm -rf "$venv"
        if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "python3 must be Python 3.10 or newer; install it, or set MEGAZERO_PYTHON" >&2
            return 1
        fi
        if ! log="$(python3 -m venv "$venv" 2>&1)"; then
            rm -rf "$venv"
            echo "$log" >&2
            echo "python3 -m venv does not work here; on Debian or Ubuntu: apt-get install python3-venv" >&2
            return 1
        fi
    fi
    wanted="$(cd "$ROOT" && cat requirements.txt setup.cfg pyproject.toml <(pwd) | cksum)"
    if [ "$(cat "$venv/megazero-installed" 2>/dev/null)" != "$wanted" ]; then
        echo "== installing requirements.txt into $venv (minutes on a first run)"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --requirement "$ROOT/requirements.txt"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable "$ROOT"
        echo "$wanted" > "$venv/megazero-installed"
    fi
}
