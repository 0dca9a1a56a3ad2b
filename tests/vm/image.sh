#!/usr/bin/env bash
# Builds the guest's first file system: busybox, RDMA userland, kernel modules, the test programs.
# usage: image.sh OUT.cpio PROGRAM...   with VM_DIR set; PROGRAMs land in /gdrd under their own names
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=tests/vm/lib.sh
. "$here/lib.sh"

out=$1
shift
abi=$(<"$VM_DIR/abi")
tree=$(mktemp -d "$VM_DIR/tree.XXXXXX")
trap 'rm -rf "$tree"' EXIT
# The root of the guest, for all its users.
chmod 755 "$tree"
mkdir -p "$tree"/{bin,dev,etc/libibverbs.d,gdrd,lib64,proc,run,sys,tmp}
mkdir -p "$tree"/usr/{bin,lib/x86_64-linux-gnu/libibverbs} "$tree/lib/modules/$abi"
ln -s bin "$tree/sbin"

# The static busybox, whose applets must not hide the real ip and modprobe.
cp "$(unpacked bin/busybox)" "$tree/bin/busybox"
for applet in cat cp dd echo grep head ls mkdir mount poweroff sleep stty sync umount; do
  ln -s busybox "$tree/bin/$applet"
done
cp "$(unpacked bin/dash)" "$tree/bin/sh"
cp "$(unpacked bin/kmod)" "$tree/bin/kmod"
# The kernel itself calls /sbin/modprobe.
ln -s kmod "$tree/bin/modprobe"
cp "$(unpacked bin/ip)" "$tree/bin/ip"
cp "$(unpacked bin/rdma)" "$tree/bin/rdma"
cp "$(unpacked lib64/ld-linux-x86-64.so.2)" "$tree/lib64/"

# copy_libraries PROGRAM: those it names, asked of the unpacked loader.
copy_libraries() {
  local library
  "$(unpacked lib64/ld-linux-x86-64.so.2)" --library-path "$(libraries)" --list "$1" |
    awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
    while read -r library; do
      cp -Ln "$library" "$tree/usr/lib/x86_64-linux-gnu/"
    done
}
for library in libibverbs.so.1 libgcc_s.so.1; do
  path=$(unpacked "lib/x86_64-linux-gnu/$library")
  cp "$path" "$tree/usr/lib/x86_64-linux-gnu/$library"
  copy_libraries "$path"
done
cp "$VM_DIR/root/etc/libibverbs.d/rxe.driver" "$tree/etc/libibverbs.d/"
cp -L "$VM_DIR/root/usr/lib/x86_64-linux-gnu/libibverbs/"librxe-rdmav*.so \
  "$tree/usr/lib/x86_64-linux-gnu/libibverbs/"
for program in sh kmod ip rdma; do
  copy_libraries "$tree/bin/$program"
done
for program in "$@"; do
  cp "$program" "$tree/gdrd/"
  strip "$tree/gdrd/$(basename "$program")"
  copy_libraries "$program"
done
ln -s usr/lib/x86_64-linux-gnu "$tree/lib/x86_64-linux-gnu"

# Modules with what they need. rxe asks for crc32 through the crypto core, which no dependency names.
modules=$(echo "$VM_DIR"/kernel/{lib,usr/lib}/modules/"$abi")
for place in $modules; do
  if [[ -d $place ]]; then
    modules=$place
  fi
done
mkdir -p "$VM_DIR/depmod/lib/modules"
ln -sfn "$modules" "$VM_DIR/depmod/lib/modules/$abi"
unpacked_run depmod bin/kmod -b "$VM_DIR/depmod" "$abi"
for module in virtio_pci virtio_net ib_uverbs rdma_rxe crc32_generic; do
  line=$(grep -E "(^|/)$module\.ko[.a-z]*:" "$modules/modules.dep" || true)
  # Built into this kernel.
  [[ -n $line ]] || continue
  for file in ${line/:/ }; do
    target=$tree/lib/modules/$abi/${file%.xz}
    mkdir -p "$(dirname "$target")"
    if [[ $file == *.xz ]]; then
      busybox unxz -c "$modules/$file" >"$target"
    else
      cp "$modules/$file" "$target"
    fi
  done
done
cp "$modules"/modules.{builtin,builtin.modinfo,order} "$tree/lib/modules/$abi/"
unpacked_run depmod bin/kmod -b "$tree" "$abi"

cp "$here/guest-init.sh" "$tree/init"
chmod +x "$tree/init"
echo 'root:x:0:0:root:/:/bin/sh' >"$tree/etc/passwd"
echo 'root:x:0:' >"$tree/etc/group"
# Uncompressed: the emulator copies it faster than a guest could unpack it.
(cd "$tree" && find . | busybox cpio -o -H newc -R 0:0 2>/dev/null) >"$out"
