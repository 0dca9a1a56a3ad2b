#!/usr/bin/env bash
# Measures a simulated daemon of the release build with `gdrctl bench`; its arguments are passed on.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/sim-daemon.sh
source scripts/sim-daemon.sh

cargo build --release --locked --quiet -p gdrd -p gdrctl
start_sim_daemon dgx-a100
target/release/gdrctl bench "$@"
