#!/usr/bin/env bash
# Prints the emulator's arguments for a machine with two NUMA nodes, two root complexes on each of which are two PCIe
# switches, and below each switch a GPU-like function, a NIC and an NVMe drive. nicN and its port portN can be named at
# the monitor.
set -euo pipefail

echo -smp 2 -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=512M
echo -numa node,nodeid=0,cpus=0,memdev=m0 -numa node,nodeid=1,cpus=1,memdev=m1 -numa dist,src=0,dst=1,val=21
# Numbers of the root buses leave room for the buses below.
echo -device pxb-pcie,id=root0,bus=pcie.0,bus_nr=32,numa_node=0 -device pxb-pcie,id=root1,bus=pcie.0,bus_nr=128,numa_node=1
# A NIC without a root complex of virtio's kind; one that has virtual functions; one whose interface hangs a level lower.
nics=(e1000e igb virtio-net-pci e1000e)
for switch in 0 1 2 3; do
  echo -device "pcie-root-port,id=rp$switch,bus=root$((switch / 2)),chassis=$((switch + 1)),slot=$switch"
  echo -device "x3130-upstream,id=up$switch,bus=rp$switch"
  # Pairs of chassis and slot differ over the whole machine.
  echo -device "xio3130-downstream,id=gpuport$switch,bus=up$switch,chassis=$((16 + switch)),slot=0"
  echo -device "xio3130-downstream,id=port$switch,bus=up$switch,chassis=$((16 + switch)),slot=1"
  echo -device "xio3130-downstream,id=driveport$switch,bus=up$switch,chassis=$((16 + switch)),slot=2"
  # 0x0302 is a 3D controller, as GPUs of data centres are; no device of the emulator has it by itself.
  echo -drive "driver=null-co,size=1M,if=none,id=gpu$switch"
  echo -device "virtio-blk-pci,class=0x0302,disable-legacy=on,drive=gpu$switch,bus=gpuport$switch"
  echo -netdev "user,id=net$switch,restrict=on,ipv6=off"
  echo -device "${nics[switch]},id=nic$switch,netdev=net$switch,bus=port$switch,mac=52:54:00:00:01:0$switch,romfile="
  echo -drive "driver=null-co,size=16M,if=none,id=drive$switch"
  echo -device "nvme,drive=drive$switch,serial=drive$switch,bus=driveport$switch"
done
