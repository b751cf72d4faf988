"""The operator library exports no symbols, which other libraries of the process might have too."""

import shutil
import subprocess

import pytest
import tensorflow as tf

from tf_dynemb import _ops

# Add a symbol here, and to cc/tf/exported.lds, if something outside the library looks it up.
ALLOWED: frozenset[str] = frozenset()


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, of binutils")
def test_the_operator_library_exports_nothing():
    library = str(_ops.library_path(tf.__version__))
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", "-P", library], check=True, capture_output=True, text=True
    )
    exported = {line.split()[0] for line in listed.stdout.splitlines()}
    assert exported <= ALLOWED, sorted(exported - ALLOWED)[:20]
    imported = subprocess.run(
        ["nm", "-D", "--undefined-only", "-P", library], check=True, capture_output=True, text=True
    )
    assert "OpDefBuilder" in imported.stdout  # nm did read the table of symbols
