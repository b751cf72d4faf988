"""Loading tables from what TFRA has saved: checkpoints, SavedModels, and files of rows."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb._presence import exists, local_path
from tf_dynemb._warn import warn
from tf_dynemb.ids.strings import ids_of_strings
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.persistence.foreign import ForeignRows, System, load_foreign
from tf_dynemb.tfra import kv_files
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable

# TFRA keeps each state of an optimizer in a separate table, named after the state. The names that
# Keras gives a state have changed over time.
_STATES = {
    "adagrad": ("accumulator",),
    "adam": ("m", "v"),
    "adamax": ("m", "v|u"),
    "adadelta": ("accum_grad|accumulated_grad", "accum_var|accumulated_delta_var"),
    "ftrl": ("accumulator", "linear"),
}
_OPTIMIZER = "the optimizer"
_TFRA = System(
    "TFRA",
    "tfra.load_checkpoint",
    {optimizer: (_OPTIMIZER, states) for optimizer, states in _STATES.items()},
)
# Beside the TensorFlow checkpoint of a SavedModel or of a FileSystemSaver.
_FOLDER = "TFRADynamicEmbedding"

# Reads the (keys, vectors) of a shard, given the key type, the dtype of vectors, and their width.
Shard: TypeAlias = Callable[
    [tuple[tf.DType, tf.DType, int]], tuple[npt.NDArray[Any], npt.NDArray[Any]]
]
# By the name of each table, a function that returns its shards.
Shards: TypeAlias = Mapping[str, Callable[[], list[Shard]]]


def load_checkpoint(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: OptimizerWrapper | None = None,
    value_dtype: tf.DType | None = None,
) -> None:
    """Replaces the content of tables with what TFRA has saved, on any number of devices and ranks.

    All rows are read into separate tables first; a failure changes nothing. With several ranks all
    of them call this, and each loads the rows that it owns.

    Args:
        path: one of these:
            a folder of files of `save_to_file_system` or of a `FileSystemSaver`;
            a TensorFlow checkpoint, as for `tf.train.load_checkpoint`;
            a SavedModel, or a model that Keras 2 saved as one.
        variables: tables as in `tf_dynemb.dump`; or a dict of TFRA's names and tables. The name of
            a table in a TFRA layer is the layer's name followed by "-parameter".
        optimizer: if given, its state is loaded too, where it has the same meaning: Adagrad, Adam,
            Adamax, Adadelta and Ftrl. Set `optimizer.core.iterations` yourself for Adam and
            Adamax.
        value_dtype: the dtype of the vectors in files of rows, which do not contain it. None: the
            dtype of each table. Keys must have the key type of the table.

    Raises:
        FileNotFoundError: there is nothing of TFRA at `path`, or no table of a name; the message
            lists the names that there are.
        TypeError: an element of `variables`, or `optimizer`, has another type.
        ValueError: a table differs in dimension, a key does not fit the table's key type, or files
            are incomplete.
        RuntimeError: the function was called inside a `tf.function`, or failed on another rank.
    """

    def read(tables: Mapping[str, DynamicVariable | Variable]) -> dict[str, list[ForeignRows]]:
        shards, flat = _find(os.fspath(path))
        found = {}
        for name, table in tables.items():
            wide = table.dtype if value_dtype is None else tf.as_dtype(value_dtype)
            key_type = getattr(table, "key_type", tf.int64)  # the row numbers of a static Variable
            layout = (key_type, wide, table.shape[1])
            states: dict[str, str] = {}
            if optimizer is not None:
                states = _names_of_states(shards, _saved(name, flat), flat, optimizer, table)
            found[name] = [
                dataclasses.replace(rows, keys=_as_numbers(rows.keys, name, table))
                for rows in _rows(shards, _saved(name, flat), states, layout)
            ]
        return found

    load_foreign(_TFRA, variables, optimizer, read)


def _saved(name: str, flat: bool) -> str:
    """Returns a table's name as it is saved: names of files have no "/"."""
    return name.replace("/", "_") if flat else name


def _as_numbers(
    keys: npt.NDArray[Any], name: str, table: DynamicVariable | Variable
) -> npt.NDArray[Any]:
    """Returns the keys as integers; strings are hashed for the table of a layer that does so."""
    if keys.dtype.kind in "iu":
        return keys
    if getattr(table, "string_hash", None) is None:
        raise TypeError(
            f"TFRA's table {name!r} has {keys.dtype} keys: load it into a layer with "
            "key_dtype=tf.string or hash_strings=True."
        )
    hashed: npt.NDArray[np.int64] = ids_of_strings(tf.constant(keys)).numpy()
    return hashed


def _rows(
    shards: Shards, name: str, states: Mapping[str, str], layout: tuple[tf.DType, tf.DType, int]
) -> list[ForeignRows]:
    """Reads the shards of a table; `states` has the name of the table of each state."""
    if name not in shards:
        raise FileNotFoundError(
            f"TFRA has saved no table {name!r}; saved: {', '.join(map(repr, shards)) or 'none'}."
        )
    columns_of_state = {}
    for state, state_table in states.items():
        pairs = [read(layout) for read in shards[state_table]()]
        keys, vectors = (np.concatenate(column) for column in zip(*pairs, strict=True))
        order = np.argsort(keys, kind="stable")
        columns_of_state[state] = (keys[order], vectors, order)
    rows = []
    for read in shards[name]():
        keys, vectors = read(layout)
        shard_states, has_all = {}, np.ones(len(keys), bool)
        for state, columns in columns_of_state.items():
            shard_states[state], has = _at_keys(keys, *columns)
            has_all &= has
        rows.append(
            ForeignRows(keys, vectors, shard_states, _OPTIMIZER if states else None, has_all)
        )
    return rows


def _at_keys(
    keys: npt.NDArray[Any],
    sorted_keys: npt.NDArray[Any],
    vectors: npt.NDArray[Any],
    order: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the vectors of keys, zeros for a key that has none, and which keys have one."""
    found = np.zeros((len(keys), vectors.shape[1]), np.float32)
    has = np.zeros(len(keys), bool)
    if len(sorted_keys):
        place = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
        has = sorted_keys[place] == keys
        found[has] = vectors[order[place[has]]]
    return found, has


def _names_of_states(
    shards: Shards,
    name: str,
    flat: bool,
    optimizer: OptimizerWrapper,
    table: DynamicVariable | Variable,
) -> dict[str, str]:
    """Returns for each state of an optimizer the name of TFRA's table, in the order of our state.

    TFRA saves the names of states, not of optimizers.
    """
    optimizer_name, widths, _ = (
        optimizer.state_spec(table) if hasattr(table, "state_spec") else ("", (), ())
    )
    wanted = _STATES.get(optimizer_name)
    if wanted is None:
        if widths:
            warn(
                f"the state of {optimizer_name!r} is not loaded: the rows of {name!r} start with "
                "fresh state."
            )
        return {}
    # <name>/<name of the optimizer's variable>/<state>, or <name>/<state>
    separator = "_" if flat else "/"
    beginning = re.escape(name + separator)
    longer = [other for other in shards if other.startswith(name + separator)]
    complete = []
    for first in longer:
        match = re.fullmatch(rf"({beginning}(?:.*{separator})?)(?:{wanted[0]})", first)
        # With "_", "user_id_m" can be a state of "user_id".
        if match and not any(first.startswith(other + separator) for other in longer):
            others = [
                next((match[1] + one for one in state.split("|") if match[1] + one in shards), "")
                for state in wanted
            ]
            if all(others):
                complete.append(dict(zip(wanted, others, strict=True)))
    if len(complete) != 1:
        what = "no state of" if not complete else f"{len(complete)} states of"
        warn(
            f"TFRA has saved {what} {optimizer_name!r} for the table {name!r}: its rows start with "
            "fresh state."
        )
        return {}
    return complete[0]


def _find(path: str) -> tuple[Shards, bool]:
    """Returns the shards at a path, and whether their names have "_" for "/"."""
    for folder in _folders(path):
        names = kv_files.names_in(folder)
        if names:
            return {name: functools.partial(_in_files, folder, name) for name in names}, True
    for prefix in (path, os.path.join(path, "variables", "variables")):
        if tf.train.latest_checkpoint(prefix) or exists(f"{prefix}.index"):
            found = _in_checkpoint(prefix)
            if found:
                return found, all("/" not in name for name in found)
    local_path(path, "path")  # TensorFlow may have a file system for a URL
    raise FileNotFoundError(f"{path} has neither files nor a checkpoint of TFRA's tables.")


def _folders(path: str) -> list[str]:
    """Returns the folders in which files of rows can be, the most specific first."""
    beside = os.path.dirname(path)
    folders = [path, os.path.join(path, _FOLDER), os.path.join(path, "variables", _FOLDER)]
    step = re.search(r"-(\d+)$", path)
    if step:  # tf.compat.v1.train.Saver
        numbers = (step[1], f"{int(step[1]):08d}")
        folders += [os.path.join(beside, f"{_FOLDER}-{number}") for number in numbers]
    if exists(f"{path}.index"):
        folders.append(os.path.join(beside, _FOLDER))
    return folders


def _in_files(folder: str, name: str) -> list[Shard]:
    shards = kv_files.find(folder, name)
    kv_files.check_one_save(shards)

    def reader(shard: str) -> Shard:
        def read(
            layout: tuple[tf.DType, tf.DType, int],
        ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
            key_type, dtype, dim = layout
            return kv_files.read(shard, key_type.as_numpy_dtype, dtype.as_numpy_dtype, dim)

        return read

    return [reader(shard) for shard in shards]


def _in_checkpoint(prefix: str) -> Shards:
    checkpoint = tf.train.load_checkpoint(prefix)
    keys = sorted(checkpoint.get_variable_to_shape_map())
    entries: dict[str, list[str]] = {}
    for key in keys:
        entry = key.removesuffix("-keys")
        if entry != key and f"{entry}-values" in keys:
            entries.setdefault(_name_in_checkpoint(entry), []).append(entry)

    def reader(entry: str) -> Shard:
        def read(_: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
            vectors = checkpoint.get_tensor(f"{entry}-values")
            return checkpoint.get_tensor(f"{entry}-keys"), vectors

        return read

    def shards(name: str) -> list[Shard]:
        return [reader(entry) for entry in entries[name]]

    return {name: functools.partial(shards, name) for name in entries}


def _name_in_checkpoint(entry: str) -> str:
    """Returns the name of the table that an entry of a checkpoint is a shard of."""
    in_object = re.search(r"(?:^|/)tables_of_([^/]+)/\d+/\.ATTRIBUTES/", entry)
    if in_object:
        # TensorFlow's escapes in the names of edges: ".S" and "..".
        return re.sub(r"\.([S.])", lambda escape: "/" if escape[1] == "S" else ".", in_object[1])
    return re.sub(r"_mht_\d+of\d+$", "", entry)
