#!/bin/bash
# Builds Horovod for the TensorFlow of a Python (default: the one in .venv), and installs it there:
#
#   tools/horovod.sh install [python]
#
# `make horovod` calls it after it has installed requirements_horovod.txt into .venv.
#
# Does only what is missing. The wheel is kept in the user's cache, separately for each version of Horovod, TensorFlow and
# Python, and for each set of operations. HOROVOD_GPU_OPERATIONS=NCCL in the environment adds operations on GPUs. Horovod's
# other variables (HOROVOD_NCCL_HOME, HOROVOD_NCCL_LINK, HOROVOD_CUDA_HOME and so on) are passed to its build.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VERSION=0.28.1
readonly SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
readonly BUILD=build/horovod
readonly NAME=horovod LOG=build/horovod.log
. tools/steps.sh

[ "${1:-install}" = install ] && [ $# -le 2 ] || stop "usage: tools/horovod.sh install [python]"
PYTHON=$(command -v "${2:-.venv/bin/python}") || stop "there is no ${2:-.venv}: run make horovod, or name a Python"
PYTHON=$(realpath -s "$PYTHON")
readonly PYTHON

export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 \
  HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=GLOO

# Changes Horovod's sources.
amend() {
  # The TensorFlow operators link compatible17_gloo, a copy that CMake makes. Nothing links the other one.
  sed -i 's/add_subdirectory(third_party\/gloo)/add_subdirectory(third_party\/gloo EXCLUDE_FROM_ALL)/' CMakeLists.txt
  # This file includes XLA headers that TensorFlow no longer ships; nothing else needs the file.
  sed -i '/xla_mpi_ops\.cc/d' horovod/tensorflow/CMakeLists.txt
  # Without this change the vector stays empty, the stall check finds no rank missing, and with Gloo a rank waits forever.
  sed -i 's/global_ranks_\.reserve(size_)/global_ranks_.resize(size_)/' horovod/common/gloo/gloo_controller.cc
  # Collective operations have side effects. Unless they are stateful, TensorFlow folds an operation with constant inputs
  # when it optimizes a graph, and merges two with the same inputs. If one rank does this, the others wait.
  sed -i -E 's/^REGISTER_OP\("Horovod(Grouped)?(Allreduce|Allgather|Broadcast|Alltoall|Reducescatter)"\)/&.SetIsStateful()/' \
    horovod/tensorflow/mpi_ops.cc
}

# Changes the sources for operations on GPUs: TensorFlow has renamed the handle of a stream.
amend_for_gpus() {
  sed -i -E 's|^// Forward declaration of AsGpuStreamValue$|#include "xla/stream_executor/stream.h"|
    s|^(GpuStreamHandle AsGpuStreamValue\(Stream\* stream\));$|inline \1 {\
      return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream); }|' horovod/tensorflow/mpi_ops.cc
}

hash_of() { declare -f "$1" | sha256sum | head -c 8; }

# Prints the name of the wanted wheel's folder in the cache. pip records where it installed a wheel from.
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

# Whether the wheel is installed. A wheel with operations on GPUs also serves if they are not requested.
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
    stop "Horovod needs packages that $PYTHON lacks: run make horovod, or for another Python than the one in .venv," \
      "  $PYTHON -m pip install -r requirements_horovod.txt"
}

# Avoids pip and tracebacks, so that the log ends with the compiler's errors.
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
    stop "to build Horovod $PYTHON lacks packages: $PYTHON -m pip install setuptools wheel -r requirements_horovod.txt"
  say "building $KEY (minutes)"
  # The build fails in a tree where Horovod was built before.
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
