#!/usr/bin/env bash
# Give the checkout a working .venv/bin/python. Called by `make setup`, once; delete .venv to start again.
#
#   a python on this machine already has torch with CUDA and sees a GPU -> .venv/bin/python is a one-line
#       wrapper around it; nothing is installed (GPU machines often have no network)
#   otherwise -> a virtual environment. Without a GPU, torch is installed first and by exact version: a plain
#       `torch>=2.11` would pull gigabytes of CUDA libraries that this machine cannot use.
#
# Environment: PYTHON (python3), TORCH (requirement for torch), PIP_ARGS (e.g. --index-url ...), EXTRAS (dev).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
extras=${EXTRAS:-dev}

sees_cuda() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

if has_gpu && [ ! -x .venv/bin/pip ]; then
    for candidate in "$python" python3 /opt/*/bin/python3 /opt/*/.venv/bin/python3; do
        candidate=$(command -v "$candidate" || true)
        if [ -n "$candidate" ] && [[ $candidate != "$PWD"/.venv/* ]] && sees_cuda "$candidate"; then
            echo "setup: using $candidate, which has torch with CUDA; nothing to install"
            rm -rf .venv && mkdir -p .venv/bin
            printf '#!/bin/sh\nexec "%s" "$@"\n' "$candidate" >.venv/bin/python
            chmod +x .venv/bin/python
            exit 0
        fi
    done
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "setup: $python is $("$python" -V 2>&1), megamoe needs 3.10 or newer: make setup PYTHON=python3.11" >&2
    exit 1
}
if [ ! -x .venv/bin/pip ] && ! "$python" -m venv .venv; then
    rm -rf .venv
    echo "setup: $python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2
    exit 1
fi

if has_gpu; then torch=${TORCH:-torch>=2.11}; else torch=${TORCH:-torch==2.13.0}; fi
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
# shellcheck disable=SC2086  # PIP_ARGS is a list of words
{
    echo "setup: $torch"
    pip install ${PIP_ARGS:-} "$torch" numpy
    echo "setup: megamoe[$extras]"
    pip install ${PIP_ARGS:-} -c constraints.txt -e ".[$extras]"
}
