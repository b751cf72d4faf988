#!/bin/bash
# Builds Horovod for the TensorFlow of a Python, which is .venv's if none is named, and installs it there:
#
#   tools/horovod.sh install [python]
#
# Does only what is missing. The wheel is kept in the user's cache, apart for each version of Horovod, TensorFlow and Python
# and each set of operations. HOROVOD_GPU_OPERATIONS=NCCL in the environment adds those on GPUs; Horovod's other variables
# (HOROVOD_NCCL_HOME, HOROVOD_NCCL_LINK, HOROVOD_CUDA_HOME and so on) reach its build too.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VERSION=0.28.1
readonly SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
readonly BUILD=build/horovod
readonly NAME=horovod LOG=build/horovod.log
. tools/steps.sh

[ "${1:-install}" = install ] && [ $# -le 2 ] || stop "what it can do: tools/horovod.sh install [python]"
PYTHON=$(command -v "${2:-.venv/bin/python}") || stop "there is no ${2:-.venv}: run tools/setup.sh, or name a Python"
PYTHON=$(realpath -s "$PYTHON")
readonly PYTHON

export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 \
  HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=GLOO

# What is changed in Horovod's sources.
amend() {
  # It includes headers of XLA that TensorFlow does not ship any more; nothing else needs it.
  sed -i '/xla_mpi_ops\.cc/d' horovod/tensorflow/CMakeLists.txt
  # The vector stays empty, so that the stall check finds no rank missing: with Gloo a rank that waits waits for ever.
  sed -i 's/global_ranks_\.reserve(size_)/global_ranks_.resize(size_)/' horovod/common/gloo/gloo_controller.cc
  # What ranks do together has effects. TensorFlow, if not told so, runs an operation whose inputs are constant once, when
  # it optimises a graph, and merges two that have the same inputs: on one rank, and the others wait.
  sed -i -E 's/^REGISTER_OP\("Horovod(Grouped)?(Allreduce|Allgather|Broadcast|Alltoall|Reducescatter)"\)/&.SetIsStateful()/' \
    horovod/tensorflow/mpi_ops.cc
}

# What is changed for operations on GPUs: TensorFlow has another name for a stream's handle now.
amend_for_gpus() {
  sed -i -E 's|^// Forward declaration of AsGpuStreamValue$|#include "xla/stream_executor/stream.h"|
    s|^(GpuStreamHandle AsGpuStreamValue\(Stream\* stream\));$|inline \1 {\
      return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream); }|' horovod/tensorflow/mpi_ops.cc
}

hash_of() { declare -f "$1" | sha256sum | head -c 8; }

# Which wheel is wanted: its folder in the cache. pip notes where it installed a wheel from.
wheel_key() {
  local on_gpus=
  [ -z "${HOROVOD_GPU_OPERATIONS:-}" ] || on_gpus=-$HOROVOD_GPU_OPERATIONS-$(hash_of amend_for_gpus)
  "$PYTHON" -B - "$VERSION-$(hash_of amend)" "$on_gpus" <<'END'
import sys

sys.path.insert(0, "bazel")
import find_tensorflow

horovod, on_gpus = sys.argv[1:]
try:
    folder, tensorflow = find_tensorflow.find()
except find_tensorflow.TensorFlowError as error:
    sys.exit(str(error))
build = (folder / "python/platform/build_info.py").read_text()
if on_gpus and "('is_cuda_build', True)" not in build:
    sys.exit(f"horovod: operations on GPUs need the package tensorflow; {sys.executable} has tensorflow-cpu")
python = f"cp{sys.version_info.major}{sys.version_info.minor}"
print(f"horovod-{horovod}_tensorflow-{tensorflow}_{python}_GLOO{on_gpus}")
END
}

# Whether it is there; one with operations on GPUs too will do where they are not asked for.
installed() {
  "$PYTHON" -B - "$KEY" <<'END'
import importlib.metadata
import re
import sys

try:
    origin = importlib.metadata.distribution("horovod").read_text("direct_url.json") or ""
except importlib.metadata.PackageNotFoundError:
    origin = ""
sys.exit(not re.search(f"/{re.escape(sys.argv[1])}[/-]", origin))
END
}

needs() {
  "$PYTHON" -B -c 'import cloudpickle, packaging, psutil, yaml' 2>/dev/null ||
    stop "Horovod needs packages that $PYTHON lacks: $PYTHON -m pip install cloudpickle packaging psutil pyyaml"
}

# Neither pip nor a traceback is between the compiler's errors and the end of the log.
make_wheel() (
  cd "$BUILD/horovod-$VERSION" && "$PYTHON" -W ignore - bdist_wheel -d ../wheel <<'END'
import runpy
import sys

sys.path.insert(0, ".")
sys.tracebacklimit = 0
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
END
)

build() {
  local cmake=${HOROVOD_CMAKE:-$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/cmake}
  { [ -x "$cmake" ] && "$PYTHON" -B -c 'import setuptools, wheel'; } 2>/dev/null ||
    stop "to build Horovod $PYTHON lacks packages: $PYTHON -m pip install setuptools wheel 'cmake==3.28.*'"
  say "building $KEY (minutes)"
  # Afresh: in a tree where it was built already, it fails.
  rm -rf "$BUILD"
  mkdir -p "$BUILD/wheel"
  quietly "$PYTHON" -m pip download --disable-pip-version-check --no-build-isolation --no-deps --no-binary horovod \
    --require-hashes -d "$BUILD" -r /dev/stdin <<<"horovod==$VERSION --hash=sha256:$SHA256"
  tar -xf "$BUILD/horovod-$VERSION.tar.gz" -C "$BUILD"
  (cd "$BUILD/horovod-$VERSION" && amend && amend_for_gpus)
  HOROVOD_CMAKE=$cmake MAKEFLAGS=${MAKEFLAGS:--j$(nproc)} quietly make_wheel
  mkdir -p "$(dirname "$KEPT")"
  rm -rf "$KEPT"
  mv "$BUILD/wheel" "$KEPT"
  rm -rf "$BUILD"
}

mkdir -p build
KEY=$(wheel_key)
readonly KEY KEPT=${XDG_CACHE_HOME:-$HOME/.cache}/tf_dynemb/$KEY
if ! installed; then
  needs
  ls "$KEPT"/*.whl >/dev/null 2>&1 || build
  say "installing $KEY"
  quietly "$PYTHON" -m pip install --disable-pip-version-check --no-deps --no-index --force-reinstall "$KEPT"/*.whl
fi
