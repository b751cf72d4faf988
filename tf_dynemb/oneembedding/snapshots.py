"""Snapshots of the tables of an embedding, below its `persistent_path`."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from tf_dynemb import storage
from tf_dynemb._presence import is_directory
from tf_dynemb._warn import warn
from tf_dynemb.optimizers.trained_tables import optimizer_of
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel.agreement import Ranks
from tf_dynemb.persistence.dump import dump
from tf_dynemb.persistence.load import load


def save(
    folder: str,
    snapshot_name: str,
    name: str,
    tables: dict[str, Any],
    optimizer: OptimizerWrapper | None,
) -> None:
    """Writes a snapshot; see `MultiTableEmbedding.save_snapshot`.

    Args:
        folder: the folder of the snapshots.
        snapshot_name: the name of the snapshot.
        name: the name of the embedding.
        tables: its tables, by their names on disk.
        optimizer: the optimizer, or None: the one that trains the tables.
    """
    path = _path(folder, snapshot_name, name)
    optimizer = optimizer or _optimizer_of(tables, "save_snapshot")
    if optimizer is None and any(table.state_spec is not None for table in tables.values()):
        warn(
            f"the optimizer of {name!r} does not exist any more, so that snapshot "
            f"{snapshot_name!r} has no optimizer state: pass optimizer=."
        )
    dump(path, tables, optimizer, quiet=True)


def load_into(
    folder: str,
    snapshot_name: str,
    name: str,
    tables: dict[str, Any],
    optimizer: OptimizerWrapper | None,
) -> None:
    """Reads a snapshot; see `MultiTableEmbedding.load_snapshot`. The arguments are as in `save`."""
    path = _path(folder, snapshot_name, name)
    optimizer = optimizer or _optimizer_of(tables, "load_snapshot")
    ranks = Ranks("load_snapshot")
    with ranks.stage() as stage:
        if ranks.rank == 0:
            stage.say(_contents(path))
    there, trained_with, others = stage.said[0]
    if there is None:
        raise FileNotFoundError(
            f"{name!r} has no snapshot {snapshot_name!r}: there is none at {path}; snapshots in "
            f"{folder}: {', '.join(others) or 'none'}."
        )
    if sorted(there) != sorted(tables):
        raise ValueError(
            f"snapshot {snapshot_name!r} has the tables {', '.join(there)}, but {name!r} has "
            f"{', '.join(tables)}."
        )
    load(path, tables, optimizer, quiet=True)
    if optimizer is None and trained_with is not None:
        warn(
            f"snapshot {snapshot_name!r} has the state of {trained_with}, but no optimizer trains "
            f"{name!r} yet, so that only the vectors were loaded: pass optimizer=."
        )


def _contents(path: str) -> tuple[list[str] | None, str | None, list[str]]:
    """Returns the names of a snapshot's tables, its optimizer, and the snapshots beside it."""
    try:
        manifest = storage.Chain.open(path).last.manifest
    except FileNotFoundError:
        folder = pathlib.Path(path).parent.parent
        others = sorted(each.name for each in folder.iterdir()) if is_directory(folder) else []
        return None, None, others
    optimizer = manifest.optimizer
    return (
        [table.name for table in manifest.tables],
        None if optimizer is None else str(optimizer.get("name")),
        [],
    )


def _path(folder: str, snapshot_name: Any, name: str) -> str:
    if not isinstance(snapshot_name, str):
        raise TypeError(f"snapshot_name must be a string, got {snapshot_name!r}.")
    if snapshot_name in ("", ".", "..") or "/" in snapshot_name or os.sep in snapshot_name:
        raise ValueError(f"snapshot_name must be the name of a folder, got {snapshot_name!r}.")
    return os.path.join(folder, snapshot_name, name)


def _optimizer_of(tables: dict[str, Any], call: str) -> OptimizerWrapper | None:
    """Returns the wrapper that trains the tables, or None.

    Raises:
        ValueError: different wrappers train them.
    """
    optimizers = {
        id(optimizer): optimizer
        for optimizer in map(optimizer_of, tables.values())
        if optimizer is not None
    }
    if len(optimizers) > 1:
        raise ValueError(
            f"{len(optimizers)} optimizers train the tables: {call} needs optimizer=, one of them."
        )
    return next(iter(optimizers.values()), None)
