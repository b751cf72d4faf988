"""Functions that SOK scripts call and that are not part of the shared API."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.ids.keys import as_keys
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import dynamic, unwrap


def all2all_dense_embedding(param: tf.Variable | keras.Variable, indices: TensorLike) -> tf.Tensor:
    """Reads one vector for each id, from the ranks that hold them.

    Args:
        param: a `DynamicVariable` or `Variable`.
        indices: integers of any shape.

    Returns:
        indices.shape + [dimension] of the table's dtype. Same as `tf.nn.embedding_lookup`.
    """
    return tf.nn.embedding_lookup(unwrap(param), indices)


@_ops.not_converted
def sparse_read_and_evict(
    var: tf.Variable | keras.Variable, indices: tf.RaggedTensor | TensorLike
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Reads one vector for each id, and returns the rows that were evicted for new ones.

    Args:
        var: a `DynamicVariable` with a `max_capacity`. Unknown ids get a row.
        indices: integers of any shape, or a RaggedTensor of them.

    Returns:
        (vectors, evicted keys, evicted vectors). The vectors are indices.shape + [dimension] and
        differentiable. The rows that this rank's table evicted for them are [n] and [n, dimension],
        with the values that they had before.

    Raises:
        TypeError: `var` is not a table, or the indices are not integers.
    """
    table = dynamic(var)
    if isinstance(indices, tf.RaggedTensor):
        flat, *gone = sparse_read_and_evict(table, indices.flat_values)
        return indices.with_flat_values(flat), *gone
    keys = table.as_keys(indices, "indices")
    evicted = table.insert_and_evict(keys)
    # The eviction must come first, even if nothing except the order of the code requires it.
    with tf.control_dependencies(list(evicted)):
        vectors = table.lookup(tf.identity(keys), insert=False)
    return vectors, evicted.keys, evicted.vectors


class SGD:
    """SOK's own optimizer: plain gradient descent on tables, without a Keras optimizer.

    On several ranks the gradients of all ranks are added up, as in SOK.

    Args:
        lr: the learning rate.

    Attributes:
        lr: the learning rate, a variable.
    """

    def __init__(self, lr: float) -> None:
        self.lr = tf.Variable(lr, dtype=tf.float32, trainable=False, name="sgd_learning_rate")

    @_ops.not_converted
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[tf.IndexedSlices | None, tf.Variable | keras.Variable]]
    ) -> None:
        """Subtracts lr times the gradient from the rows that have one.

        Args:
            grads_and_vars: pairs of a `tf.IndexedSlices` (None: skipped) and a `DynamicVariable` or
                `Variable`.

        Raises:
            TypeError: a gradient or a variable has another type.
        """
        for grad, variable in grads_and_vars:
            if grad is None:
                continue
            table = unwrap(variable)
            if not isinstance(grad, tf.IndexedSlices):
                raise TypeError(
                    f"The gradient of {table.name} must be IndexedSlices, got {grad!r}."
                )
            step = -tf.cast(grad.values, tf.float32) * self.lr
            if isinstance(table, Variable):
                table.scatter_add(tf.IndexedSlices(tf.cast(step, table.dtype), grad.indices))
            else:
                # A gradient contains keys of this rank only.
                table = dynamic(variable)
                _ops.library().dynemb_accumulate(
                    table.handle,
                    as_keys(grad.indices, table.key_type, "indices"),
                    tf.cast(step, table.dtype),
                )
