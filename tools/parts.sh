# Sourced by setup.sh, after steps.sh: parts of the work that run beside each other. Each writes its
# own log; a line says what runs, how far it is, and in the end how long it took.

readonly LOGS=build/setup
declare -A TITLE PROCESS SINCE
WIDTH=100
if [ -t 1 ]; then
  { columns=$(stty size <&3 2>/dev/null | cut -d' ' -f2) || true; } 3>&1
  [ "${columns:-0}" -lt 40 ] || WIDTH=$columns
fi
readonly WIDTH
PRINTED=0 # when the last line of progress was printed, in seconds since the start

# 75 -> 1:15
clock() { printf "%d:%02d" $(($1 / 60)) $(($1 % 60)); }

# Starts a part: begin NAME TITLE COMMAND...
begin() {
  local name=$1
  TITLE[$name]=$2 SINCE[$name]=$SECONDS
  shift 2
  mkdir -p "$LOGS"
  # In a new process group, so that it can be ended with all that it has started.
  set -m
  "$@" >"$LOGS/$name.log" 2>&1 </dev/null &
  set +m
  PROCESS[$name]=$!
  # A terminal shows it in the line of progress.
  [ -t 1 ] || say "[$(clock $SECONDS)] ${TITLE[$name]} ..."
}

# How far a part is, from the end of its log: Bazel's count of actions, make's percentage, or the
# last line of pip or apt-get. A part that is a script has its own log.
far() {
  { tail -qc 2000 "$LOGS/$1.log" "build/$1.log" 2>/dev/null || true; } | tr '\r' '\n' | sed -nE '
    s/\x1b\[[0-9;]*[A-Za-z]//g
    s/^\[([0-9,]+) \/ ([0-9,]+)\].*/step \1 of \2/p
    s/^ *\[ *([0-9]+%)\].*/\1/p
    s/^ *(Collecting|Downloading|Installing|Unpacking|Setting up) ([^ ]+).*/\1 \2/p' | tail -n 1 | cut -c1-60
}

# One line for all parts that run: rewritten on a terminal, otherwise every 20 seconds.
progress() {
  local name now line=
  for name in "$@"; do
    now=$(far "$name")
    line+="${line:+; }${TITLE[$name]}, $(clock $((SECONDS - SINCE[$name])))${now:+, $now}"
  done
  if [ -t 1 ]; then
    printf '\r\033[K%s' "$(printf '%s: [%s] %s' "$NAME" "$(clock $SECONDS)" "$line" | cut -c1-$((WIDTH - 1)))"
  elif ((SECONDS - PRINTED >= 20)); then
    say "[$(clock $SECONDS)] $line"
    PRINTED=$SECONDS
  fi
}

end_parts() {
  local name
  for name in "${!PROCESS[@]}"; do kill -- "-${PROCESS[$name]}" 2>/dev/null || true; done
}
trap end_parts EXIT

# Waits until a part has ended. If one fails, shows the end of its log, and ends the others.
finish() {
  local name
  while true; do
    for name in "${!PROCESS[@]}"; do
      kill -0 "${PROCESS[$name]}" 2>/dev/null || ended "$name"
    done
    [ -n "${PROCESS[$1]:-}" ] || return 0
    progress "${!PROCESS[@]}"
    sleep 0.3
  done
}

ended() {
  local rc=0
  wait "${PROCESS[$1]}" || rc=$?
  unset "PROCESS[$1]"
  [ ! -t 1 ] || printf '\r\033[K'
  if [ $rc != 0 ]; then
    tail -n 40 "$LOGS/$1.log" >&2
    stop "${TITLE[$1]}: failed (all of its output: $LOGS/$1.log)"
  fi
  say "[$(clock $SECONDS)] ${TITLE[$1]}: took $((SECONDS - SINCE[$1])) s"
}
