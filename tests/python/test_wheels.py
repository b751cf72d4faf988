"""tools/wheels.sh: what the wheel for upload has, and what the last line says of it.

Nothing is compiled: there are stand-ins for Python, and for the tools that pack a wheel.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest
from example_runs import ROOT

TOOL = ROOT / "tools" / "wheels.sh"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="no sources: this tests a wheel")

VERSIONS = 'TENSORFLOW_VERSION = "2.21"\nTENSORFLOW_VERSIONS = ("2.20", "2.21")\n'

# Of an environment for a TensorFlow: it compiles what $COMPILED names, and packs the package.
PYTHON = f"""#!/bin/bash
set -e
minor=$(basename "$(dirname "$(dirname "$0")")") && minor=${{minor#tf}}
case "$*" in
  "-m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    echo "$3" >>environments.txt
    case $3 in */tools) cp stand_ins/* "$3/bin" ;; esac
    ;;
  *" -m pip install "* | "-m pip install "*) ;;
  *"build_ext --build-lib "*)
    mkdir -p "${{!#}}/tf_dynemb"
    for kind in $COMPILED; do
      library=${{!#}}/tf_dynemb/_dynemb_ops_tf$minor${{kind#cuda13}}
      echo "ELF $DEVICE_CODE" >"$library.so"
      echo sources >"$library.sources"
    done
    ;;
  *"-m pip wheel "*)
    mkdir build/wheels/plain
    {sys.executable} -m zipfile -c build/wheels/plain/a.whl tf_dynemb
    ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
STAND_INS = {
    "python": PYTHON,
    "patchelf": "#!/bin/sh\n",
    # unpack -d FOLDER WHEEL, or pack -d FOLDER UNPACKED
    "wheel": f"""#!/bin/bash
set -e
mkdir -p "$3"
case $1 in
  unpack) {sys.executable} -m zipfile -e "$4" "$3/a" ;;
  pack) cd "$4" && {sys.executable} -m zipfile -c "$3/a.whl" * ;;
esac
""",
    # repair ... -w dist WHEEL
    "auditwheel": """#!/bin/bash
[ "$1" != repair ] || { mkdir dist && cp "${!#}" dist/a.whl; }
""",
}


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    for name in ("tools/wheels.sh", "bazel/library.py", "bazel/find_tensorflow.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "tools" / "old_symbols.py").touch()
    (root / "tf_dynemb").mkdir()
    (root / "tf_dynemb" / "_version.py").write_text(VERSIONS)
    for name, text in STAND_INS.items():
        program(root / "stand_ins" / name, text)
    return root


def wheels(checkout, compiled="cuda13", device_code=""):
    """Builds the wheel: returns its libraries, and what was printed last."""
    done = subprocess.run(
        ["tools/wheels.sh"],
        cwd=checkout,
        env={
            "PATH": os.environ["PATH"],
            "PYTHON": str(checkout / "stand_ins" / "python"),
            "COMPILED": compiled,
            "DEVICE_CODE": device_code,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(checkout / "dist" / "a.whl") as content:
        names = {pathlib.PurePath(name).name for name in content.namelist()}
    libraries = {name.removesuffix(".so") for name in names if name.endswith(".so")}
    stamps = {name.removesuffix(".sources") for name in names if name.endswith(".sources")}
    assert stamps == libraries
    return {name.removeprefix("_dynemb_ops_tf") for name in libraries}, done.stdout.splitlines()[-1]


def test_the_last_line_says_which_drivers_there_are_kernels_for(checkout):
    libraries, last = wheels(checkout)
    assert libraries == {"2.20", "2.21"}
    assert last == "wheels: a.whl: without device code"
    libraries, last = wheels(checkout, device_code=".nv_fatbin")
    assert libraries == {"2.20", "2.21"}
    assert last == (
        "wheels: a.whl: with device code for drivers of CUDA 13, not 12, which needs clang 19 "
        "(package clang-19)"
    )
    libraries, last = wheels(checkout, "cuda13 _cuda12", device_code=".nv_fatbin")
    assert libraries == {"2.20", "2.21", "2.20_cuda12", "2.21_cuda12"}
    assert last == "wheels: a.whl: with device code for drivers of CUDA 12 and 13"


def test_libraries_of_an_earlier_wheel_are_not_packed(checkout):
    assert "2.20_cuda12" in wheels(checkout, "cuda13 _cuda12")[0]
    text = VERSIONS.replace('"2.20", "2.21"', '"2.21", ')
    (checkout / "tf_dynemb" / "_version.py").write_text(text)
    assert wheels(checkout)[0] == {"2.21"}


def test_environments_outlive_the_link_of_a_release(checkout, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (checkout / "build").mkdir()
    (checkout / "build" / "wheels").symlink_to(kept)
    wheels(checkout)
    made = (checkout / "environments.txt").read_text().split()
    assert made == [str(kept / name) for name in ("tools", "tf2.20", "tf2.21")]
