#!/bin/bash
# Compares training on a table that does not fit memory with RocksDB, which gets its own venv
# (benchmarks/files.py). The contenders run in turns. Arguments are passed on: tools/bench_files.sh
# --rows 5000000
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=build/rocksdb
readonly FOLDER=${BENCHMARK_FOLDER:-build/bench_files}
if [ ! -e "$VENV/installed" ]; then
  echo "bench-files: creating $VENV with rocksdict"
  ${PYTHON:-python3} -m venv "$VENV"
  "$VENV/bin/pip" install -q --disable-pip-version-check rocksdict==0.3.29 numpy
  touch "$VENV/installed"
fi
export TF_CPP_MIN_LOG_LEVEL=2
mkdir -p "$FOLDER"
for _ in 1 2 3; do
  .venv/bin/python -m benchmarks.files --contender ours --folder "$FOLDER" "$@"
  "$VENV/bin/python" -m benchmarks.files --contender rocksdb --folder "$FOLDER" "$@"
done
rm -rf "$FOLDER"
