# Sourced by the set-up scripts, which set NAME, for their messages, and LOG.

say() { echo "$NAME: $*"; }

stop() {
  printf "$NAME: %s\n" "$@" >&2
  exit 1
}

# Runs a command with its output in the log; shows the end of the log if the command fails.
quietly() {
  "$@" >"$LOG" 2>&1 || {
    tail -n 40 "$LOG" >&2
    stop "failed: $* (all of its output: $LOG)"
  }
}
