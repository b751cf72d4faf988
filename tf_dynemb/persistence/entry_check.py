"""Checks that the entry of a table in a snapshot fits the variable that it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_dynemb import storage
from tf_dynemb._warn import warn
from tf_dynemb.persistence import columns
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable


def check_entry(
    snapshot: storage.Snapshot, name: str, variable: DynamicVariable | Variable, cast: bool
) -> None:
    """Raises ValueError unless a snapshot's table can be loaded into the variable."""
    manifest = snapshot.manifest
    names = [entry.name for entry in manifest.tables]
    if name not in names:
        hint = "A dict of names and variables loads tables under other names."
        if variable.has_automatic_name:
            hint = (
                "The name is automatic, and depends on the layers that the process created before: "
                f"name the layer. {hint}"
            )
        raise ValueError(
            f"{snapshot} has no table {name!r}; its tables are {', '.join(names)}. {hint}"
        )
    _, entry = manifest.table(name)
    have = form_of(variable)
    if not isinstance(variable, DynamicVariable):
        all_rows, _ = variable.global_shape
        rows = sum(shard.rows for shard in entry.shards)
        if rows != all_rows:
            raise ValueError(
                f"table {name!r} has {rows} rows on disk, but {variable.name!r} has {all_rows}."
            )
    for what, here in have.items():
        there = getattr(entry, what)
        if there != here and not (what == "dtype" and cast):
            hint = " Pass cast=True to convert the vectors." if what == "dtype" else ""
            raise ValueError(
                f"table {name!r} has {what} {there} on disk, but {variable.name!r} has {here}."
                + hint
            )


def form_of(variable: DynamicVariable | Variable) -> dict[str, Any]:
    """Returns what an entry must have in common with a variable, by the names of its members."""
    if isinstance(variable, DynamicVariable):
        dimension, key_type = variable.dimension, variable.key_type.name
    else:
        dimension, key_type = variable.global_shape[1], "int64"
    return {"dimension": dimension, "key_type": key_type, "dtype": variable.dtype.name}


def check_is_same(entry: storage.TableEntry, variable: DynamicVariable | Variable) -> None:
    """Raises ValueError if a table on disk, found by an automatic name, is another one."""
    if not isinstance(variable, DynamicVariable):
        return
    here = {
        "initializer": columns.initializer_of(variable),
        "padding_id": variable.padding_id,
        "string_hash": variable.string_hash,
    }
    for what, value in here.items():
        there = getattr(entry, what)
        if there != value:
            raise ValueError(
                f"table {entry.name!r} has {what} {there} on disk, but {variable.name!r} has "
                f"{value}. The name is automatic, so these are probably two different tables: name "
                "the layers, or load a dict of names and variables."
            )


def has_state(snapshot: storage.Snapshot, name: str) -> bool:
    """Whether a snapshot contains the state of a table's rows."""
    return snapshot.manifest.table(name)[1].state_width > 0


def fits_state(snapshot: storage.Snapshot, name: str, spec: StateSpec) -> bool:
    """Whether a snapshot contains the state of a table's rows, and it is the state `spec`."""
    _, entry = snapshot.manifest.table(name)
    if entry.state is None or entry.state_width == 0:
        return False
    return spec[:2] == (entry.state.optimizer, tuple(entry.state.widths))


def takes_state(
    snapshot: storage.Snapshot, name: str, table: DynamicVariable, spec: StateSpec | None
) -> bool:
    """Whether a snapshot's state fits rows with the state `spec`; warns if it is dropped or absent.

    If it does not fit, the rows start with fresh state.
    """
    _, entry = snapshot.manifest.table(name)
    optimizer = spec[0] if spec else "no optimizer"
    if entry.state and spec and spec[:2] == (entry.state.optimizer, tuple(entry.state.widths)):
        return entry.state_width > 0
    if entry.state and entry.state_width:
        warn(
            f"the state of {entry.state.optimizer!r} that table {name!r} has in "
            f"{snapshot} is dropped: {table.name!r} is trained with {optimizer!r}. Its "
            "rows start with fresh state."
        )
    elif spec and sum(spec[1]) and any(shard.rows for shard in entry.shards):
        warn(
            f"table {name!r} has no optimizer state in {snapshot}: the rows in it start "
            f"with fresh state of {optimizer!r}."
        )
    return False


def last_optimizer(snapshots: Sequence[storage.Snapshot]) -> Mapping[str, Any] | None:
    """Returns the last optimizer entry in the snapshots, or None."""
    entries = [snapshot.manifest.optimizer for snapshot in snapshots]
    return next((entry for entry in reversed(entries) if entry is not None), None)
