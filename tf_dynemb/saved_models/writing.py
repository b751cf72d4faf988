"""Writing of the snapshots of a SavedModel."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tf_dynemb import _ops, storage
from tf_dynemb._presence import exchange as exchange_at_once
from tf_dynemb._presence import exists, is_directory, remove_tree
from tf_dynemb._warn import warn
from tf_dynemb.persistence.dump import dump
from tf_dynemb.storage.chain import MANIFEST, list_snapshots
from tf_dynemb.variables.served import ServedTable, Source

# The columns that lookups do not need, and that a copy can be without.
_ONLY_FOR_TRAINING = ("state", "admission")


def write(source: Source, path: pathlib.Path) -> None:
    """Writes the snapshots of a source at a path, as a whole or not at all.

    Raises:
        ValueError: a dump has other tables than the model.
        OSError, DataLossError: as in `export_saved_model`.
    """
    rows = source.rows
    if rows.path is not None:
        storage.Chain.load(rows.path, lambda chain: _check_tables(chain, source.tables))
    if rows.how == "external":
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if rows.path is None:
        _dump(source, path)
    elif rows.how == "move":
        os.rename(rows.path, path)
    elif not (exists(path) and os.path.samefile(rows.path, path)):
        is_link = rows.how == "link"
        storage.Chain.load(rows.path, lambda chain: _take(chain, path, is_link))


def _dump(source: Source, path: pathlib.Path) -> None:
    try:
        dump(path, source.tables, overwrite=True, keep=0, quiet=True)
    except BaseException:
        # It may be a folder of the model that is replaced, with its snapshots.
        if is_directory(path) and not list_snapshots(path):
            remove_tree(path)
        raise


def _check_tables(chain: storage.Chain, tables: Mapping[str, Any]) -> None:
    """Raises ValueError unless a chain has these tables."""
    if chain.base is None:
        raise ValueError(f"{chain.last.directory} is a delta: a model needs a base.")
    there = {entry.name: entry for entry in chain.base.manifest.tables}
    for name, table in tables.items():
        entry = there.get(name)
        if entry is None:
            names = ", ".join(map(repr, there)) or "none"
            raise ValueError(f"{chain.base.directory} has no table {name!r}: it has {names}.")
        on_disk = (entry.dimension, entry.key_type, entry.dtype)
        here = (table.dimension, table.key_type.name, table.dtype.name)
        if on_disk != here:
            raise ValueError(
                f"table {name!r} has dimension, key_type and dtype {on_disk} in "
                f"{chain.base.directory}, but {here} in the model."
            )


def _take(chain: storage.Chain, path: pathlib.Path, is_link: bool) -> None:
    """Copies a chain, or links its files; it then replaces what is at the path."""
    unfinished = path.with_name(path.name + ".tmp")
    remove_tree(unfinished)
    try:
        for number, snapshot in enumerate(chain.snapshots, 1):
            manifest = snapshot.manifest
            target = unfinished / f"{number:08d}-{manifest.kind}-{manifest.id}"
            target.mkdir(parents=True)
            (_link if is_link else _copy)(snapshot, target)
        remove_tree(path)
        os.rename(unfinished, path)
    except BaseException:
        remove_tree(unfinished)
        raise


def _link(snapshot: storage.Snapshot, target: pathlib.Path) -> None:
    for file in [MANIFEST, *(file.file for file in snapshot.files)]:
        try:
            os.link(snapshot.directory / file, target / file)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise OSError(
                errno.EXDEV,
                f"tables='link' needs a dump on the file system of the model, which is at {target}",
                str(snapshot.directory / file),
            ) from error


def _copy(snapshot: storage.Snapshot, target: pathlib.Path) -> None:
    """Copies what lookups need. The manifest keeps its id, so that deltas continue it."""
    tables = []
    for table in snapshot.manifest.tables:
        shards = []
        for shard in table.shards:
            files = {k: f for k, f in shard.files.items() if k not in _ONLY_FOR_TRAINING}
            kept = dataclasses.replace(
                shard, files=files, admission_lines=0, first_admission_line=0
            )
            shards.append(kept)
            for file in files.values():
                _copy_file(snapshot.directory / file.file, target / file.file)
        tables.append(
            dataclasses.replace(table, state=None, admission_lines=None, shards=tuple(shards))
        )
    dense = tuple(file for file in snapshot.manifest.dense if file.part == "weights")
    for each in dense:
        _copy_file(snapshot.directory / each.file, target / each.file)
    manifest = dataclasses.replace(
        snapshot.manifest, optimizer=None, tables=tuple(tables), dense=dense
    )
    (target / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _copy_file(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file in multiples of `storage.WRITE_UNIT`, which `shutil.copyfile` does not."""
    with source.open("rb", 0) as read, target.open("wb", 0) as written:
        while data := read.read(storage.WRITE_UNIT):
            left = memoryview(data)
            while left:
                left = left[written.write(left) :]


def sync(folder: pathlib.Path) -> None:
    """Syncs all files and directories in a folder that has been written."""
    for file in [folder, *folder.rglob("*")]:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some file systems cannot sync directories.
            if error.errno != errno.EINVAL or not is_directory(file):
                raise
        finally:
            os.close(descriptor)


def exchange(new: pathlib.Path, path: pathlib.Path) -> None:
    """Exchanges two files or folders.

    `path` exists at all times, if the system can do that. After an error, it is as before.
    """
    if exchange_at_once(new, path):  # otherwise `os.rename` raises what is wrong
        return
    old = new.with_name(new.name + ".old")
    try:
        os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        if exists(old, follow=False) and not exists(path, follow=False):
            os.rename(old, path)
        raise
    os.rename(old, new)


def check_states(tables: Sequence[ServedTable]) -> None:
    """Warns if deltas that a loaded model has applied are not in the new one."""
    for served in tables:
        source = served.loaded_from
        if source is None:
            continue
        now = _ops.library().dynemb_served_state(served.handle).id.numpy().decode()
        if now != storage.Chain.open(source).last.manifest.id:
            warn(
                f"The model of {source} is saved as it was exported: the deltas that were applied "
                "to it since are not in the new model."
            )
            return
