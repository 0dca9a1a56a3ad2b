#!/usr/bin/env bash
# Builds the first file system of the guest with systemd: Debian's own, with gdrd laid over it by `make install`.
# usage: system-image.sh OUT.cpio PROGRAM...   with VM_DIR set; PROGRAMs land in /gdrd under their own names
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=tests/vm/lib.sh
. "$here/lib.sh"

out=$1
shift
tree=$(mktemp -d "$VM_DIR/tree.XXXXXX")
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
cp -a "$VM_DIR/system/." "$tree/"
# What the maintainer scripts of unpacked packages would have done.
cp "$tree/usr/share/base-passwd/passwd.master" "$tree/etc/passwd"
cp "$tree/usr/share/base-passwd/group.master" "$tree/etc/group"
mkdir -p "$tree/etc/sysusers.d"
printf 'g %s -\n' input kvm render sgx >"$tree/etc/sysusers.d/udev.conf"
ln -sf dash "$tree/usr/bin/sh"
# An unknown one would be a first boot, with questions to a person.
echo 0123456789abcdef0123456789abcdef >"$tree/etc/machine-id"
ln -sf usr/lib/systemd/systemd "$tree/init"

units=$tree/etc/systemd/system
mkdir -p "$units/multi-user.target.wants"
ln -sf /usr/lib/systemd/system/multi-user.target "$units/default.target"
# They cost seconds of an emulated CPU, and nothing here needs them. No ldconfig is unpacked.
for unit in getty.target systemd-timesyncd.service systemd-networkd.service systemd-networkd.socket \
  systemd-firstboot.service systemd-hwdb-update.service ldconfig.service \
  fstrim.timer systemd-update-utmp.service systemd-pstore.service; do
  ln -sf /dev/null "$units/$unit"
done
cat >"$units/vm-test.service" <<UNIT
[Unit]
Description=Tests of gdrd
After=multi-user.target
[Service]
Type=exec
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS1
ExecStart=/gdrd/guest-run.sh
UNIT
ln -sf ../vm-test.service "$units/multi-user.target.wants/"

add_programs "$tree" "$here/guest-run.sh" "$@"
add_modules "$tree" virtio_pci virtio_net ib_uverbs rdma_rxe crc32_generic
make --no-print-directory -C "$here/../.." install-files BUILD_DIR="$VM_DIR/programs" PREFIX=/usr SYSCONFDIR=/etc DESTDIR="$tree"
strip "$tree"/usr/bin/gdr{d,ctl}
pack "$tree" "$out"
