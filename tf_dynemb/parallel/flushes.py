"""The folder of a table with `persistent=True`: its lock, and its flushes.

    <file_path>/[<rank>-<ranks>/]<name>.persistent/
        LOCK          locked (flock) by the process that has the table
        flush-<n>/    the n-th flush; complete if it has a file `manifest`

A table that is created while this process has another one of that name, as when a cell of a
notebook runs again, takes the folder over: it has the rows of the last flush, and the former table
can be used, but not flushed. Another process is refused.

There is one complete flush, except between the end of a flush and the removal of the one before it.
With several ranks, each removes the one before only when all have the new one. Whenever the
processes end, there is therefore a flush that all ranks have: the latest common one is opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import urllib.parse
import weakref
from typing import IO

_FLUSH = re.compile(r"flush-([0-9]{1,18})")
_RANK = re.compile(r"[0-9]+-([0-9]+)")

# Those of this process, by path.
_open: weakref.WeakValueDictionary[str, Flushes] = weakref.WeakValueDictionary()


class Flushes:
    """The flushes of one table on one rank.

    Args:
        file_path: the folder of the rows of this rank.
        name: the name of the table.

    Raises:
        OSError: the folder cannot be created, or another process has it.
    """

    def __init__(self, file_path: str, name: str) -> None:
        self.path = os.path.join(file_path, _folder_of(name))
        os.makedirs(self.path, exist_ok=True)
        _sync(os.path.dirname(self.path))
        former = _open.get(self.path)
        if former is not None:
            former.close()
        self._lock: IO[str] | None = self._take_lock(name)
        self._last = 0
        _open[self.path] = self

    @property
    def is_open(self) -> bool:
        """Whether no other table has taken the folder over."""
        return self._lock is not None

    def close(self) -> None:
        """Gives the folder up."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self, name: str) -> IO[str]:
        path = os.path.join(self.path, "LOCK")
        # It is closed with this object, which ends the lock.
        file = open(path, "a")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise BlockingIOError(
                error.errno,
                f"Another process has the persistent table {name!r}",
                path,
            ) from None
        return file

    def complete(self) -> list[int]:
        """The numbers of the complete flushes, in ascending order."""
        return [
            number
            for number in sorted(self._numbers())
            if os.path.exists(os.path.join(self.folder(number), "manifest"))
        ]

    def folder(self, number: int) -> str:
        """The folder of a flush."""
        return os.path.join(self.path, f"flush-{number}")

    def begin(self) -> tuple[int, str]:
        """Makes the folder of the next flush, empty; returns its number and its path."""
        number = self._last + 1
        folder = self.folder(number)
        if os.path.exists(folder):
            shutil.rmtree(folder)  # of a flush that failed
        os.mkdir(folder)
        _sync(self.path)
        return number, folder

    def discard(self, number: int) -> None:
        """Removes what a flush that failed has written."""
        shutil.rmtree(self.folder(number), ignore_errors=True)

    def keep_only(self, number: int) -> None:
        """Makes a flush the last one, and removes all others. 0: there is none."""
        self._last = number
        for other in self._numbers():
            if other == number:
                continue
            # Without a manifest it is no flush, should the process end halfway.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.folder(other), "manifest"))
            shutil.rmtree(self.folder(other), ignore_errors=True)
        _sync(self.path)

    def _numbers(self) -> list[int]:
        matches = map(_FLUSH.fullmatch, os.listdir(self.path))
        return [int(match[1]) for match in matches if match]


def folders_of_other_jobs(file_path: str, name: str, ranks: int) -> list[str]:
    """Returns the folders in which a job with another number of ranks kept a table.

    Args:
        file_path: the folder that all ranks share.
        name: the name of the table.
        ranks: the number of ranks.
    """
    found = []
    folder = _folder_of(name)
    with contextlib.suppress(FileNotFoundError):
        for part in os.listdir(file_path):
            match = _RANK.fullmatch(part)
            if match and int(match[1]) != ranks:
                found.append(os.path.join(file_path, part, folder))
    if ranks > 1:
        found.append(os.path.join(file_path, folder))
    return [path for path in sorted(found) if glob.glob(f"{glob.escape(path)}/flush-*/manifest")]


def _folder_of(name: str) -> str:
    return urllib.parse.quote(name, safe="") + ".persistent"


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
