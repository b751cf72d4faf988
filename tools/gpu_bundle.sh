#!/bin/bash
# Builds the tests and benchmarks that have kernels, and packs them or runs them on this machine.
#
#   gpu_bundle.sh pack          packs dist/gpu-bundle.tar.gz for a machine with only a driver: unpack it there, and call
#                               its run.sh
#   gpu_bundle.sh run [ARG...]  calls run.sh here with these arguments; without a GPU, exits with 77 and compiles no tests
set -euo pipefail
cd "$(dirname "$0")/.."

readonly NAME=gpu LOG=build/gpu.log
readonly PLACE=build/gpu-bundle BUNDLE=dist/gpu-bundle.tar.gz
# A file for a machine without a network should be small.
readonly MOST_BYTES=$((32 << 20))
. tools/steps.sh

bazel_build() { "${BAZEL:-bazel}" build --config=cuda "$@"; }

# The labels of all rules of a kind in the packages whose programs need a GPU.
targets() {
  local packages=//tests/cuda:all
  [ ! -e benchmarks/cuda/BUILD ] || packages+=" + //benchmarks/cuda:all"
  "${BAZEL:-bazel}" query --repo_env=TF_DYNEMB_CUDA=1 --noshow_progress "kind('$1', $packages)" 2>"$LOG" ||
    { cat "$LOG" >&2; exit 1; }
}

place() {
  local label path
  mkdir -p "$PLACE/$2"
  for label in $1; do
    path=${label#//}
    path=bazel-bin/${path/://}
    strip -o "$PLACE/$2/${path##*/}" "$path"
  done
}

# Fails if a program needs a library that another distribution may lack.
standalone() {
  local program library
  for program in "$PLACE"/find_gpu "$PLACE"/tests/* "$PLACE"/benchmarks/*; do
    [ -x "$program" ] || continue
    for library in $(readelf -d "$program" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
      case $library in
        libc.so.6 | libm.so.6 | libdl.so.2 | librt.so.1 | libpthread.so.0 | ld-linux-x86-64.so.2) ;;
        *) stop "$program needs $library, which other machines may lack" ;;
      esac
    done
  done
}

stage() {
  local tests benchmarks
  tests=$(targets "cc_test rule" | grep -v ':load_test$')
  benchmarks=$(targets "cc_binary rule" | grep '_benchmark$' || true)
  bazel_build //tests/cuda:find_gpu $tests $benchmarks
  rm -rf "$PLACE"
  place //tests/cuda:find_gpu .
  place "$tests" tests
  place "$benchmarks" benchmarks
  cp tools/gpu_run.sh "$PLACE/run.sh"
  standalone
}

mkdir -p build dist
case ${1-} in
  pack)
    stage
    tar -C build -czf "$BUNDLE" --owner=0 --group=0 gpu-bundle
    bytes=$(stat -c %s "$BUNDLE")
    say "$BUNDLE: $((bytes >> 10)) KiB"
    [ "$bytes" -le $MOST_BYTES ] || stop "that is more than $((MOST_BYTES >> 20)) MiB"
    ;;
  run)
    shift
    bazel_build //tests/cuda:find_gpu
    bazel-bin/tests/cuda/find_gpu || {
      rc=$?
      [ $rc != 77 ] || printf "$NAME: %s\n" "no test was run; make gpu-bundle packs them for a machine with a GPU" >&2
      exit $rc
    }
    stage
    exec "$PLACE/run.sh" "$@"
    ;;
  *)
    stop "usage: gpu_bundle.sh pack, or gpu_bundle.sh run [ARG...]"
    ;;
esac
