"""The operator library exports no symbols, which other libraries of the process might have too.

It calls only what the systems of a wheel have.
"""

import pathlib
import re
import runpy
import shutil
import subprocess

import pytest
import tensorflow as tf

from tf_dynemb import _ops

# Add a symbol here, and to cc/tf/exported.lds, if something outside the library looks it up.
ALLOWED: frozenset[str] = frozenset()
OLD_SYMBOLS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "old_symbols.py"


@pytest.fixture(params=["", "_cuda12"], ids=["cuda13", "cuda12"])
def library(request):
    """The libraries for this TensorFlow."""
    path = _ops.library_path(tf.__version__)
    path = path.with_name(path.stem.removesuffix("_cuda12") + request.param + ".so")
    if not path.exists():
        pytest.skip("there is one library")
    return path


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, of binutils")
def test_the_operator_library_exports_nothing(library):
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", "-P", library], check=True, capture_output=True, text=True
    )
    exported = {line.split()[0] for line in listed.stdout.splitlines()}
    assert exported <= ALLOWED, sorted(exported - ALLOWED)[:20]
    imported = subprocess.run(
        ["nm", "-D", "--undefined-only", "-P", library], check=True, capture_output=True, text=True
    )
    assert "OpDefBuilder" in imported.stdout  # nm did read the table of symbols


@pytest.mark.skipif(
    shutil.which("objdump") is None or shutil.which("g++") is None or not OLD_SYMBOLS.exists(),
    reason="needs objdump and g++, and a checkout",
)
def test_older_systems_have_what_the_operator_library_calls(library):
    """The linker of wheels finds each function, in a version of the systems that they promise."""
    program = runpy.run_path(str(OLD_SYMBOLS))
    framework = pathlib.Path(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")
    defined = subprocess.run(
        ["nm", "-D", "--defined-only", "-P", framework], check=True, capture_output=True, text=True
    )
    has = {line.split()[0].partition("@")[0] for line in defined.stdout.splitlines()}
    for name in ("ld-linux-x86-64.so.2", *program["LIBRARIES"].values()):
        has |= program["symbols"](program["path_of"](name)).keys()
    listed = subprocess.run(["objdump", "-T", library], check=True, capture_output=True, text=True)
    families = "|".join(program["NEWEST"])
    calls = re.findall(
        rf"\*UND\*\s+\w+\s+\(?(?:{families})_[\d.]+\)?\s+(\S+)$", listed.stdout, re.M
    )
    assert len(calls) > 100
    assert not set(calls) - has, "cc/tf/older_systems/symbols.cc can have them"
