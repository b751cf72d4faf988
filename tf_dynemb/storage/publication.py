"""Writing of a snapshot, which becomes visible as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_dynemb._presence import exists, is_directory, local_path, remove_tree
from tf_dynemb._version import __version__
from tf_dynemb.format import crc32c
from tf_dynemb.format.errors import DataLossError, naming
from tf_dynemb.format.manifest import KINDS, MOST_AFTER, DenseFile, Manifest
from tf_dynemb.format.table_entry import TableEntry
from tf_dynemb.storage.chain import (
    MANIFEST,
    Name,
    Snapshot,
    list_snapshots,
    no_snapshot,
    since_last_base,
)
from tf_dynemb.storage.part import BLOCK_BYTES, Part

UNPUBLISHED = ".tmp-"

# The errors of flock where a file system, or the server of a network file system, has no locks.
_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)


class Publication(Part):
    """A snapshot being written; leaving the `with` before `publish` discards it.

        with Publication(path, "base") as publication:
            keys = publication.column(0, "keys", np.int64)
            keys.append(...)
            publication.publish(...)

    Other processes can write parts of it meanwhile: `Part(unpublished(path, id), rank)`. The
    publication itself is the part of this process.

    Args:
        path: the path of the chain, created if it does not exist.
        kind: "base" or "delta".
        checksum: a faster function that is equivalent to `crc32c.blocks`.
        block_bytes: the number of bytes that one checksum covers, at least 128.

    Attributes:
        id: the id of the snapshot, 32 hexadecimal digits.
        path: the path of the chain.

    Raises:
        ValueError: `kind` has another value, or `block_bytes` is below 128.
        RuntimeError: another process writes at this path; raised on entering.
        OSError: an error of the file system; raised on entering.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        checksum: crc32c.Checksum = crc32c.blocks,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
        self.id = secrets.token_hex(16)
        self.path = local_path(path, "path")
        super().__init__(unpublished(self.path, self.id), 0, checksum, block_bytes)
        self._kind = kind
        self._locked = contextlib.ExitStack()

    def __enter__(self) -> Publication:
        make_directory(self.path)
        with contextlib.ExitStack() as stack:
            if stack.enter_context(locked(self.path)):
                remove_unpublished(self.path)
            self._directory.mkdir()
            self._locked = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
        # Other processes can still write to it; after the rename, they find no directory there.
        dropped = self._directory.with_name(self._directory.name + "-dropped")
        with contextlib.suppress(OSError):  # it is published, or is removed under its own name
            os.rename(self._directory, dropped)
        for directory in (self._directory, dropped):
            remove_tree(directory)
        self._locked.close()

    @functools.cached_property
    def last(self) -> Manifest | None:
        """The manifest of the last snapshot at the path, which a delta must continue.

        Raises:
            DataLossError: the manifest is damaged.
        """
        names = list_snapshots(self.path)
        return Snapshot(self.path / str(names[-1])).manifest if names else None

    @property
    def superseded(self) -> tuple[Manifest, Manifest] | None:
        """The first and the last manifest of the chain that a base replaces; None: there is none.

        Raises:
            DataLossError: one of them is damaged.
        """
        names = since_last_base(list_snapshots(self.path))
        if not names or self.last is None:
            return None
        first = Snapshot(self.path / str(names[0])).manifest if len(names) > 1 else self.last
        return first, self.last

    def publish(
        self,
        tables: Sequence[TableEntry],
        *,
        since: int = 0,
        watermark: int,
        watermark_utc_ns: int,
        parent: str | None = None,
        optimizer: Mapping[str, Any] | None = None,
        world_size: int = 1,
        continues: Sequence[str] = (),
        after: Sequence[str] = (),
        keep: int = 0,
        dense: Sequence[DenseFile] | None = None,
        extra: Mapping[str, Any] | None = None,
        copy: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Makes the snapshot visible. From then on it survives crashes.

        Args:
            tables: as for `with_files`; shards that other processes wrote have their files.
            since: for a delta, the tick after which all updated rows are in it.
            watermark: the tick up to which every change is in the snapshot.
            watermark_utc_ns: the time of the watermark, in nanoseconds since 1970 UTC.
            parent: for a delta, the id of the snapshot that it continues. If the path has
                snapshots, it must be the last one.
            optimizer: the optimizer's entry in the manifest.
            world_size: the number of ranks that wrote.
            continues: for a base, the ids of snapshots that have the same state.
            after: for a base, the ids of snapshots whose tables became these, the latest last. The
                last `MOST_AFTER` are written.
            keep: for a base, the number of bases before it that stay at the path, each with its
                deltas. All others are removed.
            dense: the files of dense variables, also of other processes. None: those that this
                process has written.
            extra: an object of the user.
            copy: the member of a served copy.

        Returns:
            The published snapshot.

        Raises:
            ValueError: the entries and the files that were written do not form a snapshot, or the
                parent is not the path's last snapshot. Nothing is published.
            OSError: an error of the file system. The snapshot is published only if it was the last
                sync that failed.
        """
        before = list_snapshots(self.path)
        if self._kind == "delta" and before and not self._is_continued(before[-1], parent):
            raise ValueError(
                f"parent is {parent!r}, but the last snapshot at {self.path} is {before[-1]}: "
                "with this delta the path's chain would have a gap."
            )
        tables = self.with_files(tables)
        manifest = Manifest(
            kind=self._kind,
            id=self.id,
            parent=parent,
            since=since,
            watermark=watermark,
            watermark_utc_ns=watermark_utc_ns,
            world_size=world_size,
            writer=f"tf_dynemb {__version__}",
            block_bytes=self._block_bytes,
            optimizer=optimizer,
            tables=tables,
            continues=tuple(continues),
            after=tuple(after)[-MOST_AFTER:],
            dense=tuple(self.dense if dense is None else dense),
            extra=extra,
            copy=copy,
        )
        self._check_files(manifest)
        text = manifest.to_json()
        try:
            Manifest.from_json(text, str(self.path))
        except DataLossError as error:
            raise ValueError(f"these entries do not form a snapshot: {error}") from error
        write_file(self._directory / MANIFEST, text.encode())
        sync_directory(self._directory)
        number = before[-1].number + 1 if before else 1
        directory = self.path / str(Name(number, self._kind, self.id))
        os.rename(self._directory, directory)
        sync_directory(self.path)
        if self._kind == "base":
            prune_locked(self.path, keep)
        return Snapshot(directory)

    def _is_continued(self, last: Name, parent: str | None) -> bool:
        """Whether a delta with this parent continues the path's last snapshot."""
        if last.id == parent or last.kind == "delta":
            return last.id == parent
        return parent in Snapshot(self.path / str(last)).manifest.ids

    def _check_files(self, manifest: Manifest) -> None:
        """Raises ValueError unless this process sees all files that were written."""
        for file, rank in manifest.files_of_ranks:
            path = self._directory / file.file
            size = path.stat().st_size if exists(path) else 0
            if size != file.bytes:
                raise ValueError(
                    f"{path} has {size} bytes, but rank {rank} has written {file.bytes}: all ranks "
                    f"must share the file system of {self.path}."
                )


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


def prune(path: str | os.PathLike[str], keep: int = 0) -> list[Name]:
    """Removes the superseded snapshots at a path, except the snapshots of the last `keep` bases.

    Returns:
        The names of the removed snapshots.

    Raises:
        FileNotFoundError: there is no snapshot at the path.
        RuntimeError: another process writes at the path.
        OSError: an error of the file system.
    """
    path = local_path(path, "path")
    if not is_directory(path) or not list_snapshots(path):
        raise no_snapshot(path)
    with locked(path):
        return prune_locked(path, keep)


def prune_locked(path: pathlib.Path, keep: int) -> list[Name]:
    """Same as `prune`, for the holder of the lock."""
    gone = superseded(list_snapshots(path), keep)
    for name in gone:
        remove_tree(path / str(name))
    return gone


def superseded(names: list[Name], keep: int) -> list[Name]:
    """Returns the snapshots before the last bases: before the last one, and `keep` before it."""
    bases = [place for place, name in enumerate(names) if name.kind == "base"]
    return names[: bases[-1 - min(keep, len(bases) - 1)]] if bases else []


def unpublished(path: str | os.PathLike[str], id_: str) -> pathlib.Path:
    """Returns the directory of a snapshot before it is published."""
    return pathlib.Path(path) / (UNPUBLISHED + id_)


def remove_unpublished(path: pathlib.Path) -> None:
    """Removes what killed writers have left at a path whose lock is held."""
    for name in os.listdir(path):
        if name.startswith(UNPUBLISHED):
            remove_tree(path / name)


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
