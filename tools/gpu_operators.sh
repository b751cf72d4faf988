#!/bin/sh
# gpu_operators.sh [MODULE...]: runs the operators' tests, or these modules of tests/python, with tables in the memory of the GPU
# that TensorFlow sees. Fails if it sees none, or if the operators have no device code. PYTHON names the Python that has TensorFlow and pytest; default: the one in .venv, if
# there is one, otherwise python3.
set -eu
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -x .venv/bin/python ]; then PYTHON=$PWD/.venv/bin/python; fi
fi
readonly PYTHON

if ! "$PYTHON" -c "import sys, tensorflow as tf; sys.exit(not tf.config.list_physical_devices('GPU'))" 2>/dev/null; then
  echo "gpu: TensorFlow sees no GPU (its CUDA libraries: pip install 'tensorflow[and-cuda]'); operators did not run on one" >&2
  exit 1
fi
# Otherwise all tables would be in the host's memory.
if ! "$PYTHON" -c "import sys; from tf_dynemb.parallel import placement; sys.exit(not placement.has_gpu_kernels())" 2>/dev/null; then
  echo "gpu: the operators have no device code: TF_DYNEMB_CUDA=1 make build compiles it; no test ran" >&2
  exit 1
fi
cd tests/python
[ $# -gt 0 ] || set -- $(cat ../fake_gpu/modules.txt)
# Otherwise TensorFlow takes all memory and leaves none for tables. Few rows fit the device tier, so both tiers are used.
TF_FORCE_GPU_ALLOW_GROWTH=true DYNEMB_TEST_ON_GPU=1 exec "$PYTHON" -m pytest -p no:cacheprovider "$@"
