#!/usr/bin/env bash
# What the scripts of tests/vm share: programs of the unpacked packages, run with their own loader and libraries, and
# pieces of guest images.
# usage: . lib.sh, with VM_DIR set to the folder that fetch.sh filled, VM_KERNEL to a kernel in it (kernel by default)

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

# add_modules TREE MODULE...: with what they need, unpacked, and what is in VM_EXTRA.
add_modules() {
  local tree=$1 kernel=$VM_DIR/${VM_KERNEL:-kernel} abi module line file target
  shift
  abi=$(<"$kernel/abi")
  mkdir -p "$kernel/depmod/lib/modules" "$tree/usr/lib/modules/$abi"
  ln -sfn "$kernel/modules" "$kernel/depmod/lib/modules/$abi"
  unpacked_run depmod bin/kmod -b "$kernel/depmod" "$abi"
  for module in "$@"; do
    line=$(grep -E "(^|/)$module\.ko[.a-z]*:" "$kernel/modules/modules.dep" || true)
    # Built into this kernel, or not in it.
    [[ -n $line ]] || continue
    for file in ${line/:/ }; do
      target=$tree/usr/lib/modules/$abi/${file%.xz}
      mkdir -p "$(dirname "$target")"
      if [[ $file == *.xz ]]; then
        busybox unxz -c "$kernel/modules/$file" >"$target"
      else
        cp "$kernel/modules/$file" "$target"
      fi
    done
  done
  if [[ -n ${VM_EXTRA:-} ]]; then
    mkdir -p "$tree/usr/lib/modules/$abi/extra" "$tree/gdrd/dma-buf"
    cp "$VM_EXTRA"/*.ko "$tree/usr/lib/modules/$abi/extra/"
    cp "$VM_EXTRA"/{dmabuf-exec,libibverbs.so.1} "$tree/gdrd/dma-buf/"
  fi
  cp "$kernel"/modules/modules.{builtin,builtin.modinfo,order} "$tree/usr/lib/modules/$abi/"
  unpacked_run depmod bin/kmod -b "$tree" "$abi"
}

# pack TREE OUT: uncompressed, since the emulator copies it faster than a guest could unpack it.
pack() {
  (cd "$1" && find . | busybox cpio -o -H newc -R 0:0 2>/dev/null) >"$2"
}
