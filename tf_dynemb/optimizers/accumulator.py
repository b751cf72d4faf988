"""Accumulator: the gradient of a table, summed over the steps of gradient_accumulation_steps."""

from __future__ import annotations

import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.optimizers.gradients import TableGradient
from tf_dynemb.variables.dynamic import DynamicVariable


class Accumulator:
    """Holds the keys and sums of the steps since the last update.

    It has one row for each row of the gradients of these steps.

    It is not saved: after a restart, the steps since the last update are lost for tables.

    Attributes:
        is_used: whether the table has had a gradient.
    """

    def __init__(self, table: DynamicVariable) -> None:
        self._table = table
        self.is_used = False
        with tf.init_scope(), tf.device(_ops.CPU):
            keys, sums = self._nothing()
            self._keys = tf.Variable(keys, shape=[None], trainable=False)
            self._sums = tf.Variable(sums, shape=[None, table.dimension], trainable=False)

    def add(self, grad: TableGradient) -> None:
        """Adds the gradient of one step."""
        self.is_used = True
        self._keys.assign(tf.concat([self._keys, grad.keys], 0))
        self._sums.assign(tf.concat([self._sums, grad.sums], 0))

    def take(self, steps: int) -> TableGradient:
        """Returns the sum for each key, divided by the number of steps, and resets."""
        with _ops.on(self._table.placement.device):
            keys, sums = _ops.library().dynemb_dedup_sum(
                self._keys.read_value(), self._sums.read_value()
            )
        with tf.control_dependencies([keys, sums]):
            no_keys, no_sums = self._nothing()
            self._keys.assign(no_keys)
            self._sums.assign(no_sums)
        return TableGradient(self._table, keys, sums / steps, tf.zeros([0], tf.uint32))

    def _nothing(self) -> tuple[tf.Tensor, tf.Tensor]:
        table = self._table
        return tf.zeros([0], table.key_type), tf.zeros([0, table.dimension], tf.float32)
