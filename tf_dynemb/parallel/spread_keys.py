"""Operations of a DynamicVariable on given keys, when it is spread over ranks.

Each rank can pass any keys, whether or not other ranks pass them too. The owner of a key performs
the operation. All functions are collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.parallel import exchange
from tf_dynemb.parallel.exchange import Spread


def upsert(table: Spread, keys: tf.Tensor, values: tf.Tensor) -> tf.Operation | None:
    """Sets vectors. If a key is repeated, the last vector of the highest rank wins.

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


def scores(table: Spread, keys: tf.Tensor) -> tf.Tensor:
    """Returns the scores of keys [n], -1 for keys without a row: int64 [n]."""
    asked = exchange.request([table], [keys])
    held = _ops.library().dynemb_scores(table.variable.handle, asked.keys[0])
    (found,) = asked.to_askers([tf.reshape(tf.bitcast(held, tf.int32), [-1, 2])], "other")
    return tf.gather(tf.bitcast(found, tf.int64), tf.cast(asked.index[0], tf.int64))


def set_scores(table: Spread, keys: tf.Tensor, values: tf.Tensor) -> tf.Operation | None:
    """Sets scores, int64 [n]. If a key is repeated, the last score of the highest rank wins."""
    asked = exchange.request([table], [keys])
    last = tf.math.unsorted_segment_max(
        tf.range(tf.size(keys)), tf.cast(asked.index[0], tf.int64), asked.num_asked(0)
    )
    sent = tf.reshape(tf.bitcast(tf.gather(values, last), tf.int32), [-1, 2])
    (arrived,) = asked.to_owners([sent], "other")
    return _ops.library().dynemb_set_scores(
        table.variable.handle, asked.keys[0], tf.bitcast(arrived, tf.int64)
    )


def accumulate(table: Spread, keys: tf.Tensor, deltas: tf.Tensor) -> tf.Operation | None:
    """Adds to vectors; the values that the ranks pass for one key are added up."""
    asked = exchange.request([table], [keys])
    sums = tf.math.unsorted_segment_sum(
        tf.cast(deltas, tf.float32), tf.cast(asked.index[0], tf.int64), asked.num_asked(0)
    )
    (sums,) = asked.to_owners([sums], "other")
    return _ops.library().dynemb_accumulate(
        table.variable.handle, asked.keys[0], tf.cast(sums, table.dtype)
    )


def erase(table: Spread, keys: tf.Tensor, wipe: bool) -> tf.Tensor:
    """Removes rows; returns the number of rows that were removed on all ranks, an int64 scalar."""
    asked = exchange.request([table], [keys])
    erased = _ops.library().dynemb_erase(table.variable.handle, asked.keys[0], wipe=wipe)
    (total,) = communicator.get().allreduce([erased], average=False, name="dynemb_erased")
    return total


def contains(
    tables: Sequence[Spread], keys: Sequence[tf.Tensor], table_of: Sequence[int] | None = None
) -> list[tf.Tensor]:
    """Returns which keys have a row.

    Args:
        tables: the tables, each once.
        keys: the keys of each feature: [n].
        table_of: the number of each feature's table. None: one feature for each table.

    Returns:
        For each feature, bool [n].
    """
    asked = exchange.request(tables, keys, table_of)
    held = [
        _ops.library().dynemb_contains(table.variable.handle, owned)
        for table, owned in zip(tables, asked.keys, strict=True)
    ]
    found = asked.to_askers([tf.cast(h, tf.int32)[:, tf.newaxis] for h in held], "other")
    return [
        tf.gather(found[table][:, 0], tf.cast(index, tf.int64)) != 0
        for table, index in zip(table_of or range(len(tables)), asked.index, strict=True)
    ]
