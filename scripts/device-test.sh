#!/usr/bin/env bash
# Runs all checks that need an NVIDIA GPU, and ends in one line 'N passed, N failed'. What is measured goes to
# docs/measured/. Changes nothing on the GPU that outlives the processes: no modes, no clocks, no reset.
#
# On a machine without a compiler, carry target/release/gdrd and gdrd-device-test side by side and run the second one.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; then
  echo "device-test: there is no NVIDIA GPU here; carry the binaries to a machine that has one (docs/hardware.md)"
  exit 1
fi
if command -v cargo >/dev/null; then
  cargo build --locked --release --quiet -p gdrd -p gdrd-device-test
fi
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr '[:upper:] ' '[:lower:]-')
count=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
[ "$count" -eq 1 ] || name=$name-x$count
mkdir -p docs/measured
"${CARGO_TARGET_DIR:-target}"/release/gdrd-device-test "$@" --measured "docs/measured/$name.md"
