#!/usr/bin/env bash
# Boots guests on one emulated wire, shows what their tests print, and succeeds only if each guest said so.
# usage: run.sh IMAGE.cpio COUNT PROGRAM[,PROGRAM...] [EMULATOR ARGUMENT...]   COUNT is 1 or 2
# With VM_DIR set, VM_KERNEL to one of its kernels (kernel by default), VM_KERNEL_ARGUMENTS to words for its command line.
# A guest commands its emulator as a person at its monitor would, by its serial port ttyS2, and the other's by ttyS3.
# VM_QUITS=N: guest N is ended by the other.
set -euo pipefail
emulator=$VM_DIR/emulator
image=$1
count=$2
programs=$3
shift 3
# A guest that hangs ends here; far beyond what a loaded machine needs.
limit_s=${VM_LIMIT_S:-400}
# Status of the emulator when a guest has passed: see guest-run.sh.
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

kernel=$VM_DIR/${VM_KERNEL:-kernel}/vmlinuz
export QEMU_MODULE_DIR=$emulator/usr/lib/x86_64-linux-gnu/qemu

# monitor NODE WHO: a monitor of this guest's emulator. port NODE WHO: a serial port to the monitor that NODE has for WHO,
# which may come later.
monitor() { echo "-chardev socket,id=monitor-$2,path=$work/monitor$1-$2,server=on,wait=off -mon chardev=monitor-$2"; }
port() { echo "-chardev socket,id=port$1-$2,path=$work/monitor$1-$2,reconnect-ms=100 -serial chardev:port$1-$2"; }

# start NODE ARGUMENT...: tcg unless told otherwise; one CPU a guest, so that two fit a small machine.
start() {
  local node=$1 wire other=$((count == 2 ? 3 - $1 : $1)) monitors
  shift
  # shellcheck disable=SC2207  # words without blanks
  monitors=($(monitor "$node" itself) $(monitor "$node" peer) $(port "$node" itself) $(port "$other" peer))
  if ((count == 1)); then
    # Packets for others go nowhere; a hub without a second port would stall the NIC's queue.
    wire=user,id=wire,restrict=on,ipv6=off
  else
    wire=dgram,id=wire,local.type=unix,local.path=$work/wire$node,remote.type=unix,remote.path=$work/wire$other
  fi
  timeout "$limit_s" "$emulator/usr/lib64/ld-linux-x86-64.so.2" --library-path "$emulator/usr/lib/x86_64-linux-gnu" \
    "$emulator/usr/bin/qemu-system-x86_64" -L "$emulator/usr/share/qemu" -L "$emulator/usr/share/seabios" \
    -M q35,sata=off,smbus=off,usb=off,vmport=off -accel "${VM_ACCEL:-tcg,thread=multi}" -cpu max -smp 1 -m 1024 \
    -nodefaults -no-user-config -display none -no-reboot \
    -serial "file:$work/console$node" -serial "file:$work/output$node" "${monitors[@]}" \
    -kernel "$kernel" -initrd "$image" \
    -append "console=ttyS0 quiet panic=-1 cryptomgr.notests gdrd.node=$node gdrd.run=$programs ${VM_KERNEL_ARGUMENTS:-}" \
    -netdev "$wire" -device "virtio-net-pci,netdev=wire,id=nic,mac=52:54:00:00:00:0$node,romfile=" \
    -device isa-debug-exit,iobase=0xf4,iosize=4 "$@" </dev/null >"$work/emulator$node" 2>&1 &
  pids+=($!)
}

for ((node = 1; node <= count; node++)); do
  start "$node" "$@"
done

failed=0
for ((node = 1; node <= count; node++)); do
  status=0
  wait "${pids[node - 1]}" || status=$?
  cat "$work/output$node" 2>/dev/null || true
  if ((status != passed_status)) && ! [[ $status == 0 && $node == "${VM_QUITS:-}" ]]; then
    failed=1
    echo "== guest $node: the emulator ended with $status; its console:"
    tail -n 40 "$work/console$node" "$work/emulator$node" 2>/dev/null || true
  fi
done
pids=()
exit "$failed"
