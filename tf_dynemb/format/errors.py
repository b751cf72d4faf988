"""Errors for files on disk that differ from what was written."""

from __future__ import annotations

import contextlib
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
