"""Gradients before the optimizer: unique keys, reduction over ranks, loss scale, clipping.

There are two kinds of gradients on several ranks:

- Every rank has a copy of a dense variable, and a gradient of it from its own batch. These
  gradients are reduced over the ranks.
- Each rank has some rows of a table or a `tf_dynemb.Variable`, and the gradient that reaches them
  is already the sum over all ranks. Ranks only agree on values that depend on all rows: norms, and
  whether all gradients are finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.ids.keys import as_keys
from tf_dynemb.optimizers.pooled import PooledGradient, pooled_gradient
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import unwrap

# The gradient of a variable.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class TableGradient:
    """The gradient of one table.

    Attributes:
        table: the table.
        keys: [n], unique, of the table's key type.
        sums: float32 [n, dim]: the sum of the gradients of each key.
        rows: uint32 [n], the row ids of the keys; or [0], if the operator finds rows by key.
        pooled: what `sums` are the sums of, if it can be applied in their place.
    """

    table: DynamicVariable
    keys: tf.Tensor
    sums: tf.Tensor
    rows: tf.Tensor
    pooled: PooledGradient | None = None

    def with_sums(self, sums: tf.Tensor) -> TableGradient:
        """Returns the gradient with the same keys and other sums."""
        return dataclasses.replace(self, sums=sums, pooled=None)


def from_slices(table: DynamicVariable, grads: Sequence[tf.IndexedSlices]) -> TableGradient:
    """Creates one gradient from the results of `tape.gradient` for a table.

    Args:
        table: the table.
        grads: IndexedSlices; several are added up.

    Raises:
        TypeError, ValueError: a gradient is not an IndexedSlices, or its width is not the table's.
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
        with _ops.on(table.placement.device):
            keys, sums = _ops.library().dynemb_dedup_sum(keys, sums)
        return TableGradient(table, keys, sums, tf.zeros([0], tf.uint32))
    return TableGradient(table, keys, sums, rows, pooled_gradient(table, grads[0]))


def with_rows(grad: TableGradient) -> TableGradient:
    """Gives the keys of a gradient rows, in a table with `inserts_in_steps`."""
    table = grad.table
    if not table.inserts_in_steps:
        return grad
    with _ops.on(table.placement.device):
        no_default = tf.zeros([0], table.dtype)
        _, rows = _ops.library().dynemb_lookup(table.handle, grad.keys, no_default, insert=True)
    return dataclasses.replace(grad, rows=rows, pooled=None)


def reduce_over_ranks(
    reduction: str,
    table_grads: list[TableGradient],
    dense_grads: list[Gradient],
    dense: Sequence[tf.Variable | keras.Variable],
) -> tuple[list[TableGradient], list[Gradient]]:
    """Reduces the gradients of this rank's batch over the batches of all ranks.

    Args:
        reduction: "mean" (the sum divided by the number of ranks) or "sum".
        table_grads: gradients of tables, already sums over ranks.
        dense_grads: gradients of the variables `dense`.
        dense: dense variables. Each rank has a copy of each, except for this package's `Variable`s.

    Returns:
        (table gradients, dense gradients).
    """
    comm = communicator.get()
    if comm.size == 1:
        return table_grads, dense_grads
    dense_grads = list(dense_grads)
    copies = [i for i, variable in enumerate(dense) if not is_spread(variable)]
    if copies:
        reduced = comm.allreduce(
            [dense_grads[i] for i in copies], average=reduction == "mean", name="dynemb_gradients"
        )
        for i, grad in zip(copies, reduced, strict=True):
            dense_grads[i] = grad
    if reduction == "mean":
        share = 1.0 / comm.size
        table_grads = [grad.with_sums(grad.sums * share) for grad in table_grads]
        dense_grads = [
            multiply(grad, share) if is_spread(variable) else grad
            for grad, variable in zip(dense_grads, dense, strict=True)
        ]
    return table_grads, dense_grads


def is_spread(variable: tf.Variable | keras.Variable) -> bool:
    """Whether there are several ranks and each has some rows of a dense variable."""
    return communicator.get().size > 1 and isinstance(unwrap(variable), Variable)


def of_unique_rows(grad: Gradient, variable: tf.Variable | keras.Variable) -> Gradient:
    """Returns the gradient of a `Variable` with one sum per row; any other gradient unchanged.

    If a row is repeated, Keras squares its values separately before it adds them.
    """
    if not isinstance(grad, tf.IndexedSlices) or not isinstance(unwrap(variable), Variable):
        return grad
    rows, sums = _ops.library().dynemb_dedup_sum(grad.indices, grad.values)
    return tf.IndexedSlices(tf.cast(sums, grad.values.dtype), rows, grad.dense_shape)


def all_finite(table_grads: Sequence[TableGradient], dense_grads: Sequence[Gradient]) -> tf.Tensor:
    """Whether no gradient on any rank contains NaN or infinity: a bool tensor."""
    values = [grad.sums for grad in table_grads] + [_values(grad) for grad in dense_grads]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
    return _sum_over_ranks(tf.cast(~finite, tf.float32), "dynemb_not_finite") == 0


def divide(grad: Gradient, divisor: tf.Tensor | float) -> Gradient:
    """Returns a dense gradient or IndexedSlices divided by a scalar."""
    return _with_values(grad, lambda values: values / tf.cast(divisor, values.dtype))


def multiply(grad: Gradient, factor: tf.Tensor | float) -> Gradient:
    """Returns a dense gradient or IndexedSlices multiplied by a scalar."""
    return _with_values(grad, lambda values: values * tf.cast(factor, values.dtype))


def global_norm_scale(
    table_grads: Sequence[TableGradient],
    dense_grads: Sequence[Gradient],
    dense: Sequence[tf.Variable | keras.Variable],
    clip_norm: float,
) -> tf.Tensor:
    """Returns the factor by which Keras's `clip_by_global_norm` multiplies all gradients.

    It is NaN if the norm is not finite.
    Formula: `keras/src/optimizers/base_optimizer.py`, `clip_by_global_norm`.
    """
    spread: list[tf.Tensor] = [grad.sums for grad in table_grads]
    copies: list[tf.Tensor] = []
    for grad, variable in zip(dense_grads, dense, strict=True):
        (spread if is_spread(variable) else copies).append(_values(grad))
    squares = [_sum_over_ranks(tf.add_n([*map(_squares, spread)]), "dynemb_norm")] if spread else []
    norm = tf.sqrt(tf.add_n([*squares, *map(_squares, copies)]))
    scale = clip_norm * tf.minimum(1.0 / norm, 1.0 / clip_norm)
    return scale + (norm - norm)


def clip(
    optimizer: keras.optimizers.Optimizer,
    table_grads: list[TableGradient],
    dense_grads: list[Gradient],
    dense: Sequence[tf.Variable | keras.Variable],
) -> tuple[list[TableGradient], list[Gradient]]:
    """Clips according to the Keras optimizer's clipnorm, global_clipnorm or clipvalue.

    A table's gradient counts with the sum for each key, over the rows on all ranks. Dense gradients
    are returned unchanged, for Keras to clip, unless a norm depends on other gradients or ranks.

    Returns:
        (table gradients, dense gradients).
    """
    if optimizer.clipnorm is not None and optimizer.clipnorm > 0:
        most = optimizer.clipnorm
        return [grad.with_sums(_clip_by_norm(grad.sums, most)) for grad in table_grads], [
            _with_values(grad, lambda values: _clip_by_norm(values, most))
            if is_spread(variable)
            else grad
            for grad, variable in zip(dense_grads, dense, strict=True)
        ]
    if optimizer.global_clipnorm is not None and optimizer.global_clipnorm > 0:
        scale = global_norm_scale(table_grads, dense_grads, dense, optimizer.global_clipnorm)
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


def constrain(grad: TableGradient, step: tf.Tensor | float) -> None:
    """Applies the table's constraint to the rows that have a gradient.

    Args:
        grad: the gradient of the table.
        step: the step of the optimizer that has just updated the rows, scalar, from 1.
    """
    values, state, found = _ops.library().dynemb_read_rows(grad.table.handle, grad.keys)
    keys, values, state = (tf.boolean_mask(x, found) for x in (grad.keys, values, state))
    values = tf.cast(tf.convert_to_tensor(grad.table.constraint(values)), tf.float32)
    _ops.library().dynemb_write_rows(
        grad.table.handle,
        keys,
        values,
        state,
        tf.cast(step, tf.int64),
        insert=False,
        what="constraint",
    )


def _clip_by_norm(values: tf.Tensor, most: float) -> tf.Tensor:
    """Same as tf.clip_by_norm, for rows that are spread over several ranks."""
    if communicator.get().size == 1:
        return tf.clip_by_norm(values, most)
    norm = tf.sqrt(_sum_over_ranks(_squares(values), "dynemb_norm"))
    # In the order of tf.clip_by_norm, so that the bits depend on the number of ranks only through
    # the norm.
    return tf.cast(tf.cast(values, tf.float32) * most / tf.maximum(norm, most), values.dtype)


def _squares(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))


def _sum_over_ranks(value: tf.Tensor, name: str) -> tf.Tensor:
    return communicator.get().allreduce([value], average=False, name=name)[0]


def _join(parts: list[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)


def _with_values(grad: Gradient, change: Callable[[tf.Tensor], tf.Tensor]) -> Gradient:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(change(grad.values), grad.indices, grad.dense_shape)
    return change(tf.convert_to_tensor(grad))


def _values(grad: Gradient) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)
