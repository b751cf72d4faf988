#!/bin/sh
# Runs the Python tests of operators, lookups, optimizers, layers and saved tables (modules.txt), and of two ranks that train, on the
# fake GPU (tests/fake_gpu) and a stand-in for NCCL, which need neither a GPU nor nvcc. The last line of output is pytest's. Arguments are options of pytest.
set -eu
cd "$(dirname "$0")/.."
BAZEL=${BAZEL:-$(command -v bazel || command -v bazelisk || echo bazel)}
PYTHON=${PYTHON:-$PWD/.venv/bin/python}

"$BAZEL" build //tests/fake_gpu:_fake_gpu.so //tests/fake_nccl:libfake_nccl.so
FAKE_GPU_LIBRARY=$PWD/bazel-bin/tests/fake_gpu/_fake_gpu.so
PYTHONPATH=$PWD/tests/fake_gpu:$PWD${PYTHONPATH:+:$PYTHONPATH}
PYTEST_ADDOPTS="-p fake_gpu"  # for the ranks, too
TF_DYNEMB_NCCL=$PWD/bazel-bin/tests/fake_nccl/libfake_nccl.so
export FAKE_GPU_LIBRARY TF_DYNEMB_NCCL PYTHONPATH PYTEST_ADDOPTS DYNEMB_TEST_ON_GPU=1 TF_CPP_MIN_LOG_LEVEL=2
exec "$PYTHON" -m pytest -p no:cacheprovider -m "not slow" "$@" tests/fake_gpu $(sed 's|^|tests/python/|' tests/fake_gpu/modules.txt) \
  tests/parallel/ranks/test_training.py tests/parallel/ranks/test_same_bits.py
