"""Loading tables from disk: load."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dynemb import _ops, storage
from tf_dynemb._warn import warn
from tf_dynemb.chains.conditions import ns_of
from tf_dynemb.dense import weights as dense_weights
from tf_dynemb.dense.names import Dense
from tf_dynemb.dense.optimizer_entry import check_optimizer, restore_optimizer
from tf_dynemb.format.steps import without_steps
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel import ownership
from tf_dynemb.parallel.agreement import Ranks, check_alike
from tf_dynemb.persistence import columns, static_rows
from tf_dynemb.persistence.continuation import ids_of_rows
from tf_dynemb.persistence.entry_check import (
    check_entry,
    check_is_same,
    fits_state,
    has_state,
    last_optimizer,
    takes_state,
)
from tf_dynemb.persistence.joint_reading import open_chain, read_chain, verify
from tf_dynemb.persistence.naming import (
    described,
    named_variables,
    warn_of_automatic_names,
    with_automatic_names,
)
from tf_dynemb.persistence.watermark import Watermark
from tf_dynemb.storage.places import place_of
from tf_dynemb.tables import batches, expiry
from tf_dynemb.tables.lineage import new_history
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable


def load(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: OptimizerWrapper | None = None,
    *,
    cast: bool = False,
    until: Watermark | datetime.datetime | None = None,
    dense: str | None = "all",
    quiet: bool | None = None,
) -> Watermark:
    """Replaces tables and dense weights with the chain at `path`: its base and every delta after.

    All files are checked first, and loaded into separate tables. Then all variables change at once;
    their previous content is lost. A load that fails changes nothing. A table also takes over the
    seed, if the initializer is the same: keys that are new get the initial vectors that they would
    have got in the table that was dumped.

    Args:
        path: a chain, or one base, on a file system that all ranks share; or the URL of a chain.
        variables: the tables to load, as in `dump`. A dict gives their names on disk. Other tables
            on disk are ignored.
        optimizer: if given, its state in the rows, its number of steps and its scalar variables,
            such as the learning rate, are loaded too. State of another optimizer is dropped, with a
            warning, and the rows start with fresh state; with a model, it is an error, unless
            `dense` is "weights" or None. If None, the rows also start with fresh
            state; a warning says so if the dump has the state of the optimizer that trains the
            tables, or that a model in `variables` is compiled with.
        cast: whether vectors can have another dtype on disk; they are rounded to nearest.
        until: the snapshot to load, if it is not the last one: a watermark that `dump` or
            `incremental_dump` returned; or an aware datetime, for the last one that was published
            and is not of a later time. Superseded bases are there if `dump` was told to `keep`
            them. To continue the chain from there, call `dump` after it.
        dense: what to load of a model besides its tables: "all", "weights" or None, as in `dump`.
            The model must have been called or built, so that it has its weights. They come from the
            last snapshot that has some, with a warning if it is not the last one. On another number
            of ranks than wrote them, all ranks get rank 0's values.
        quiet: as in `dump`.

    Returns:
        The watermark of the loaded tables, whose `extra` is what `dump` was given.

    Raises:
        FileNotFoundError: there is no snapshot at `path`, or not the one that `until` names; raised
            on all ranks.
        tf_dynemb.storage.DataLossError: a file is missing or damaged; the message names it.
        TypeError: an element of `variables`, or `optimizer` or `until`, has another type.
        ValueError: `until` has no time zone; or there are only deltas at `path`; or a table is not
            on disk, or differs in dimension, key type or (without `cast`) dtype; or the ranks name
            different variables; or the chain has no dense weights, or not all that `dense` says, or
            those of a model of another structure or of another optimizer.
        RuntimeError: the function was called inside a `tf.function`, or failed on another rank,
            which the message names.
        tf.errors.ResourceExhaustedError: a table cannot hold the rows.
    """
    ranks = Ranks("load")
    with ranks.stage() as stage:
        place_of(path)  # raises unless it is one
        tables = named_variables(variables)
        check_optimizer(optimizer)
        automatic = with_automatic_names(tables, variables)
        compiled_with = _compiled_with(variables)
        end = _end(until)
        weights = dense_weights.chosen(dense, variables)
        of_optimizer = f"optimizer: {optimizer is not None}"
        stage.say([*described(tables), of_optimizer, *dense_weights.described(weights)])
    check_alike(stage.said, "the variables")
    quiet = quiet if ranks.rank == 0 else True

    def read(names: Sequence[str]) -> Watermark:
        watermark, chain = _load(
            ranks, path, names, tables, (weights, variables), automatic, optimizer, cast, quiet
        )
        if optimizer is None and ranks.rank == 0:
            _warn_of_fresh_state(chain, tables, compiled_with)
        return watermark

    return read_chain(ranks, path, read, end)


def _compiled_with(variables: Any) -> OptimizerWrapper | None:
    """Returns the optimizer of a compiled model among `variables`, or None."""
    each = variables if isinstance(variables, (list, tuple)) else [variables]
    found = [getattr(one, "optimizer", None) for one in each if isinstance(one, keras.Model)]
    return next((one for one in found if isinstance(one, OptimizerWrapper)), None)


def _warn_of_fresh_state(
    chain: storage.Chain,
    tables: Mapping[str, DynamicVariable | Variable],
    compiled_with: OptimizerWrapper | None,
) -> None:
    """Warns if rows lost a state that their optimizer would have continued."""
    for name, table in tables.items():
        if not isinstance(table, DynamicVariable):
            continue
        spec = table.state_spec
        if spec is None and compiled_with is not None:
            spec = compiled_with.state_spec(table)
        if spec is not None and fits_state(chain.last, name, spec):
            warn(
                f"load: the rows of {name!r} start with fresh state of {spec[0]!r}, although "
                f"{chain.last} has it. To continue the training, pass the optimizer, "
                "such as optimizer=model.optimizer."
            )
            return


def _end(until: Watermark | datetime.datetime | None) -> str | int | None:
    """Returns `until` as `storage.Chain.names_until` has it."""
    if isinstance(until, datetime.datetime):
        return ns_of(until, "until")
    if until is None or isinstance(until, Watermark):
        return until and until.id
    raise TypeError(f"until must be a Watermark, a datetime or None, got {until!r}.")


def _load(
    ranks: Ranks,
    path: str | os.PathLike[str],
    names: Sequence[str],
    tables: Mapping[str, DynamicVariable | Variable],
    weights: tuple[Dense, Any],
    automatic: Sequence[str],
    optimizer: OptimizerWrapper | None,
    cast: bool,
    quiet: bool | None,
) -> tuple[Watermark, storage.Chain]:
    """Loads the snapshots with these names; returns the watermark, and the chain of them."""
    dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
    with ranks.stage():
        chain = open_chain(ranks, path, names)
        if chain.base is None:
            raise ValueError(
                f"{chain} contains deltas, but no dump that they continue: "
                "load the dump first, then apply the deltas with apply_delta."
            )
        for name, variable in tables.items():
            for snapshot in chain.snapshots if name in dynamic else [chain.base]:
                check_entry(snapshot, name, variable, cast)
        for name in automatic:
            check_is_same(chain.base.manifest.table(name)[1], tables[name])
        if ranks.rank == 0:
            members = ("dimension", "key_type", "dtype")
            forms = {
                entry.name: [getattr(entry, member) for member in members]
                for entry in chain.base.manifest.tables
            }
            warn_of_automatic_names("load", automatic, forms)
        verify(ranks, chain.snapshots, quiet)

    last = chain.last.manifest
    is_copy = last.copy is not None
    with ranks.stage():
        loaded = dense_weights.read(ranks, chain.snapshots, *weights, optimizer, tables, cast)
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
        _ops.library().dynemb_swap_rows(
            [table.handle for table in dynamic.values()],
            [stage.handle for stage in staged],
            last.watermark,
            last.watermark_utc_ns,
        )
    for name, value in values.items():
        tables[name].assign(value)
        history = chain.base.manifest.table(name)[1].history
        tables[name].history = new_history() if is_copy or history is None else history
    for table, spec, stage in zip(dynamic.values(), specs, staged, strict=True):
        table.took_over(None if is_copy else stage.history, stage.seed)
        if not stage.evictions:  # otherwise the table lacks rows, and no delta would report this
            for id_ in ids_of_rows(last):
                table.snapshots.note(id_, last.watermark, stage.has_state)
        if optimizer is not None:
            table.state_was_restored(spec)
    if optimizer is not None:
        optimizer.attach(list(dynamic.values()))
        restore_optimizer(optimizer, dynamic, last_optimizer(chain.snapshots))
    loaded.assign()
    return Watermark.of(last), chain


class _Staged(NamedTuple):
    """The rows of a chain, in a table that no variable uses yet.

    Attributes:
        handle: the handle of that table.
        evictions: the number of rows for which there was no space.
        has_state: whether the state of every snapshot was loaded.
        history: the history of the table that was dumped, if it is known.
        seed: the seed of that table; None if it had other initial vectors anyway.
    """

    handle: tf.Tensor
    evictions: int
    has_state: bool
    history: str | None
    seed: int | None


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
    seed = _seed(entry, table)
    handle = table.make_empty(ownership.share_of(table, rows), spec, seed)
    tick = chain.last.manifest.watermark + 1
    _, last = chain.last.manifest.table(name)
    marks = last.expiry_marks
    takes = [with_state and takes_state(each, name, table, spec) for each in chain.snapshots]
    has = [has_state(each, name) for each in chain.snapshots]
    complete = all(taken or not there for taken, there in zip(takes, has, strict=True))
    if all(takes):
        batches.load_steps(handle, without_steps(last.steps), tick - 1)
    try:
        for snapshot, taken, change in zip(
            chain.snapshots, takes, chain.changes(name), strict=True
        ):
            columns.erase(snapshot, name, handle, table.key_type)
            columns.load_rows(snapshot, name, table, handle, taken, tick, quiet, marks, change)
            columns.load_counters(snapshot, name, table, handle)
    except tf.errors.ResourceExhaustedError as error:
        raise tf.errors.ResourceExhaustedError(
            None, None, f"table {table.name!r} cannot hold the rows of {name!r}: {error.message}"
        ) from error
    evictions = batches.warn_of_evictions(handle, table, f"table {name!r}")
    expiry.take_ages(handle, table.options.lifetime, last.ttl_clock, marks, f"table {name!r}")
    return _Staged(handle, evictions, complete, last.history, seed)


def _seed(entry: storage.TableEntry, table: DynamicVariable) -> int | None:
    """Returns the seed of a table on disk if it has the same initializer as a table here."""
    if entry.initializer != columns.initializer_of(table):
        return None
    return entry.seed - 2**64 if entry.seed >= 2**63 else entry.seed


def _state_spec(table: DynamicVariable, optimizer: OptimizerWrapper | None) -> StateSpec | None:
    """The state that the loaded rows get: the optimizer's, or the state that the table has."""
    return table.state_spec if optimizer is None else optimizer.state_spec(table)
