#!/bin/sh
# Runs the operators' tests with tables in the memory of the GPU that TensorFlow sees. Prints a line if it sees none.
set -eu
cd "$(dirname "$0")/.."

readonly PYTHON=.venv/bin/python

if ! $PYTHON -c "import sys, tensorflow as tf; sys.exit(not tf.config.list_physical_devices('GPU'))" 2>/dev/null; then
  echo "gpu: TensorFlow sees no GPU (its CUDA libraries: pip install 'tensorflow[and-cuda]'); operators did not run on one"
  exit 0
fi
cd tests/python
# Otherwise TensorFlow takes all memory and leaves none for tables. Few rows fit the device tier, so both tiers are used.
TF_FORCE_GPU_ALLOW_GROWTH=true DYNEMB_TEST_ON_GPU=1 \
  exec ../../$PYTHON -m pytest -p no:cacheprovider $(../../$PYTHON -c "import simulated; print(*simulated.MODULES)") test_device_tables.py
