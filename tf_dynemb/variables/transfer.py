"""assign and export: writing keys and vectors to a table and reading them from it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.unwrap import dynamic

# Rows per operator call. It bounds the memory that is held twice while the chunks are joined.
CHUNK = 1 << 18


def assign(var: Any, keys: TensorLike, values: TensorLike) -> None:
    """Sets the vectors of keys; unknown keys get a row.

    Args:
        var: a DynamicVariable, a Keras variable of one, or a Keras layer with one table.
        keys: integers [n]; if keys repeat, the last one wins.
        values: floating point [n, dimension].

    Raises:
        TypeError, ValueError: `var` is not a table, or as in `DynamicVariable.upsert`.
    """
    dynamic(var).upsert(keys, values)


def export(var: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns all keys and vectors that this rank holds, in no particular order.

    Args:
        var: a DynamicVariable, a Keras variable of one, or a Keras layer with one table.

    Returns:
        (keys, values): tensors [n] of the table's key type and [n, dimension] of its dtype.

    Raises:
        TypeError: `var` is not a table.
        RuntimeError: the function was called inside a `tf.function`.
    """
    keys, values, _ = export_rows(dynamic(var))
    return keys, values


def export_rows(table: DynamicVariable) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Same as `export`, with the optimizer's state: a third tensor, float32 [n, floats per row]."""
    if not tf.executing_eagerly():
        raise RuntimeError("export runs eagerly only: call it outside tf.function.")
    chunks = []
    cursor = 0
    while cursor >= 0:
        keys, values, state, _, cursor_tensor = _ops.library().dynemb_export(
            table.handle,
            cursor=cursor,
            limit=CHUNK,
            since=tf.constant(-1, tf.int64),
            key_type=table.key_type,
            dtype=table.dtype,
        )
        chunks.append((keys, values, state))
        cursor = int(cursor_tensor)
    keys, values, state = (tf.concat(column, axis=0) for column in zip(*chunks, strict=True))
    return keys, values, state
