"""Copies of snapshots that have what lookups need, and not what only training needs."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from tf_dynemb.storage.chain import MANIFEST, Snapshot
from tf_dynemb.storage.column_writer import WRITE_UNIT
from tf_dynemb.storage.manifest import Manifest
from tf_dynemb.storage.publication import sync_directory

# Columns of rows that only training needs.
_ONLY_FOR_TRAINING = ("state", "admission")


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


def copy_without_training(snapshot: Snapshot, directory: pathlib.Path) -> None:
    """Writes a snapshot `without_training` to an empty directory, and syncs it.

    The files are not verified. MANIFEST.json is the last.

    Raises:
        OSError: an error of the file system.
    """
    manifest = without_training(snapshot.manifest)
    for each, _ in manifest.files_of_ranks:
        _copy(snapshot.directory / each.file, directory / each.file)
    with (directory / MANIFEST).open("xb") as file:
        file.write(manifest.to_json().encode())
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file in multiples of `WRITE_UNIT`, which `shutil.copyfile` does not."""
    with source.open("rb", 0) as read, target.open("xb", 0) as written:
        while data := read.read(WRITE_UNIT):
            left = memoryview(data)
            while left:
                left = left[written.write(left) :]
        os.fsync(written.fileno())
