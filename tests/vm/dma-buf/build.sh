#!/usr/bin/env bash
# Builds what guests need beside Debian's packages: the modules siw and rxe_dmabuf, and the programs of this folder.
# usage: build.sh OUT   with VM_DIR set to the folder that fetch.sh filled
set -euo pipefail
here=$(realpath "$(dirname "$0")")
out=$(realpath -m "$1")
build=$VM_DIR/kernel/build
mkdir -p "$out"

# The kernel's own tools want libelf, which a host may lack.
mkdir -p "$VM_DIR/elf"
cp -a "$VM_DIR"/tools/usr/lib/x86_64-linux-gnu/libelf* "$VM_DIR/elf/"

# module NAME SOURCE...: NAME.ko, built in a folder of its own.
module() {
  local name=$1 place=$VM_DIR/module-$1
  shift
  mkdir -p "$place"
  # Only what has changed, or all would be built anew.
  cp -u "$@" "$place/"
  # Without type information, which needs pahole; a module loads without.
  LD_LIBRARY_PATH=$VM_DIR/elf make -s -C "$build/headers" M="$place" RXE="$build/sw/rxe" CONFIG_RDMA_SIW=m \
    CONFIG_DEBUG_INFO_BTF_MODULES= modules
  strip --strip-debug -o "$out/$name.ko" "$place/$name.ko"
}

module siw "$build"/sw/siw/*
module rxe_dmabuf "$here"/{Kbuild,rxe_dmabuf.c}

cc -Wall -O1 -o "$out/dmabuf-exec" "$here/dmabuf-exec.c"
# The name that a library gives itself is what others write down that they need: here the path of the guest's own.
real=$VM_DIR/module-rxe_dmabuf/real.so
cc -shared -Wl,-soname,/usr/lib/x86_64-linux-gnu/libibverbs.so.1 -o "$real" -x c /dev/null
cc -Wall -O1 -shared -fPIC -o "$out/libibverbs.so.1" "$here/verbs.c" -Wl,--no-as-needed "$real"
