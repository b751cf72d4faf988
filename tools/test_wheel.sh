#!/bin/bash
# Installs the wheel in dist/ into a separate venv, and runs the Python tests against it from a folder without the package's
# sources. The venv borrows the other packages from .venv, so TensorFlow is not installed twice.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PYTHON=$PWD/.venv/bin/python
readonly PLACE=$PWD/build/wheel_test
readonly INSTALLED=$PLACE/venv/bin/python

rm -rf "$PLACE"
mkdir -p "$PLACE/run"
"$PYTHON" -m venv --without-pip "$PLACE/venv"
borrowed=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
site=$("$INSTALLED" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$borrowed" >"$site/borrowed.pth"
# --ignore-installed: the in-place copy in .venv is visible through borrowed.pth, and must not change.
"$PYTHON" -m pip --python "$INSTALLED" install -q --disable-pip-version-check --no-deps --no-index \
  --ignore-installed dist/*.whl

cp -r tests examples benchmarks pyproject.toml README.md "$PLACE/run/"
cd "$PLACE/run"
TF_CPP_MIN_LOG_LEVEL=3 "$INSTALLED" - "$site" <<'EOF'
import importlib
import pathlib
import pkgutil
import sys

import tf_dynemb

found = pathlib.Path(tf_dynemb.__file__).parent
if pathlib.Path(sys.argv[1]) not in found.parents or not list(found.glob("_dynemb_ops_tf*.so")):
    sys.exit(f"the tests would not use the installed wheel: {found}")
for module in pkgutil.walk_packages(tf_dynemb.__path__, "tf_dynemb."):
    if not module.name.endswith(("__main__", "_dynemb_ops")):
        importlib.import_module(module.name)
EOF
# Two ranks, which need nothing but the wheel.
"$INSTALLED" -m tf_dynemb run -np 2 "$INSTALLED" examples/model_parallel.py --epochs 1 --output-dir ranks
# A wheel can lack a module, which was imported above, or the library, which these tests use. (The in-place run tests
# everything.)
readonly TESTS=(layers lazy_import)
exec "$INSTALLED" -m pytest -p no:cacheprovider -n 2 "$@" $(printf "tests/python/test_%s.py " "${TESTS[@]}")
