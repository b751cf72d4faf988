"""From Keras's variables to TensorFlow's."""

from __future__ import annotations

from typing import Any

import keras

from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable


def unwrap(variable: Any) -> Any:
    """Returns the TensorFlow variable inside a Keras variable; any other object unchanged."""
    if isinstance(variable, keras.Variable):
        return getattr(variable, "_value", variable)
    return variable


def filter_variables(variables: Any) -> tuple[list[Any], list[Any]]:
    """Separates the variables of this package, dynamic and static, from all others.

    Args:
        variables: an iterable of TensorFlow or Keras variables, such as
            `model.trainable_variables`.

    Returns:
        (ours, others): two lists of the objects that were passed, in their order.
    """
    ours: list[Any] = []
    others: list[Any] = []
    for variable in variables:
        is_ours = isinstance(unwrap(variable), (DynamicVariable, Variable))
        (ours if is_ours else others).append(variable)
    return ours, others


def dynamic(variable: Any, name: str = "var") -> DynamicVariable:
    """Returns the DynamicVariable that `variable` is or wraps.

    Raises:
        TypeError: `variable` is neither; the message names it.
    """
    table = unwrap(variable)
    if not isinstance(table, DynamicVariable):
        raise TypeError(f"{name} must be a DynamicVariable, got {variable!r:.120}.")
    return table
