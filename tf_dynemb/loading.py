"""Tables from disk: load and apply_delta."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dynemb import _ops, rows_io, storage
from tf_dynemb.cut import Cut, last_tick
from tf_dynemb.dynamic_variable import DynamicVariable, Snapshots, StateSpec
from tf_dynemb.naming import named_variables
from tf_dynemb.optimizer import OptimizerWrapper
from tf_dynemb.optimizer_entry import restore_optimizer
from tf_dynemb.snapshot import (
    Watermark,
    check_optimizer,
    common_id,
    dynamic_only,
    watermark_of,
)


def load(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: OptimizerWrapper | None = None,
    *,
    cast: bool = False,
    quiet: bool | None = None,
) -> Watermark:
    """Makes tables what the chain at `path` says: its base and every delta after it.

    Everything is checked and loaded beside the tables first; then all of them change at once. What
    was in them before is gone. A load that fails changes nothing.

    Args:
        path: of the chain, or of one snapshot in it.
        variables: the tables to load, as in `dump`; a dict says under which names they are on disk.
            Other tables there are left alone.
        optimizer: also load the state in the rows, the number of steps, and settings that are
            variables, such as the learning rate. State of another optimizer is dropped, with a
            warning; rows then begin with fresh state.
        cast: whether vectors may be of another dtype on disk; they are rounded to nearest.
        quiet: as in `dump`.

    Returns:
        The watermark that the tables are at.

    Raises:
        FileNotFoundError: there is no dump.
        tf_dynemb.storage.DataLossError: a file is missing or damaged; it is named.
        ValueError: a table is not there, or differs in dimension, key type or (without `cast`)
            dtype.
        tf.errors.ResourceExhaustedError: a table cannot take the rows.
    """
    tables = named_variables(variables)
    check_optimizer(optimizer)
    if not tf.executing_eagerly():
        raise RuntimeError("tables are loaded eagerly only: call load outside tf.function.")
    return storage.Chain.load(path, lambda chain: _load(chain, tables, optimizer, cast, quiet))


def apply_delta(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: OptimizerWrapper | None = None,
    *,
    cast: bool = False,
) -> Watermark:
    """Brings tables forward by the deltas at `path` that continue what they hold.

    Rows that a delta has are set, keys that it deleted are erased; other rows stay, also those that
    were trained here. All deltas are verified before the first is applied. If it fails later, as
    where a table is full, what was applied stays; it can be called again.

    Args:
        path: of a chain, of a directory of deltas, or of one delta.
        variables: as in `load`.
        optimizer: also take over the state of rows, if it is this optimizer's.
        cast: as in `load`.

    Returns:
        The watermark of the last delta applied, or of the last one there if none was new.

    Raises:
        ValueError: no delta there continues what the tables hold.
        tf_dynemb.storage.DataLossError: as in `load`.
    """
    tables = dynamic_only(named_variables(variables))
    check_optimizer(optimizer)
    return storage.Chain.load(path, lambda chain: _apply(chain, tables, optimizer, cast))


def _apply(
    chain: storage.Chain,
    tables: Mapping[str, DynamicVariable],
    optimizer: OptimizerWrapper | None,
    cast: bool,
) -> Watermark:
    fresh = _continuations(chain, tables)
    for snapshot in fresh:
        snapshot.verify(checksum=rows_io.checksum)
        for name, table in tables.items():
            _check_entry(snapshot, name, table, cast)
    known = {name: table.snapshots for name, table in tables.items()}
    if optimizer is not None:
        optimizer.attach(list(tables.values()))
    for snapshot in fresh:
        for name, table in tables.items():
            _apply_one(snapshot, name, table, known[name], optimizer is not None)
    if fresh and optimizer is not None:
        restore_optimizer(optimizer, tables, _last_entry(fresh))
    return watermark_of(chain.last.manifest)


def _apply_one(
    snapshot: storage.Snapshot,
    name: str,
    table: DynamicVariable,
    known: Snapshots,
    with_state: bool,
) -> None:
    manifest = snapshot.manifest
    ids = (manifest.parent or "", *manifest.ids)
    at, id_ = next((s, id_) for s in (table.snapshots, known) for id_ in ids if id_ in s)
    begin = at.tick(id_)
    # `known` is the table's own, but if an optimizer has attached that lets all state begin anew.
    state_went_on = known is table.snapshots and at.has_state(id_)
    _ops.library().dynemb_advance_clock(manifest.watermark, manifest.watermark_utc_ns)
    evictions = table.stats()["evictions"]
    unchanged_until = _unchanged_until(begin, table)
    has_state = with_state and _takes_state(snapshot, name, table, table.state_spec)
    batches = rows_io.erase(snapshot, name, table.handle, table.key_type)
    batches += rows_io.load_rows(snapshot, name, table, table.handle, has_state, at_tick=-1)
    after = last_tick()
    # If anything else has changed the table, the next delta tells of all of it once more.
    alone = after == unchanged_until + batches
    alone = alone and evictions == table.stats()["evictions"]
    complete = state_went_on and (has_state or not _has_state(snapshot, name))
    table.snapshots.note(manifest.id, after if alone else begin, complete)


def _unchanged_until(tick: int, table: DynamicVariable) -> int:
    """The last batch, if none after `tick` has changed the table; -1 if one has, or may have."""
    try:
        with Cut([table], [tick], with_deleted=True) as cut:
            unchanged = not len(cut.info(0)[3]) and not any(True for _ in cut.pieces())
            return cut.tick if unchanged else -1
    except tf.errors.FailedPreconditionError:
        return -1


def _load(
    chain: storage.Chain,
    tables: Mapping[str, Any],
    optimizer: OptimizerWrapper | None,
    cast: bool,
    quiet: bool | None,
) -> Watermark:
    if chain.base is None:
        raise ValueError(
            f"{chain.last.directory.parent} holds deltas but no dump that they continue: load "
            "that, then apply them with apply_delta."
        )
    dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
    for name, variable in tables.items():
        for snapshot in chain.snapshots if name in dynamic else [chain.base]:
            _check_entry(snapshot, name, variable, cast)
    for snapshot in chain.snapshots:
        with rows_io.progress(0, "verify", "B", quiet) as bar:

            def show(done: int, total: int, bar: Any = bar) -> None:
                bar.total = total
                bar.update(done - bar.n)

            snapshot.verify(checksum=rows_io.checksum, progress=show)

    last = chain.last.manifest
    specs = [_state_spec(table, optimizer) for table in dynamic.values()]
    staged = [
        _stage(chain, name, table, spec, optimizer is not None, quiet)
        for (name, table), spec in zip(dynamic.items(), specs, strict=True)
    ]
    values = {
        name: rows_io.read_static(chain.base, name, variable)
        for name, variable in tables.items()
        if name not in dynamic
    }
    if dynamic:
        _ops.library().dynemb_adopt(
            [table.handle for table in dynamic.values()],
            [stage.handle for stage in staged],
            last.watermark,
            last.watermark_utc_ns,
        )
    for name, value in values.items():
        tables[name].assign(value)
    for table, spec, stage in zip(dynamic.values(), specs, staged, strict=True):
        table.snapshots = Snapshots()
        if not stage.evictions:  # else the table lacks rows, and no delta would say so
            for id_ in last.ids:
                table.snapshots.note(id_, last.watermark, stage.has_state)
        if optimizer is not None:
            table.state_was_restored(spec)
    if optimizer is not None:
        optimizer.attach(list(dynamic.values()))
        restore_optimizer(optimizer, dynamic, _last_entry(chain.snapshots))
    return watermark_of(last)


class _Stage(NamedTuple):
    """Rows of a chain in a table apart from the variable.

    Attributes:
        handle: of that table.
        evictions: rows that had no place.
        has_state: whether no snapshot's state was left out.
    """

    handle: Any
    evictions: int
    has_state: bool


def _stage(
    chain: storage.Chain,
    name: str,
    table: DynamicVariable,
    spec: StateSpec | None,
    with_state: bool,
    quiet: bool | None,
) -> _Stage:
    assert chain.base is not None
    _, entry = chain.base.manifest.table(name)
    handle = table.make_empty(sum(shard.rows for shard in entry.shards), spec)
    tick = chain.last.manifest.watermark + 1
    complete = True
    try:
        for snapshot in chain.snapshots:
            has_state = with_state and _takes_state(snapshot, name, table, spec)
            complete = complete and (has_state or not _has_state(snapshot, name))
            rows_io.erase(snapshot, name, handle, table.key_type)
            rows_io.load_rows(snapshot, name, table, handle, has_state, tick, quiet)
    except tf.errors.ResourceExhaustedError as error:
        raise tf.errors.ResourceExhaustedError(
            None, None, f"table {table.name!r} cannot take the rows of {name!r}: {error.message}"
        ) from error
    evictions = rows_io.warn_of_evictions(handle, table, f"table {name!r}")
    return _Stage(handle, evictions, complete)


def _has_state(snapshot: storage.Snapshot, name: str) -> bool:
    return snapshot.manifest.table(name)[1].state_width > 0


def _last_entry(snapshots: Sequence[storage.Snapshot]) -> Mapping[str, Any] | None:
    """The latest that is known of the optimizer."""
    entries = [snapshot.manifest.optimizer for snapshot in snapshots]
    return next((entry for entry in reversed(entries) if entry is not None), None)


def _check_entry(snapshot: storage.Snapshot, name: str, variable: Any, cast: bool) -> None:
    """Raises ValueError unless a snapshot's table can be loaded into the variable."""
    manifest = snapshot.manifest
    names = [entry.name for entry in manifest.tables]
    if name not in names:
        raise ValueError(
            f"{snapshot.directory} has no table {name!r}; its tables are {', '.join(names)}. "
            "A dict of names and variables loads tables under other names."
        )
    _, entry = manifest.table(name)
    if isinstance(variable, DynamicVariable):
        have = {
            "dimension": variable.dimension,
            "key_type": variable.key_type.name,
            "dtype": variable.dtype.name,
        }
    else:
        have = {"dimension": variable.shape[1], "key_type": "int64", "dtype": variable.dtype.name}
        rows = sum(shard.rows for shard in entry.shards)
        if rows != variable.shape[0]:
            raise ValueError(
                f"table {name!r} has {rows} rows on disk, but {variable.name!r} has "
                f"{variable.shape[0]}."
            )
    for what, here in have.items():
        there = getattr(entry, what)
        if there != here and not (what == "dtype" and cast):
            hint = " Pass cast=True to convert the vectors." if what == "dtype" else ""
            raise ValueError(
                f"table {name!r} has {what} {there} on disk, but {variable.name!r} has {here}."
                + hint
            )


def _state_spec(table: DynamicVariable, optimizer: OptimizerWrapper | None) -> StateSpec | None:
    """The state that rows are loaded for: the optimizer's, or what the table has."""
    return table.state_spec if optimizer is None else optimizer.state_spec(table)


def _takes_state(
    snapshot: storage.Snapshot, name: str, table: DynamicVariable, spec: StateSpec | None
) -> bool:
    """Whether a snapshot's state goes into rows with this state; warns of what is dropped."""
    _, entry = snapshot.manifest.table(name)
    ours = spec[0] if spec else "no optimizer"
    if entry.state and spec and spec[:2] == (entry.state.optimizer, tuple(entry.state.widths)):
        return entry.state_width > 0
    if entry.state and entry.state_width:
        warnings.warn(
            f"the state of {entry.state.optimizer!r} that table {name!r} has in "
            f"{snapshot.directory} is dropped: {table.name!r} is trained with {ours!r}. Its rows "
            "begin with fresh state.",
            stacklevel=6,
        )
    elif spec and sum(spec[1]) and any(shard.rows for shard in entry.shards):
        warnings.warn(
            f"table {name!r} has no optimizer state in {snapshot.directory}: rows that are in it "
            f"begin with fresh state of {ours!r}.",
            stacklevel=6,
        )
    return False


def _continuations(
    chain: storage.Chain, tables: Mapping[str, DynamicVariable]
) -> list[storage.Snapshot]:
    """The deltas of a chain that come after what all tables hold."""
    known = [table.snapshots for table in tables.values()]
    snapshots = chain.snapshots
    for place in reversed(range(len(snapshots))):
        manifest = snapshots[place].manifest
        if common_id(manifest.ids, known):
            return snapshots[place + 1 :]
        if manifest.parent is not None and common_id([manifest.parent], known):
            return snapshots[place:]
    raise ValueError(
        f"{chain.last.directory} and what is before it do not continue what these tables hold: "
        "load the dump that they continue first."
    )
