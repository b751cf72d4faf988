"""OneOptimizer: the steps of tables and dense variables with one Keras optimizer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dynemb import _warn
from tf_dynemb.optimizers import gradients, native, pairs
from tf_dynemb.optimizers.accumulator import Accumulator
from tf_dynemb.optimizers.averages import Averages
from tf_dynemb.optimizers.generic import RowsOptimizer, fresh_copy
from tf_dynemb.optimizers.gradients import TableGradient
from tf_dynemb.optimizers.trained_tables import note_optimizer
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable

_numbers = itertools.count(1)
_STATE_WITHOUT_STEPS = (
    "the rows of table {table!r} have restored state, and {optimizer!r}, which now steps them, has "
    "made no step. Its first steps would have wrong lengths, because it corrects its averages for "
    "the number of steps. Restore the optimizer with the table, for example with "
    "tf.train.Checkpoint(table=table, optimizer=optimizer), or set its step count: "
    "optimizer.iterations.assign(steps)."
)


class OneOptimizer:
    """Steps with one Keras optimizer, which can be in a LossScaleOptimizer.

    `Parts` has the same methods, for several optimizers. Keras searches the attributes of an
    optimizer for variables and optimizers to track and to save. It does not search inside this
    class.

    Args:
        wrapper: the `OptimizerWrapper` of the optimizer. It is not kept alive: tables are freed
            with the last reference to it.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._inner = wrapper.inner_optimizer
        self._core = core = wrapper.core
        self._scaler = None if self._inner is core else self._inner
        self._name = wrapper.name
        self._catch_up = wrapper.catch_up
        # Identifies the wrapper within the process, for the operators and in their messages.
        self._owner = (
            f"OptimizerWrapper {self._name!r} of {type(core).__name__} (number {next(_numbers)})"
        )
        self._form = native.native_form(core, self._catch_up)
        self._template = fresh_copy(core) if self._form is None else None
        self.variables: list[Any] = []
        self._attached: set[DynamicVariable] = set()
        # The tables with restored state that this optimizer has not stepped yet.
        self._continued: list[DynamicVariable] = []
        # The optimizers of tables that Keras's own code steps.
        self._rows: dict[DynamicVariable, RowsOptimizer] = {}
        # With gradient_accumulation_steps.
        self._accumulators: dict[DynamicVariable, Accumulator] = {}
        self._without_weight_decay: set[DynamicVariable] = set()
        self.averages = Averages()

    def describe(self) -> str:
        """The optimizer's class, and its progress if it can be read."""
        core = self._core
        text = type(core).__name__
        if not tf.executing_eagerly():
            return text
        rate, steps = float(core.learning_rate), int(core.iterations)
        return f"{text} learning_rate={rate:.6g} iterations={steps}"

    def shared_variables(self) -> list[Any]:
        """The variables that belong to no row, nor to the Keras optimizer."""
        return [v for rows in self._rows.values() for v in rows.shared_variables]

    def shared_variables_of(self, table: DynamicVariable) -> list[Any]:
        """These variables of one table."""
        return self._rows[table].shared_variables if table in self._rows else []

    def build(self, variables: Sequence[Any]) -> None:
        """Creates state for dense variables, and adds space for state to the rows of tables."""
        _, distinct = pairs.distinct([None] * len(variables), variables)
        tables, dense = pairs.split(distinct)
        with tf.init_scope():
            self._build_dense(dense)
            for table in tables:
                self._attach(table)
        self.variables = list(variables)

    def state_spec(self, table: DynamicVariable) -> StateSpec:
        """The state that this optimizer keeps, or would keep, in the table's rows."""
        self._check(table)
        if self._form is not None:
            return native.state_spec(table, self._form)
        if table in self._rows:
            return self._rows[table].state_spec
        return RowsOptimizer(self._template, table).state_spec

    def attach(self, tables: Sequence[DynamicVariable]) -> None:
        """Adds space for state to the rows of tables, also if another wrapper has taken them."""
        with tf.init_scope():
            for table in tables:
                self._attach(table)
                # Again, because another wrapper may own the state, or it may have been restored.
                table.attach_state(*self.state_spec(table), self._owner)

    def _build_dense(self, dense: list[Any]) -> None:
        # Without dense variables, the first call that has one builds the optimizer.
        inner = self._inner
        if not inner.built and (dense or self._scaler is not None):
            with keras.name_scope(inner.name, caller=inner):
                inner.build(dense)
            inner.built = True
        if self.averages.has_tables:
            self.averages.stand_in(self._core, self._scaler)

    def _check(self, table: DynamicVariable) -> None:
        if self._core.gradient_accumulation_steps and self._core.global_clipnorm:
            raise ValueError(
                "global_clipnorm cannot be combined with gradient_accumulation_steps for the table "
                f"{table.name}: Keras clips the dense gradients alone. Use clipnorm."
            )
        if self._catch_up:
            native.check_catch_up(self._core, table)

    def _attach(self, table: DynamicVariable) -> None:
        if table in self._attached:
            return
        self._check(table)
        wrapper: Any = self._wrapper()
        if self._form is not None:
            is_continued = native.attach(table, self._form, self._owner)
            is_continued = is_continued and native.counts_steps(self._form)
        else:
            rows = RowsOptimizer(self._template, table)
            is_continued = rows.attach(self._owner)
            # For tf.train.Checkpoint, which may already have been asked to restore their values.
            for i, variable in enumerate(rows.shared_variables):
                wrapper._track_trackable(variable, f"table_{len(self._rows)}_{i}")
            self._rows[table] = rows
        if is_continued:
            self._continued.append(table)
        if self._core.gradient_accumulation_steps:
            self._accumulators[table] = Accumulator(table)
        if self._core.use_ema:
            self.averages.add(table)
            self.averages.stand_in(self._core, self._scaler)
        self._attached.add(table)
        note_optimizer([table], wrapper)

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Steps tables and dense variables once."""
        grads, variables = pairs.distinct(grads, variables)
        tables, dense = pairs.split(variables)
        with tf.init_scope():
            self._build_dense(dense)
            for table in tables:
                self._attach(table)
            # Not when it attaches: a load attaches the optimizer before it sets the step count.
            while self._continued:
                table = self._continued.pop()
                if int(self._core._iterations) == 0:
                    _warn.warn(_STATE_WITHOUT_STEPS.format(table=table.name, optimizer=self._name))

        grads, variables = pairs.drop_missing(grads, variables)
        table_grads, dense_grads, dense = pairs.by_kind(grads, variables)
        dense_grads = [
            gradients.of_unique_rows(grad, variable)
            for grad, variable in zip(dense_grads, dense, strict=True)
        ]
        wrapper: Any = self._wrapper()
        table_grads, dense_grads = gradients.reduce_over_ranks(
            wrapper.gradient_reduction, table_grads, dense_grads, dense
        )
        scaler = self._scaler
        if scaler is None:
            # Keras divides the dense gradients by the factor itself.
            self._step(table_grads, dense_grads, dense, self._core.loss_scale_factor)
            return

        def step() -> None:
            scale = scaler.dynamic_scale
            unscaled = [gradients.divide(grad, scale) for grad in dense_grads]
            self._step(table_grads, unscaled, dense, scale)
            keras.ops.cond(
                keras.ops.equal(scaler.step_counter, scaler.dynamic_growth_steps - 1),
                lambda: _double(scaler),
                lambda: _count(scaler),
            )

        keras.ops.cond(
            gradients.all_finite(table_grads, dense_grads),
            step,
            scaler._stateful_handle_non_finite_grads,
        )

    def _step(
        self,
        table_grads: list[TableGradient],
        dense_grads: list[Any],
        dense: list[Any],
        table_scale: Any,
    ) -> None:
        """Steps tables and dense variables once; divides the gradients of tables by the scale."""
        core = self._core
        if table_scale is not None:
            table_grads = [
                grad.with_sums(grad.sums / tf.cast(table_scale, tf.float32)) for grad in table_grads
            ]
        if core.gradient_accumulation_steps:
            self._accumulate(table_grads)  # Keras accumulates and clips the dense gradients itself
        else:
            table_grads, dense_grads = self._clip(table_grads, dense_grads, dense)
            self._step_tables(table_grads)
        self.averages.overwrite_if_due(core)
        if dense:
            core.apply(dense_grads, dense)
        else:
            core._iterations.assign_add(1)

    def _accumulate(self, grads: Sequence[TableGradient]) -> None:
        """Adds up gradients, and steps with their mean in every gradient_accumulation_steps-th."""
        core = self._core
        for grad in grads:
            self._accumulators[grad.table].add(grad)

        def update() -> None:
            used = [each for each in self._accumulators.values() if each.is_used]
            means = [each.take(core.gradient_accumulation_steps) for each in used]
            self._step_tables(gradients.clip(core, means, [], [])[0])

        is_last = (core._iterations + 1) % core.gradient_accumulation_steps == 0
        keras.ops.cond(is_last, update, lambda: None)

    def _clip(
        self, table_grads: list[TableGradient], dense_grads: list[Any], dense: list[Any]
    ) -> Any:
        factor = self._core.loss_scale_factor
        if factor is None or not self._core.global_clipnorm:
            return gradients.clip(self._core, table_grads, dense_grads, dense)
        dense_grads = [gradients.divide(grad, factor) for grad in dense_grads]
        table_grads, dense_grads = gradients.clip(self._core, table_grads, dense_grads, dense)
        return table_grads, [gradients.multiply(grad, factor) for grad in dense_grads]

    def _step_tables(self, grads: Sequence[TableGradient]) -> None:
        core = self._core
        step = core.iterations + 1
        grads = [gradients.with_rows(grad) for grad in grads]
        before = self.averages.read(grads)
        # Again: hyperparameters may have changed since `build`.
        form = native.native_form(core, self._catch_up)
        if form is None:
            for grad in grads:
                decays = self.decays(grad.table)
                self._rows[grad.table].update(core, grad, decays, self._owner)
        else:
            for decays in (True, False):
                group = [grad for grad in grads if self.decays(grad.table) == decays]
                decay = core.weight_decay if decays else None
                native.update(form, group, core.learning_rate, decay, step, self._owner)
        for grad in grads:
            if grad.table.constraint is not None:
                gradients.constrain(grad, step)
        self.averages.update(before, core)

    def decays(self, table: DynamicVariable) -> bool:
        """Whether weight decay applies to a table, as in Keras's `_use_weight_decay`."""
        pattern = getattr(self._core, "_exclude_from_weight_decay_pattern", None)
        if pattern is not None and pattern.search(table.name):
            return False
        return table not in self._without_weight_decay

    def exclude_from_weight_decay(self, variables: Sequence[Any], names: Any) -> None:
        """Same as in Keras; `variables` can contain tables."""
        tables, dense = pairs.split(variables)
        self._core.exclude_from_weight_decay(dense, names)
        self._without_weight_decay = set(tables)

    def finalize_variable_values(self, variables: Sequence[Any]) -> None:
        """With `use_ema`, replaces values by their averages."""
        self.averages.overwrite(self._core, self._core._iterations)
        if dense := pairs.split(variables)[1]:
            stand_ins = self._core._trainable_variables[len(dense) :]
            self._inner.finalize_variable_values([*dense, *stand_ins])


def _double(scaler: Any) -> None:
    scaler.step_counter.assign(0)
    scaler.dynamic_scale.assign(scaler.dynamic_scale * 2.0)


def _count(scaler: Any) -> None:
    scaler.step_counter.assign_add(1)
