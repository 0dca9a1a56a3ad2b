#!/usr/bin/env bash
# Fuzzes the targets of tests/fuzz for a while, from their corpora on, as many at once as there are CPUs.
# usage: fuzz.sh [SECONDS [TARGET...]]   for each target; 20 s and all of them by default
# One seed unless FUZZ_SEED gives another, so that CI says the same of the same commit; who looks for more gives others.
# An input that breaks a target is left under target/fuzz/broken, and its text ends in the target's panic. What reached new
# code stays under target/fuzz/found, where the next run goes on from.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-20}
shift || true
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/fuzz
host=$(rustc -vV | sed -n 's/^host: //p')

# What cargo-fuzz passes, but for the sanitizer, which needs a nightly compiler: these are options of any rustc. There is no
# unsafe code in what is fuzzed but the copies of gdrd-shm, whose bounds are checked before.
coverage=(
  --cfg fuzzing
  -Cpasses=sancov-module
  -Cllvm-args=-sanitizer-coverage-level=4
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
  -Cllvm-args=-sanitizer-coverage-pc-table
  -Cllvm-args=-sanitizer-coverage-trace-compares
)
# With --target they are not for build scripts, which nothing is linked into that takes the counters.
RUSTFLAGS="${coverage[*]}" cargo build --locked --release --quiet \
  --manifest-path tests/fuzz/Cargo.toml --target "$host" --target-dir "$target"

if (($# > 0)); then
  names=("$@")
else
  mapfile -t names < <(sed -n 's/^name = "\(.*\)"$/\1/p' tests/fuzz/Cargo.toml | grep -v '^gdrd-')
fi

fuzz_one() {
  local name=$1 found=$target/found/$1 broken=$target/broken/$1 log=$target/$1.log
  mkdir -p "$found" "$broken"
  if ! "$target/$host/release/$name" -seed="${FUZZ_SEED:-1}" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$broken/" "$found" "tests/fuzz/corpus/$name" >"$log" 2>&1; then
    echo "fuzz: $name broke; the input is under $broken:"
    grep -a -A 4 'panicked at' "$log" || tail -n 40 "$log"
    return 1
  fi
  awk -v name="$name" '
    / cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") cov = $(i + 1) }
    /^stat::number_of_executed_units/ { runs = $2 }
    /^stat::new_units_added/ { added = $2 }
    END { printf "fuzz: %s: %d runs, %d places of code reached, %d new inputs\n", name, runs, cov, added }' "$log"
}

failed=0
running=0
for name in "${names[@]}"; do
  if ((running == $(nproc))); then
    wait -n || failed=1
    running=$((running - 1))
  fi
  fuzz_one "$name" &
  running=$((running + 1))
done
while ((running > 0)); do
  wait -n || failed=1
  running=$((running - 1))
done
((failed == 0)) && echo "fuzz: ${#names[@]} targets, none broke"
