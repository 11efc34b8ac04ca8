#!/usr/bin/env bash
# pip install; where it fails, a line says whether the index was out of reach or has no such package, which pip words
# alike ("from versions: none").
# No bytecode: that of all packages takes longer than that of what is imported.
#   tools/pip_install.sh PYTHON ARGUMENTS-OF-PIP-INSTALL...
set -uo pipefail
log=$(mktemp) && trap 'rm -f "$log"' EXIT
"$1" -m pip --disable-pip-version-check --quiet install --no-compile "${@:2}" 2>&1 | tee "$log"
code=${PIPESTATUS[0]}
[ "$code" -ne 0 ] || exit 0
if grep -qE "connection broken by|NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|SSLError" "$log"; then
    echo "setup: the package index cannot be reached from here: a proxy, or PIP_ARGS=\"--index-url ...\", or" \
        "PIP_ARGS=\"--no-index --find-links FOLDER\" with wheels" >&2
elif grep -q "No matching distribution found" "$log"; then
    echo "setup: where pip looked there is no $(sed -n 's/.*No matching distribution found for //p' "$log" | head -1)" \
        "for this Python" >&2
fi
exit "$code"
