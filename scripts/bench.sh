#!/usr/bin/env bash
# `make bench`: builds the daemon and the peers it is measured against, then measures both in one run.
# usage: bench.sh [ARGUMENT...]   as `gdrd-bench --help` says; `gdrctl bench` measures a daemon that runs already
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

shopt -s nullglob
build_peers
cargo build --release --locked --quiet -p gdrd -p gdrctl -p gdrd-bench --bins
"$target/release/gdrd-bench" --peers "$peers" --json "$target/bench.json" "$@"
echo
echo "the same as JSON: $target/bench.json"
