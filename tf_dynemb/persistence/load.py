"""Tables from disk: load."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dynemb import _ops, storage
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel import ownership
from tf_dynemb.parallel.agreement import Ranks, check_alike
from tf_dynemb.persistence.entry_check import check_entry, has_state, last_optimizer, takes_state
from tf_dynemb.persistence.naming import described, named_variables
from tf_dynemb.persistence.optimizer_entry import check_optimizer, restore_optimizer
from tf_dynemb.snapshots import columns, static_rows
from tf_dynemb.snapshots.joint_reading import open_chain, read_chain, verify
from tf_dynemb.snapshots.watermark import Watermark
from tf_dynemb.tables import batches
from tf_dynemb.tables.lineage import Snapshots
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable


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
        path: of the chain, or of one snapshot in it. All ranks must share its file system.
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
        FileNotFoundError: there is no dump; on all ranks.
        tf_dynemb.storage.DataLossError: a file is missing or damaged; it is named.
        ValueError: a table is not there, or differs in dimension, key type or (without `cast`)
            dtype; or the ranks name different variables.
        RuntimeError: it failed on another rank, which the error names.
        tf.errors.ResourceExhaustedError: a table cannot take the rows.
    """
    ranks = Ranks("load")
    with ranks.stage() as stage:
        tables = named_variables(variables)
        check_optimizer(optimizer)
        stage.say([*described(tables), f"optimizer: {optimizer is not None}"])
    check_alike(stage.said, "the variables")
    quiet = quiet if ranks.rank == 0 else True
    return read_chain(
        ranks, path, lambda names: _load(ranks, path, names, tables, optimizer, cast, quiet)
    )


def _load(
    ranks: Ranks,
    path: str | os.PathLike[str],
    names: Sequence[str],
    tables: Mapping[str, Any],
    optimizer: OptimizerWrapper | None,
    cast: bool,
    quiet: bool | None,
) -> Watermark:
    dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
    with ranks.stage():
        chain = open_chain(ranks, path, names)
        if chain.base is None:
            raise ValueError(
                f"{chain.last.directory.parent} holds deltas but no dump that they continue: load "
                "that, then apply them with apply_delta."
            )
        for name, variable in tables.items():
            for snapshot in chain.snapshots if name in dynamic else [chain.base]:
                check_entry(snapshot, name, variable, cast)
        verify(ranks, chain.snapshots, quiet)

    last = chain.last.manifest
    with ranks.stage():
        specs = [_state_spec(table, optimizer) for table in dynamic.values()]
        staged = [
            _stage(chain, name, table, spec, optimizer is not None, quiet)
            for (name, table), spec in zip(dynamic.items(), specs, strict=True)
        ]
        values = {
            name: static_rows.read_static(chain.base, name, variable)
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
        restore_optimizer(optimizer, dynamic, last_optimizer(chain.snapshots))
    return Watermark.of(last)


class _Staged(NamedTuple):
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
) -> _Staged:
    assert chain.base is not None
    _, entry = chain.base.manifest.table(name)
    rows = sum(shard.rows for shard in entry.shards)
    handle = table.make_empty(ownership.share_of(table, rows), spec)
    tick = chain.last.manifest.watermark + 1
    complete = True
    try:
        for snapshot in chain.snapshots:
            takes = with_state and takes_state(snapshot, name, table, spec)
            complete = complete and (takes or not has_state(snapshot, name))
            columns.erase(snapshot, name, handle, table.key_type)
            columns.load_rows(snapshot, name, table, handle, takes, tick, quiet)
    except tf.errors.ResourceExhaustedError as error:
        raise tf.errors.ResourceExhaustedError(
            None, None, f"table {table.name!r} cannot take the rows of {name!r}: {error.message}"
        ) from error
    evictions = batches.warn_of_evictions(handle, table, f"table {name!r}")
    return _Staged(handle, evictions, complete)


def _state_spec(table: DynamicVariable, optimizer: OptimizerWrapper | None) -> StateSpec | None:
    """The state that rows are loaded for: the optimizer's, or what the table has."""
    return table.state_spec if optimizer is None else optimizer.state_spec(table)
