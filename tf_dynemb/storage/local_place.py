"""Snapshots at a path of a local or mounted file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from tf_dynemb._presence import exists, is_directory, remove_tree
from tf_dynemb.format import crc32c
from tf_dynemb.format.manifest import Manifest
from tf_dynemb.storage.files import make_directory, sync_directory, write_file
from tf_dynemb.storage.part import Part
from tf_dynemb.storage.place import Place
from tf_dynemb.storage.snapshot import MANIFEST, Name, Snapshot

UNPUBLISHED = ".tmp-"

# The errors of flock where a file system, or the server of a network file system, has no locks.
_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)


class LocalPlace(Place):
    """The snapshots at a path; a `Place`.

        PATH/00000007-delta-9a1d…/…   a snapshot
        PATH/.tmp-9a1d…/…             one that is being written
        PATH/LOCK                     the lock of the process that writes

    What publishes a snapshot is the rename of its directory.

    Args:
        path: the path, which need not exist.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_snapshot(self) -> bool:
        """Whether this is the directory of a snapshot."""
        return exists(self.path / MANIFEST)

    def names(self, begin: str = "") -> list[Name]:
        """Returns the names of all snapshots; see `list_snapshots`."""
        try:
            return list_snapshots(self.path, begin)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def absent(self) -> FileNotFoundError:
        """Returns the error for a place without snapshots."""
        return no_snapshot(self.path)

    def open(self, names: Sequence[str]) -> list[Snapshot]:
        """Opens snapshots."""
        return [Snapshot(self.path / name) for name in names] or [Snapshot(self.path)]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which no other process writes here, if the file system has locks."""
        with locked(self.path):
            yield

    @contextlib.contextmanager
    def writing(self, kind: str, id_: str) -> Iterator[str]:
        """A context in which a snapshot is written; yields the name of its folder."""
        with self.taken(), self.folder(id_) as folder:
            yield folder.name

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A context in which this process writes here, after what killed writers have left."""
        make_directory(self.path)
        with locked(self.path) as is_locked:
            if is_locked:
                remove_unpublished(self.path)
            yield

    @contextlib.contextmanager
    def folder(self, id_: str) -> Iterator[pathlib.Path]:
        """A context with a new folder for a snapshot, which is removed unless it is published."""
        folder = unpublished(self.path, id_)
        folder.mkdir()
        try:
            yield folder
        finally:
            _discard(folder)

    def part(self, folder: str, rank: int, checksum: crc32c.Checksum, block_bytes: int) -> Part:
        """Returns the part of a process in the snapshot that is being written."""
        return Part(self.path / folder, rank, checksum, block_bytes)

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the sizes of the files of the snapshot that is being written, by name."""
        with os.scandir(self.path / folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}

    def publish(self, folder: str, name: Name, manifest: Manifest) -> Snapshot:
        """Makes the snapshot visible. From then on it survives crashes."""
        write_file(self.path / folder / MANIFEST, manifest.to_json().encode())
        sync_directory(self.path / folder)
        return self.show(folder, name)

    def show(self, folder: str, name: Name) -> Snapshot:
        """Makes the snapshot in a folder, whose files are all written and synced, visible."""
        directory = self.path / str(name)
        os.rename(self.path / folder, directory)
        sync_directory(self.path)
        return Snapshot(directory)

    def remove(self, names: Iterable[Name]) -> None:
        """Removes snapshots."""
        for name in names:
            remove_tree(self.path / str(name))


def list_snapshots(path: pathlib.Path, begin: str = "") -> list[Name]:
    """Returns all snapshots at a path, including superseded ones, in order of publication.

    Args:
        path: the path.
        begin: the name of a snapshot; if it is there, those published before it are left out, so
            that a long chain is not parsed and sorted again and again.
    """
    found = os.listdir(path)
    if begin in found:
        least = _digits(begin)
        found = [name for name in found if _digits(name) >= least]
    return sorted(name for name in map(Name.parse, found) if name)


def _digits(name: str) -> tuple[int, str]:
    """Returns what orders names as their numbers do."""
    digits = name.partition("-")[0]
    return len(digits), digits


def no_snapshot(path: pathlib.Path) -> FileNotFoundError:
    """Returns the error for a path without snapshots, which says what is there."""
    if not exists(path):
        return FileNotFoundError(f"{path} holds no snapshot: it does not exist.")
    if not is_directory(path):
        return FileNotFoundError(f"{path} holds no snapshot: it is a file.")
    if exists(path / "saved_model.pb"):
        return FileNotFoundError(
            f"{path} holds no snapshot: it is a SavedModel. `tf-dynemb inspect {path}` prints "
            "where its tables are: pass that path."
        )
    there = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
    return FileNotFoundError(f"{path} holds no snapshot; in it: {there}.")


def unpublished(path: str | os.PathLike[str], id_: str) -> pathlib.Path:
    """Returns the directory of a snapshot before it is published."""
    return pathlib.Path(path) / (UNPUBLISHED + id_)


def remove_unpublished(path: pathlib.Path) -> None:
    """Removes what killed writers have left at a path whose lock is held."""
    for name in os.listdir(path):
        if name.startswith(UNPUBLISHED):
            remove_tree(path / name)


@contextlib.contextmanager
def locked(path: pathlib.Path, held: str | None = None) -> Iterator[bool]:
    """Holds the lock of a path that exists; yields False if its file system has no locks.

    Args:
        path: the folder.
        held: the error if another process has the lock; by default, that it writes at the path.

    Raises:
        RuntimeError: another process has the lock.
        OSError: an error of the file system.
    """
    lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield _take(
            lock, held or f"another process writes at {path}: it holds the lock of {path / 'LOCK'}."
        )
    finally:
        # Closing it is not enough: processes that were forked meanwhile have it open too.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _discard(folder: pathlib.Path) -> None:
    """Removes the folder of a snapshot, unless it is published."""
    # Other processes can still write to it; after the rename, they find no directory.
    dropped = folder.with_name(folder.name + "-dropped")
    with contextlib.suppress(OSError):  # it is published, or is removed under its own name
        os.rename(folder, dropped)
    for directory in (folder, dropped):
        remove_tree(directory)


def _take(lock: int, held: str) -> bool:
    """Takes the lock without waiting; returns False if the file system has no locks.

    Raises:
        RuntimeError: another process has it; `held` is the message.
        OSError: another error, which does not mean that there are no locks.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RuntimeError(held) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True
