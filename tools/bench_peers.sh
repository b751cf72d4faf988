#!/bin/bash
# Runs the cases of benchmarks/ for TensorFlow Recommenders Addons (TFRA) and for this project, one after the other, and
# prints one table of both. TFRA needs an older TensorFlow, so it gets its own venv, and its figures come from other
# processes. The first table printed is for the older TensorFlow's static variable, to separate the effect of TFRA
# from the effect of TensorFlow. Each runs alone, because both together, with Adam's state, exceed 24 GiB.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=build/peers
readonly CASES=(tables memory sparse)

if [ ! -e "$VENV/installed" ]; then
  echo "bench-peers: creating $VENV with TFRA"
  ${PYTHON:-python3} -m venv "$VENV"
  "$VENV/bin/pip" install -q --disable-pip-version-check tensorflow-cpu==2.16.2 tf-keras==2.16.0 \
    tensorflow-recommenders-addons==0.8.1
  touch "$VENV/installed"
fi
export TF_CPP_MIN_LOG_LEVEL=2
for contender in static TFRA; do
  TF_USE_LEGACY_KERAS=1 "$VENV/bin/python" -m benchmarks --only "${CASES[@]}" --contenders "$contender" \
    --json "build/bench_peers_$contender.json" "$@"
done
.venv/bin/python -m benchmarks --only "${CASES[@]}" --json build/bench.json "$@"
.venv/bin/python -m benchmarks.report build/bench.json build/bench_peers_TFRA.json --output benchmarks/report.html
