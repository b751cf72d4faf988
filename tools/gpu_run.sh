#!/bin/bash
# run.sh of the GPU bundle: runs its tests one after the other, and prints a table of the results. It needs an NVIDIA driver
# and the tools of any Linux system. The output of the tests is kept in logs/.
#
#   run.sh [--sanitize] [--benchmarks] [--limit SECONDS] [NAME...]
#
# --sanitize    run under compute-sanitizer, from PATH or /usr/local/cuda/bin
# --benchmarks  run the benchmarks after the tests, and show their output
# --limit       time limit of each program; default: 300, and ten times that under compute-sanitizer
# NAME          run only these programs
#
# The exit status is 0 if all passed, 1 if one failed, 2 for wrong usage, and 77 without a GPU. Without a GPU, the tests
# that need none still run, and the others report that they were skipped.
set -uo pipefail
cd "$(dirname "$0")"

limit="" sanitize="" benchmarks="" names=()
while [ $# -gt 0 ]; do
  case $1 in
    --sanitize) sanitize=yes ;;
    --benchmarks) benchmarks=yes ;;
    --limit)
      [[ ${2-} =~ ^[0-9]+$ ]] || { echo "run.sh: --limit needs a number of seconds" >&2; exit 2; }
      limit=$2
      shift
      ;;
    -*) echo "run.sh: no option $1; see the top of this file" >&2; exit 2 ;;
    *) names+=("$1") ;;
  esac
  shift
done
limit=${limit:-$([ -n "$sanitize" ] && echo 3000 || echo 300)}

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
./find_gpu
case $? in
  0) gpu=yes ;;
  77) gpu="" ;;
  *) echo "run.sh: find_gpu failed" >&2; exit 1 ;;
esac

# Prints the last number in a line of GoogleTest's summary, or 0.
number() { sed -n "s/^\[$1\] *\(Running \)\?\([0-9]*\) test.*/\2/p" "$2" | tail -n 1 | grep . || echo 0; }

readonly ROW="%-28s %6s %7s %8s %8s  %s\n"
printf "$ROW" name tests passed skipped seconds verdict
failed=0 some=0
for program in tests/*; do
  name=${program##*/}
  wanted "$name" || continue
  some=1
  log=logs/$name.txt
  began=$(date +%s%N)
  timeout -k 10 "$limit" "${under[@]}" "$program" </dev/null >"$log" 2>&1
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
  printf "$ROW" "$name" "$ran" "$passed" "$skipped" "$((took / 100)).$(printf %02d $((took % 100)))" "$verdict"
  if [[ $verdict = FAILED* ]]; then
    failed=1
    tail -n 30 "$log" | sed 's/^/    /'
  fi
done

if [ -n "$benchmarks" ]; then
  for program in benchmarks/*; do
    name=${program##*/}
    [ -x "$program" ] && wanted "$name" || continue
    some=1
    echo "--- $name"
    timeout -k 10 "$limit" "$program" </dev/null 2>&1 | tee "logs/$name.txt"
    rc=${PIPESTATUS[0]}
    [ "$rc" = 0 ] || { failed=1; echo "FAILED: ended with $rc"; }
  done
fi

[ $some = 1 ] || { echo "run.sh: nothing was run" >&2; exit 2; }
[ $failed = 0 ] || exit 1
[ -n "$gpu" ] || exit 77
