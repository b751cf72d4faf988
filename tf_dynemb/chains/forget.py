"""Removing the rows of keys from snapshots on disk, whose ids and places in chains stay.

No file is changed: hard links can share it, and processes have it mapped. A shard with such keys is
rewritten, in files of other names in the directory of its snapshot. Then a new MANIFEST.json takes
the place of the old one by a rename, and the old files are removed. A process that is killed leaves
the snapshot as before or as after it, and perhaps files that no manifest has, which the next call
removes.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb._presence import remove_tree
from tf_dynemb.chains import copies, counters
from tf_dynemb.chains.copies import Query
from tf_dynemb.serving.keys import Keys
from tf_dynemb.storage import DataLossError, Manifest, Part, Shard, Snapshot, TableEntry
from tf_dynemb.storage.files import replace_manifest, sync_directory
from tf_dynemb.storage.local_place import UNPUBLISHED
from tf_dynemb.storage.snapshot import MANIFEST, Name

# Rows per iteration.
_CHUNK = 1 << 16

_UNPUBLISHED_MANIFEST = re.compile(rf"{re.escape(MANIFEST)}\.[0-9a-f]{{16}}")


def lock_of(snapshot: pathlib.Path) -> pathlib.Path:
    """Returns the folder whose lock a writer of a snapshot's directory holds."""
    return snapshot.parent if Name.parse(snapshot.name) else snapshot


def check(snapshot: Snapshot, query: Query, tables: Sequence[str] | None) -> None:
    """Raises an error if keys cannot be removed from a snapshot.

    Raises:
        DataLossError: the snapshot is damaged.
        ValueError: a table with such keys is a dense variable.
    """
    snapshot.verify()
    for entry in snapshot.manifest.tables:
        if (tables is None or entry.name in tables) and _is_dense(entry):
            keys = query.of(entry)
            for shard in entry.shards:
                column = snapshot.column(entry.name, "keys", shard.rank)
                if len(copies.positions(column, keys)):
                    raise ValueError(
                        f"table {entry.name!r} in {snapshot} is a matrix, from which rows cannot "
                        "be removed: set the rows to zeros in the training process, and dump it "
                        "again. For the other tables, pass --table."
                    )


def forget(
    snapshot: Snapshot, query: Query, tables: Sequence[str] | None, deletions: bool = False
) -> dict[str, int]:
    """Removes the rows and admission counters of keys from a snapshot that `check` has checked.

    The lock of `lock_of` must be held.

    Args:
        snapshot: the snapshot.
        query: the keys.
        tables: the names of tables; None: all.
        deletions: whether to remove the keys from lists of deleted keys, too. A reader that has the
            rows, and has not applied the snapshot yet, then keeps them.

    Returns:
        For each table that had some, the number of rows that were removed.

    Raises:
        OSError: an error of the file system. The snapshot is as before, or as after it.
    """
    _remove_remains(snapshot)
    scratch = lock_of(snapshot.directory) / f"{UNPUBLISHED}{secrets.token_hex(16)}"
    scratch.mkdir()
    removed: dict[str, int] = {}
    try:
        part = Part(scratch, block_bytes=snapshot.manifest.block_bytes)
        entries = []
        for number, entry in enumerate(snapshot.manifest.tables):
            wanted = tables is None or entry.name in tables
            keys = query.of(entry) if wanted else np.zeros(0, np.int64)
            shards = []
            for shard in entry.shards:
                kept = _write_shard(part, snapshot, number, shard, keys, deletions)
                gone = shard.rows - kept.rows
                if gone or kept is not shard:
                    removed[entry.name] = removed.get(entry.name, 0) + gone
                shards.append(kept)
            entries.append(dataclasses.replace(entry, shards=tuple(shards)))
        if removed:
            _replace(
                snapshot, scratch, part.with_files([_without_files(e) for e in entries]), entries
            )
    finally:
        remove_tree(scratch)
    if removed:
        _remove_remains(Snapshot(snapshot.directory))
    return removed


def _write_shard(
    part: Part, snapshot: Snapshot, number: int, shard: Shard, keys: Keys, deletions: bool
) -> Shard:
    """Writes the columns of a shard that have keys; returns the shard, itself if none has."""
    entry = snapshot.manifest.tables[number]

    def column(name: str) -> npt.NDArray[Any]:
        return snapshot.column(number, name, shard.rank)

    def write(name: str, gone: copies.Positions) -> None:
        values = column(name)
        writer = part.column(number, name, values.dtype, values.shape[1:], shard.rank)
        for begin in range(0, len(values), _CHUNK):
            chunk = np.asarray(values[begin : begin + _CHUNK])
            kept = np.ones(len(chunk), np.bool_)
            kept[gone[(gone >= begin) & (gone < begin + len(chunk))] - begin] = False
            writer.append(chunk[kept])

    result = shard
    rows = copies.positions(column("keys"), keys)
    if len(rows):
        for name in entry.row_columns:
            if name in shard.files:
                write(name, rows)
        if "index" in shard.files:
            part.write_index(number, shard.rank)
        result = dataclasses.replace(result, rows=shard.rows - len(rows))
    if deletions and "deleted" in shard.files:
        listed = copies.positions(column("deleted"), keys)
        if len(listed):
            write("deleted", listed)
            result = dataclasses.replace(result, deleted=shard.deleted - len(listed))
    if shard.admission_lines and entry.admission_lines:
        place = shard.first_admission_line, entry.admission_lines
        lines = np.asarray(column("admission"))
        if counters.counted(lines, keys, *place):
            writer = part.column(number, "admission", lines.dtype, lines.shape[1:], shard.rank)
            writer.append(counters.without(lines, keys, *place))
            result = dataclasses.replace(result)  # another object: it has changed
    return result


def _without_files(entry: TableEntry) -> TableEntry:
    shards = (dataclasses.replace(shard, files={}) for shard in entry.shards)
    return dataclasses.replace(entry, shards=tuple(shards))


def _replace(
    snapshot: Snapshot,
    scratch: pathlib.Path,
    written: Sequence[TableEntry],
    entries: Sequence[TableEntry],
) -> None:
    """Moves the files that were written to the snapshot, and publishes its new manifest."""
    token = secrets.token_hex(8)
    tables = []
    for new, old in zip(written, entries, strict=True):
        shards = []
        for shard, before in zip(new.shards, old.shards, strict=True):
            files = dict(before.files)
            for column, file in shard.files.items():
                name = f"{file.file.removesuffix('.npy')}.{token}.npy"
                os.rename(scratch / file.file, snapshot.directory / name)
                files[column] = dataclasses.replace(file, file=name)
            shards.append(dataclasses.replace(before, files=files, index_salt=shard.index_salt))
        tables.append(dataclasses.replace(old, shards=tuple(shards)))
    manifest = dataclasses.replace(snapshot.manifest, tables=tuple(tables))
    _publish(snapshot.directory, manifest, token)


def _publish(directory: pathlib.Path, manifest: Manifest, token: str) -> None:
    try:
        Manifest.from_json(manifest.to_json(), str(directory))
    except DataLossError as error:
        raise ValueError(f"the rows that are left do not form a snapshot: {error}") from error
    replace_manifest(directory, manifest, token)


def _remove_remains(snapshot: Snapshot) -> None:
    """Removes the files of a snapshot's directory that it does not have."""
    names = list(filter(_UNPUBLISHED_MANIFEST.fullmatch, os.listdir(snapshot.directory)))
    remains = [*copies.remains_of(snapshot), *(snapshot.directory / name for name in names)]
    for file in remains:
        file.unlink()
    if remains:
        sync_directory(snapshot.directory)


def _is_dense(entry: TableEntry) -> bool:
    """Whether a table holds a matrix (persistence/static_rows.py)."""
    initializer = (entry.initializer.kinds, tuple(entry.initializer.args))
    return (
        (initializer, entry.seed) == ((("constant",), (0.0, 0.0)), 0)
        and entry.state is None
        and entry.evict_strategy is None
    )
