#!/usr/bin/env bash
# Downloads what the virtual machines are made of, as packages of this host's Debian suite, and unpacks it below a
# folder; installs nothing. What is there already is not fetched again.
# usage: fetch.sh DIR   leaves in DIR: emulator, tools (guest userland), system (a guest's root with systemd), kernel and
# kernel-next, each with its version in the file abi; kernel with build, what modules are built with
set -euo pipefail

dir=$1
tools=(busybox-static dash kmod iproute2 rdma-core libibverbs1 ibverbs-providers libgcc-s1 perftest)
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
# In 6.12 a device cannot be removed while a process has it open.
next_suite=trixie-backports

# mirror: the archive that the host's own apt takes this Debian from, in either format of its files; there may be others
# beside it, of drivers say.
mirror() {
  local found
  found=$({
    cat /etc/apt/sources.list.d/*.sources 2>/dev/null | awk -v suite="$VERSION_CODENAME" 'BEGIN { RS = ""; FS = "\n" } {
      uri = ""; fits = 0
      for (i = 1; i <= NF; i++) {
        if ($i ~ /^URIs:/) { split($i, words, " "); uri = words[2] }
        if ($i ~ /^Suites:/ && $i " " ~ " " suite " ") fits = 1
      }
      if (uri && fits) print uri
    }'
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
      sed -n "s/^deb \(\[[^]]*\] *\)\?\([^ ]*\) *$VERSION_CODENAME .*/\2/p"
  } | sed -n 1p)
  echo "${found:-http://deb.debian.org/debian}"
}

# private_apt SUITE...: an empty list of installed packages gives the whole closure, and the host's lists stay as they
# are.
private_apt() {
  apt_dir=$dir/apt
  [[ $* != "${apt_suites:-}" ]] || return 0
  apt_suites=$*
  rm -rf "$apt_dir"
  mkdir -p "$apt_dir"/{lists/partial,cache/archives/partial,sources.d}
  cat >"$apt_dir/sources.d/vm.sources" <<SOURCES
Types: deb
URIs: $(mirror)
Suites: $*
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
  # shellcheck disable=SC2046  # one word or two
  private_apt $(printf '%s\n' "$VERSION_CODENAME" "$kernel_suite" | uniq)
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

# unpack_kernel PLACE SUITE [build]: leaves vmlinuz, modules and abi in PLACE. From 7.x on the image is several packages.
unpack_kernel() {
  local place=$1 suite=$2 build=${3:-} version image abi packages
  private_apt "$suite"
  # Whoever reads from apt-cache reads to its end: `pipefail` would take its SIGPIPE for a failure.
  version=$(apt-cache madison linux-image-amd64 | awk -F'|' 'NR == 1 { gsub(/ /, "", $2); print $2 }')
  image=$(apt-cache show "linux-image-amd64=$version" |
    sed -n 's/^Depends:.*\(linux-image-[0-9][^ ,]*\).*/\1/p' | sed -n 1p)
  abi=${image#linux-image-}
  packages=("$image=$version")
  if [[ $(apt-cache show "$image=$version") == *linux-binary-* ]]; then
    packages=(linux-{base,binary,modules}-"$abi=$version")
  fi
  mkdir -p "$place/root"
  (cd "$apt_dir/cache" && apt-get -qq download "${packages[@]}")
  for package in "$apt_dir"/cache/linux-*.deb; do
    dpkg -x "$package" "$place/root"
  done
  rm -f "$apt_dir"/cache/linux-*.deb
  ln -s "$(cd "$place" && find root -name 'vmlinuz*')" "$place/vmlinuz"
  ln -s "$(cd "$place" && find root -path "*/lib/modules/$abi" -prune)" "$place/modules"
  echo "$abi" >"$place/abi"
  # Now, since the suite has no other version of it later.
  [[ -z $build ]] || unpack_build "$(realpath "$place")/build" "$abi" "$version"
}

# unxz_stream: by the host's own program where it has one, which is several times as fast as busybox.
unxz_stream() {
  if command -v xz >/dev/null; then xz -dc; else "$dir/tools/usr/bin/busybox" unxz -c; fi
}

# unpack_build PLACE ABI VERSION: leaves in PLACE what modules of this kernel are built with, reached by the link headers,
# and the kernel's sources of its RDMA drivers in software, in sw.
unpack_build() {
  local place=$1 abi=$2 version=$3 needs package source common file
  # The headers common to all flavours, and the programs.
  needs=$(apt-cache show "linux-headers-$abi=$version" | sed -n 's/^Depends: //p' | head -n 1 |
    grep -oE 'linux-(headers|kbuild)-[^ ,]+' | sort -u)
  common=$(grep -- -common <<<"$needs")
  source=linux-source-$(cut -d. -f1,2 <<<"$abi")
  mkdir -p "$place"
  for package in "linux-headers-$abi" $needs "$source"; do
    (cd "$apt_dir/cache" && apt-get -qq download "$package=$version")
  done
  for package in "$apt_dir"/cache/linux-{headers,kbuild}*.deb; do
    dpkg -x "$package" "$place"
  done
  # The packages name each other by absolute paths.
  for file in "$place/usr/src/linux-headers-$abi" "$place/usr/src/$common"; do
    sed -i -E "s#(^|[ =])/usr/(src|lib)/linux-#\\1$place/usr/\\2/linux-#g" "$file/Makefile"
    find "$file" -type l -lname '/usr/*' -printf '%p %l\n' | while read -r link target; do
      ln -sfn "$place$target" "$link"
    done
  done
  ln -sfn "usr/src/linux-headers-$abi" "$place/headers"
  mkdir -p "$place/sw"
  dpkg-deb --fsys-tarfile "$apt_dir"/cache/linux-source*.deb | tar -xO --wildcards '*/linux-source-*.tar.xz' |
    unxz_stream | tar -x -C "$place/sw" --strip-components=4 --wildcards 'linux-source-*/drivers/infiniband/sw/*'
  rm -f "$apt_dir"/cache/linux-*.deb
}

# once NAME COMMAND ARGUMENT...: runs it with the place of NAME before the arguments, unless an earlier run finished just
# that.
once() {
  local name=$1 command=$2
  shift 2
  [[ $(cat "$dir/$name.done" 2>/dev/null) != "$command $*" ]] || return 0
  rm -rf "${dir:?}/$name"{,.done}
  "$command" "$dir/$name" "$@"
  echo "$command $*" >"$dir/$name.done"
}

mkdir -p "$dir"
# That of bookworm itself has no igb, the NIC with virtual functions.
once emulator unpack_closure "$kernel_suite" qemu-system-x86
once tools unpack_closure "$VERSION_CODENAME" "${tools[@]}"
once system unpack_closure "$VERSION_CODENAME" "${system[@]}"
once kernel unpack_kernel "$kernel_suite" build
once kernel-next unpack_kernel "$next_suite"
rm -rf "$dir/apt"
