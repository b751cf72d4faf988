"""Parts: steps with the optimizers inside a `keras.optimizers.MultiOptimizer`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from tf_dynemb.optimizers import pairs
from tf_dynemb.optimizers.trained_tables import note_optimizer
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.keras_weight import keras_weight
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import unwrap


class Parts:
    """Steps each variable with the optimizer that a MultiOptimizer chooses for it.

    Each of these optimizers has a wrapper. `OneOptimizer` has the same methods, for an
    optimizer that is not a MultiOptimizer.

    Args:
        wrapper: the `OptimizerWrapper` of the MultiOptimizer, whose own step only counts. It is not
            kept alive.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._multi = wrapper.core
        self.variables: list[Any] = []
        # By the optimizer's id; the wrappers keep the optimizers alive, so that ids stay valid.
        self._parts: dict[int, Any] = {}
        # By the variable's id; the variable is kept alive, so that its id stays valid.
        self._chosen: dict[int, tuple[Any, Any]] = {}
        for optimizer in self._multi.optimizers:
            self._part(optimizer)

    def describe(self) -> str:
        """The MultiOptimizer's class: the optimizers in it have a progress each."""
        return type(self._multi).__name__

    def shared_variables(self) -> list[Any]:
        """The variables that belong to no row, nor to the Keras optimizers."""
        return [
            variable
            for part in self._parts.values()
            for variable in part.variables[len(part.inner_optimizer.variables) :]
        ]

    def shared_variables_of(self, table: DynamicVariable) -> list[Any]:
        """These variables of one table."""
        return list(self._part_of(table).shared_variables(table))

    def build(self, variables: Sequence[Any]) -> None:
        """Builds the optimizers with their variables."""
        for part, numbers in self._divided(variables):
            part.build([variables[i] for i in numbers])
        self._multi.built = True
        note_optimizer(pairs.split(variables)[0], self._wrapper())
        self.variables = list(variables)

    def state_spec(self, table: DynamicVariable) -> StateSpec:
        """The state that the table's optimizer keeps, or would keep, in the table's rows."""
        spec: StateSpec = self._part_of(table).state_spec(table)
        return spec

    def attach(self, tables: Sequence[DynamicVariable]) -> None:
        """Adds space for state to the rows of tables, also if another wrapper has taken them."""
        for table in tables:
            self._part_of(table).attach([table])

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Steps all variables once."""
        for part, numbers in self._divided(variables):
            part_grads = [grads[i] for i in numbers]
            if any(grad is not None for grad in part_grads):
                part.apply(part_grads, [variables[i] for i in numbers])
        self._multi._iterations.assign_add(1)

    def decays(self, table: DynamicVariable) -> bool:
        """Whether the weight decay of the table's optimizer applies to the table."""
        return bool(self._part_of(table).decays(table))

    def exclude_from_weight_decay(self, variables: Sequence[Any], names: Any) -> None:
        """Same as in Keras, for each part; `variables` can contain tables."""
        numbers_of = dict(self._divided(variables))
        for part in self._parts.values():
            excluded = [variables[i] for i in numbers_of.get(part, [])]
            part.exclude_from_weight_decay(excluded, names)

    def finalize_variable_values(self, variables: Sequence[Any]) -> None:
        """With `use_ema`, replaces values by their averages."""
        for part, numbers in self._divided(variables):
            part.finalize_variable_values([variables[i] for i in numbers])

    def _divided(self, variables: Sequence[Any]) -> list[tuple[Any, list[int]]]:
        """The numbers of the variables of each part that has any, by the order of parts."""
        chosen = [self._part_of(variable) for variable in variables]
        divided = []
        for part in self._parts.values():
            numbers = [i for i, chosen_part in enumerate(chosen) if chosen_part is part]
            if numbers:
                divided.append((part, numbers))
        return divided

    def _part_of(self, variable: Any) -> Any:
        """Returns the wrapper that steps a variable: always the one that was chosen first.

        The map can be a function that creates an optimizer in each call.
        """
        held = unwrap(variable)
        if id(held) not in self._chosen:
            if isinstance(variable, (DynamicVariable, Variable)):
                # Only variables of Keras have a path, which the map needs.
                variable = keras_weight(variable, variable.name.split(":")[0])
            part = self._part(self._multi._optimizer_map(variable))
            self._chosen[id(held)] = (held, part)
        return self._chosen[id(held)][1]

    def _part(self, optimizer: Any) -> Any:
        """Returns the wrapper of an optimizer."""
        if id(optimizer) not in self._parts:
            if all(optimizer is not known for known in self._multi._inner_optimizers):
                optimizer.loss_scale_factor = self._multi.loss_scale_factor
                self._multi._inner_optimizers.append(optimizer)
            whole: Any = self._wrapper()
            self._parts[id(optimizer)] = type(whole)(
                optimizer, gradient_reduction=whole.gradient_reduction, catch_up=whole.catch_up
            )
        return self._parts[id(optimizer)]
