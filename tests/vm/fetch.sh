#!/usr/bin/env bash
# Downloads what the virtual machines are made of, as packages of this host's Debian suite, and unpacks it below a
# folder; installs nothing. What is there already is not fetched again.
# usage: fetch.sh DIR   leaves in DIR: emulator, tools (guest userland), system (a guest's root with systemd), kernel, abi
set -euo pipefail

dir=$1
tools=(busybox-static dash kmod iproute2 rdma-core libibverbs1 ibverbs-providers libgcc-s1)
# A root of its own, since packages of the emulator bring services along.
system=(systemd systemd-sysv udev base-files base-passwd bash coreutils dash grep kmod mount util-linux
  iproute2 rdma-core libibverbs1 ibverbs-providers libgcc-s1)

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

# private_apt: an empty list of installed packages gives the whole closure, and the host's lists stay as they are.
private_apt() {
  apt_dir=$dir/apt
  rm -rf "$apt_dir"
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
}

# unpack_closure PLACE SUITE PACKAGE...: the packages and all they depend on, with /bin and its like as links into /usr.
unpack_closure() {
  local place=$1 suite=$2 part package
  shift 2
  mkdir -p "$place"/usr/{bin,sbin,lib,lib64}
  for part in bin sbin lib lib64; do
    ln -sfn "usr/$part" "$place/$part"
  done
  apt-get -qq -y -t "$suite" --download-only --no-install-recommends install "$@"
  for package in "$apt_dir"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x -C "$place" --keep-directory-symlink --no-same-owner \
      --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*'
  done
  rm -f "$apt_dir"/cache/archives/*.deb
}

unpack_kernel() {
  local version image
  version=$(apt-cache madison linux-image-amd64 |
    awk -F'|' -v suite=" $kernel_suite/" 'index($3, suite) { gsub(/ /, "", $2); print $2; exit }')
  image=$(apt-cache show "linux-image-amd64=$version" |
    sed -n 's/^Depends:.*\(linux-image-[0-9][^ ,]*\).*/\1/p' | head -n 1)
  mkdir -p "$1"
  (cd "$apt_dir/cache" && apt-get -qq download "$image=$version")
  dpkg -x "$apt_dir"/cache/linux-image-*.deb "$1"
  echo "${image#linux-image-}" >"$dir/abi"
}

# once NAME COMMAND...: runs it with the place of NAME before the other arguments, unless an earlier run has finished it.
once() {
  local name=$1 command=$2
  shift 2
  [[ ! -e $dir/$name.done ]] || return 0
  [[ -n ${apt_dir:-} ]] || private_apt
  rm -rf "${dir:?}/$name"
  "$command" "$dir/$name" "$@"
  touch "$dir/$name.done"
}

mkdir -p "$dir"
# That of bookworm itself has no igb, the NIC with virtual functions.
once emulator unpack_closure "$kernel_suite" qemu-system-x86
once tools unpack_closure "$VERSION_CODENAME" "${tools[@]}"
once system unpack_closure "$VERSION_CODENAME" "${system[@]}"
once kernel unpack_kernel
rm -rf "$dir/apt"
