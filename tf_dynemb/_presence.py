"""What is at a path, and the removal of it; for all modules.

Only ENOENT and ENOTDIR mean that something is absent. The functions of `os.path` and, in some
versions, `pathlib` and `glob` also say so if the file system could not answer (EIO, or ESTALE of a
network file system), and would let their caller overwrite or leave out what is there.
"""

from __future__ import annotations

import os
import shutil
import stat
import warnings


def exists(path: str | os.PathLike[str], follow: bool = True) -> bool:
    """Returns whether there is something at a path.

    Args:
        path: the path.
        follow: whether a symbolic link to nothing is absent.

    Raises:
        OSError: the file system did not answer.
    """
    return _mode(path, follow) is not None


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Returns whether there is a directory at a path; raises as `exists`."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether there is a regular file at a path; raises as `exists`."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def remove_tree(path: str | os.PathLike[str]) -> bool:
    """Removes a directory with all that is in it; returns whether it is gone.

    Warns if it is not, because it takes space until somebody removes it.
    """
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        warnings.warn(f"{path} cannot be removed, and takes space: {error}", stacklevel=3)
        return False
    return True


def _mode(path: str | os.PathLike[str], follow: bool = True) -> int | None:
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
