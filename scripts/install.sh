#!/usr/bin/env bash
# Install digenrl with an extra into an environment: scripts/install.sh PYTHON EXTRA
# uv takes a minute where pip takes five, and seconds for the next clone on the same machine. pip goes on where uv cannot
# be installed or fails. Exact versions are those of constraints.txt in both cases; INSTALL_ARGS stands in its place.
set -euo pipefail
python="$1" extra="${2:-dev}"
what=(-e ".[$extra]")
[[ -n "${INSTALL_ARGS:-}" ]] || what=(-c constraints.txt "${what[@]}")

configured() {  # uv does not read pip's configuration
    "$python" -m pip config get "global.$1" 2>/dev/null || true
}

by_uv() {
    "$python" -m pip install --disable-pip-version-check --quiet uv 2>/dev/null || return 1
    local index more links cert
    index="${PIP_INDEX_URL:-$(configured index-url)}" more="${PIP_EXTRA_INDEX_URL:-$(configured extra-index-url)}"
    links="${PIP_FIND_LINKS:-$(configured find-links)}" cert="${PIP_CERT:-$(configured cert)}"
    # As with pip, the newest of all indexes counts. Empty values would be taken for addresses.
    [[ -z "$index" ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
    [[ -z "$more" ]] || export UV_INDEX="${UV_INDEX:-$more}"
    [[ -z "$links" ]] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$links}"
    [[ -z "$cert" ]] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
    "$python" -m uv pip install --python "$python" --index-strategy unsafe-best-match ${INSTALL_ARGS:-} "${what[@]}" || return 1
    # Bytecode of what a run imports is written now where later processes may not write it: 4,800 files of 22,700.
    [[ -z "${PYTHONDONTWRITEBYTECODE:-}" ]] || PYTHONDONTWRITEBYTECODE= "$python" -c \
        "import digenrl.extensions.tasks.scenes, digenrl.launchers.job, digenrl.report.build" || true
}

by_uv || {
    [[ -z "${INSTALL_ARGS:-}" ]] || exit 1
    echo "uv is not available here: installing by pip, which takes some minutes." >&2
    "$python" -m pip install --disable-pip-version-check "${what[@]}"
}
