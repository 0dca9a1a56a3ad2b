#!/bin/sh
# Process 1 of most guests: sets up the network and rxe, and hands over to guest-run.sh. gdrd.node=N of the kernel
# command line is the guest's number.
export PATH=/gdrd:/bin HOME=/
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
# Monitors of the emulators.
stty -F /dev/ttyS2 raw -echo
stty -F /dev/ttyS3 raw -echo

for module in virtio_pci virtio_net crc32_generic ib_uverbs rdma_rxe; do
  # Not every kernel has each of them.
  modprobe -q "$module"
done
read -r line </proc/cmdline
for word in $line; do
  case $word in
    gdrd.node=*) node=${word#*=} ;;
  esac
done
ip link set lo up
ip addr add "10.77.0.$node/24" dev eth0
# A frame that holds an RDMA MTU of 4096.
ip link set eth0 mtu 4200 up
rdma link add rxe0 type rxe netdev eth0
exec /gdrd/guest-run.sh
