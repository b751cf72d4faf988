"""Which path a user means, what is at a path, its removal and exchange; for all modules.

Only ENOENT and ENOTDIR mean that something is absent. The functions of `os.path` and, in some
versions, `pathlib` and `glob` also say so if the file system could not answer (EIO, or ESTALE of a
network file system), and would let their caller overwrite or leave out what is there.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import shutil
import stat
import urllib.parse
import warnings

# The beginning of a URL: a scheme of two or more characters, so that no drive letter is one, and a
# slash. `pathlib` makes `s3:/bucket` of `s3://bucket`. A name with a colon, such as `a:b`, is none.
# `fsspec` has URLs such as `simplecache::s3://bucket`.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+:/")
_FILE_URL = re.compile(r"file:(?://(?:localhost)?)?(/(?!/).*)", re.IGNORECASE | re.DOTALL)

# From linux/fcntl.h and linux/fs.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def local_path(path: str | os.PathLike[str], argument: str) -> pathlib.Path:
    """Returns a path of this machine's file system.

    Args:
        path: a path, or a `file:` URL of one.
        argument: the name of the argument that has the path, for errors.

    Raises:
        ValueError: the path is a URL of another kind. It would otherwise name a folder `s3:` below
            the current one.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not _URL.match(text):
        found = pathlib.Path(path)
        # pathlib makes `s3:/x` of `./s3:/x`, which must not be a URL for the code that gets the
        # result.
        return found.absolute() if _URL.match(str(found)) else found
    file = _FILE_URL.fullmatch(text)
    if file and isinstance(path, str):  # pathlib has lost the host of `file://host/path`
        return pathlib.Path(urllib.parse.unquote(file[1]))
    if not isinstance(path, str):
        raise ValueError(
            f"{argument}={text!r} is a URL: pass it as a str, because pathlib changes URLs."
        )
    mounted = f"/dbfs{text[5:].replace('//', '/')}" if text.startswith("dbfs:/") else ""
    raise ValueError(
        f"{argument}={text!r} is a URL, and only local files can be read and written here. Pass "
        f"the path of a local or mounted file system{f' ({mounted})' if mounted else ''}; "
        "`publish` copies chains to and from stores. To name a folder, write './NAME:/...'."
    )


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL of a store, not of a local or mounted file system."""
    if not isinstance(path, str) or not _URL.match(path):
        return False
    return path.partition(":")[0].lower() not in ("file", "dbfs")


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
        warnings.warn(
            f"{path} cannot be removed, and still takes disk space: {error}", stacklevel=3
        )
        return False
    return True


def exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Exchanges two paths in one step of the file system; returns False if it did not."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # since glibc 2.28
    if rename is None:
        return False
    status: int = rename(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )
    return status == 0


def _mode(path: str | os.PathLike[str], follow: bool = True) -> int | None:
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
