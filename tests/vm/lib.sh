#!/usr/bin/env bash
# What the scripts of tests/vm share: programs of the unpacked packages, run with their own loader and libraries, and
# pieces of guest images.
# usage: . lib.sh, with VM_DIR set to the folder that fetch.sh filled

tools=$VM_DIR/tools
libraries=$tools/usr/lib/x86_64-linux-gnu

# unpacked_run NAME PROGRAM ARGUMENT...: PROGRAM of the packages, told that its name is NAME.
unpacked_run() {
  local name=$1 program=$tools/usr/$2
  shift 2
  "$tools/usr/lib64/ld-linux-x86-64.so.2" --argv0 "$name" --library-path "$libraries" "$program" "$@"
}

busybox() { "$tools/usr/bin/busybox" "$@"; }

# copy_libraries TREE PROGRAM: the libraries that it names, asked of the unpacked loader.
copy_libraries() {
  local library
  "$tools/usr/lib64/ld-linux-x86-64.so.2" --library-path "$libraries" --list "$2" |
    awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
    while read -r library; do
      cp -Ln "$library" "$1/usr/lib/x86_64-linux-gnu/"
    done
}

# add_programs TREE PROGRAM...: under their own names in /gdrd.
add_programs() {
  local tree=$1 program
  shift
  mkdir -p "$tree/gdrd"
  for program in "$@"; do
    cp "$program" "$tree/gdrd/"
    # Not scripts.
    strip "$tree/gdrd/$(basename "$program")" 2>/dev/null || true
  done
}

# add_modules TREE MODULE...: with what they need, unpacked.
add_modules() {
  local tree=$1 abi place module line file target
  shift
  abi=$(<"$VM_DIR/abi")
  # Suites differ in which of the two.
  place=$(ls -d "$VM_DIR"/kernel/{,usr/}lib/modules/"$abi" 2>/dev/null || true)
  mkdir -p "$VM_DIR/depmod/lib/modules" "$tree/usr/lib/modules/$abi"
  ln -sfn "$place" "$VM_DIR/depmod/lib/modules/$abi"
  unpacked_run depmod bin/kmod -b "$VM_DIR/depmod" "$abi"
  for module in "$@"; do
    line=$(grep -E "(^|/)$module\.ko[.a-z]*:" "$place/modules.dep" || true)
    # Built into this kernel.
    [[ -n $line ]] || continue
    for file in ${line/:/ }; do
      target=$tree/usr/lib/modules/$abi/${file%.xz}
      mkdir -p "$(dirname "$target")"
      if [[ $file == *.xz ]]; then
        busybox unxz -c "$place/$file" >"$target"
      else
        cp "$place/$file" "$target"
      fi
    done
  done
  cp "$place"/modules.{builtin,builtin.modinfo,order} "$tree/usr/lib/modules/$abi/"
  unpacked_run depmod bin/kmod -b "$tree" "$abi"
}

# pack TREE OUT: uncompressed, since the emulator copies it faster than a guest could unpack it.
pack() {
  (cd "$1" && find . | busybox cpio -o -H newc -R 0:0 2>/dev/null) >"$2"
}
