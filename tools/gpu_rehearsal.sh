#!/bin/bash
# Rehearses a session on a GPU machine, without a GPU: each step of docs/gpu.md, "A rehearsal", with a stand-in for what is
# missing here. Prints a table of the steps, with the sizes of what is carried and the times. The output of the steps is
# kept in build/rehearsal.
#
# The programs of the bundle run on a stand-in for CUDA (tests/fake_cuda), the operators on the fake GPU (tests/fake_gpu), and
# compute-sanitizer is a script that runs its program. Not rehearsed: lanes_cuda_test and cuda_device_test, which test what only
# a GPU does, and Nsight Compute.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PLACE=$PWD/build/rehearsal
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
BAZEL=${BAZEL:-$(command -v bazel || command -v bazelisk || echo bazel)}
export BAZEL PYTHON
rm -rf "$PLACE"
mkdir -p "$PLACE/machine" "$PLACE/bin"

readonly ROW="%-56s %8s  %s\n"
failed=0
# step STATUS LOG TITLE COMMAND...: runs a step that has to end with this status, and prints its row.
step() {
  local expected=$1 log=$PLACE/$2.txt title=$3 began rc=0 verdict=passed
  shift 3
  began=$(date +%s%N)
  "$@" >"$log" 2>&1 </dev/null || rc=$?
  local took=$((($(date +%s%N) - began) / 100000000))
  [ "$rc" = "$expected" ] || { verdict="FAILED: ended with $rc, see $log" failed=1; }
  printf "$ROW" "$title" "$((took / 10)).$((took % 10))" "$verdict"
}
size() { [ ! -e "$1" ] || echo "  ${1##*/}: $(($(stat -c %s "$1") >> 10)) KiB"; }

printf "$ROW" step seconds verdict
step 0 pack "the bundle is packed" tools/gpu_bundle.sh pack
size dist/gpu-bundle.tar.gz
step 77 empty "run.sh where there is no GPU" build/gpu-bundle/run.sh --limit 60
step 0 stand-in "the same programs on a stand-in for CUDA are packed" tools/gpu_bundle.sh stand-in "$PLACE/stand-in.tar.gz"
size "$PLACE/stand-in.tar.gz"
step 0 unpack "they are unpacked" tar -C "$PLACE/machine" -xzf "$PLACE/stand-in.tar.gz"
readonly RUN=$PLACE/machine/gpu-bundle/run.sh
step 0 tests "run.sh: tests side by side, then small benchmarks" \
  "$RUN" --jobs 6 --limit 300 --benchmarks --shrink 12
size "$PLACE/machine/gpu-bundle/logs.tar.gz"
step 0 figures "run.sh: one case of a benchmark" "$RUN" --benchmarks --shrink 12 --case hbm1.00/adam lookups_benchmark

# It takes the options that run.sh passes, and runs the program.
cat >"$PLACE/bin/compute-sanitizer" <<'END'
#!/bin/sh
[ "$1 $2 $3 $4 $5 $6" = "--tool memcheck --report-api-errors no --error-exitcode 99" ] || exit 2
shift 6
exec "$@"
END
chmod +x "$PLACE/bin/compute-sanitizer"
PATH=$PLACE/bin:$PATH step 0 sanitizer "run.sh: compute-sanitizer on a test" "$RUN" --sanitize device_work_test

step 0 fake-gpu "the fake GPU is built" "$BAZEL" build //tests/fake_gpu:_fake_gpu.so
# The Python of the operators' tests, with the fake GPU in it.
cat >"$PLACE/bin/python" <<END
#!/bin/sh
export FAKE_GPU_LIBRARY='$PWD/bazel-bin/tests/fake_gpu/_fake_gpu.so' TF_CPP_MIN_LOG_LEVEL=2
export PYTHONPATH='$PWD/tests/fake_gpu:$PWD'
if [ "\$1" = -c ]; then
  code=\$2
  shift 2
  exec '$PYTHON' -c "import fake_gpu
\$code" "\$@"
fi
exec '$PYTHON' "\$@"
END
chmod +x "$PLACE/bin/python"
PYTHON=$PLACE/bin/python PYTEST_ADDOPTS="-p fake_gpu -n ${JOBS:-2} -m 'not slow'" \
  step 0 operators "gpu_operators.sh, on the fake GPU" tools/gpu_operators.sh $(cat tests/fake_gpu/modules.txt)
echo "  $(tail -n 1 "$PLACE/operators.txt")"

exit $failed
