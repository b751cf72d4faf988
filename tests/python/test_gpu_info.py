"""Which of the two operator libraries a process takes, by the driver of the machine."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import _gpu, _ops

STAND_IN = pathlib.Path(__file__).parents[1] / "cuda" / "stand_in_driver.cc"

# A table is created and used with whichever library is loaded.
CODE = """
import tf_dynemb as de
info = de.gpu_info()
assert de.DynamicVariable(dimension=2, initializer="1").lookup([3]).numpy().tolist() == [[1, 1]]
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "_dynemb_ops" in line}
assert loaded == {info.library}, (loaded, info)
print(f"{info.driver}|{info.library}|{info.device_code}|{info.reason}")
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The folder of a stand-in for NVIDIA's driver."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("driver")
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
    subprocess.run(["g++", STAND_IN, *options], check=True)
    return folder


def info(driver=None, version=None):
    """What a process with this driver says."""
    more = {"LD_LIBRARY_PATH": str(driver), "STAND_IN_CUDA": str(version)} if driver else {}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1].split("|")


def paths():
    """The libraries for this TensorFlow: for drivers of CUDA 13, and of CUDA 12."""
    library = _ops.FOLDER / f"_dynemb_ops_tf{'.'.join(tf.__version__.split('.')[:2])}.so"
    return library, library.with_name(f"{library.stem}_cuda12.so")


@pytest.mark.parametrize(
    ("version", "text"), [(12000, "12.0"), (12040, "12.4"), (12090, "12.9"), (13000, "13.0")]
)
def test_the_library_fits_the_driver(driver, version, text):
    main, cuda12 = paths()
    found, library, device_code, reason = info(driver, version)
    assert found == text
    assert reason.startswith(f"The NVIDIA driver supports CUDA {text}")
    wanted = cuda12 if cuda12.exists() and version < 13000 else main
    assert library == str(wanted)
    assert device_code == str(b".nv_fatbin" in wanted.read_bytes())


def test_an_older_driver_is_named(driver):
    found, library, _, reason = info(driver, 11080)
    assert (found, library) == ("11.8", str(paths()[0]))
    assert "need a driver for CUDA 12 or newer" in reason


def test_without_a_driver():
    if _gpu.driver_version() is not None:
        pytest.skip("there is a driver")
    found, library, _, reason = info()
    assert (found, library) == ("None", str(paths()[0]))
    assert "libcuda.so.1 was not found" in reason


def test_a_library_without_code_for_gpus_is_named():
    found = de.gpu_info()
    assert found.device_code == (b".nv_fatbin" in pathlib.Path(found.library).read_bytes())
    assert ("has no code for GPUs" in found.reason) is not found.device_code


@pytest.mark.parametrize(
    ("version", "both", "chosen"),
    [
        (None, True, "ops.so"),
        (11080, True, "ops.so"),
        (12000, True, "ops_cuda12.so"),
        (12090, True, "ops_cuda12.so"),
        (12090, False, "ops.so"),  # compiled on this machine, by its nvcc
        (13000, True, "ops.so"),
        (13000, False, "ops.so"),
        (14010, True, "ops.so"),
    ],
)
def test_choice(tmp_path, version, both, chosen):
    if both:
        (tmp_path / "ops_cuda12.so").touch()
    path, reason = _gpu.choose(tmp_path / "ops.so", version)
    assert path == tmp_path / chosen
    assert reason.endswith(".")
    assert version is None or _gpu.version_text(version) in reason


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_damaged_driver_is_none(tmp_path, content):
    (tmp_path / "libcuda.so.1").write_bytes(content)
    found, library, _, _ = info(tmp_path, 0)
    assert (found, library) == ("None", str(paths()[0]))
