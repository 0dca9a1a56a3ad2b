#!/usr/bin/env bash
# What the broker costs on real verbs: optimized programs in one virtual machine with two CPUs, beside a C program that
# posts to a queue pair of its own. Prints ratios; they say something where the host has two idle CPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
VM_DIR=$(realpath -m "$target")/vm
export VM_DIR

tests/vm/fetch.sh "$VM_DIR"
cargo build --locked --release -p gdrd -p gdrctl -p gdrd-harness -p gdrd-bench --bins
built=$(cargo test --locked --release -p gdrd-vm --test=speed --no-run 2>&1 | tee /dev/stderr)
programs=$VM_DIR/bench-programs
rm -rf "$programs"
mkdir -p "$programs"
cp "$(sed -n 's|^ *Executable tests/speed.rs (\(.*\))$|\1|p' <<<"$built")" "$programs/speed"
cp "$target"/release/{gdrd,gdrctl,gdrd-puppet,gdrd-bench} "$programs/"
cc -O2 -Wall -o "$programs/direct" tests/vm/speed/direct.c -libverbs

image=$VM_DIR/bench-image.cpio
tests/vm/image.sh "$image" "$programs"/{gdrd,gdrctl,gdrd-puppet,gdrd-bench,direct,speed}
tests/vm/run.sh "$image" 1 speed -smp 2
