"""The folder of a table with `persistent=True`: its lock, and its flushes.

    <file_path>/[<rank>-<ranks>/]<name>.persistent/
        LOCK          locked (flock) by the process that has the table
        flush-<n>/    the n-th flush; complete if it has a file `manifest`; its file HISTORY has the
                      id of the table's history (`tables/lineage.py`)

A table that is created while this process has another one of that name, as when a cell of a
notebook runs again, takes the folder over when it has the rows of the last flush: the former table
can then be used, but not flushed. Meanwhile, the former one does not flush (`_guard`): it would
remove the flush that the later one begins with. Another process is refused, a child of fork, too.

There is one complete flush, except between the end of a flush and the removal of the one before it.
With several ranks, each removes the one before only when all have the new one, and removes the new
one only when it is known that not all have it. Whenever the processes end after their first flush,
there is therefore a flush that all ranks have: the latest common one is opened.

Only ENOENT and ENOTDIR mean that something does not exist (`_presence`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import urllib.parse
import weakref
from collections.abc import Sequence

import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb._presence import exists, is_directory, remove_tree
from tf_dynemb.parallel.agreement import Ranks

_FLUSH = re.compile(r"flush-([0-9]{1,18})")
_HISTORY = "HISTORY"
_RANK = re.compile(r"[0-9]+-([0-9]+)")


class Flushes:
    """The flushes of one table on one rank.

    Until `take_over`, a former table of this process still has the folder.

    Args:
        file_path: the folder of the rows of this rank.
        name: the name of the table.
        handle: the table. (Not the variable: that would be a reference cycle.)

    Raises:
        OSError: the folder cannot be created, or another process has it.
    """

    def __init__(self, file_path: str, name: str, handle: tf.Tensor) -> None:
        self.path = _path_of(file_path, name)
        make_durable_folder(self.path)
        self._name = name
        self._handle = handle
        self._last = ""  # the folder of the last flush
        former = _former(self.path)
        self._lock: _Lock | None = _Lock(self.path, name) if former is None else former._lock

    @property
    def history(self) -> str | None:
        """The history of the table whose rows the last flush has; None: there is none."""
        if not self._last:
            return None
        try:
            with open(os.path.join(self._last, _HISTORY), encoding="ascii") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    @classmethod
    def open(
        cls, root: str, file_path: str, name: str, handle: tf.Tensor
    ) -> tuple[Flushes, Sequence[tf.Tensor] | None]:
        """Gives a new table the rows of the last flush that all ranks have, if there is one.

        Args:
            root: the folder that all ranks share.
            file_path: the folder of the rows of this rank.
            name: the name of the table.
            handle: the table.

        Returns:
            The flushes, and what DynembRestore returned; None: there is no flush.

        Raises:
            ValueError: another number of ranks wrote the flushes, or ranks have different flushes.
        """
        with _guard(_path_of(file_path, name)):
            return cls._open(root, file_path, name, handle)

    @classmethod
    def _open(
        cls, root: str, file_path: str, name: str, handle: tf.Tensor
    ) -> tuple[Flushes, Sequence[tf.Tensor] | None]:
        ranks = Ranks("DynamicVariable(persistent=True)")
        with ranks.stage() as stage:
            others = folders_of_other_jobs(root, name, ranks.size)
            if others:
                raise ValueError(
                    f"persistent=True: table {name!r} was flushed by another number of ranks, to "
                    f"{others[0]}. Open it with that number and dump it; a dump can be loaded with "
                    "any number of ranks."
                )
            flushes = cls(file_path, name, handle)
            stage.say(flushes.complete())
        common = set.intersection(*map(set, stage.said))
        if not common and any(stage.said):
            raise ValueError(
                f"persistent=True: the ranks have different flushes of table {name!r}: "
                f"{stage.said}. Remove them, and load a dump."
            )
        last = max(common, default=0)
        restored = None
        with ranks.stage():
            if last:
                flushes._last = flushes.folder(last)
                restored = _ops.library().dynemb_restore(handle, flushes._last)
        flushes.take_over()
        flushes.keep_only(last)
        return flushes, restored

    def flush(self, history: str) -> None:
        """Makes a flush, together with all ranks, and removes the one before.

        Args:
            history: the history of the table.

        Raises:
            ValueError: another table, or another process, has the folder.
        """
        with _guard(self.path):
            self._flush(history)

    def _flush(self, history: str) -> None:
        if not self.is_open:
            raise ValueError(
                f"flush: the files of table {self._name!r} belong to a later table of this "
                "process, or to the process that forked this one."
            )
        ranks = Ranks("flush")
        with ranks.stage() as stage:
            stage.say([self.last_number(), self.complete()])
        number = 1 + max(last for last, _ in stage.said)
        common = max(set.intersection(*(set(numbers) for _, numbers in stage.said)), default=0)
        begun = False
        try:
            with ranks.stage():
                if common and self.complete() != [common]:
                    # An interrupted call has left a flush that a restart may or may not find.
                    self._keep(common)
                self.begin(number)
                begun = True
                _write(os.path.join(self.folder(number), _HISTORY), history)
                _ops.library().dynemb_flush(self._handle, self.folder(number))
        except BaseException:
            # Unless all ranks know that it has failed, others can keep it, and this one must not
            # remove it: a restart then decides, and until then rows are forgotten in both.
            if ranks.failures:
                if begun:
                    self.revoke(number)
                _keep_flush(self._handle, self._last)
                if begun:
                    self.discard(number)
            raise
        self._keep(number)

    def _keep(self, number: int) -> None:
        """From now on, a restart continues from this flush, which all ranks have."""
        folder = self.folder(number)
        _keep_flush(self._handle, folder)
        self._last = folder
        self.keep_only(number)

    @property
    def is_open(self) -> bool:
        """Whether this process has the folder, and no other table of it has taken it over."""
        return self._lock is not None and self._lock.taken_by_this_process

    def take_over(self) -> None:
        """Makes this table the one that has the folder, instead of a former one."""
        former = _former(self.path)
        _open[self.path] = self
        if former is not None:
            former._lock = None
            _keep_flush(former._handle, "")

    def complete(self) -> list[int]:
        """The numbers of the complete flushes, in ascending order."""
        return [
            number
            for number in sorted(self._numbers())
            if exists(os.path.join(self.folder(number), "manifest"))
        ]

    def last_number(self) -> int:
        """The highest number of a flush, complete or not; 0 if there is none."""
        return max(self._numbers(), default=0)

    def folder(self, number: int) -> str:
        """The folder of a flush."""
        return os.path.join(self.path, f"flush-{number}")

    def begin(self, number: int) -> None:
        """Makes the folder of a flush that does not exist yet."""
        os.mkdir(self.folder(number))
        _sync(self.path)

    def revoke(self, number: int) -> None:
        """Makes a folder no flush anymore."""
        folder = self.folder(number)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(os.path.join(folder, "manifest"))
            _sync(folder)

    def discard(self, number: int) -> None:
        """Removes a flush that some rank does not have."""
        # The manifest goes first: if the process ends or power is lost halfway, the rest is no
        # flush.
        self.revoke(number)
        remove_tree(self.folder(number))

    def keep_only(self, number: int) -> None:
        """Removes all flushes except one. 0: all."""
        for other in self._numbers():
            if other != number:
                self.discard(other)
        _sync(self.path)

    def _numbers(self) -> list[int]:
        matches = map(_FLUSH.fullmatch, os.listdir(self.path))
        numbers = [int(match[1]) for match in matches if match]
        return [number for number in numbers if is_directory(self.folder(number))]


class _Lock:
    """The lock of a folder; it ends with this object."""

    def __init__(self, folder: str, name: str) -> None:
        path = os.path.join(folder, "LOCK")
        self._pid = os.getpid()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                raise BlockingIOError  # another process has replaced the folder
        except BlockingIOError as error:
            raise BlockingIOError(
                error.errno or 0, f"Another process has the persistent table {name!r}", path
            ) from None

    @property
    def taken_by_this_process(self) -> bool:
        """Whether this process took the lock, and not the one that it is a child of."""
        return os.getpid() == self._pid


# The threads of this process that open or flush the table of a folder, by its path. A child of fork
# does not have the thread that may hold one.
_guards: dict[str, threading.RLock] = {}
os.register_at_fork(after_in_child=_guards.clear)


def _guard(path: str) -> threading.RLock:
    return _guards.setdefault(path, threading.RLock())


# The Flushes of this process that own their folders, by path.
_open: weakref.WeakValueDictionary[str, Flushes] = weakref.WeakValueDictionary()


def _keep_flush(handle: tf.Tensor, folder: str) -> None:
    """Says that a restart continues from the flush in this folder; empty: from none."""
    with tf.init_scope():
        _ops.library().dynemb_keep_flush(handle, folder)


def _former(path: str) -> Flushes | None:
    former = _open.get(path)
    return former if former is not None and former.is_open else None


def folders_of_other_jobs(file_path: str, name: str, ranks: int) -> list[str]:
    """Returns the folders in which a job with another number of ranks kept a table.

    Args:
        file_path: the folder that all ranks share.
        name: the name of the table.
        ranks: the number of ranks.
    """
    found = []
    folder = _folder_of(name)
    for part in _list(file_path):
        match = _RANK.fullmatch(part)
        if match and int(match[1]) != ranks:
            found.append(os.path.join(file_path, part, folder))
    if ranks > 1:
        found.append(os.path.join(file_path, folder))
    return [
        path
        for path in sorted(found)
        if any(
            _FLUSH.fullmatch(flush) and exists(os.path.join(path, flush, "manifest"))
            for flush in _list(path)
        )
    ]


def make_durable_folder(path: str) -> None:
    """Makes a folder, and the parents that are missing, all of them durable.

    Args:
        path: the folder; it may exist.
    """
    missing = []
    while not exists(path):
        missing.append(path)
        path = os.path.dirname(path) or "."
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        _sync(os.path.dirname(folder) or ".")
    if not missing:
        # An earlier process may have ended before it did this.
        _sync(os.path.dirname(path) or ".")


def _path_of(file_path: str, name: str) -> str:
    # One path for one folder, by whatever links it is named.
    return os.path.join(os.path.realpath(file_path), _folder_of(name))


def _folder_of(name: str) -> str:
    return urllib.parse.quote(name, safe="") + ".persistent"


def _list(path: str) -> list[str]:
    """The names in a folder; none if it does not exist."""
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write(path: str, text: str) -> None:
    """Writes a new file, durable once its folder is synced."""
    with open(path, "x", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
