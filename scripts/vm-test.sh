#!/usr/bin/env bash
# Real verbs in virtual machines: fetches Debian packages, builds the guests' images from the programs as built here, runs
# the tests inside and shows what they print. Leaves nothing outside of the target folder, installs nothing.
# Where the host is not Debian 12 or 13 it says why it does nothing; in CI that is a failure.
# usage: vm-test.sh [RUN...]   all runs, or those of: one-host two-hosts bad-wire topology removal systemd
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
VM_DIR=$(realpath -m "$target")/vm
export VM_DIR
started=$SECONDS
for name in "$@"; do
  case $name in
    one-host | two-hosts | bad-wire | topology | removal | systemd) ;;
    *) echo "vm-test: no run is called '$name'; see the usage in this script" >&2 && exit 2 ;;
  esac
done
# Each has a program of tests of its own, in tests/vm/tests.
runs=(conformance one_host isolation dma_buf siw two_hosts systemd topology removal bad_wire)

# One fetched tree serves all later runs of the same checkout.
status=0
tests/vm/fetch.sh "$VM_DIR" || status=$?
if ((status == 3)) && [[ -z ${CI:-} ]]; then
  echo "vm-test: SKIPPED, see above"
  exit 0
fi
((status == 0)) || exit "$status"

cargo build --locked -p gdrd -p gdrctl -p gdrd-harness --bins
# The name of each test program stands in cargo's own message about it.
built=$(cargo test --locked -p gdrd-vm "${runs[@]/#/--test=}" --no-run 2>&1 | tee /dev/stderr)
programs=$VM_DIR/programs
rm -rf "$programs"
mkdir -p "$programs"
for run in "${runs[@]}"; do
  path=$(sed -n "s|^ *Executable tests/$run.rs (\(.*\))\$|\1|p" <<<"$built")
  cp "$path" "$programs/$run"
done
cp "$target"/debug/{gdrd,gdrctl,gdrd-puppet} "$programs/"

image=$VM_DIR/image.cpio
system_image=$VM_DIR/system-image.cpio
extra=$VM_DIR/extra
tests/vm/dma-buf/build.sh "$extra"
VM_EXTRA=$extra tests/vm/image.sh "$image" "$programs"/{gdrd,gdrctl,gdrd-puppet,conformance,one_host,isolation,dma_buf,siw,two_hosts,bad_wire,topology}
# In 6.12 a device that a process has open cannot be removed.
next_image=$VM_DIR/next-image.cpio
VM_KERNEL=kernel-next tests/vm/image.sh "$next_image" "$programs"/{gdrd,gdrctl,gdrd-puppet,removal}
tests/vm/system-image.sh "$system_image" "$programs"/{gdrd-puppet,systemd}

failed=0
# guest_run NAME COMMAND...: one of the runs, unless others were asked for.
guest_run() {
  local name=$1 at=$SECONDS
  shift
  [[ -z $wanted || " $wanted " == *" $name "* ]] || return 0
  echo "== $name"
  "$@" || failed=1
  echo "== $name: $((SECONDS - at)) s"
}
wanted=$*
guest_run one-host tests/vm/run.sh "$image" 1 conformance,one_host,isolation,dma_buf,siw
guest_run two-hosts tests/vm/run.sh "$image" 2 two_hosts
VM_QUITS=2 guest_run bad-wire tests/vm/run.sh "$image" 2 bad_wire
# shellcheck disable=SC2046  # words without blanks
guest_run topology tests/vm/run.sh "$image" 1 topology $(tests/vm/pcie.sh)
# shellcheck disable=SC2046
VM_KERNEL=kernel-next guest_run removal tests/vm/run.sh "$next_image" 1 removal $(tests/vm/pcie.sh)
guest_run systemd tests/vm/run.sh "$system_image" 1 systemd
# Emulators run by a loader of their own packages.
if left=$(compgen -G "$VM_DIR/run.*" || compgen -G "$VM_DIR/tree.*" || readlink /proc/[0-9]*/exe | grep -F "$VM_DIR/"); then
  echo "vm-test: left behind: $left"
  failed=1
fi
echo "vm-test: $((SECONDS - started)) s"
exit "$failed"
