"""Gradients of tables on their way to the optimizer: unique keys, loss scale, clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.dynamic_variable import DynamicVariable
from tf_dynemb.keys import as_keys


@dataclasses.dataclass(frozen=True)
class TableGradient:
    """The gradient of one table.

    Attributes:
        table: the table.
        keys: [n], unique, of the table's key type.
        sums: float32 [n, dim]: the sum of the gradients of each key.
        rows: uint32 [n] row ids of the keys, or [0]: to be found by key.
    """

    table: DynamicVariable
    keys: Any
    sums: Any
    rows: Any

    def with_sums(self, sums: Any) -> TableGradient:
        """The same keys with other values."""
        return dataclasses.replace(self, sums=sums)


def from_slices(table: DynamicVariable, grads: Sequence[Any]) -> TableGradient:
    """Makes one gradient of what `tape.gradient` gave for a table.

    Args:
        table: the table.
        grads: one IndexedSlices; several are added.

    Raises:
        TypeError, ValueError: not an IndexedSlices, or of another width than the table.
    """
    for grad in grads:
        if not isinstance(grad, tf.IndexedSlices):
            raise TypeError(
                f"The gradient of the table {table.name} must be a tf.IndexedSlices, got {grad!r}."
            )
    rows = _ops.rows_of_gradient(grads[0]) if len(grads) == 1 else None
    keys = _join([as_keys(g.indices, table.key_type, "indices") for g in grads])
    sums = _join([tf.cast(g.values, tf.float32) for g in grads])
    if not sums.shape.is_compatible_with([keys.shape[0], table.dimension]):
        raise ValueError(
            f"The gradient of the table {table.name} must have values of the shape "
            f"[{keys.shape[0]}, {table.dimension}], got {sums.shape}."
        )
    if rows is None:
        keys, sums = _ops.library().dynemb_dedup_sum(keys, sums)
        rows = tf.zeros([0], tf.uint32)
    return TableGradient(table, keys, sums, rows)


def all_finite(table_grads: Sequence[TableGradient], dense_grads: Sequence[Any]) -> Any:
    """Whether no gradient holds NaN or infinity: a bool tensor."""
    values = [grad.sums for grad in table_grads] + [_values(grad) for grad in dense_grads]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])


def divide(grad: Any, divisor: Any) -> Any:
    """A dense gradient or IndexedSlices, divided by a scalar."""
    return _with_values(grad, lambda values: values / tf.cast(divisor, values.dtype))


def multiply(grad: Any, factor: Any) -> Any:
    """A dense gradient or IndexedSlices, multiplied by a scalar."""
    return _with_values(grad, lambda values: values * tf.cast(factor, values.dtype))


def global_norm_scale(
    table_grads: Sequence[TableGradient], dense_grads: Sequence[Any], clip_norm: float
) -> Any:
    """What Keras's `clip_by_global_norm` multiplies all gradients by.

    It is NaN if the norm is not finite.
    Formula: `keras/src/optimizers/base_optimizer.py`, `clip_by_global_norm`.
    """
    values = [grad.sums for grad in table_grads] + [_values(grad) for grad in dense_grads]
    squares = [tf.reduce_sum(tf.square(tf.cast(value, tf.float32))) for value in values]
    norm = tf.sqrt(tf.add_n(squares))
    scale = clip_norm * tf.minimum(1.0 / norm, 1.0 / clip_norm)
    return scale + (norm - norm)


def clip(optimizer: Any, table_grads: list[TableGradient], dense_grads: list[Any]) -> Any:
    """Clips as the Keras optimizer's clipnorm, global_clipnorm or clipvalue says.

    A table's gradient counts with the sum for each key. Dense gradients are returned unchanged
    unless the norm of all gradients together matters (global_clipnorm): the others are clipped by
    Keras itself.

    Returns:
        (table gradients, dense gradients).
    """
    if optimizer.clipnorm is not None and optimizer.clipnorm > 0:
        return [
            grad.with_sums(tf.clip_by_norm(grad.sums, optimizer.clipnorm)) for grad in table_grads
        ], dense_grads
    if optimizer.global_clipnorm is not None and optimizer.global_clipnorm > 0:
        scale = global_norm_scale(table_grads, dense_grads, optimizer.global_clipnorm)
        return (
            [grad.with_sums(grad.sums * scale) for grad in table_grads],
            [multiply(grad, scale) for grad in dense_grads],
        )
    if optimizer.clipvalue is not None and optimizer.clipvalue > 0:
        limit = optimizer.clipvalue
        return [
            grad.with_sums(tf.clip_by_value(grad.sums, -limit, limit)) for grad in table_grads
        ], dense_grads
    return table_grads, dense_grads


def constrain(grad: TableGradient) -> None:
    """Applies the table's constraint to the rows that have a gradient."""
    values, state, found = _ops.library().dynemb_read_rows(grad.table.handle, grad.keys)
    keys, values, state = (tf.boolean_mask(part, found) for part in (grad.keys, values, state))
    values = tf.cast(tf.convert_to_tensor(grad.table.constraint(values)), tf.float32)
    _ops.library().dynemb_write_rows(grad.table.handle, keys, values, state, insert=False)


def _join(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)


def _with_values(grad: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(change(grad.values), grad.indices, grad.dense_shape)
    return change(tf.convert_to_tensor(grad))


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)
