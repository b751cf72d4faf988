"""The file system that all ranks share."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time

from tf_dynemb._presence import is_directory

# A network file system may cache for a while that a file did not exist.
_PATIENCE = 5.0


def wait_for(directory: pathlib.Path, rank: int) -> None:
    """Waits until this rank sees a directory that rank 0 sees.

    Raises:
        FileNotFoundError: this rank does not see it after a few seconds.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        problem = None
        try:
            if is_directory(directory):
                return
        except OSError as error:  # such as a stale handle, until the client asks again
            problem = error
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"rank {rank} does not see {directory}, which rank 0 sees: all ranks must share "
                "the file system."
            ) from problem
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            os.listdir(directory.parent)  # makes the client ask the server again
