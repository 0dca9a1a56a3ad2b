#!/usr/bin/env bash
# Builds the first file system of most guests: busybox, RDMA userland, kernel modules, the test programs.
# usage: image.sh OUT.cpio PROGRAM...   with VM_DIR set; PROGRAMs land in /gdrd under their own names. VM_EXTRA: a folder
# that dma-buf/build.sh filled, for the kernel of VM_KERNEL
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=tests/vm/lib.sh
. "$here/lib.sh"

out=$1
shift
tree=$(mktemp -d "$VM_DIR/tree.XXXXXX")
trap 'rm -rf "$tree"' EXIT
# The root of the guest, for all its users.
chmod 755 "$tree"
mkdir -p "$tree"/{dev,etc/libibverbs.d,proc,run,sys,tmp} "$tree"/usr/{bin,lib64,lib/x86_64-linux-gnu/libibverbs}
ln -s usr/bin "$tree/bin"
ln -s usr/bin "$tree/sbin"
ln -s usr/lib "$tree/lib"
ln -s usr/lib64 "$tree/lib64"

# The static busybox, whose applets must not hide the real ip and modprobe.
cp "$tools/usr/bin/busybox" "$tree/bin/busybox"
for applet in cat cp dd echo grep head install ls mkdir mount poweroff sleep stty sync umount; do
  ln -s busybox "$tree/bin/$applet"
done
cp "$tools/usr/bin/dash" "$tree/bin/sh"
cp "$tools/usr/bin/kmod" "$tree/bin/kmod"
# The kernel itself calls /sbin/modprobe.
ln -s kmod "$tree/bin/modprobe"
ln -s kmod "$tree/bin/rmmod"
for program in ip rdma tc ib_write_bw ib_write_lat; do
  # Suites differ in which of the two.
  cp "$(find "$tools"/usr/{s,}bin -type f -name "$program")" "$tree/bin/$program"
done
cp -L "$tools/usr/lib64/ld-linux-x86-64.so.2" "$tree/usr/lib64/"
for library in libibverbs.so.1 libgcc_s.so.1; do
  cp -L "$libraries/$library" "$tree/usr/lib/x86_64-linux-gnu/"
  copy_libraries "$tree" "$libraries/$library"
done
for provider in rxe siw; do
  cp "$tools/etc/libibverbs.d/$provider.driver" "$tree/etc/libibverbs.d/"
  cp -L "$libraries/libibverbs/lib$provider-rdmav"*.so "$tree/usr/lib/x86_64-linux-gnu/libibverbs/"
done
add_programs "$tree" "$here/guest-run.sh" "$@"
for program in "$tree"/bin/{sh,kmod,ip,rdma,tc,ib_write_bw,ib_write_lat} "$@"; do
  copy_libraries "$tree" "$program"
done

# rxe asks for crc32 through the crypto core, which no dependency names.
add_modules "$tree" virtio_pci virtio_net e1000e igb igbvf nvme ib_uverbs rdma_rxe crc32_generic sch_netem ${VM_EXTRA:+iw_cm crc32c_generic libcrc32c}

cp "$here/guest-init.sh" "$tree/init"
chmod +x "$tree/init"
echo 'root:x:0:0:root:/:/bin/sh' >"$tree/etc/passwd"
echo 'root:x:0:' >"$tree/etc/group"
pack "$tree" "$out"
