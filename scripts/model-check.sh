#!/usr/bin/env bash
# The model checks of `make test` with more preemptions, within a bound: some two to three minutes on two cores.
# usage: model-check.sh [SECONDS]   after which a model ends at its next checkpoint; 20 by default
set -euo pipefail
cd "$(dirname "$0")/.."

# Both are read by loom (docs.rs/loom, model::Builder).
LOOM_MAX_PREEMPTIONS=6 LOOM_MAX_DURATION=${1:-20} \
  cargo test --locked --quiet -p gdrd-ring -p gdrd-engine -p gdrd-client --lib -- model gate
