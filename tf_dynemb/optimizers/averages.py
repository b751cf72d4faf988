"""Averages: the moving averages of rows, for Keras optimizers with `use_ema=True`.

Keras keeps an average of each variable. After each step, with the momentum m (0 in the first one),

    average = m · average + (1 - m) · value

and it replaces the values by their averages every `ema_overwrite_frequency` steps and at the end of
`fit`. A row that a step does not change has the same value x before and after it, and so after k
such steps its average is x + m^k · (average - x). An average is therefore computed when its row is
stepped, and when it replaces the value. Before the first step of a row, its average is its value.

With `gradient_accumulation_steps`, the calls of `apply` are the steps of this formula.

The averages are in a separate table, with one row for each row that was stepped: the average, the
value that the step left, and the number of the step, all in float32 (numbers up to 2^24 are exact).
It is in host memory; for a table with rows in files, it has rows in files, too. If a row has
another value than the last step left, or was stepped later than now, something else has changed it:
it was erased, evicted, assigned or loaded. Its average begins again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.optimizers.gradients import TableGradient
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.transfer import CHUNK, export


class Averages:
    """The averages of the tables of an optimizer; without tables, its methods do nothing.

    They are not saved: after a restart, they begin with the values of the rows.
    """

    def __init__(self) -> None:
        # The table of averages of each table.
        self._tables: dict[DynamicVariable, DynamicVariable] = {}

    @property
    def has_tables(self) -> bool:
        """Whether there are tables whose rows are averaged."""
        return bool(self._tables)

    def add(self, table: DynamicVariable) -> None:
        """Begins to average the rows of a table."""
        options, memory = table.options, None
        if options.file_path is not None:
            # The averages are in host memory. They take the number of bytes that the rows have in
            # all memory.
            on_gpu = options.max_hbm_bytes if table.placement.tier == "hybrid" else 0
            memory = (options.max_dram_bytes + on_gpu) / 2**30
        with tf.init_scope():
            averages = DynamicVariable(
                2 * table.dimension + 1,
                0.0,
                "host" if options.file_path is None else "file",
                name=f"{str(table.name).removesuffix(':0')}/average",
                trainable=False,
                key_type=table.key_type,
                max_capacity=options.max_capacity,
                file_path=options.file_path,
                max_dram_for_vectors=memory,
            )
        self._tables[table] = averages

    def read(self, grads: Sequence[TableGradient]) -> list[tuple[TableGradient, tf.Tensor]]:
        """Returns the gradients with the values of their rows; must be called before a step."""
        return [(grad, _values(grad.table, grad.keys)) for grad in grads if self._tables]

    def update(
        self, before: Sequence[tuple[TableGradient, tf.Tensor]], core: keras.optimizers.Optimizer
    ) -> None:
        """Averages the rows of a step after it.

        Args:
            before: what `read` returned before the step.
            core: the Keras optimizer.
        """
        now = tf.cast(core._iterations + 1, tf.float32)
        # `iterations` counts the steps with accumulated gradients, `_iterations` all.
        momentum = tf.where(tf.equal(core.iterations, 0), 0.0, core.ema_momentum)
        for grad, old in before:
            averages = self._tables[grad.table]
            # A row that was evicted after its lookup has not been stepped.
            held = _contains(grad.table, grad.keys)
            keys, old = tf.boolean_mask(grad.keys, held), tf.boolean_mask(old, held)
            average, is_known, last = _read(averages, keys, old, now)
            average = old + (average - old) * core.ema_momentum ** (now - 1 - last)
            average = tf.where(is_known, average, old)
            value = _values(grad.table, keys)
            average = momentum * average + (1 - momentum) * value
            _set(averages, keys, average, value, now)

    def overwrite_if_due(self, core: keras.optimizers.Optimizer) -> None:
        """Replaces values by averages if `ema_overwrite_frequency` says so for this step."""
        if not self._tables or not core.ema_overwrite_frequency:
            return
        calls = core._iterations + 1

        def overwrite() -> None:
            # Eagerly, because the number of rows is only known then. The sizes make TensorFlow run
            # it in order with the operators of the tables.
            tables = [table for both in self._tables.items() for table in both]
            sizes = [_ops.library().dynemb_size(table.handle) for table in tables]
            tf.py_function(lambda now, *_: self.overwrite(core, now), [calls, *sizes], [])

        is_due = tf.equal((core.iterations + 1) % core.ema_overwrite_frequency, 0)
        keras.ops.cond(is_due, overwrite, lambda: None)

    def overwrite(self, core: keras.optimizers.Optimizer, calls: tf.Tensor) -> None:
        """Replaces the values of all rows that were ever stepped by their averages. Eager only.

        Args:
            core: the Keras optimizer.
            calls: the number of calls of `apply` that have stepped the tables.
        """
        now = tf.cast(calls, tf.float32)
        for table, averages, keys in self._blocks():
            self._overwrite(core, table, averages, keys, now, keeps=False)

    def _overwrite(
        self,
        core: keras.optimizers.Optimizer,
        table: DynamicVariable,
        averages: DynamicVariable,
        keys: tf.Tensor,
        now: tf.Tensor,
        keeps: bool,
    ) -> None:
        """Replaces the values of keys; `keeps`: the rows of averages keep the values."""
        value = _values(table, keys)
        average, is_known, last = _read(averages, keys, value, now + 1)
        average = value + (average - value) * core.ema_momentum ** (now - last)
        average = tf.where(is_known, average, value)
        _ops.library().dynemb_upsert(table.handle, keys, tf.cast(average, table.dtype))
        _set(averages, keys, average, value if keeps else _values(table, keys), now)

    def swap(self, core: keras.optimizers.Optimizer) -> None:
        """Puts the averages of rows into the tables, or their values back. Eager only.

        Values are put back with the same bits. A row that something else has changed in between
        keeps the change.
        """
        now = tf.cast(core._iterations, tf.float32)
        for table, averages, keys in self._blocks():
            average, value, _ = _parts(averages, keys, table.dimension)
            average = tf.cast(tf.cast(average, table.dtype), tf.float32)
            held = _values(table, keys)
            swapped = tf.reduce_all(held == average, 1) & ~tf.reduce_all(held == value, 1)
            self._overwrite(core, table, averages, tf.boolean_mask(keys, ~swapped), now, True)
            keys, value = tf.boolean_mask(keys, swapped), tf.boolean_mask(value, swapped)
            _ops.library().dynemb_upsert(table.handle, keys, tf.cast(value, table.dtype))

    def stand_in(
        self, core: keras.optimizers.Optimizer, scaler: keras.optimizers.LossScaleOptimizer | None
    ) -> None:
        """Lets `keras.callbacks.SwapEMAWeights` swap the rows of tables, too.

        The callback swaps two lists of the Keras optimizer: its variables and their averages. Each
        gets a last element that represents all tables.

        Args:
            core: the Keras optimizer.
            scaler: a LossScaleOptimizer around it, which the callback takes for it; or None.
        """
        if not hasattr(core, "_model_variables_moving_average"):
            core._model_variables_moving_average = []  # It has no dense variables.
        if not any(isinstance(each, _Values) for each in core._trainable_variables):
            with_tables = [*core._trainable_variables, _Values(self, core)]
            # As Keras does: checkpoints do not track this list.
            core.__dict__["_trainable_variables"] = with_tables
            averages = [*core._model_variables_moving_average, _Averages(self, core)]
            core.__dict__["_model_variables_moving_average"] = averages
        if scaler is not None:
            for name in ("_trainable_variables", "_model_variables_moving_average"):
                scaler.__dict__[name] = getattr(core, name)

    def _blocks(self) -> Iterator[tuple[DynamicVariable, DynamicVariable, tf.Tensor]]:
        """Yields (table, averages, keys) of the rows that have an average, some at a time."""
        for table, averages in self._tables.items():
            keys = export(averages)[0].numpy()
            step = min(CHUNK, table.rows_at_a_time, averages.rows_at_a_time)
            for start in range(0, len(keys), step):
                chunk = tf.constant(keys[start : start + step])
                held = _contains(table, chunk)
                _ops.library().dynemb_erase(averages.handle, tf.boolean_mask(chunk, ~held))
                yield table, averages, tf.boolean_mask(chunk, held)


_DIFFERENCE = "values - averages"


class _Values:
    """Represents the values of all tables among the variables of a Keras optimizer.

    The callback swaps values a and averages b by: a += b, b = a - b, a = a - b. The last one swaps.
    Keras's own assignments, in its steps and when `fit` ends, have no effect.
    """

    dtype = "float32"
    device = "CPU"

    def __init__(self, averages: Averages, core: keras.optimizers.Optimizer) -> None:
        self._averages, self._core = averages, core

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[np.float32]:
        return np.zeros([], np.float32)

    def assign_add(self, value: Any) -> None:
        """Does nothing."""

    def __sub__(self, other: Any) -> str:
        return _DIFFERENCE

    def assign(self, value: Any) -> None:
        """Swaps, if the callback assigns."""
        if isinstance(value, str):
            self._averages.swap(self._core)


class _Averages(_Values):
    """Represents the averages of all tables, which `_Values.assign` swaps, too."""

    def assign(self, value: Any) -> None:
        """Does nothing."""


# The operators of this rank's rows: the keys of a gradient are this rank's.


def _values(table: DynamicVariable, keys: tf.Tensor) -> tf.Tensor:
    with _ops.on(table.placement.device):
        values, _ = _ops.library().dynemb_lookup(
            table.handle, keys, tf.zeros([0], table.dtype), insert=False
        )
    values.set_shape([None, table.dimension])
    return tf.cast(values, tf.float32)


def _contains(table: DynamicVariable, keys: tf.Tensor) -> tf.Tensor:
    return _ops.library().dynemb_contains(table.handle, keys)


def _read(
    averages: DynamicVariable, keys: tf.Tensor, values: tf.Tensor, now: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the averages of keys, whether each has one, and the step of each.

    Args:
        averages: the table of averages.
        keys: [n].
        values: [n, dim], the values of the rows; an average of another value does not count.
        now: the number of the step; an average of this step or a later one does not count.
    """
    average, value, last = _parts(averages, keys, values.shape[1])
    is_same = tf.reduce_all(tf.equal(value, values), axis=1, keepdims=True)
    is_known = _contains(averages, keys)[:, tf.newaxis] & is_same & (last < now)
    return average, is_known, tf.where(is_known, last, now - 1)


def _parts(averages: DynamicVariable, keys: tf.Tensor, dim: int) -> list[tf.Tensor]:
    parts: list[tf.Tensor] = tf.split(_values(averages, keys), [dim, dim, 1], axis=1)
    return parts


def _set(
    averages: DynamicVariable,
    keys: tf.Tensor,
    average: tf.Tensor,
    values: tf.Tensor,
    step: tf.Tensor,
) -> None:
    steps = tf.fill([tf.shape(average)[0], 1], step)
    rows = tf.concat([average, values, steps], 1)
    _ops.library().dynemb_upsert(averages.handle, keys, rows)
