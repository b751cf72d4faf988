# Sourced by the scripts that set something up, which set NAME, for their messages, and LOG.

say() { echo "$NAME: $*"; }

stop() {
  printf "$NAME: %s\n" "$@" >&2
  exit 1
}

# Runs a command with its output in the log, and shows the end of the log if it fails.
quietly() {
  "$@" >"$LOG" 2>&1 || {
    tail -n 40 "$LOG" >&2
    stop "failed: $* (all of its output: $LOG)"
  }
}
