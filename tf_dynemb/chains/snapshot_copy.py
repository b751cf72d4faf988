"""Copies of snapshots that have what lookups need, and not what only training needs."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.format.manifest import Manifest
from tf_dynemb.format.table_entry import ColumnFile, Shard, TableEntry
from tf_dynemb.format.vector_format import convert, smaller
from tf_dynemb.storage.files import copy_file, in_parallel, sync_directory, write_file
from tf_dynemb.storage.part import Part
from tf_dynemb.storage.snapshot import MANIFEST, Snapshot

# Columns of rows that only training needs.
_ONLY_FOR_TRAINING = ("state", "admission")

# Rows per iteration: few enough that the intermediate results stay in the cache.
CHUNK = 1 << 14


def without_training(manifest: Manifest) -> Manifest:
    """Returns a manifest of the same snapshot without optimizer state and admission counters.

    It keeps its id, so that deltas continue it.
    """
    tables = []
    for table in manifest.tables:
        shards = tuple(
            dataclasses.replace(
                shard,
                files={k: f for k, f in shard.files.items() if k not in _ONLY_FOR_TRAINING},
                admission_lines=0,
                first_admission_line=0,
            )
            for shard in table.shards
        )
        tables.append(dataclasses.replace(table, state=None, admission_lines=None, shards=shards))
    dense = tuple(file for file in manifest.dense if file.part == "weights")
    return dataclasses.replace(manifest, optimizer=None, tables=tuple(tables), dense=dense)


class SnapshotCopy:
    """A copy of a snapshot `without_training`, being written to an empty directory.

        copy = SnapshotCopy(snapshot, directory)
        table = copy.write_vectors(0, "int8")    # what is to be others than in the snapshot
        copy.finish([table])                     # copies all other files

    The files of the snapshot that are read are verified.

    Args:
        snapshot: the snapshot.
        directory: the directory.

    Attributes:
        manifest: the manifest of the copy, as if nothing were written.

    Raises:
        OSError: an error of the file system; all methods raise it too.
        DataLossError: the snapshot is damaged; raised by the methods.
    """

    def __init__(self, snapshot: Snapshot, directory: pathlib.Path) -> None:
        self.manifest = without_training(snapshot.manifest)
        self._snapshot = snapshot
        self._directory = directory
        self._part = Part(directory, block_bytes=self.manifest.block_bytes)

    def write_vectors(self, number: int, stored_as: str) -> TableEntry:
        """Writes the vectors of a table in a format, if it is another one; returns its entry."""
        table = self.manifest.tables[number]
        if stored_as != table.stored_as:
            for shard in table.shards:
                self._write(number, shard, "vectors", None, stored_as)
        return with_format(table, stored_as)

    def write_rows(
        self,
        number: int,
        shard: Shard,
        kept: npt.NDArray[np.bool_],
        deleted: npt.NDArray[Any],
        stored_as: str,
    ) -> Shard:
        """Writes some rows of a shard of a table.

        Args:
            number: the number of the table.
            shard: the shard.
            kept: [rows], which rows.
            deleted: keys that are deleted besides those of the snapshot, which is a delta.
            stored_as: the format of the vectors.

        Returns:
            The shard with its new numbers of keys.
        """
        for name in self.manifest.tables[number].row_columns:
            self._write(number, shard, name, kept, stored_as)
        if self.manifest.kind == "base":
            self._part.write_index(number, shard.rank)
        else:
            self._snapshot.verify(files=[shard.files["deleted"]])
            listed = np.asarray(self._snapshot.column(number, "deleted", shard.rank))
            writer = self._part.column(number, "deleted", listed.dtype, (), shard.rank)
            for keys in (listed, deleted):
                writer.append(keys)
        rows = int(np.count_nonzero(kept))
        return dataclasses.replace(shard, rows=rows, deleted=shard.deleted + deleted.size)

    def finish(
        self, tables: Sequence[TableEntry], options: Mapping[str, Any] | None = None
    ) -> None:
        """Copies the files that were not written, writes MANIFEST.json as the last, and syncs.

        Args:
            tables: the tables of the manifest, with what was written in place.
            options: the member `copy` of the manifest.
        """
        written = self._part.with_files(
            [
                dataclasses.replace(
                    table, shards=tuple(dataclasses.replace(s, files={}) for s in table.shards)
                )
                for table in tables
            ]
        )
        entries: list[TableEntry] = []
        copied: list[ColumnFile] = list(self.manifest.dense)
        for new, old in zip(written, tables, strict=True):
            shards = []
            for shard, before in zip(new.shards, old.shards, strict=True):
                shards.append(dataclasses.replace(shard, files={**before.files, **shard.files}))
                copied += [before.files[name] for name in before.files.keys() - shard.files.keys()]
            entries.append(dataclasses.replace(new, shards=tuple(shards)))
        in_parallel(self._copy, copied)
        manifest = dataclasses.replace(self.manifest, tables=tuple(entries), copy=options)
        write_file(self._directory / MANIFEST, manifest.to_json().encode())
        sync_directory(self._directory)

    def abandon(self) -> None:
        """Closes the open files without completing them."""
        self._part.abandon()

    def _write(
        self,
        number: int,
        shard: Shard,
        name: str,
        kept: npt.NDArray[np.bool_] | None,
        stored_as: str,
    ) -> None:
        """Writes a column of some rows; None: of all."""
        entry = dataclasses.replace(self.manifest.tables[number], vector_format=stored_as)
        writer = self._part.column(number, name, *entry.row_columns[name], shard.rank)
        self._snapshot.verify(files=[shard.files[name]])
        values = self._snapshot.column(number, name, shard.rank)
        for begin in range(0, len(values), CHUNK):
            chunk = np.asarray(values[begin : begin + CHUNK])
            if kept is not None:
                chunk = chunk[kept[begin : begin + CHUNK]]
            if name == "vectors":
                chunk = convert(chunk, entry.dimension, stored_as)
            writer.append(chunk)
        writer.flush()

    def _copy(self, file: ColumnFile) -> None:
        copy_file(self._snapshot.read(file), self._directory / file.file)


def copy_without_training(
    snapshot: Snapshot, directory: pathlib.Path, formats: Mapping[str | None, str] | None = None
) -> None:
    """Writes a snapshot `without_training` to an empty directory, and syncs it.

    The files are verified. MANIFEST.json is the last.

    Args:
        snapshot: the snapshot.
        directory: the directory.
        formats: the formats for the vectors, by the names of tables; under None, of all others.
            Vectors that are as small already stay as they are.

    Raises:
        DataLossError: a file is damaged.
        OSError: an error of the file system.
    """
    copy = SnapshotCopy(snapshot, directory)
    options = snapshot.manifest.copy
    try:
        tables = []
        for number, table in enumerate(copy.manifest.tables):
            stored_as = in_format(table, of_table(formats or {}, table.name))
            if stored_as != table.stored_as:
                options = options or {}  # the rows are not those of training any more
            tables.append(copy.write_vectors(number, stored_as))
        copy.finish(tables, options)
    finally:
        copy.abandon()


def of_table(values: Mapping[str | None, Any], table: str) -> Any:
    """Returns the value of a table among those by the names of tables; None if it has none."""
    return values.get(table, values.get(None))


def in_format(table: TableEntry, rows: str | None) -> str:
    """Returns the format that the vectors of a table get: `rows`, unless they are as small."""
    return table.stored_as if rows is None else smaller(rows, table.stored_as)


def with_format(table: TableEntry, stored_as: str) -> TableEntry:
    """Returns the entry of a table whose vectors are stored in a format."""
    return dataclasses.replace(table, vector_format=None if stored_as == table.dtype else stored_as)
