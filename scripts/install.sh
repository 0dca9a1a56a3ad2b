#!/usr/bin/env bash
# Installs or uninstalls gdrd; `make` gives the folders.
# usage: install.sh install|uninstall
set -euo pipefail
cd "$(dirname "$0")/.."

: "${PREFIX:?}" "${SYSCONFDIR:?}" "${BUILD_DIR:?}" "${UNITDIR:?}" "${SYSUSERSDIR:?}" "${TMPFILESDIR:?}"
dest=${DESTDIR:-}
bindir=$PREFIX/bin
docdir=$PREFIX/share/doc/gdrd
mandir=$PREFIX/share/man
config=$SYSCONFDIR/gdrd/gdrd.toml

# Each line: mode, source, target.
files() {
  cat <<LIST
0755 $BUILD_DIR/gdrd $bindir/gdrd
0755 $BUILD_DIR/gdrctl $bindir/gdrctl
0644 systemd/gdrd.service.in $UNITDIR/gdrd.service
0644 systemd/gdrd.socket $UNITDIR/gdrd.socket
0644 systemd/gdrd-session.socket $UNITDIR/gdrd-session.socket
0644 systemd/gdrd.sysusers $SYSUSERSDIR/gdrd.conf
0644 systemd/gdrd.tmpfiles $TMPFILESDIR/gdrd.conf
0644 README.md $docdir/README.md
0644 CHANGELOG.md $docdir/CHANGELOG.md
0644 LICENSE $docdir/LICENSE
LIST
}

# What gdrctl completes in each shell, where that looks for it. Each line: shell, target.
completions() {
  cat <<LIST
bash $PREFIX/share/bash-completion/completions/gdrctl
zsh $PREFIX/share/zsh/site-functions/_gdrctl
fish $PREFIX/share/fish/vendor_completions.d/gdrctl.fish
LIST
}

# What is made here goes through a file: a program that fails inside of <(…) would install an empty one.
install_written() {
  local shell target
  "$BUILD_DIR/gdrctl" man "$written"
  "$BUILD_DIR/gdrd" man "$written"
  install -d "$dest$mandir/man1" "$dest$mandir/man8"
  install -m 0644 "$written"/*.1 "$dest$mandir/man1"
  install -m 0644 "$written"/*.8 "$dest$mandir/man8"
  while read -r shell target; do
    "$BUILD_DIR/gdrctl" completions "$shell" >"$written/completions"
    install -D -m 0644 "$written/completions" "$dest$target"
  done < <(completions)
}

install_all() {
  local mode source target
  written=$(mktemp -d)
  trap 'rm -rf "$written"' EXIT
  while read -r mode source target; do
    if [[ $source == *.in ]]; then
      fill_in "$source" >"$written/filled"
      source=$written/filled
    fi
    install -D -m "$mode" "$source" "$dest$target"
  done < <(files)
  install_written
  install_config
  if [[ -z $dest ]]; then
    echo "installed; next, as root: systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload"
    echo "then: systemctl enable --now gdrd.socket gdrd-session.socket gdrd.service"
  fi
}

fill_in() {
  sed -e "s|@BINDIR@|$bindir|g; s|@SYSCONFDIR@|$SYSCONFDIR|g; s|@DOCDIR@|$docdir|g" "$1"
}

# What an operator wrote is never overwritten: a changed default is laid beside it.
install_config() {
  local target=$dest$config
  if [[ -e $target ]] && ! cmp -s config/gdrd.toml "$target"; then
    install -D -m 0644 config/gdrd.toml "$target.new"
    echo "kept $target; the defaults of this version are in $target.new"
  else
    install -D -m 0644 config/gdrd.toml "$target"
  fi
}

uninstall_all() {
  local target
  while read -r _ _ target; do
    rm -f "$dest$target"
  done < <(files)
  while read -r _ target; do
    rm -f "$dest$target"
  done < <(completions)
  rm -f "$dest$mandir/man1/gdrctl.1" "$dest$mandir"/man1/gdrctl-*.1 "$dest$mandir"/man8/gdrd{,-keeper}.8
  rmdir --ignore-fail-on-non-empty "$dest$docdir" 2>/dev/null || true
  echo "uninstalled; $dest$SYSCONFDIR/gdrd stays"
}

case ${1:-} in
  install) install_all ;;
  uninstall) uninstall_all ;;
  *)
    echo "install.sh: say install or uninstall" >&2
    exit 2
    ;;
esac
