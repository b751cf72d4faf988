"""Writing of the snapshots of a SavedModel."""

from __future__ import annotations

import errno
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tf_dynemb import _ops, storage
from tf_dynemb._presence import exchange as exchange_at_once
from tf_dynemb._presence import exists, is_directory, remove_tree
from tf_dynemb._warn import warn
from tf_dynemb.chains.snapshot_copy import copy_without_training
from tf_dynemb.persistence.dump import dump
from tf_dynemb.storage.local_place import list_snapshots
from tf_dynemb.storage.snapshot import MANIFEST
from tf_dynemb.variables.served import ServedTable, Source

# Puts the files of a snapshot into an empty directory.
Take: TypeAlias = Callable[[storage.Snapshot, pathlib.Path], None]


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
    elif rows.how == "move" and not rows.formats:
        os.rename(rows.path, path)
    elif not (exists(path) and os.path.samefile(rows.path, path)):
        copy = functools.partial(copy_without_training, formats=rows.formats)
        take = _link if rows.how == "link" else copy
        storage.Chain.load(rows.path, lambda chain: _take(chain, path, take))
        if rows.how == "move":
            remove_tree(rows.path)


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
        raise ValueError(f"{chain.last} is a delta: a model needs a base.")
    there = {entry.name: entry for entry in chain.base.manifest.tables}
    for name, table in tables.items():
        entry = there.get(name)
        if entry is None:
            names = ", ".join(map(repr, there)) or "none"
            raise ValueError(f"{chain.base} has no table {name!r}: it has {names}.")
        on_disk = (entry.dimension, entry.key_type, entry.dtype)
        here = (table.dimension, table.key_type.name, table.dtype.name)
        if on_disk != here:
            raise ValueError(
                f"table {name!r} has dimension, key_type and dtype {on_disk} in "
                f"{chain.base}, but {here} in the model."
            )


def _take(chain: storage.Chain, path: pathlib.Path, take: Take) -> None:
    """Takes the snapshots of a chain; they then replace what is at the path."""
    unfinished = path.with_name(path.name + ".tmp")
    remove_tree(unfinished)
    try:
        for number, snapshot in enumerate(chain.snapshots, 1):
            manifest = snapshot.manifest
            target = unfinished / f"{number:08d}-{manifest.kind}-{manifest.id}"
            target.mkdir(parents=True)
            take(snapshot, target)
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
