#!/usr/bin/env bash
# `make bench`: builds the daemon and the peers it is measured against, then measures both in one run.
# usage: bench.sh [--nixl] [ARGUMENT...]   as `gdrd-bench --help` says; `gdrctl bench` measures a daemon that runs already
# With --nixl, NIXL is installed from PyPI under target/, for the rows that are measured against it.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
peers=$target/bench-peers

# Each peer is one C file whose line `libs: ...` says what it links.
build_peers() {
  local source name libs
  mkdir -p "$peers"
  for source in tests/bench/peers/*.c; do
    name=$(basename "$source" .c)
    read -ra libs < <(sed -n 's/.*libs: \([-a-z ]*\).*/\1/p' "$source")
    # Its rows say 'absent' then.
    cc -O2 -o "$peers/$name" "$source" "${libs[@]}" || rm -f "$peers/$name"
  done
}

# NIXL comes as wheels of some 90 MB, so only where it is asked for; its rows say 'absent' otherwise. It names torch and the CUDA
# libraries as what it needs, 3 GB, and uses none of them to register host memory: hence --no-deps. pip says what it downloads.
nixl_peer() {
  local venv=$target/nixl
  if [[ ! -x $venv/bin/nixl_ready ]]; then
    echo "bench: installing NIXL into $venv"
    python3 -m venv "$venv" || return 0
    "$venv/bin/pip" --disable-pip-version-check --timeout 30 --retries 2 install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy || return 0
    "$venv/bin/python" -c 'import nixl._api' || return 0
    ln -s python3 "$venv/bin/nixl_ready"
  fi
  { echo "#!$(realpath "$venv")/bin/python"; tail -n +2 tests/bench/peers/nixl_list.py; } >"$peers/nixl_list"
  chmod +x "$peers/nixl_list"
}

shopt -s nullglob
build_peers
if [[ ${1:-} == --nixl ]]; then
  shift
  nixl_peer
fi
scripts/release.sh gdrd-bench
"$target/release/gdrd-bench" --peers "$peers" --json "$target/bench.json" "$@"
echo
echo "the same as JSON: $target/bench.json"
