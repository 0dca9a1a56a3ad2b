#!/bin/sh
# Runs the programs that the kernel command line names in gdrd.run=A,B and ends the guest with a status that the
# emulator hands on. gdrd.node=N is the guest's number, gdrd.test=PART what a
# test's name must contain to be run.
export PATH=/gdrd:/bin:/sbin RUST_BACKTRACE=1

option() {
  read -r line </proc/cmdline
  for word in $line; do
    case $word in
      "$1="*) echo "${word#*=}" ;;
    esac
  done
}

GDRD_VM_NODE=$(option gdrd.node)
export GDRD_VM_NODE
status=0
for program in $(option gdrd.run | { IFS=, read -r a b c d e; echo "$a $b $c $d $e"; }); do
  echo "== guest $GDRD_VM_NODE: $program"
  # A case at a time: they share one device and one small CPU.
  # shellcheck disable=SC2046  # one word or none
  "$program" --test-threads=1 $(option gdrd.test) || status=1
done

echo "guest $GDRD_VM_NODE ends with $status"
sync
# isa-debug-exit at port 0xf4: the emulator ends with 2 * value + 1. With 16 added no failure of its own looks alike.
if [ "$status" = 0 ]; then value='\0020'; else value='\0021'; fi
printf '%b' "$value" | dd of=/dev/port bs=1 seek=244 2>/dev/null
poweroff -f
