"""Updating tables with deltas: apply_delta."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dynemb import _ops, storage
from tf_dynemb.dense import weights as dense_weights
from tf_dynemb.dense.names import Dense
from tf_dynemb.dense.optimizer_entry import check_optimizer, restore_optimizer
from tf_dynemb.format.steps import decays
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel.agreement import Ranks, check_alike
from tf_dynemb.persistence import columns
from tf_dynemb.persistence.continuation import (
    common_id,
    continuations,
    id_of_copy,
    ids_of_rows,
    parent_of_rows,
)
from tf_dynemb.persistence.entry_check import check_entry, has_state, last_optimizer, takes_state
from tf_dynemb.persistence.joint_reading import open_chain, read_chain, verify
from tf_dynemb.persistence.naming import described, dynamic_only, named_variables
from tf_dynemb.persistence.watermark import Watermark
from tf_dynemb.storage.places import place_of
from tf_dynemb.storage.snapshot import Name
from tf_dynemb.tables.batches import load_steps
from tf_dynemb.tables.cut import Cut, last_tick
from tf_dynemb.tables.lineage import Snapshots
from tf_dynemb.tables.table import table_stats
from tf_dynemb.variables.dynamic import DynamicVariable


def apply_delta(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: OptimizerWrapper | None = None,
    *,
    cast: bool = False,
    dense: str | None = "all",
) -> Watermark:
    """Updates tables and dense weights with the deltas at `path` that continue their content.

    The rows in a delta are set, and the keys that it names as deleted are erased. All other rows
    remain, including rows that were trained here. All deltas are verified before the first is
    applied. If applying one fails later, for example because a table is full, the changes up to
    then remain, and `apply_delta` can be called again. With several ranks all of them call this, as
    with `load`.

    Args:
        path: a chain, a directory of deltas, or one delta; or the URL of a chain or of deltas.
        variables: as in `load`.
        optimizer: if given, the state of the rows, the number of steps and the scalar variables are
            also loaded if they are this optimizer's.
        cast: as in `load`.
        dense: as in `load`, except that deltas without dense weights leave them as they are.

    Returns:
        The watermark of the last delta applied, or of the last one at `path` if none was new.

    Raises:
        ValueError: no snapshot at `path` continues the content of the tables; or a table differs,
            as in `load`.
        TypeError: a variable is not a `DynamicVariable`, or `optimizer` has another type.
        FileNotFoundError, tf_dynemb.storage.DataLossError, RuntimeError: as in `load`.
    """
    ranks = Ranks("apply_delta")
    with ranks.stage() as stage:
        place_of(path)  # raises unless it is one
        tables = dynamic_only(named_variables(variables))
        check_optimizer(optimizer)
        weights = dense_weights.chosen(dense, variables)
        of_optimizer = f"optimizer: {optimizer is not None}"
        stage.say([*described(tables), of_optimizer, *dense_weights.described(weights)])
    check_alike(stage.said, "the variables")
    return read_chain(
        ranks,
        path,
        lambda names: _apply(ranks, path, names, tables, (weights, variables), optimizer, cast),
    )


def _apply(
    ranks: Ranks,
    path: str | os.PathLike[str],
    names: Sequence[str],
    tables: Mapping[str, DynamicVariable],
    weights: tuple[Dense, Any],
    optimizer: OptimizerWrapper | None,
    cast: bool,
) -> Watermark:
    if ranks.size == 1:  # several ranks may have applied different ones
        names = _from_known(names, tables)
    with ranks.stage() as stage:
        chain = open_chain(ranks, path, names)
        fresh = continuations(chain, tables)
        for snapshot in fresh:
            for name, table in tables.items():
                check_entry(snapshot, name, table, cast)
                _check_steps(snapshot, name, table, optimizer)
        stage.say([snapshot.manifest.id for snapshot in fresh])
    # Ranks may have applied different deltas if an earlier call failed on some of them.
    fresh_ids = set().union(*stage.said)
    fresh_somewhere = [s for s in chain.snapshots if s.manifest.id in fresh_ids]
    with ranks.stage():
        verify(ranks, fresh_somewhere, quiet=True)
    with ranks.stage():
        holders = [each for each in fresh_somewhere if each.manifest.dense][-1:]
        loaded = dense_weights.read(ranks, holders, *weights, optimizer, tables, cast)
        known = {name: table.snapshots for name, table in tables.items()}
        if optimizer is not None:
            optimizer.attach(list(tables.values()))
        for snapshot in fresh:
            for name, table in tables.items():
                _apply_one(snapshot, name, table, known[name], optimizer is not None)
    if fresh_somewhere and optimizer is not None:
        restore_optimizer(optimizer, tables, last_optimizer(fresh_somewhere))
    loaded.assign()
    return Watermark.of(chain.last.manifest)


def _from_known(names: Sequence[str], tables: Mapping[str, DynamicVariable]) -> Sequence[str]:
    """Returns the directories of a chain from the last one that all tables have, or all of them.

    A long chain that is applied again and again is thereby not read again and again.
    """
    known = [table.snapshots for table in tables.values()]
    for place in reversed(range(len(names))):
        name = Name.parse(names[place])
        if name is not None and common_id([name.id, id_of_copy(name.id)], known):
            return names[place:]
    return names


def _check_steps(
    snapshot: storage.Snapshot,
    name: str,
    table: DynamicVariable,
    optimizer: OptimizerWrapper | None,
) -> None:
    """Raises ValueError if rows that a delta lacks would miss steps that have changed them."""
    entry = snapshot.manifest.table(name)[1]
    if not decays(entry.steps):
        return
    spec = None if optimizer is None else optimizer.state_spec(table)
    state = entry.state
    if spec is None or state is None or spec[:2] != (state.optimizer, tuple(state.widths)):
        raise ValueError(
            f"{snapshot} comes from an optimizer with catch_up and weight_decay, which "
            f"shrinks the rows of {name!r} that the delta does not have. Pass apply_delta the same "
            "optimizer, and write dumps and deltas with it; or use load."
        )


def _apply_one(
    snapshot: storage.Snapshot,
    name: str,
    table: DynamicVariable,
    known: Snapshots,
    with_state: bool,
) -> None:
    manifest = snapshot.manifest
    ids = (parent_of_rows(manifest) or "", *ids_of_rows(manifest))
    at, id_ = next((s, id_) for s in (table.snapshots, known) for id_ in ids if id_ in s)
    begin = at.tick(id_)
    # `known` is the table's own, unless an optimizer has attached that reset all state.
    state_continued = known is table.snapshots and at.has_state(id_)
    _ops.library().dynemb_advance_clock(manifest.watermark, manifest.watermark_utc_ns)
    evictions = table_stats(table.handle)["evictions"]
    unchanged_until = _unchanged_until(begin, table)
    takes = with_state and takes_state(snapshot, name, table, table.state_spec)
    if takes:
        load_steps(table.handle, manifest.table(name)[1].steps, manifest.watermark)
    batches = columns.erase(snapshot, name, table.handle, table.key_type)
    batches += columns.load_rows(snapshot, name, table, table.handle, takes, at_tick=-1)
    columns.load_counters(snapshot, name, table, table.handle)
    after = last_tick()
    # If any other call has changed the table, the next delta repeats all of these changes.
    alone = after == unchanged_until + batches
    alone = alone and evictions == table_stats(table.handle)["evictions"]
    complete = state_continued and (takes or not has_state(snapshot, name))
    table.snapshots.note(ids_of_rows(manifest)[0], after if alone else begin, complete)


def _unchanged_until(tick: int, table: DynamicVariable) -> int:
    """Returns the last tick if no batch after `tick` has changed the table, otherwise -1.

    It also returns -1 if the table no longer remembers this.
    """
    try:
        with Cut([table], [tick], with_deleted=True) as cut:
            info = cut.info(0)
            # A delta can also have rows that were not updated (docs/catch_up.md).
            updates = (rows.updates + np.int64(info.base) for _, rows in cut.blocks())
            unchanged = not len(info.deleted) and all(
                (block_updates <= tick).all() for block_updates in updates
            )
            return cut.tick if unchanged else -1
    except tf.errors.FailedPreconditionError:
        return -1
