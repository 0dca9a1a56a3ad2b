#!/usr/bin/env bash
# Boots guests on one emulated wire, shows what their tests print, and succeeds only if each guest said so.
# usage: run.sh IMAGE.cpio COUNT PROGRAM[,PROGRAM...]   with VM_DIR set; COUNT is 1 or 2
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=tests/vm/lib.sh
. "$here/lib.sh"

image=$1
count=$2
programs=$3
# A guest that hangs ends here; far beyond what a loaded machine needs.
limit_s=${VM_LIMIT_S:-240}
# Status of the emulator when a guest has passed: see guest-init.sh.
passed_status=33

work=$(mktemp -d "$VM_DIR/run.XXXXXX")
pids=()
# shellcheck disable=SC2317  # the trap calls it
finish() {
  local pid
  for pid in "${pids[@]}"; do
    kill "$pid" 2>/dev/null || true
  done
  rm -rf "$work"
}
trap finish EXIT

kernel=$(echo "$VM_DIR"/kernel/boot/vmlinuz-*)
QEMU_MODULE_DIR=$(unpacked lib/x86_64-linux-gnu/qemu)
export QEMU_MODULE_DIR

emulator=(timeout "$limit_s" "$(unpacked lib64/ld-linux-x86-64.so.2)" --library-path "$(libraries)" "$(unpacked bin/qemu-system-x86_64)")

# start NODE: tcg unless the host offers KVM; one CPU a guest, so that two fit a small machine.
start() {
  local node=$1 wire
  if ((count == 1)); then
    # Packets for others go nowhere; a hub without a second port would stall the NIC's queue.
    wire=user,id=wire,restrict=on,ipv6=off
  else
    wire=dgram,id=wire,local.type=unix,local.path=$work/wire$node,remote.type=unix,remote.path=$work/wire$((3 - node))
  fi
  "${emulator[@]}" \
    -L "$VM_DIR/root/usr/share/qemu" -L "$VM_DIR/root/usr/share/seabios" \
    -M q35,sata=off,smbus=off,usb=off,vmport=off -accel "${VM_ACCEL:-tcg,thread=multi}" -cpu max -smp 1 -m 1024 \
    -nodefaults -no-user-config -display none -no-reboot \
    -serial "file:$work/console$node" -serial "file:$work/output$node" \
    -kernel "$kernel" -initrd "$image" \
    -append "console=ttyS0 quiet panic=-1 cryptomgr.notests gdrd.node=$node gdrd.run=$programs" \
    -netdev "$wire" -device "virtio-net-pci,netdev=wire,mac=52:54:00:00:00:0$node,romfile=" \
    -device isa-debug-exit,iobase=0xf4,iosize=4 </dev/null >"$work/emulator$node" 2>&1 &
  pids+=($!)
}

for ((node = 1; node <= count; node++)); do
  start "$node"
done

failed=0
for ((node = 1; node <= count; node++)); do
  status=0
  wait "${pids[node - 1]}" || status=$?
  cat "$work/output$node" 2>/dev/null || true
  if ((status != passed_status)); then
    failed=1
    echo "== guest $node: the emulator ended with $status; its console:"
    tail -n 40 "$work/console$node" "$work/emulator$node" 2>/dev/null || true
  fi
done
pids=()
exit "$failed"
