#!/usr/bin/env bash
# Runs every test suite, shows their output as they go, and ends in one line 'N passed, N failed' that sums them.
# usage: test.sh [vm]   with vm: the tests in virtual machines too
# A suite that dies without saying what failed (it did not compile, a test process was killed) counts as one failure.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

export CARGO_TERM_COLOR=never
log_dir=${CARGO_TARGET_DIR:-target}/test-logs
mkdir -p "$log_dir"
rm -f "$log_dir"/*.log
passed=0
failed=0

# suite NAME COMMAND...: run it, add up the `test result:` lines that each cargo test binary ends with.
suite() {
  local name=$1 log=$log_dir/$1.log status suite_passed suite_failed
  shift
  echo "== $name: $*"
  "$@" 2>&1 </dev/null | tee "$log"
  status=${PIPESTATUS[0]}
  read -r suite_passed suite_failed < <(awk '
    /^test result: / {
      for (i = 3; i < NF; i++) {
        if ($(i + 1) == "passed;") p += $i
        if ($(i + 1) == "failed;") f += $i
      }
    }
    END { print p + 0, f + 0 }' "$log")
  if ((status != 0 && suite_failed == 0)); then
    echo "== $name ended with status $status and named no failed test"
    suite_failed=1
  fi
  passed=$((passed + suite_passed))
  failed=$((failed + suite_failed))
}

# Tests start the real binaries, also those of other packages, which `cargo test` alone does not build.
suite build cargo build --locked --workspace --bins
if ((failed == 0)); then
  suite workspace cargo test --locked --workspace --no-fail-fast
  if [[ ${1:-} == vm ]]; then
    suite vm scripts/vm-test.sh
  fi
fi

echo
grep -h SKIPPED "$log_dir/vm.log" 2>/dev/null
echo "$passed passed, $failed failed"
((failed == 0 && passed > 0))
