#!/usr/bin/env bash
# Real verbs in virtual machines: fetches Debian packages, builds the guests' image from the programs as built here, runs
# the tests inside and shows what they print. Leaves nothing outside of the target folder, installs nothing.
# Where the host is not Debian 12 or 13 it says why it does nothing; in CI that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

VM_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}")/vm
export VM_DIR
started=$SECONDS

# One fetched tree serves all later runs of the same checkout; a half-fetched one is fetched again.
if [[ ! -e $VM_DIR/complete ]]; then
  rm -rf "$VM_DIR"
  mkdir -p "$VM_DIR"
  status=0
  tests/vm/fetch.sh "$VM_DIR" || status=$?
  if ((status == 3)) && [[ -z ${CI:-} ]]; then
    echo "vm-test: SKIPPED, see above"
    exit 0
  fi
  if ((status != 0)); then
    exit "$status"
  fi
  touch "$VM_DIR/complete"
fi

cargo build --locked -p gdrd -p gdrd-harness --bins
# The name of each test program stands in cargo's own message about it.
built=$(cargo test --locked -p gdrd-vm --test conformance --test one_host --test two_hosts --no-run 2>&1 | tee /dev/stderr)
programs=$VM_DIR/programs
rm -rf "$programs"
mkdir -p "$programs"
for name in conformance one_host two_hosts; do
  path=$(sed -n "s|^ *Executable tests/$name.rs (\(.*\))\$|\1|p" <<<"$built")
  cp "$path" "$programs/$name"
done
cp "${CARGO_TARGET_DIR:-target}"/debug/{gdrd,gdrd-puppet} "$programs/"
tests/vm/image.sh "$VM_DIR/image.cpio" "$programs"/*

failed=0
tests/vm/run.sh "$VM_DIR/image.cpio" 1 conformance,one_host || failed=1
tests/vm/run.sh "$VM_DIR/image.cpio" 2 two_hosts || failed=1
echo "vm-test: $((SECONDS - started)) s"
exit "$failed"
