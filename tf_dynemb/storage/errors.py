"""What is raised where a file on disk is not what was written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


class DataLossError(ValueError):
    """A file is missing, damaged or of another snapshot; the message names it.

    Where it is known, the message also says at which byte offset of the file.
    """


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Names a file in the OSErrors that do not, such as those of calls on descriptors."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
