"""Reads the rows of tables, in the form in which chain_reader reads chains."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from chain_reader import Rows, in_order

from tf_dynemb import _ops

# The columns that an operator returns for rows.
ALL = ("keys", "vectors", "state", "updates")


def rows_of(table) -> Rows:
    """Returns all rows of a table. Last accesses are 0, because no operator returns them."""
    parts = []
    cursor = 0
    while cursor >= 0:
        *columns, following = _ops.library().dynemb_export(
            table.handle,
            cursor=cursor,
            limit=1 << 18,
            since=tf.constant(-1, tf.int64),
            key_type=table.key_type,
            dtype=table.dtype,
        )
        keys, vectors, state, updates = columns
        if table.dtype == tf.bfloat16:
            vectors = tf.bitcast(vectors, tf.uint16)
        parts.append([column.numpy() for column in (keys, vectors, state, updates)])
        cursor = int(following)
    keys, vectors, state, updates = (np.concatenate(part) for part in zip(*parts, strict=True))
    return in_order(keys, vectors, state, updates, np.zeros(len(keys), np.int64))


def contents(tables) -> dict[str, Rows]:
    """Returns the rows of tables by their names on disk."""
    return {table.name.removesuffix(":0"): rows_of(table) for table in tables}


def same(found, expected, columns=("keys", "vectors", "state")) -> bool:
    """Whether tables of the same names have the same bits in these columns."""
    return found.keys() == expected.keys() and all(
        found[name].same(expected[name], columns) for name in expected
    )
