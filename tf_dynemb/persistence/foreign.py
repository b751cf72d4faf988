"""Replaces the content of tables with rows that another system wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb._warn import warn
from tf_dynemb.dense.optimizer_entry import check_optimizer
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel import ownership
from tf_dynemb.parallel.agreement import Ranks, check_alike
from tf_dynemb.persistence.naming import described, named_variables
from tf_dynemb.tables.batches import NEW_SCORES, NO_STATE, owned_rows, warn_of_evictions
from tf_dynemb.tables.cut import NOW, last_tick
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable


@dataclass(frozen=True, eq=False)
class ForeignRows:
    """Rows of a table that another system wrote: all of them, or the rows of one shard.

    Attributes:
        keys: an array [n] of integers; each key is in one shard only.
        vectors: an array [n, dim], floating point.
        states: for each state of the optimizer, by that system's name for it, an array [n, dim].
        optimizer: that system's name of the optimizer that the states belong to.
        has_state: bool [n], which rows have states; the others start with fresh state. None: all.
    """

    keys: npt.NDArray[Any]
    vectors: npt.NDArray[Any]
    states: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    optimizer: str | None = None
    has_state: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class System:
    """The system that wrote the rows.

    Attributes:
        name: its name in messages, as in "SOK's table 'users'".
        call: the name of the function that loads its rows.
        same_state: our optimizers whose state has the same meaning there: by our name, its name
            there and, in the order of our rows, the names of its states.
    """

    name: str
    call: str
    same_state: Mapping[str, tuple[str, tuple[str, ...]]]


def load_foreign(
    system: System,
    variables: Any,
    optimizer: OptimizerWrapper | None,
    read: Callable[[Mapping[str, DynamicVariable | Variable]], Mapping[str, Sequence[ForeignRows]]],
) -> None:
    """Replaces the content of tables with another system's rows.

    All rows are read into separate tables first; a failure changes nothing. All ranks call it, and
    each loads the rows that it owns.

    Args:
        system: the system.
        variables: `DynamicVariable`s and `tf_dynemb.Variable`s, as in `tf_dynemb.dump`.
        optimizer: if given, the state of an optimizer whose state means the same is loaded too.
            Other state is dropped, with a warning.
        read: returns the shards of each of the tables, which it gets by name.
    """
    ranks = Ranks(system.call)
    with ranks.stage() as stage:
        tables = named_variables(variables)
        check_optimizer(optimizer)
        stage.say([*described(tables), f"optimizer: {optimizer is not None}"])
        found = read(tables)
        for name, variable in tables.items():
            for rows in found[name]:
                _check(system, rows, name, variable)
        dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
        specs = {
            name: table.state_spec if optimizer is None else optimizer.state_spec(table)
            for name, table in dynamic.items()
        }
        handles = [
            _stage(system, found[name], name, table, specs[name], optimizer is not None)
            for name, table in dynamic.items()
        ]
        values = {
            name: _dense(system, found[name], name, v)
            for name, v in tables.items()
            if name not in dynamic
        }
    check_alike(stage.said, "the variables")
    if dynamic:
        current_handles = [table.handle for table in dynamic.values()]
        _ops.library().dynemb_swap_rows(current_handles, handles, last_tick(), NOW)
    for name, value in values.items():
        tables[name].assign(value)
    for name, table in dynamic.items():
        table.took_over(None, None)
        if optimizer is not None:
            table.state_was_restored(specs[name])
    if optimizer is not None:
        optimizer.attach(list(dynamic.values()))


def _check(
    system: System, rows: ForeignRows, name: str, variable: DynamicVariable | Variable
) -> None:
    dimension = variable.shape[1]
    if rows.vectors.shape[1] != dimension:
        raise ValueError(
            f"{system.name}'s table {name!r} has dimension {rows.vectors.shape[1]}, but "
            f"{variable.name!r} has {dimension}."
        )


def _stage(
    system: System,
    shards: Sequence[ForeignRows],
    name: str,
    table: DynamicVariable,
    spec: StateSpec | None,
    with_state: bool,
) -> tf.Tensor:
    """Creates a table with another system's rows, apart from the variable; returns its handle."""
    count = sum(len(shard.keys) for shard in shards)
    handle = table.make_empty(ownership.share_of(table, count), spec)
    for shard in shards:
        _stage_shard(system, shard, name, table, spec, with_state, handle)
    warn_of_evictions(handle, table, f"{system.name}'s table {name!r}")
    return handle


def _stage_shard(
    system: System,
    rows: ForeignRows,
    name: str,
    table: DynamicVariable,
    spec: StateSpec | None,
    with_state: bool,
    handle: tf.Tensor,
) -> None:
    states = _states(system, rows, name, table, spec) if with_state else []
    key_type = table.key_type.as_numpy_dtype

    def read_keys(selected: slice) -> npt.NDArray[Any]:
        return _as_key_type(system, rows.keys[selected], key_type, name)

    for selected, keys in owned_rows(
        table, len(rows.keys), len(states) * table.dimension, read_keys
    ):
        state = [np.asarray(values[selected], np.float32) for values in states]
        if state and rows.has_state is not None and spec is not None:
            has = rows.has_state[selected, np.newaxis]
            state = [
                np.where(has, x, np.float32(init)) for x, init in zip(state, spec[2], strict=True)
            ]
        times = np.zeros(len(keys), np.uint32)
        _ops.library().dynemb_load_rows(
            handle,
            keys,
            tf.cast(tf.constant(rows.vectors[selected]), table.dtype),
            np.concatenate(state, axis=1) if state else NO_STATE,
            times,
            NEW_SCORES,
            0,
            -1,
        )


def _states(
    system: System, rows: ForeignRows, name: str, table: DynamicVariable, spec: StateSpec | None
) -> list[npt.NDArray[Any]]:
    """Returns the other system's states in the order of ours; none if their meaning differs."""
    optimizer = spec[0] if spec else "no optimizer"
    foreign_optimizer, names = system.same_state.get(optimizer, ("", ()))
    if foreign_optimizer == rows.optimizer and set(names) == set(rows.states):
        return [rows.states[state] for state in names]
    if rows.states:
        warn(
            f"the state of {rows.optimizer} that {system.name}'s table {name!r} has is dropped: "
            f"{table.name!r} is trained with {optimizer!r}. Its rows start with fresh state."
        )
    return []


def _as_key_type(
    system: System, keys: npt.NDArray[Any], key_type: npt.DTypeLike, name: str
) -> npt.NDArray[Any]:
    cast = keys.astype(key_type)
    if not (cast == keys).all():
        raise ValueError(
            f"{system.name}'s table {name!r} has {keys.dtype} keys that do not fit "
            f"{np.dtype(key_type)}."
        )
    return cast


def _dense(
    system: System, shards: Sequence[ForeignRows], name: str, variable: Variable
) -> tf.Tensor:
    """Returns the rows of a dense variable that this rank holds."""
    rows = variable.global_shape[0]
    keys = np.concatenate([shard.keys.astype(np.int64) for shard in shards])
    if len(keys) != rows or not np.array_equal(np.sort(keys), np.arange(rows)):
        raise ValueError(
            f"{system.name}'s table {name!r} has {len(keys)} rows that are not the {rows} of "
            f"{variable.name!r}."
        )
    positions = np.empty(rows, np.int64)
    positions[keys] = np.arange(rows)
    vectors = np.concatenate([shard.vectors for shard in shards])
    value = vectors[positions[ownership.global_rows(variable)]]
    return tf.cast(tf.constant(value), variable.dtype)
