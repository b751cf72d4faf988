"""From Keras's variables to TensorFlow's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable


def unwrap(variable: Any) -> Any:
    """Returns the TensorFlow variable inside a Keras variable; any other object unchanged."""
    if isinstance(variable, keras.Variable):
        return getattr(variable, "_value", variable)
    return variable


def filter_variables(
    variables: Iterable[tf.Variable | keras.Variable],
) -> tuple[list[tf.Variable | keras.Variable], list[tf.Variable | keras.Variable]]:
    """Separates the variables of this package, dynamic and static, from all others.

    Args:
        variables: an iterable of TensorFlow or Keras variables, such as
            `model.trainable_variables`.

    Returns:
        (embedding_variables, other_variables): two lists of the objects that were passed, in
            their order.
    """
    embedding_variables: list[tf.Variable | keras.Variable] = []
    other_variables: list[tf.Variable | keras.Variable] = []
    for variable in variables:
        is_embedding = isinstance(unwrap(variable), (DynamicVariable, Variable))
        (embedding_variables if is_embedding else other_variables).append(variable)
    return embedding_variables, other_variables


def tables_of(layer: keras.layers.Layer) -> list[DynamicVariable | Variable]:
    """Returns the variables of this package among the weights of a Keras layer or model.

    Raises:
        ValueError: the layer has none, or has not been called yet and therefore not made them.
    """
    variables, _ = filter_variables(layer.variables)
    if not variables:
        raise ValueError(
            f"{layer.name} has no tables among its weights. If they are attributes of a layer that "
            "has not been called yet, call it once."
        )
    return [unwrap(variable) for variable in variables]


def dynamic(variable: Any, name: str = "var") -> DynamicVariable:
    """Returns the DynamicVariable that `variable` is or wraps, or that is a layer's only table.

    Raises:
        TypeError: `variable` is none of these; the message names it.
        ValueError: `variable` is a layer or model that has no table, or several.
    """
    if isinstance(variable, keras.layers.Layer):
        tables = tables_of(variable)
        if len(tables) > 1:
            names = ", ".join(repr(table.name.removesuffix(":0")) for table in tables)
            raise ValueError(f"{variable.name} has several tables: {names:.200}. Pass one of them.")
        variable = tables[0]
    table = unwrap(variable)
    if not isinstance(table, DynamicVariable):
        raise TypeError(f"{name} must be a DynamicVariable, got {variable!r:.120}.")
    return table
