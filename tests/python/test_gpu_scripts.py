"""The scripts that run tests on a GPU: what they do without one, and under compute-sanitizer."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="no sources: this tests a wheel")


def run(command, **environment):
    return subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("python", [sys.executable, "/there/is/no/python"])
def test_the_operators_fail_without_a_gpu(python):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    done = run([TOOLS / "gpu_operators.sh"], PYTHON=python)
    assert done.returncode == 1
    assert "TensorFlow sees no GPU" in done.stderr


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("kernels", [True, False])
def test_the_operators_fail_without_device_code(tmp_path, kernels):
    # A Python that sees a GPU.
    asked = f"*has_gpu_kernels*) exit {int(not kernels)} ;;"
    program(tmp_path / "python", f'case "$*" in {asked} *pytest*) echo tests ran ;; esac')
    done = run([TOOLS / "gpu_operators.sh", "test_x.py"], PYTHON=tmp_path / "python")
    assert ("tests ran" in done.stdout) == kernels
    assert ("TF_DYNEMB_CUDA=1 make build" in done.stderr) == (not kernels)
    assert done.returncode == int(not kernels)


def test_the_sanitizer_reports_no_calls_that_tests_make_fail(tmp_path):
    shutil.copy(TOOLS / "gpu_run.sh", tmp_path / "run.sh")
    program(tmp_path / "find_gpu", "echo a GPU")
    program(
        tmp_path / "tests" / "one_test",
        "echo '[==========] 1 test from 1 test suite ran.'\necho '[  PASSED  ] 1 test.'",
    )
    # Prints its options, and runs the program.
    program(
        tmp_path / "bin" / "compute-sanitizer",
        'echo "options: $*"\nfor last; do :; done\nexec "$last"',
    )
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = run([tmp_path / "run.sh", "--sanitize"], PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "logs" / "one_test.txt").read_text()
    assert "--tool memcheck --report-api-errors no" in log
