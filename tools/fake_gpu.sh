#!/bin/sh
# Runs the Python tests of operators, lookups, optimizers, layers and saved tables on the fake GPU (tests/fake_gpu), which needs
# neither a GPU nor nvcc. The last line of output is pytest's. Arguments are options of pytest.
set -eu
cd "$(dirname "$0")/.."
BAZEL=${BAZEL:-$(command -v bazel || command -v bazelisk || echo bazel)}
PYTHON=${PYTHON:-$PWD/.venv/bin/python}

"$BAZEL" build //tests/fake_gpu:_fake_gpu.so
FAKE_GPU_LIBRARY=$PWD/bazel-bin/tests/fake_gpu/_fake_gpu.so
PYTHONPATH=$PWD/tests/fake_gpu:$PWD${PYTHONPATH:+:$PYTHONPATH}
export FAKE_GPU_LIBRARY PYTHONPATH DYNEMB_TEST_ON_GPU=1 TF_CPP_MIN_LOG_LEVEL=2
# Left out: tests that need kernels of TensorFlow's own on a GPU, which its build for the CPU lacks; and ranks that are threads,
# which get each other's tensors from TensorFlow (docs/gpu.md, "What was run, and where").
exec "$PYTHON" -m pytest -p no:cacheprovider -p fake_gpu -m "not slow" \
  --deselect tests/python/test_dynamic_variable.py::test_tables_are_arguments_of_functions \
  --deselect tests/python/test_lookup_sparse.py::test_dynamic_and_static_tables_in_one_call \
  --deselect tests/python/test_lookup_sparse.py::test_max_norm_is_that_of_tensorflow \
  --deselect tests/python/test_admission_saved.py::test_counters_survive_resharding \
  "$@" tests/fake_gpu $(printf 'tests/python/test_%s.py ' ops ops_gradients ops_model exchange_ops dynamic_variable lookup_sparse \
    optimizer layers dump checkpoint admission_option admission_saved file_tables persistent_tables)
