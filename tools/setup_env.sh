#!/usr/bin/env bash
# Give the checkout a working .venv/bin/python. Called by `make setup`, once; delete .venv to start again.
#
#   a python on this machine has torch with CUDA and sees a GPU -> .venv is a virtual environment over that python's
#       packages. Only what is missing is installed into it, and torch never. Where nothing can be installed (no
#       network), one line says what is missing and how to add it; the layer runs through `staged` meanwhile.
#   otherwise -> a virtual environment of its own. Without a GPU, torch is installed first and by exact version: a
#       plain `torch>=2.11` would pull gigabytes of CUDA libraries that this machine cannot use.
#
# Environment: PYTHON (python3), TORCH (requirement for torch), EXTRAS (dev), PIP_ARGS (e.g. --index-url ..., or
# "--no-index --find-links DIR" for a folder of wheels).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
extras=${EXTRAS:-dev}
py=.venv/bin/python
base=.venv/.over # names the python whose packages .venv uses

sees_cuda() {
    "$1" -c '
import sys, torch
version = tuple(int(n) for n in torch.__version__.split(".")[:2])
sys.exit(version < (2, 11) or not torch.cuda.is_available())' >/dev/null 2>&1
}
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
# shellcheck disable=SC2086  # PIP_ARGS is a list of words
install() { tools/pip_install.sh "$py" ${PIP_ARGS:-} "$@"; }

make_over() { # python with torch
    rm -rf .venv
    "$1" -m venv --without-pip --system-site-packages .venv || return 1
    # "System" is what lies below every virtual environment. If this python is one itself, its packages come first.
    "$1" -c '
import sys
if sys.prefix != sys.base_prefix:
    print(f"import site; site.PREFIXES.insert(0, {sys.prefix!r})")
print(sys.argv[1])' "$PWD" >"$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megamoe.pth"
    sees_cuda "$py" || return 1
    echo "$1" >"$base"
}

try() { install --retries 1 --timeout 20 "$@" >>.venv/install.log 2>&1; }
try_all() { # options -- requirements: together, or from a folder one by one, so that one that lacks costs no other
    local options=()
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    try "${options[@]}" "$@" && return
    [[ ${PIP_ARGS:-} == *--no-index* ]] || return 1
    for requirement in "$@"; do try "${options[@]}" "$requirement" || true; done
}
look() {
    mapfile -t runtime < <("$py" tools/missing.py runtime)
    mapfile -t dev < <([ "$extras" != dev ] || "$py" tools/missing.py dev)
    [ -n "${runtime[*]}${dev[*]}" ]
}
install_missing() {
    local runtime dev
    look || return 0
    echo "setup: installing ${runtime[*]} ${dev[*]}"
    "$py" -m pip --version >/dev/null 2>&1 || "$py" -m ensurepip >/dev/null 2>&1 || true
    "$py" -c 'import torch; print("torch==" + torch.__version__)' >.venv/constraints.txt
    if [ -z "${runtime[*]}" ] || try_all --no-deps --ignore-installed -c constraints.txt -- "${runtime[@]}"; then
        [ -z "${dev[*]}" ] || try_all -c .venv/constraints.txt -c constraints.txt -- "${dev[@]}" || true
    fi
    look || return 0
    grep -h "^setup: " .venv/install.log | tail -1 || true
    echo "setup: could not install ${runtime[*]} ${dev[*]} (.venv/install.log); with a network, or with these wheels" \
        "in a folder: make -B setup PIP_ARGS=\"--no-index --find-links FOLDER\"" \
        "${runtime:+- until then the layer runs through staged, not mega}"
}

if has_gpu && { [ -e "$base" ] || [ ! -x .venv/bin/pip ]; }; then
    for candidate in "$(cat "$base" 2>/dev/null)" "$python" python3 /opt/*/bin/python3 /opt/*/.venv/bin/python3; do
        candidate=$(command -v "$candidate" || true)
        if [ -n "$candidate" ] && [[ $candidate != "$PWD"/.venv/* ]] && sees_cuda "$candidate"; then
            if { [ -e "$base" ] && sees_cuda "$py"; } || make_over "$candidate"; then
                echo "setup: using $candidate, which has torch with CUDA"
                install_missing
                exit 0
            fi
        fi
    done
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "setup: $python is $("$python" -V 2>&1), megamoe needs 3.10 or newer: make setup PYTHON=python3.11" >&2
    exit 1
}
if [ ! -x .venv/bin/pip ]; then
    rm -rf .venv
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "setup: $python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2
        exit 1
    fi
fi

if has_gpu; then torch=${TORCH:-torch>=2.11}; else torch=${TORCH:-torch==2.13.0}; fi
echo "setup: $torch"
install "$torch" numpy
echo "setup: megamoe[$extras]"
install -c constraints.txt -e ".[$extras]"
