#!/bin/bash
# Builds the tests and benchmarks that have kernels, and packs them or runs them on this machine.
#
#   gpu_bundle.sh pack          packs dist/gpu-bundle.tar.gz for a machine with only a driver: unpack it there, and call
#                               its run.sh
#   gpu_bundle.sh run [ARG...]  calls run.sh here with these arguments; without a GPU, exits with 77 and compiles no tests
#   gpu_bundle.sh stand-in FILE packs FILE: the same programs on a stand-in for CUDA (tests/fake_cuda), to rehearse without a GPU
set -euo pipefail
cd "$(dirname "$0")/.."

readonly NAME=gpu LOG=build/gpu.log
readonly BUNDLE=dist/gpu-bundle.tar.gz
PLACE=build/gpu-bundle
# A file for a machine without a network should be small.
readonly MOST_BYTES=$((48 << 20))
. tools/steps.sh

bazel_build() { "${BAZEL:-bazel}" build --config=cuda "$@"; }

# The labels of all rules of a kind in some packages.
targets() {
  "${BAZEL:-bazel}" query --repo_env=TF_DYNEMB_CUDA=1 --noshow_progress "kind('$1', $2)" 2>"$LOG" ||
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

# Builds the programs of some packages, and lays them out in $PLACE. $1 is the package of find_gpu.
stage() {
  local tests benchmarks
  tests=$(targets "cc_test rule" "$2" | grep -v -e ':load_[a-z0-9_]*$' -e ':fake_cuda[0-9]*_test$')
  benchmarks=$(targets "cc_binary rule" "$2" | grep '_benchmark$' || true)
  bazel_build "$1:find_gpu" $tests $benchmarks
  rm -rf "$PLACE"
  place "$1:find_gpu" .
  place "$tests" tests
  place "$benchmarks" benchmarks
  cp tools/gpu_run.sh "$PLACE/run.sh"
}

stage_cuda() {
  stage //tests/cuda "//tests/cuda:all + //benchmarks/cuda:all"
  standalone
}

mkdir -p build dist
case ${1-} in
  pack)
    stage_cuda
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
    stage_cuda
    exec "$PLACE/run.sh" "$@"
    ;;
  stand-in)
    PLACE=build/stand-in/gpu-bundle
    stage //tests/fake_cuda //tests/fake_cuda:all
    tar -C build/stand-in -czf "$2" gpu-bundle
    ;;
  *)
    stop "usage: gpu_bundle.sh pack, gpu_bundle.sh run [ARG...], or gpu_bundle.sh stand-in FILE"
    ;;
esac
