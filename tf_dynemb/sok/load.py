"""Loading tables from the dumps of NVIDIA SOK."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb._warn import warn
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel import ownership
from tf_dynemb.parallel.agreement import Ranks, check_alike
from tf_dynemb.persistence.naming import described, named_variables
from tf_dynemb.persistence.optimizer_entry import check_optimizer
from tf_dynemb.sok.dump import SokTable, file_name_of, read_sok_dump
from tf_dynemb.tables.batches import NO_STATE, own_rows, warn_of_evictions
from tf_dynemb.tables.cut import last_tick
from tf_dynemb.tables.lineage import Snapshots
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable

# The optimizers whose state has the same meaning in SOK: SOK's name for each and, in the order of
# our rows, for its states. Momentum is not included: Keras scales it by the learning rate.
_SAME_STATE = {
    "adagrad": ("Adagrad", ("accumulator",)),
    "adam": ("Adam", ("m", "v")),
    "adamax": ("Adam", ("m", "v")),
    "adadelta": ("Adadelta", ("accum_grad", "accum_var")),
    "ftrl": ("Ftrl", ("accumulator", "linear")),
}


def load_sok_dump(
    directory: str | os.PathLike[str], variables: Any, optimizer: OptimizerWrapper | None = None
) -> None:
    """Replaces the content of tables with a dump that `sok.dump` wrote, from any number of GPUs.

    Every file is checked and loaded into separate tables first; a failure changes nothing. With
    several ranks all of them call this, as with `tf_dynemb.load`, and each loads the rows that it
    owns.

    Args:
        directory: the directory that was passed to `sok.dump`.
        variables: `DynamicVariable`s and `tf_dynemb.Variable`s, as in `tf_dynemb.dump`. They must
            have the names of SOK's variables.
        optimizer: if given, the state in the dump is loaded too if it has the same meaning for this
            optimizer: Adagrad, Adam, Adamax, Adadelta and Ftrl. Other state is dropped, with a
            warning. SOK does not dump the number of steps: set `optimizer.core.iterations` for Adam
            and Adamax.

    Raises:
        OSError: the directory or a file cannot be read.
        TypeError: an element of `variables`, or `optimizer`, has another type.
        ValueError: a file is missing or damaged, or a table differs in dimension, or a key does not
            fit the table's key type; or the ranks name different variables.
        RuntimeError: the function was called inside a `tf.function`, or failed on another rank.
        tf.errors.ResourceExhaustedError: a table cannot hold the rows.
    """
    ranks = Ranks("load_sok_dump")
    with ranks.stage() as stage:
        tables = named_variables(variables)
        check_optimizer(optimizer)
        stage.say([*described(tables), f"optimizer: {optimizer is not None}"])
        files = {name: _file_name(os.fspath(directory), name) for name in tables}
        found = read_sok_dump(os.fspath(directory), files.values())
        of_name = {name: found[file] for name, file in files.items()}
        for name, variable in tables.items():
            _check(of_name[name], name, variable)
        dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
        specs = {
            name: table.state_spec if optimizer is None else optimizer.state_spec(table)
            for name, table in dynamic.items()
        }
        handles = [
            _stage(of_name[name], name, table, specs[name], optimizer is not None)
            for name, table in dynamic.items()
        ]
        values = {
            name: _dense(of_name[name], name, v)
            for name, v in tables.items()
            if name not in dynamic
        }
    check_alike(stage.said, "the variables")
    if dynamic:
        mine = [table.handle for table in dynamic.values()]
        _ops.library().dynemb_swap_rows(mine, handles, last_tick(), time.time_ns())
    for name, value in values.items():
        tables[name].assign(value)
    for name, table in dynamic.items():
        table.snapshots = Snapshots()
        if optimizer is not None:
            table.state_was_restored(specs[name])
    if optimizer is not None:
        optimizer.attach(list(dynamic.values()))


def _file_name(directory: str, name: str) -> str:
    """Returns the prefix of a table's file names; SOK's name may end with TensorFlow's ":0"."""
    with_output = file_name_of(name + ":0")
    return with_output if os.path.exists(f"{directory}/{with_output}-key") else file_name_of(name)


def _check(sok: SokTable, name: str, variable: Any) -> None:
    dimension = variable.shape[1]
    if sok.vectors.shape[1] != dimension:
        raise ValueError(
            f"SOK's table {name!r} has dimension {sok.vectors.shape[1]}, but {variable.name!r} has "
            f"{dimension}."
        )


def _stage(
    sok: SokTable, name: str, table: DynamicVariable, spec: StateSpec | None, with_state: bool
) -> Any:
    """Creates a table with SOK's rows, separate from the variable; returns its handle."""
    handle = table.make_empty(ownership.share_of(table, len(sok.keys)), spec)
    states = _states(sok, name, table, spec) if with_state else []
    key_type = table.key_type.as_numpy_dtype

    def read_keys(some: slice) -> Any:
        return _as_key_type(sok.keys[some], key_type, name)

    for some, keys in own_rows(table, len(sok.keys), len(states) * table.dimension, read_keys):
        state = [np.asarray(values[some], np.float32) for values in states]
        times = np.zeros(len(keys), np.uint32)
        _ops.library().dynemb_load_rows(
            handle,
            keys,
            tf.cast(tf.constant(sok.vectors[some]), table.dtype),
            np.concatenate(state, axis=1) if state else NO_STATE,
            times,
            times,
            0,
            -1,
        )
    warn_of_evictions(handle, table, f"SOK's table {name!r}")
    return handle


def _states(sok: SokTable, name: str, table: DynamicVariable, spec: StateSpec | None) -> list[Any]:
    """Returns SOK's states in the order of the table's; none if their meaning differs."""
    ours = spec[0] if spec else "no optimizer"
    theirs, names = _SAME_STATE.get(ours, ("", ()))
    if theirs == sok.optimizer and set(names) == set(sok.states):
        return [sok.states[state] for state in names]
    if sok.states:
        warn(
            f"the state of {sok.optimizer} that SOK's table {name!r} has is dropped: "
            f"{table.name!r} is trained with {ours!r}. Its rows start with fresh state."
        )
    return []


def _as_key_type(keys: Any, key_type: Any, name: str) -> Any:
    cast = keys.astype(key_type)
    if not (cast == keys).all():
        raise ValueError(
            f"SOK's table {name!r} has {keys.dtype} keys that do not fit {np.dtype(key_type)}."
        )
    return cast


def _dense(sok: SokTable, name: str, variable: Any) -> Any:
    """Returns the rows of a dense variable that this rank holds."""
    rows = variable.global_shape[0]
    keys = sok.keys.astype(np.int64)
    if len(keys) != rows or not np.array_equal(np.sort(keys), np.arange(rows)):
        raise ValueError(
            f"SOK's table {name!r} has {len(keys)} rows that are not the {rows} of "
            f"{variable.name!r}."
        )
    positions = np.empty(rows, np.int64)
    positions[keys] = np.arange(rows)
    value = sok.vectors[positions[ownership.global_rows(variable)]]
    return tf.cast(tf.constant(value), variable.dtype)
