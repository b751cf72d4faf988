"""What a DynamicVariable does with given keys, when it is spread over ranks.

Each rank may name any keys, the same or others than the others name; what is done to a key is done
by the rank that holds it. All of it is collective.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_dynemb import _ops, communicator, exchange
from tf_dynemb.exchange import Spread


def upsert(table: Spread, keys: Any, values: Any) -> Any:
    """Sets vectors: of a key that is named twice the last counts, and that of the highest rank.

    Args:
        table: the table.
        keys: [n].
        values: [n, dimension] of the table's dtype.
    """
    asked = exchange.request([table], [keys])
    last = tf.math.unsorted_segment_max(
        tf.range(tf.size(keys)), tf.cast(asked.index[0], tf.int64), asked.num_asked(0)
    )
    (values,) = asked.to_owners([tf.gather(values, last)], "other")
    return _ops.library().dynemb_upsert(table.variable.handle, asked.keys[0], values)


def accumulate(table: Spread, keys: Any, deltas: Any) -> Any:
    """Adds to vectors; what the ranks add to one key adds up."""
    asked = exchange.request([table], [keys])
    sums = tf.math.unsorted_segment_sum(
        tf.cast(deltas, tf.float32), tf.cast(asked.index[0], tf.int64), asked.num_asked(0)
    )
    (sums,) = asked.to_owners([sums], "other")
    return _ops.library().dynemb_accumulate(
        table.variable.handle, asked.keys[0], tf.cast(sums, table.dtype)
    )


def erase(table: Spread, keys: Any, wipe: bool) -> Any:
    """Removes rows; returns how many there were on all ranks, int64."""
    asked = exchange.request([table], [keys])
    erased = _ops.library().dynemb_erase(table.variable.handle, asked.keys[0], wipe=wipe)
    (total,) = communicator.get().allreduce([erased], average=False, name="dynemb_erased")
    return total


def contains(table: Spread, keys: Any) -> Any:
    """Which of `keys` [n] have a row."""
    asked = exchange.request([table], [keys])
    held = _ops.library().dynemb_contains(table.variable.handle, asked.keys[0])
    (found,) = asked.to_askers([tf.cast(held, tf.int32)[:, tf.newaxis]], "other")
    return tf.gather(found[:, 0], tf.cast(asked.index[0], tf.int64)) != 0
