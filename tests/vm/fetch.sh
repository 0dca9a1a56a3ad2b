#!/usr/bin/env bash
# Downloads what the virtual machines are made of, as packages of this host's Debian suite, and unpacks it below a
# folder; installs nothing.
# usage: fetch.sh DIR   leaves DIR/root (emulator and guest userland), DIR/kernel and DIR/abi (its version)
set -euo pipefail

dir=$1
# qemu and busybox for the host; the rest is the guest's. perftest would pull in more than all others.
packages=(qemu-system-x86 busybox-static dash kmod iproute2 rdma-core libibverbs1 ibverbs-providers libgcc-s1)

# shellcheck source=/dev/null
. /etc/os-release
case ${VERSION_CODENAME:-} in
  # 6.1 has no udmabuf and an older rxe; 6.12 is trixie's own kernel too.
  bookworm) kernel_suite=bookworm-backports ;;
  trixie) kernel_suite=trixie ;;
  *)
    echo "vm-test: needs Debian 12 or 13 for its packages, this is ${PRETTY_NAME:-unknown}" >&2
    exit 3
    ;;
esac
suites=$VERSION_CODENAME
if [[ $kernel_suite != "$suites" ]]; then
  suites+=" $kernel_suite"
fi

# mirror: the first Debian archive that the host's own apt uses, in either format of its files.
mirror() {
  local found
  found=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null | head -n 1)
  if [[ -z $found ]]; then
    found=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
      sed -n 's/^deb \(\[[^]]*\] \)\?\([^ ]*\) .*/\2/p' | head -n 1)
  fi
  echo "$found"
}

# A private apt: an empty list of installed packages gives the whole closure, and the host's lists stay as they are.
apt_dir=$dir/apt
mkdir -p "$apt_dir"/{lists/partial,cache/archives/partial,sources.d}
cat >"$apt_dir/sources.d/vm.sources" <<SOURCES
Types: deb
URIs: $(mirror)
Suites: $suites
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
: >"$apt_dir/status"
cat >"$apt_dir/apt.conf" <<CONF
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "$apt_dir/sources.d";
Dir::State::Lists "$apt_dir/lists";
Dir::State::status "$apt_dir/status";
Dir::Cache "$apt_dir/cache";
APT::Sandbox::User "$(id -un)";
Acquire::Languages "none";
CONF
export APT_CONFIG=$apt_dir/apt.conf

apt-get -qq update
version=$(apt-cache madison linux-image-amd64 | awk -F'|' -v suite=" $kernel_suite/" 'index($3, suite) { gsub(/ /, "", $2); print $2; exit }')
image=$(apt-cache show "linux-image-amd64=$version" | sed -n 's/^Depends:.*\(linux-image-[0-9][^ ,]*\).*/\1/p' | head -n 1)
apt-get -qq -y --download-only --no-install-recommends install "${packages[@]}"
mkdir -p "$dir/root" "$dir/kernel"
for package in "$apt_dir"/cache/archives/*.deb; do
  dpkg -x "$package" "$dir/root"
done
(cd "$apt_dir/cache" && apt-get -qq download "$image=$version")
dpkg -x "$apt_dir"/cache/linux-image-*.deb "$dir/kernel"
echo "${image#linux-image-}" >"$dir/abi"
rm -rf "$apt_dir"
