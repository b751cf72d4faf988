#!/bin/bash
# run.sh of the GPU bundle: runs its tests, and prints a table of the results. It needs an NVIDIA driver and the tools of any
# Linux system. The output of each program is kept in logs/, also from earlier calls, and packed in logs.tar.gz.
#
#   run.sh [--sanitize] [--benchmarks] [--limit SECONDS] [--jobs N] [--shrink N] [--case TEXT] [NAME...]
#
# --sanitize    run under compute-sanitizer, from PATH or /usr/local/cuda/bin
# --benchmarks  run the benchmarks after the tests, and show their output
# --limit       time limit of each program; default: 300, and ten times that under compute-sanitizer
# --jobs        the number of tests that run side by side; with several, the tests of tables are divided among them.
#               Default: 1. The suites of the device itself, and benchmarks, always run alone.
# --shrink      for benchmarks: log2 of the factor by which all sizes are divided
# --case        for benchmarks: only the cases that have this text in their names
# NAME          run only these programs
#
# The exit status is 0 if all passed, 1 if one failed, 2 for wrong usage, and 77 without a GPU. Without a GPU, the tests
# that need none still run, and the others report that they were skipped.
set -uo pipefail
cd "$(dirname "$0")"

limit="" sanitize="" benchmarks="" jobs=1 names=() sizes=()

# Checks that the argument of an option is a number.
numeric() { [[ ${2-} =~ ^[0-9]+$ ]] || { echo "run.sh: $1 needs a number" >&2; exit 2; }; }

while [ $# -gt 0 ]; do
  case $1 in
    --sanitize) sanitize=yes ;;
    --benchmarks) benchmarks=yes ;;
    --limit) numeric "$@" && limit=$2 && shift ;;
    --jobs) numeric "$@" && jobs=$((10#$2)) && shift ;;
    --shrink) numeric "$@" && sizes+=("$2") && shift ;;
    --case) [ $# -gt 1 ] || { echo "run.sh: --case needs a text" >&2; exit 2; }
      sizes+=(--case "$2") && shift ;;
    -*) echo "run.sh: no option $1; see the top of this file" >&2; exit 2 ;;
    *) names+=("$1") ;;
  esac
  shift
done
limit=${limit:-$([ -n "$sanitize" ] && echo 3000 || echo 300)}
[ "$jobs" -gt 0 ] || { echo "run.sh: --jobs needs at least 1" >&2; exit 2; }

wanted() { [ ${#names[@]} = 0 ] || [[ " ${names[*]} " = *" $1 "* ]]; }

for name in "${names[@]}"; do
  [ -x "tests/$name" ] || [ -x "benchmarks/$name" ] || { echo "run.sh: there is no $name here" >&2; exit 2; }
done

under=()
if [ -n "$sanitize" ]; then
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer) ||
    { echo "run.sh: there is no compute-sanitizer on PATH nor in /usr/local/cuda/bin" >&2; exit 2; }
  # Calls of CUDA that fail are no findings: tests make some fail on purpose, and the library checks the result of each.
  under=("$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 99)
  export DYNEMB_SANITIZE=1  # tests skip planted faults
fi

mkdir -p logs
# However this ends. A call that is cut off leaves what it had.
pack() { tar -czf logs.tar.gz logs; }
trap pack EXIT
./find_gpu
case $? in
  0) gpu=yes ;;
  77) gpu="" ;;
  *) echo "run.sh: find_gpu failed" >&2; exit 1 ;;
esac

# Prints the last number in a line of GoogleTest's summary, or 0.
number() { sed -n "s/^\[$1\] *\(Running \)\?\([0-9]*\) test.*/\2/p" "$2" | tail -n 1 | grep . || echo 0; }

readonly ROW="%-28s %6s %7s %8s %8s  %s\n"

# Runs a test, or the part PART of PARTS of it, and prints its row. Fails if the test does.
run_test() {
  local name=$1 part=${2-} parts=${3-} log began rc took ran passed skipped verdict
  local label=$name${part:+ $((part + 1))/$parts}
  log=logs/$name${part:+_$part}.txt
  began=$(date +%s%N)
  (
    [ -z "$part" ] || export GTEST_SHARD_INDEX=$part GTEST_TOTAL_SHARDS=$parts
    exec timeout -k 10 "$limit" "${under[@]}" "tests/$name"
  ) </dev/null >"$log" 2>&1
  rc=$?
  took=$((($(date +%s%N) - began) / 10000000))
  ran=$(number "==========" "$log") passed=$(number "  PASSED  " "$log") skipped=$(number "  SKIPPED " "$log")
  if [ $rc = 124 ] || [ $rc = 137 ]; then
    verdict="FAILED: not done after $limit s"
  elif [ $rc != 0 ]; then
    verdict="FAILED: ended with $rc"
  elif [ "$((passed + skipped))" != "$ran" ] || [ "$ran" = 0 ]; then
    verdict="FAILED: no summary of all tests"
  elif [ -z "$gpu" ] && [ "$skipped" != 0 ]; then
    verdict="skipped: no GPU"
  elif [ "$passed" = 0 ]; then
    verdict="FAILED: skipped all, with a GPU"
  else
    verdict=passed
  fi
  # Together, so that the rows of tests that run side by side do not mix.
  {
    printf "$ROW" "$label" "$ran" "$passed" "$skipped" "$((took / 100)).$(printf %02d $((took % 100)))" "$verdict"
    [[ $verdict != FAILED* ]] || tail -n 30 "$log" | sed 's/^/    /'
  } >"logs/row.$BASHPID"
  cat "logs/row.$BASHPID"
  rm "logs/row.$BASHPID"
  [[ $verdict != FAILED* ]]
}

# The tests of the device come first, and run alone: some need most of its memory, or want it idle.
alone=() beside=()
for program in tests/*; do
  name=${program##*/}
  wanted "$name" || continue
  case $name in
    cuda_device_test | device_* | lanes_*) alone+=("$name") ;;
    *) beside+=("$name") ;;
  esac
done

printf "$ROW" name tests passed skipped seconds verdict
failed=0 some=0 running=0
for name in "${alone[@]}"; do
  some=1
  run_test "$name" || failed=1
done
for name in "${beside[@]}"; do
  some=1
  parts=1
  case $name in
    cuda_table_test | cuda_snapshot_test) parts=$jobs ;; # the longest
  esac
  for ((part = 0; part < parts; part++)); do
    if [ "$running" = "$jobs" ]; then
      wait -n || failed=1
      running=$((running - 1))
    fi
    if [ $parts = 1 ]; then run_test "$name" & else run_test "$name" $part $parts & fi
    running=$((running + 1))
  done
done
while [ $running -gt 0 ]; do
  wait -n || failed=1
  running=$((running - 1))
done
pack

if [ -n "$benchmarks" ]; then
  for program in benchmarks/*; do
    name=${program##*/}
    [ -x "$program" ] && wanted "$name" || continue
    some=1
    echo "--- $name"
    timeout -k 10 "$limit" "$program" "${sizes[@]}" </dev/null 2>&1 | tee "logs/$name.txt"
    rc=${PIPESTATUS[0]}
    [ "$rc" = 0 ] || { failed=1; echo "FAILED: ended with $rc"; }
    pack
  done
fi

[ $some = 1 ] || { echo "run.sh: nothing was run" >&2; exit 2; }
[ $failed = 0 ] || exit 1
[ -n "$gpu" ] || exit 77
