"""RowwiseAdagrad: Adagrad with one accumulator for each row instead of one for each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="tf_dynemb")
class RowwiseAdagrad(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Adagrad whose state is one float per row; in a table it costs 4 bytes per row.

        accumulator += mean(gradient², over the row)
        variable -= learning_rate * gradient / (sqrt(accumulator) + epsilon)

    Formula: FBGEMM's EXACT_ROWWISE_ADAGRAD. A row of a dense variable is its last dimension; a
    one-dimensional or scalar variable is one row.

    Args:
        learning_rate: a float, or a Keras schedule.
        initial_accumulator_value: the initial value of the accumulator, >= 0.
        epsilon: added to the square root.
        **kwargs: arguments of `keras.optimizers.Optimizer`.

    Raises:
        ValueError: `initial_accumulator_value` is negative.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 0.001,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-7,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        if initial_accumulator_value < 0:
            raise ValueError(
                f"initial_accumulator_value must be >= 0, got {initial_accumulator_value!r}."
            )
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates one accumulator for each row of each variable."""
        if self.built:
            return
        super().build(variables)
        self._accumulators = [
            self.add_variable(
                shape=[*variable.shape[:-1], 1] if len(variable.shape) else [],
                initializer=keras.initializers.Constant(self.initial_accumulator_value),
                dtype=variable.dtype,
                name="accumulator",
            )
            for variable in variables
        ]

    def update_step(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: tf.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        """Updates one variable; see the class for the formula."""
        accumulator = self._accumulators[self._get_variable_index(variable)].value
        learning_rate = tf.cast(learning_rate, variable.dtype)
        epsilon = tf.cast(self.epsilon, variable.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            rows, position = tf.unique(gradient.indices)
            gradient = tf.math.unsorted_segment_sum(
                tf.cast(gradient.values, variable.dtype), position, tf.size(rows)
            )
            square = tf.reduce_mean(tf.square(gradient), axis=-1, keepdims=True)
            accumulator.scatter_add(tf.IndexedSlices(square, rows))
            step = learning_rate * gradient / (tf.sqrt(tf.gather(accumulator, rows)) + epsilon)
            variable.scatter_sub(tf.IndexedSlices(step, rows))
            return
        gradient = tf.cast(gradient, variable.dtype)
        square = tf.square(gradient)
        if len(variable.shape):
            square = tf.reduce_mean(square, axis=-1, keepdims=True)
        accumulator.assign_add(square)
        variable.assign_sub(learning_rate * gradient / (tf.sqrt(accumulator) + epsilon))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "initial_accumulator_value": self.initial_accumulator_value,
            "epsilon": self.epsilon,
        }
