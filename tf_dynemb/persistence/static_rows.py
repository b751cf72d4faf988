"""Dense variables on disk: matrices as tables whose keys are their row numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tf_dynemb import storage
from tf_dynemb.parallel import ownership
from tf_dynemb.persistence.columns import as_tensor, build_index
from tf_dynemb.tables.cut import bits


def write_static(
    part: storage.Part,
    variables: Mapping[str, tf.Variable],
    values: Mapping[str, tf.Tensor],
    first: int,
    base_tick: int,
) -> list[storage.TableEntry]:
    """Writes this rank's rows of matrices, as tables numbered from `first`; returns their entries.

    Args:
        part: the part to write to.
        variables: the matrices, by their names on disk.
        values: the values of these variables that are written.
        first: the number of the first matrix among the snapshot's tables.
        base_tick: the tick of all rows.
    """
    entries = []
    for number, (name, variable) in enumerate(variables.items(), first):
        vectors = bits(values[name])
        rows, dimension = vectors.shape
        shards = []
        if not ownership.is_elsewhere(variable):
            times = np.zeros([rows], np.uint32)
            columns = {
                "keys": ownership.global_rows(variable),
                "vectors": vectors,
                "updates": times,
                "accesses": times,
            }
            for column, array in columns.items():
                rows_known = None if column == "keys" else len(array)  # the index needs the file
                writer = part.column(number, column, array.dtype, array.shape[1:], rows=rows_known)
                writer.append(array)
                writer.flush()
            part.write_index(number, build=build_index)
            shards.append(storage.Shard(part.rank, rows=rows, deleted=0, base_tick=base_tick))
        entries.append(
            storage.TableEntry(
                name=name,
                dimension=dimension,
                key_type="int64",
                dtype=values[name].dtype.name,
                seed=0,
                initializer=storage.InitializerEntry(("constant",), (0.0, 0.0)),
                state=None,
                shards=tuple(shards),
                history=variables[name].history,
                matrix=True,
            )
        )
    return entries


def read_static(snapshot: storage.Snapshot, name: str, variable: tf.Variable) -> tf.Tensor:
    """Returns the rows of a dense variable that this rank holds.

    Raises:
        ValueError: the keys are not the numbers of its rows.
    """
    _, entry = snapshot.manifest.table(name)
    stored = entry.row_columns["vectors"]
    value = np.empty([variable.shape[0], *stored[1]], stored[0])
    missing = np.ones(len(value), np.bool_)
    rows = variable.global_shape[0]
    for shard in entry.shards:
        keys = np.asarray(snapshot.column(name, "keys", shard.rank))
        is_owned = ownership.owned(variable, keys)
        if is_owned is not None and not is_owned.any():
            continue
        selected = slice(None) if is_owned is None else np.flatnonzero(is_owned)
        if len(keys) and not (keys.min() >= 0 and keys.max() < rows):
            raise ValueError(
                f"table {name!r} has keys on disk that are not row numbers below {rows}."
            )
        positions = ownership.local_rows(variable, keys[selected])
        value[positions] = snapshot.column(name, "vectors", shard.rank)[selected]
        missing[positions] = False
    if missing.any():
        raise ValueError(f"table {name!r} lacks rows of {variable.name!r} on disk.")
    return tf.cast(as_tensor(value, entry), variable.dtype)
