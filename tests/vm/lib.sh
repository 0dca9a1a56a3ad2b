#!/usr/bin/env bash
# What the scripts of tests/vm share: programs of the unpacked packages, run with their own loader and libraries.
# usage: . lib.sh, with VM_DIR set to the folder that fetch.sh filled

# Where a merged /usr is unpacked as links or not at all, depending on the suite.
unpacked() {
  local place
  for place in "$VM_DIR/root/$1" "$VM_DIR/root/usr/$1"; do
    if [[ -e $place ]]; then
      readlink -f "$place"
      return
    fi
  done
  echo "vm-test: the packages hold no $1" >&2
  return 1
}

# libraries: where the unpacked programs find theirs.
libraries() { echo "$VM_DIR/root/lib/x86_64-linux-gnu:$VM_DIR/root/usr/lib/x86_64-linux-gnu"; }

# unpacked_run NAME PROGRAM ARGUMENT...: PROGRAM of the packages, told that its name is NAME.
unpacked_run() {
  local name=$1 program
  program=$(unpacked "$2")
  shift 2
  "$(unpacked lib64/ld-linux-x86-64.so.2)" --argv0 "$name" --library-path "$(libraries)" "$program" "$@"
}

busybox() { "$(unpacked bin/busybox)" "$@"; }
