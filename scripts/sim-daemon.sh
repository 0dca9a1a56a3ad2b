#!/usr/bin/env bash
# For other scripts to source: start_sim_daemon PROFILE starts a simulated gdrd of target/release in a folder of its own,
# sets GDRD_RUNTIME_DIR, and has it stopped and its folder removed when the script ends, however it ends.

release=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release

start_sim_daemon() {
  local profile=$1 tries=600
  work=$(mktemp -d)
  trap stop_sim_daemon EXIT
  export GDRD_RUNTIME_DIR=$work/run
  "$release"/gdrd --sim "$profile" --runtime-dir "$GDRD_RUNTIME_DIR" 2>"$work/gdrd.log" &
  daemon=$!
  until "$release"/gdrctl status >/dev/null 2>&1; do
    if ! kill -0 "$daemon" 2>/dev/null || ((tries-- == 0)); then
      echo "gdrd did not start:" >&2
      cat "$work/gdrd.log" >&2
      exit 1
    fi
    sleep 0.05
  done
}

stop_sim_daemon() {
  local status=$?
  trap - EXIT
  # The clients of a script that failed half-way are still there.
  jobs -p | xargs -r kill 2>/dev/null || true
  wait
  if ((status != 0)); then
    echo "--- the daemon's log" >&2
    cat "$work/gdrd.log" >&2
  fi
  rm -rf "$work"
  exit "$status"
}
