"""Writing a snapshot, so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tf_dynemb._version import __version__
from tf_dynemb.storage import block_file, crc32c, key_index, npy
from tf_dynemb.storage.chain import MANIFEST, Name, Snapshot, list_snapshots, since_last_base
from tf_dynemb.storage.column_writer import ColumnWriter
from tf_dynemb.storage.errors import DataLossError, naming
from tf_dynemb.storage.manifest import (
    INDEX_ROWS,
    KINDS,
    ColumnFile,
    Manifest,
    TableEntry,
    file_name,
)

# (keys' file, its data's offset, rows, bytes of a key, index's file, its data's offset): fills in
# the index, whose slots are zeros in a file that has its size already.
BuildIndex: TypeAlias = Callable[[str, int, int, int, str, int], None]

_UNPUBLISHED = ".tmp-"


class Publication:
    """A snapshot being written; leaving the `with` before `publish` drops it.

        with Publication(path, "base") as publication:
            keys = publication.column(0, "keys", np.int64)
            keys.append(...)
            publication.publish(...)

    Belongs to one thread, except that each ColumnWriter may be used by another.

    Args:
        path: of the chain; made if it is not there.
        kind: "base" or "delta".
        checksum: a faster function that does as `crc32c.blocks`.
        block_bytes: what one checksum is of, at least 128.

    Attributes:
        id: of the snapshot, 32 hexadecimal digits.

    Raises:
        RuntimeError: another process writes at this path, on entering.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        checksum: crc32c.Checksum = crc32c.blocks,
        block_bytes: int = 1 << 20,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
        if block_bytes < npy.HEADER_BYTES:
            raise ValueError(f"block_bytes must be at least 128, got {block_bytes}.")
        self.id = secrets.token_hex(16)
        self._path = pathlib.Path(path)
        self._kind = kind
        self._checksum = checksum
        self._block_bytes = block_bytes
        self._directory = self._path / (_UNPUBLISHED + self.id)
        self._columns: dict[tuple[int, int, str], ColumnWriter] = {}
        self._indexes: dict[tuple[int, int, str], ColumnFile] = {}
        self._lock = -1

    def __enter__(self) -> Publication:
        _make_directory(self._path)
        self._lock = os.open(self._path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _take(self._lock, self._path):
                for stale in self._path.glob(_UNPUBLISHED + "*"):
                    shutil.rmtree(stale, ignore_errors=True)
            self._directory.mkdir()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for column in self._columns.values():
            column.abandon()
        shutil.rmtree(self._directory, ignore_errors=True)
        # Not only closed: processes that were forked meanwhile have it open too.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)

    @functools.cached_property
    def last(self) -> Manifest | None:
        """The manifest of the last snapshot at the path, which a delta is to continue.

        Raises:
            DataLossError: it is damaged.
        """
        names = list_snapshots(self._path)
        return Snapshot(self._path / str(names[-1])).manifest if names else None

    def column(
        self,
        table: int,
        column: str,
        dtype: npt.DTypeLike,
        row_shape: tuple[int, ...] = (),
        rank: int = 0,
    ) -> ColumnWriter:
        """Begins a column.

        Args:
            table: its number among the tables that `publish` will be given.
            column: as in docs/file_format.md; for "index" see `write_index`.
            dtype: of the column; uint16 for bfloat16.
            row_shape: of a row: () or (width,).
            rank: of the shard.

        Raises:
            OSError: from the file system, here and from the writer's methods.
        """
        path = self._directory / file_name(table, rank, column)
        little = np.dtype(dtype).newbyteorder("<")
        writer = ColumnWriter(path, little, row_shape, self._checksum, self._block_bytes)
        self._columns[table, rank, column] = writer
        return writer

    def write_index(self, table: int, rank: int = 0, build: BuildIndex | None = None) -> None:
        """Writes the index of a shard whose keys are complete, if it can have one.

        Args:
            table: number of the table.
            rank: of the shard.
            build: as `build_index`, but faster.
        """
        keys = self._columns[table, rank, "keys"]
        key_file = keys.close()
        if keys.rows >= INDEX_ROWS:
            return
        slots = key_index.index_size(keys.rows)
        header = npy.header(np.dtype(np.uint32), (slots,))
        size = len(header) + 4 * slots
        path = self._directory / file_name(table, rank, "index")
        with naming(path), path.open("x+b") as file:
            file.write(header)
            file.flush()
            # Takes the blocks now: a full disk would kill a process that writes to a mapped file.
            os.posix_fallocate(file.fileno(), 0, size)
            if keys.rows:
                key_bytes = (key_file.bytes - npy.HEADER_BYTES) // keys.rows
                offset = npy.HEADER_BYTES
                build = build or build_index
                build(str(keys.path), offset, keys.rows, key_bytes, str(path), offset)
            os.fsync(file.fileno())
        blocks = block_file.checksums(path, size, self._block_bytes, self._checksum)
        digits = "".join(f"{value:08x}" for _, values in blocks for value in values)
        self._indexes[table, rank, "index"] = ColumnFile(path.name, size, digits)

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
    ) -> Snapshot:
        """Makes the snapshot visible: it survives what comes after this call.

        Args:
            tables: their shards' `files` are filled in here.
            since: of a delta: rows that were updated after this tick are in it.
            watermark: every change up to this tick is in.
            watermark_utc_ns: when the watermark was taken, nanoseconds since 1970 UTC.
            parent: of a delta: id of the snapshot that it continues, which is the path's last one
                if the path has any.
            optimizer: the optimizer's entry in the manifest.
            world_size: how many ranks wrote.
            continues: of a base: ids of snapshots that have the same state.

        Raises:
            ValueError: the entries and the files that were written are no snapshot together, or
                the parent is not the path's last snapshot. Nothing is published.
            OSError: from the file system. The snapshot is published only if it was the last sync
                that failed.
        """
        before = list_snapshots(self._path)
        if self._kind == "delta" and before and not self._is_continued(before[-1], parent):
            raise ValueError(
                f"parent is {parent!r}, but the last snapshot at {self._path} is {before[-1]}: "
                "with this delta the path's chain would have a gap."
            )
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
            tables=self._with_files(tables),
            continues=tuple(continues),
        )
        text = manifest.to_json()
        try:
            Manifest.from_json(text, str(self._path))
        except DataLossError as error:
            raise ValueError(f"no snapshot can be made of this: {error}") from error
        path = self._directory / MANIFEST
        with naming(path), path.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(self._directory)
        number = before[-1].number + 1 if before else 1
        directory = self._path / str(Name(number, self._kind, self.id))
        os.rename(self._directory, directory)
        _sync_directory(self._path)
        names = list_snapshots(self._path)
        for name in set(names) - set(since_last_base(names)):
            shutil.rmtree(self._path / str(name), ignore_errors=True)
        return Snapshot(directory)

    def _is_continued(self, last: Name, parent: str | None) -> bool:
        """Whether a delta of this parent continues the path's last snapshot."""
        if last.id == parent or last.kind == "delta":
            return last.id == parent
        return parent in Snapshot(self._path / str(last)).manifest.ids

    def _with_files(self, tables: Sequence[TableEntry]) -> tuple[TableEntry, ...]:
        """The entries, with the files that were written for them."""
        files = {place: writer.close() for place, writer in self._columns.items()}
        files.update(self._indexes)
        entries = []
        for number, table in enumerate(tables):
            shards = []
            for shard in table.shards:
                places = [place for place in files if place[:2] == (number, shard.rank)]
                columns = {place[2]: files.pop(place) for place in places}
                shards.append(dataclasses.replace(shard, files=columns))
            entries.append(dataclasses.replace(table, shards=tuple(shards)))
        if files:
            names = ", ".join(file.file for file in files.values())
            raise ValueError(f"files of no shard of these tables were written: {names}.")
        return tuple(entries)


def build_index(
    keys_path: str,
    data_offset: int,
    rows: int,
    key_bytes: int,
    index_path: str,
    index_data_offset: int,
) -> None:
    """Fills in the index of a file of keys, at least one.

    Args:
        keys_path: the keys' file.
        data_offset: where its keys begin.
        rows: how many they are.
        key_bytes: 4 or 8.
        index_path: a file of the index's size, whose slots are 0.
        index_data_offset: where its slots begin.
    """
    keys = np.memmap(keys_path, np.dtype(f"<u{key_bytes}"), "r", data_offset, (rows,))
    slots = (key_index.index_size(rows),)
    key_index.build(keys, np.memmap(index_path, "<u4", "r+", index_data_offset, slots))


def _take(lock: int, path: pathlib.Path) -> bool:
    """Takes the lock without waiting; False where the file system has none."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RuntimeError(
            f"another process writes at {path}: it holds the lock of {path / 'LOCK'}."
        ) from error
    except OSError:
        return False
    return True


def _make_directory(path: pathlib.Path) -> None:
    """Makes a directory and those above it, so that they survive a crash."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(path: pathlib.Path) -> None:
    """Syncs a directory's entries, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
