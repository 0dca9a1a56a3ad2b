#!/bin/sh
# Process 1 of a guest: sets up the network and rxe, runs the programs that the kernel command line names, and leaves
# with a status that the emulator hands on. gdrd.node=N is the guest's number, gdrd.run=A,B its programs.
# The console (ttyS0) is for the kernel; what the tests print goes to ttyS1.
export PATH=/gdrd:/bin:/usr/bin HOME=/ RUST_BACKTRACE=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs run /run
exec </dev/null >/dev/ttyS1 2>&1
stty -F /dev/ttyS1 -opost

option() {
  read -r line </proc/cmdline
  for word in $line; do
    case $word in
      "$1="*) echo "${word#*=}" ;;
    esac
  done
}

for module in virtio_pci virtio_net crc32_generic ib_uverbs rdma_rxe; do
  modprobe "$module" || echo "guest: no module $module"
done
GDRD_VM_NODE=$(option gdrd.node)
export GDRD_VM_NODE
ip link set lo up
ip addr add "10.77.0.$GDRD_VM_NODE/24" dev eth0
# A frame that holds an RDMA MTU of 4096.
ip link set eth0 mtu 4200 up
rdma link add rxe0 type rxe netdev eth0

status=0
for program in $(option gdrd.run | { IFS=, read -r a b c d; echo "$a $b $c $d"; }); do
  echo "== guest $GDRD_VM_NODE: $program"
  # A case at a time: they share one device and one small CPU.
  "$program" --test-threads=1 || status=1
done

echo "guest $GDRD_VM_NODE ends with $status"
sync
# isa-debug-exit at port 0xf4: the emulator ends with 2 * value + 1. With 16 added no failure of its own looks alike.
if [ "$status" = 0 ]; then value='\0020'; else value='\0021'; fi
printf '%b' "$value" | dd of=/dev/port bs=1 seek=244 2>/dev/null
poweroff -f
