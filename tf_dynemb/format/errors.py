"""Errors of files: those that differ from what was written, and of system calls."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator


class DataLossError(ValueError):
    """A file is missing, damaged or belongs to another snapshot; the message names it.

    If it is known, the message also contains the byte offset in the file.
    """


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds a file's name to OSErrors without one, such as errors of calls on descriptors."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes bytes to a file, in one or more system calls.

    Raises:
        OSError: a call failed, or wrote nothing, without a reason (EIO).
    """
    left = memoryview(data)
    while left:
        written = os.write(descriptor, left)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left = left[written:]
