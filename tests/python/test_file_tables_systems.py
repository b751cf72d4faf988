"""Tables in files on several file systems, and without io_uring: the same rows."""

import gc
import os
import pathlib
import subprocess

import pytest
import warm_python
from file_pairs import train_flush_and_compare

HERE = pathlib.Path(__file__).parent


def mounted(folder, kind, options):
    """Mounts a file system, or skips the test."""
    folder.mkdir()
    mount = ["mount", "-t", kind, "-o", options, kind, str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no {kind} can be mounted: {done.stderr.strip()}")


@pytest.fixture(params=["overlay", "ramfs", "disk"])
def place(request, tmp_path, disk_folder):
    """A folder on each file system: the one of containers, one without O_DIRECT, and a disk."""
    if request.param == "disk":
        yield disk_folder
        return
    layers = {name: tmp_path / name for name in ("lowerdir", "upperdir", "workdir")}
    for layer in layers.values():
        layer.mkdir()
    options = ",".join(f"{name}={layer}" for name, layer in layers.items())
    folder = tmp_path / "mounted"
    mounted(folder, request.param, options if request.param == "overlay" else "mode=755")
    if request.param == "ramfs":
        (folder / "file").touch()
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(folder / "file", os.O_RDONLY | os.O_DIRECT)
    yield folder
    gc.collect()
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_same_rows_on_each_file_system(place):
    train_flush_and_compare(place / "rows")


def test_the_same_rows_without_io_uring(disk_folder):
    run = warm_python.run([str(HERE / "without_io_uring.py"), str(disk_folder)], HERE)
    assert run.returncode == 0, run.stderr[-3000:]
