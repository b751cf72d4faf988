"""Dense variables on disk: matrices as tables, whose keys are the numbers of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dynemb import storage
from tf_dynemb.parallel import ownership
from tf_dynemb.snapshots.columns import build_index
from tf_dynemb.tables.cut import bits, from_bits


def write_static(
    part: storage.Part,
    variables: Mapping[str, Any],
    values: Mapping[str, Any],
    first: int,
    base_tick: int,
) -> list[storage.TableEntry]:
    """Writes the rows that this rank has of matrices, as tables with the numbers from `first` on.

    Args:
        part: to write into.
        variables: by their names on disk.
        values: of these variables, as they are to be written.
        first: number of the first one among the snapshot's tables.
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
                part.column(number, column, array.dtype, array.shape[1:]).append(array)
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
            )
        )
    return entries


def read_static(snapshot: storage.Snapshot, name: str, variable: Any) -> Any:
    """The rows that this rank has of a dense variable.

    Raises:
        ValueError: the keys are not the numbers of its rows.
    """
    _, entry = snapshot.manifest.table(name)
    value = np.empty(variable.shape, storage.manifest.DTYPES[entry.dtype])
    missing = np.ones(len(value), np.bool_)
    rows = variable.global_shape[0]
    for shard in entry.shards:
        keys = snapshot.column(name, "keys", shard.rank)
        mine = ownership.owned(variable, keys)
        if mine is not None and not mine.any():
            continue
        some = slice(None) if mine is None else np.flatnonzero(mine)
        if len(keys) and not (keys.min() >= 0 and keys.max() < rows):
            raise ValueError(f"table {name!r} has keys on disk that are no rows of 0 to {rows}.")
        places = ownership.local_rows(variable, np.asarray(keys[some]))
        value[places] = snapshot.column(name, "vectors", shard.rank)[some]
        missing[places] = False
    if missing.any():
        raise ValueError(f"table {name!r} has not all rows of {variable.name!r} on disk.")
    return tf.cast(from_bits(value, entry.dtype), variable.dtype)
