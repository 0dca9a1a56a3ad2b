#!/usr/bin/env bash
# Builds gdrd and gdrctl as they are installed; further packages are built with them.
# usage: release.sh [PACKAGE...]
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(-p gdrd)
for name in "$@"; do
  packages+=(-p "$name")
done
cargo build --locked --release "${packages[@]}" --bins

# A run of gdrctl over a captured tree is mostly its start, and a quarter of that the loading and binding of libc and libm: it
# is linked with them where the C library can be (Debian's libc6-dev has it). gdrd and programs of the client library load
# drivers, which need the host's own libc; gdrctl maps no GPU memory and loads none.
static=()
if [[ -f $(cc -print-file-name=libc.a) ]]; then
  static=(-C target-feature=+crt-static -C relocation-model=static)
else
  echo "release: there is no libc.a here: gdrctl is linked with libc.so, and starts slower"
fi
cargo rustc --locked --release -p gdrctl --bin gdrctl -- "${static[@]}"
