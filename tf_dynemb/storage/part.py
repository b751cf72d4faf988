"""The files of a snapshot that one process writes, and the tables that all parts form together."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tf_dynemb.format import crc32c, key_index, npy, safetensors
from tf_dynemb.format.errors import naming
from tf_dynemb.format.manifest import DenseFile, dense_file_name
from tf_dynemb.format.table_entry import INDEX_ROWS, ColumnFile, TableEntry, file_name
from tf_dynemb.storage.column_writer import ColumnWriter, LocalOutput, Output
from tf_dynemb.storage.files import copy_file
from tf_dynemb.storage.snapshot import Snapshot

# (file of the keys, offset of its data, rows, bytes per key, file of the index, offset of its
# data): fills in the index, in a file that already has its size and whose slots are zeros; returns
# the index's salt.
BuildIndex: TypeAlias = Callable[[str, int, int, int, str, int], int]

# The bytes that one checksum covers.
BLOCK_BYTES = 1 << 20


class Part:
    """Columns that one process writes to the directory of a snapshot before it is published.

    Only one thread may use it, except that each ColumnWriter may be used by another.

    Args:
        directory: the directory of the snapshot; must exist.
        rank: the rank of the shards that are written, unless another is passed.
        checksum: a faster function that is equivalent to `crc32c.blocks`.
        block_bytes: the number of bytes that one checksum covers, as in the `Publication`.

    Attributes:
        rank: the `rank` of the constructor.
        dense: the files of dense variables that were written.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        rank: int = 0,
        checksum: crc32c.Checksum = crc32c.blocks,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        check_block_bytes(block_bytes)
        self.rank = rank
        self.dense: list[DenseFile] = []
        self._directory = directory
        self._checksum = checksum
        self._block_bytes = block_bytes
        self._columns: dict[tuple[int, int, str], ColumnWriter] = {}
        self._indexes: dict[tuple[int, int, str], ColumnFile] = {}
        self._salts: dict[tuple[int, int], int] = {}

    def column(
        self,
        table: int,
        column: str,
        dtype: npt.DTypeLike,
        row_shape: tuple[int, ...] = (),
        rank: int | None = None,
        rows: int | None = None,
    ) -> ColumnWriter:
        """Starts a column.

        Args:
            table: the number of the table in the snapshot.
            column: the name of the column in docs/file_format.md; for "index" see `write_index`.
            dtype: the dtype of the column; uint16 for bfloat16.
            row_shape: the shape of a row: () or (width,).
            rank: the rank of the shard.
            rows: the number of rows, if it is known; then a store gets them as they are written.

        Raises:
            OSError: an error of the file system; the writer's methods raise it too.
        """
        rank = self.rank if rank is None else rank
        little = np.dtype(dtype).newbyteorder("<")
        header = None if rows is None else npy.header(little, (rows, *row_shape))
        size = (rows or 0) * little.itemsize * math.prod(row_shape)
        output = self._output(file_name(table, rank, column), header, size)
        writer = ColumnWriter(output, little, row_shape, self._checksum, self._block_bytes)
        self._columns[table, rank, column] = writer
        return writer

    def _output(self, file: str, header: bytes | None, data_bytes: int) -> Output:
        """Starts a file of a column.

        Args:
            file: its name.
            header: the header that it will have; None: it is not known yet.
            data_bytes: the number of bytes after the header, if that is known.
        """
        return LocalOutput(str(self._directory / file))

    def write_index(
        self, table: int, rank: int | None = None, build: BuildIndex | None = None
    ) -> None:
        """Writes the index of a shard whose keys are complete, unless it is too large for one.

        Args:
            table: the number of the table.
            rank: the rank of the shard.
            build: a faster function that is equivalent to `build_index`.

        Raises:
            OSError: an error of the file system.
        """
        rank = self.rank if rank is None else rank
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
            # Allocates the blocks now: a full disk would kill a process that writes to a map.
            os.posix_fallocate(file.fileno(), 0, size)
            if keys.rows:
                key_bytes = (key_file.bytes - npy.HEADER_BYTES) // keys.rows
                offset = npy.HEADER_BYTES
                build = build or build_index
                self._salts[table, rank] = build(
                    keys.path, offset, keys.rows, key_bytes, str(path), offset
                )
            os.fsync(file.fileno())
        self._indexes[table, rank, "index"] = ColumnFile(path.name, size, self._digits(path, size))

    def write_dense(self, part: str, arrays: Mapping[str, safetensors.Array]) -> None:
        """Writes and syncs a file of dense variables.

        Args:
            part: "weights" or "training".
            arrays: the values by name.

        Raises:
            OSError: an error of the file system.
        """
        path = self._directory / dense_file_name(part, self.rank)
        size = safetensors.write(path, arrays)
        self.dense.append(DenseFile(path.name, size, self._synced(path, size), part, self.rank))

    def copy_dense(self, snapshot: Snapshot) -> None:
        """Copies and syncs the files of dense variables, of all ranks, of another snapshot.

        Raises:
            DataLossError: a file is damaged.
            OSError: an error of the file system.
        """
        for file in snapshot.manifest.dense:
            path = self._directory / file.file
            copy_file(snapshot.read(file), path)
            digits = self._digits(path, file.bytes)  # its blocks may have another size here
            self.dense.append(dataclasses.replace(file, crc32c=digits))

    def _synced(self, path: pathlib.Path, size: int) -> str:
        """Syncs a file, and returns its checksums, which are computed meanwhile."""
        with (
            naming(path),
            path.open("rb") as file,
            concurrent.futures.ThreadPoolExecutor(1) as syncing,
        ):
            synced = syncing.submit(os.fsync, file.fileno())
            digits = self._digits(path, size)
            synced.result()
        return digits

    def _digits(self, path: pathlib.Path, size: int) -> str:
        """Returns the checksums of a file's blocks as in the manifest."""
        blocks = crc32c.of_file(path, size, self._block_bytes, self._checksum)
        return "".join(f"{value:08x}" for _, values in blocks for value in values)

    def with_files(self, tables: Sequence[TableEntry]) -> tuple[TableEntry, ...]:
        """Syncs all files, and returns the entries of tables with the files written for them.

        Shards for which no files were written here keep the files that they have.

        Raises:
            ValueError: files were written that belong to no shard of these tables.
            OSError: an error of the file system.
        """
        files = {place: writer.close() for place, writer in self._columns.items()}
        files.update(self._indexes)
        entries = []
        for number, table in enumerate(tables):
            shards = []
            for shard in table.shards:
                places = [place for place in files if place[:2] == (number, shard.rank)]
                columns = {place[2]: files.pop(place) for place in places}
                salt = self._salts.get((number, shard.rank), shard.index_salt)
                files_here = columns or shard.files
                shards.append(dataclasses.replace(shard, files=files_here, index_salt=salt))
            entries.append(dataclasses.replace(table, shards=tuple(shards)))
        if files:
            names = ", ".join(file.file for file in files.values())
            raise ValueError(f"files were written that belong to no shard of the tables: {names}.")
        return tuple(entries)

    def abandon(self) -> None:
        """Closes the open files without completing them."""
        for column in self._columns.values():
            column.abandon()


def check_block_bytes(block_bytes: int) -> None:
    """Raises ValueError unless checksums can cover this number of bytes each."""
    if block_bytes < npy.HEADER_BYTES:
        raise ValueError(f"block_bytes must be at least 128, got {block_bytes}.")


def joined(parts: Sequence[Sequence[TableEntry]]) -> tuple[TableEntry, ...]:
    """Returns tables with the shards that several processes have written.

    Args:
        parts: the entries of each process for the same tables, with its own shards.

    Raises:
        ValueError: the entries differ in more than shards.
    """
    first = parts[0]
    for number, part in enumerate(parts):
        for one, other in zip(first, part, strict=True):
            if dataclasses.replace(one, shards=()) != dataclasses.replace(other, shards=()):
                raise ValueError(
                    f"part {number} has another table than part 0: "
                    f"{dataclasses.replace(other, shards=())}, not "
                    f"{dataclasses.replace(one, shards=())}."
                )
    return tuple(
        dataclasses.replace(entries[0], shards=tuple(s for e in entries for s in e.shards))
        for entries in zip(*parts, strict=True)
    )


def build_index(
    keys_path: str,
    data_offset: int,
    rows: int,
    key_bytes: int,
    index_path: str,
    index_data_offset: int,
) -> int:
    """Builds the index of a file with at least one key.

    Args:
        keys_path: the file of the keys.
        data_offset: the offset of its data.
        rows: the number of keys.
        key_bytes: 4 or 8.
        index_path: a file of the index's size, whose slots are 0.
        index_data_offset: the offset of its slots.

    Returns:
        The salt of the index.
    """
    keys = np.memmap(keys_path, np.dtype(f"<u{key_bytes}"), "r", data_offset, (rows,))
    slots = (key_index.index_size(rows),)
    out = np.memmap(index_path, "<u4", "r+", index_data_offset, slots)
    return key_index.build(keys, out)[1]
