"""Parts: the optimizers inside a `keras.optimizers.MultiOptimizer`, each in its own wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.keras_weight import keras_weight
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import unwrap


class Parts:
    """Gives each variable to the wrapper of the optimizer that the MultiOptimizer chooses for it.

    Args:
        multi: the MultiOptimizer. Its own step only counts.
        make: creates the wrapper of one optimizer.
    """

    def __init__(self, multi: Any, make: Callable[[Any], Any]) -> None:
        self._multi = multi
        self._make = make
        self._wrappers: dict[int, Any] = {}
        # By the variable's id; the variable is kept alive, so that its id stays valid.
        self._chosen: dict[int, tuple[Any, Any]] = {}
        for optimizer in multi.optimizers:
            self._wrapper(optimizer)

    def of(self, variable: Any) -> Any:
        """Returns the wrapper that steps a variable: always the one that was chosen first.

        The map may be a function that creates an optimizer in each call.
        """
        held = unwrap(variable)
        if id(held) not in self._chosen:
            if isinstance(variable, (DynamicVariable, Variable)):
                # Only variables of Keras have a path, which the map needs.
                variable = keras_weight(variable, variable.name.split(":")[0])
            wrapper = self._wrapper(self._multi._optimizer_map(variable))
            self._chosen[id(held)] = (held, wrapper)
        return self._chosen[id(held)][1]

    def shared_variables(self) -> list[Any]:
        """The variables of all wrappers that are not the optimizers' own, and belong to no row."""
        return [
            variable
            for wrapper in self._wrappers.values()
            for variable in wrapper.variables[len(wrapper.inner_optimizer.variables) :]
        ]

    def build(self, variables: Sequence[Any]) -> None:
        """Builds the optimizers with their variables."""
        for wrapper, numbers in self._divided(variables):
            wrapper.build([variables[i] for i in numbers])
        self._multi.built = True

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Steps all variables once."""
        for wrapper, numbers in self._divided(variables):
            its_grads = [grads[i] for i in numbers]
            if any(grad is not None for grad in its_grads):
                wrapper.apply(its_grads, [variables[i] for i in numbers])
        self._multi._iterations.assign_add(1)

    def exclude_from_weight_decay(self, variables: Sequence[Any], names: Any) -> None:
        """Same as the wrapper's, for each part."""
        its = dict(self._divided(variables))
        for wrapper in self._wrappers.values():
            excluded = [variables[i] for i in its.get(wrapper, [])]
            wrapper.exclude_from_weight_decay(excluded, names)

    def finalize_variable_values(self, variables: Sequence[Any]) -> None:
        """Same as the wrapper's, for each part."""
        for wrapper, numbers in self._divided(variables):
            wrapper.finalize_variable_values([variables[i] for i in numbers])

    def _divided(self, variables: Sequence[Any]) -> list[tuple[Any, list[int]]]:
        """The numbers of the variables of each wrapper that has any, by the order of wrappers."""
        chosen = [self.of(variable) for variable in variables]
        divided = []
        for wrapper in self._wrappers.values():
            numbers = [i for i, own in enumerate(chosen) if own is wrapper]
            if numbers:
                divided.append((wrapper, numbers))
        return divided

    def _wrapper(self, optimizer: Any) -> Any:
        # The wrappers keep the optimizers alive, so that ids stay valid.
        if id(optimizer) not in self._wrappers:
            if all(optimizer is not known for known in self._multi._inner_optimizers):
                optimizer.loss_scale_factor = self._multi.loss_scale_factor
                self._multi._inner_optimizers.append(optimizer)
            self._wrappers[id(optimizer)] = self._make(optimizer)
        return self._wrappers[id(optimizer)]
