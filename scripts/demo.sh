#!/usr/bin/env bash
# Starts a simulated DGX A100, has two processes move registered GPU memory between two GPUs, kills one of them, and
# shows that its leases came back. Fails if any of it does not hold.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/sim-daemon.sh
source scripts/sim-daemon.sh

profile=dgx-a100
from=GPU0
to=GPU5
bytes=$((64 << 20))

say() { printf '\n== %s\n' "$*"; }

fail() {
  echo "demo: $*" >&2
  exit 1
}

# expect FD WORD: prints the lines of a client until one starts with WORD, and leaves that one in $line.
expect() {
  local fd=$1 word=$2 name=$3
  while IFS= read -r -t 120 -u "$fd" line; do
    printf '  %-9s %s\n' "$name" "$line"
    [[ $line == "$word"* ]] && return 0
  done
  fail "the $name ended before it said '$word'"
}

# It shows and does not measure: without what makes the installed programs faster to start and longer to build.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16

say "building"
cargo build --release --locked --quiet -p gdrd -p gdrctl
cargo build --release --locked --quiet -p gdrd-client --examples

start_sim_daemon "$profile"
PATH=$release:$PATH

say "the host (simulated: $profile; no GPU or NIC of this machine takes part)"
gdrctl topo

say "which NICs each GPU should use"
gdrctl plan

say "two client processes move $((bytes >> 20)) MiB of random content from $from to $to by RDMA writes (simulated)"
# The clients stay, with what they lease, until their stdin ends.
mkfifo "$work/receiver.in" "$work/receiver.out" "$work/sender.in" "$work/sender.out"
exec {hold_receiver}<>"$work/receiver.in" {hold_sender}<>"$work/sender.in"
"$release"/examples/receiver "$work/job.sock" "$to" "$bytes" <"$work/receiver.in" >"$work/receiver.out" \
  {hold_receiver}>&- {hold_sender}>&- &
receiver=$!
exec {receiver_says}<"$work/receiver.out"
expect "$receiver_says" leased receiver
"$release"/examples/sender "$work/job.sock" "$from" "$bytes" <"$work/sender.in" >"$work/sender.out" \
  {hold_receiver}>&- {hold_sender}>&- {receiver_says}<&- &
sender=$!
exec {sender_says}<"$work/sender.out"
expect "$sender_says" sha256 sender
sent=$line
expect "$sender_says" written sender
expect "$receiver_says" sha256 receiver
received=$line
[[ $sent == "$received" ]] || fail "the digests differ: sent $sent, received $received"
echo "  the receiver's digest of its own mapping equals the sender's"

say "leases and queue pairs while both live"
gdrctl buffers
gdrctl queue-pairs

say "the sender (pid $sender) is killed with SIGKILL"
kill -KILL "$sender"
wait "$sender" 2>/dev/null || true
leases() { gdrctl buffers --format json | grep -c '"lease_id"' || true; }
tries=600
until [[ $(leases) == 1 ]]; do
  ((tries-- > 0)) || fail "the killed sender's lease did not come back: $(gdrctl buffers)"
  sleep 0.05
done
gdrctl buffers
gdrctl queue-pairs
gdrctl buffers --format json | grep -q '"label": "demo-receiver"' || fail "the receiver's lease is gone"
echo "  the sender's lease and queue pair came back, the receiver's are untouched"

say "the receiver ends, and the daemon is stopped"
exec {hold_receiver}>&- {hold_sender}>&-
wait "$receiver" || fail "the receiver ended with $?"
until [[ $(leases) == 0 ]]; do
  ((tries-- > 0)) || fail "the receiver's lease did not come back: $(gdrctl buffers)"
  sleep 0.05
done
kill -TERM "$daemon"
wait "$daemon" || fail "gdrd ended with $?"
say "demo: all of it held, on a simulated host"
