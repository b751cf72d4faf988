"""Variables by their names on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import tables_of, unwrap


def named_variables(variables: Any) -> dict[str, Any]:
    """Returns variables by their names on disk.

    Args:
        variables: a variable of this package, a Keras variable of one, a Keras layer or model,
            which stands for all of its tables, a sequence of these, or a dict of names and
            variables or layers of one table.

    Raises:
        TypeError, ValueError: a variable or its name cannot be dumped.
    """
    if isinstance(variables, Mapping):
        pairs = [(name, _only(variable)) for name, variable in variables.items()]
    else:
        if not isinstance(variables, Sequence) and not isinstance(variables, Iterator):
            variables = [variables]
        expanded: list[Any] = []
        for variable in variables:
            is_layer = isinstance(variable, keras.layers.Layer)
            expanded += tables_of(variable) if is_layer else [unwrap(variable)]
        pairs = [(_name(variable), variable) for variable in expanded]
    named: dict[str, Any] = {}
    for name, variable in pairs:
        if not isinstance(variable, (DynamicVariable, Variable)):
            raise TypeError(
                f"variables must be DynamicVariables or tf_dynemb.Variables, got {variable!r:.120}."
            )
        if not isinstance(name, str) or not name:
            raise TypeError(f"a table's name must be a non-empty string, got {name!r}.")
        if isinstance(variable, Variable) and variable.shape.rank != 2:
            raise ValueError(f"{name!r} has the shape {variable.shape}, expected two dimensions.")
        if name in named:
            raise ValueError(
                f"Two of the variables are named {name!r}. A dict gives them names on disk."
            )
        if any(variable is other for other in named.values()):
            raise ValueError(f"The table {variable.name!r} is named twice.")
        named[name] = variable
    if not named:
        raise ValueError("variables is empty.")
    return named


def dynamic_only(tables: Mapping[str, Any]) -> dict[str, DynamicVariable]:
    """Returns the tables; raises TypeError if one of them is dense."""
    for name, variable in tables.items():
        if not isinstance(variable, DynamicVariable):
            raise TypeError(
                f"{name!r} is a dense variable, which does not record which of its rows changed: "
                "deltas can only contain DynamicVariables."
            )
    return dict(tables)


def described(tables: Mapping[str, Any]) -> list[str]:
    """Returns a description of each variable, for a comparison between ranks."""
    texts = []
    for name, variable in tables.items():
        if isinstance(variable, DynamicVariable):
            what = f"{variable.dimension} x {variable.dtype.name} by {variable.key_type.name}"
        else:
            what = f"{list(variable.global_shape)} x {variable.dtype.name}"
        texts.append(f"{name!r}: {what}, {variable.mode or 'distributed'}")
    return texts


def _only(variable: Any) -> Any:
    """Returns the variable inside a Keras variable, or a layer's only table."""
    if isinstance(variable, keras.layers.Layer):
        tables = tables_of(variable)
        if len(tables) > 1:
            raise ValueError(f"{variable.name} has {len(tables)} tables; a name is for one.")
        return tables[0]
    return unwrap(variable)


def _name(variable: Any) -> Any:
    """Returns a variable's name as it was given, without TensorFlow's output number."""
    name = getattr(variable, "name", None)
    return name.removesuffix(":0") if isinstance(name, str) else name
