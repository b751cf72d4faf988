"""Files and directories that survive a crash once they are written."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tf_dynemb._presence import is_directory
from tf_dynemb.format.errors import naming, write_all
from tf_dynemb.format.manifest import Manifest
from tf_dynemb.storage.snapshot import MANIFEST

T = TypeVar("T")

# Files that are transferred at a time.
_AT_A_TIME = 8


def make_directory(path: pathlib.Path) -> None:
    """Creates a directory and its parents, so that they survive a crash."""
    if not is_directory(path):
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Writes and syncs a new file."""
    with naming(path), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def copy_file(parts: Iterable[npt.NDArray[np.uint8]], path: pathlib.Path) -> None:
    """Writes and syncs a new file of these parts."""
    with naming(path), path.open("xb", 0) as file:
        for part in parts:
            write_all(file.fileno(), part.data)
        os.fsync(file.fileno())


def in_parallel(transfer: Callable[[T], object], files: Sequence[T]) -> None:
    """Transfers files, several at a time; raises the first error after all have ended."""
    with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
        pending = [pool.submit(transfer, file) for file in files]
        try:
            for each in concurrent.futures.as_completed(pending):
                each.result()
        except BaseException:
            for each in pending:
                each.cancel()
            raise


def replace_manifest(directory: pathlib.Path, manifest: Manifest, suffix: str) -> None:
    """Gives a published snapshot another manifest, at once.

    Args:
        directory: the directory of the snapshot.
        manifest: the manifest, with the same id.
        suffix: of the file MANIFEST.json.SUFFIX, which a process that is killed leaves.

    Raises:
        OSError: an error of the file system.
    """
    path = directory / f"{MANIFEST}.{suffix}"
    try:
        write_file(path, manifest.to_json().encode())
        sync_directory(directory)  # the names of other new files first
        os.replace(path, directory / MANIFEST)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sync_directory(directory)


def sync_directory(path: pathlib.Path) -> None:
    """Syncs a directory's entries, if the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
