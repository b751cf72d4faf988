"""Variables by their names on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dynemb._warn import warn
from tf_dynemb.dense.names import is_dense
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import filter_variables, tables_of, unwrap


def named_variables(variables: Any) -> dict[str, DynamicVariable | Variable]:
    """Returns variables by their names on disk.

    Args:
        variables: a variable of this package, a Keras variable of one, a Keras layer or model or
            a `tf.Module`, which mean all of their tables, a sequence of these, or a dict of names
            and variables or layers of one table. Dense weights are skipped in a dict.

    Raises:
        TypeError, ValueError: a variable or its name cannot be dumped.
    """
    if isinstance(variables, Mapping):
        _check_names(variables)
        pairs = [
            (name, _only(variable))
            for name, variable in variables.items()
            if not is_dense(variable)
        ]
    elif isinstance(variables, tf.Module):
        return named_tables(variables)
    else:
        if not isinstance(variables, Sequence) and not isinstance(variables, Iterator):
            variables = [variables]
        expanded: list[Any] = []
        for variable in variables:
            is_layer = isinstance(variable, keras.layers.Layer)
            expanded += tables_of(variable) if is_layer else [unwrap(variable)]
        pairs = [(_name(variable), variable) for variable in expanded]
    named: dict[str, DynamicVariable | Variable] = {}
    for name, variable in pairs:
        if not isinstance(variable, (DynamicVariable, Variable)):
            raise TypeError(
                f"variables must be DynamicVariables or tf_dynemb.Variables, got {variable!r:.120}."
            )
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


def _check_names(variables: Mapping[Any, Any]) -> None:
    for name in variables:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a table's name must be a non-empty string, got {name!r}.")


def named_tables(model: keras.layers.Layer | tf.Module) -> dict[str, DynamicVariable | Variable]:
    """Returns the tables of a model by names on disk that do not depend on what else was created.

    A table keeps the name that it, or its layer, was given. Without one, Keras numbers layers in
    the order of their creation (`embedding`, `embedding_1`), so that such a table is named by its
    place in the model: the attributes that lead to it, the keys or positions in dicts and lists,
    and the positions among the `layers` of a functional or sequential model.

    Example:
    >>> model = keras.Sequential([Embedding(4), Embedding(4, name="users")])
    >>> list(named_tables(model))
    ['layers/0', 'users/embeddings']

    Args:
        model: a Keras layer or model, or a `tf.Module`.

    Returns:
        A dict for `dump`, `load` and similar functions.

    Raises:
        ValueError: there is no table; or two have one name; or one without a name is an attribute
            of another kind of object, or of one whose name begins with an underscore.
    """
    places = dict(_places(model, "", set()))
    named: dict[str, DynamicVariable | Variable] = {}
    if isinstance(model, keras.layers.Layer):
        weights = model.variables
    else:
        weights = tf.train.TrackableView(model).descendants()
    # A layer that has not been called yet does not have the tables among its attributes as weights.
    variables = {id(v): v for v in (*filter_variables(map(unwrap, weights))[0], *places.values())}
    for variable in variables.values():
        name = _name(variable)
        if variable.has_automatic_name:
            found = [place for place, other in places.items() if other is variable]
            if not found:
                raise ValueError(
                    f"{name!r} is not among the public attributes of {type(model).__name__} and "
                    "its layers, by which tables without a name are named: give it a name."
                )
            name = found[0]
        if name in named:
            raise ValueError(f"Two tables are named {name!r}: give them different names.")
        named[name] = variable
    if not named:
        raise ValueError(f"{type(model).__name__} has no tables.")
    return named


def _places(
    node: Any, path: str, seen: set[int]
) -> Iterator[tuple[str, DynamicVariable | Variable]]:
    """Yields the tables in an object, with the ways to them; each object is visited once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    node = unwrap(node)
    if isinstance(node, (DynamicVariable, Variable)):
        yield path, node
        return
    parts: list[tuple[Any, Any]] = []
    if isinstance(node, Mapping):
        parts = list(node.items())
    elif isinstance(node, (list, tuple)):
        parts = list(enumerate(node))
    elif isinstance(node, (keras.layers.Layer, tf.Module)):
        parts = [(name, part) for name, part in vars(node).items() if name[:1] != "_"]
        if isinstance(node, keras.Model):
            parts += [(f"layers/{number}", layer) for number, layer in enumerate(node.layers)]
        tables = [unwrap(weight) for weight in getattr(node, "_weights_of_tables", ())]
        names = [_name(table).removeprefix(f"{node.name}/") for table in tables]
        parts += [
            (name if len(tables) > 1 else "", table)
            for name, table in zip(names, tables, strict=True)
        ]
    for name, part in parts:
        yield from _places(part, "/".join(filter(None, (path, str(name)))), seen)


def with_automatic_names(
    tables: Mapping[str, DynamicVariable | Variable], variables: Any
) -> list[str]:
    """Returns the names on disk of the tables whose names are automatic.

    Args:
        tables: the variables by their names on disk.
        variables: the argument of `named_variables`.
    """
    if isinstance(variables, (Mapping, tf.Module)):
        return []
    return [name for name, table in tables.items() if table.has_automatic_name]


def warn_of_automatic_names(call: str, names: Sequence[str], forms: Mapping[str, Any]) -> None:
    """Warns if tables could be taken for others, because their names are automatic.

    Args:
        call: "dump" or "load".
        names: the result of `with_automatic_names`.
        forms: for each table on disk what a load compares, such as its dimension.
    """
    alike = [name for name in names if list(forms.values()).count(forms[name]) > 1]
    if alike:
        warn(
            f"{call}: the names of {', '.join(map(repr, alike))} are automatic, and depend on the "
            "order in which a process creates its layers. If the order changes, a table gets the "
            "rows of another one. Name the layers, or dump and load "
            "tf_dynemb.named_tables(model)."
        )


def dynamic_only(tables: Mapping[str, DynamicVariable | Variable]) -> dict[str, DynamicVariable]:
    """Returns the tables; raises TypeError if one of them is dense."""
    for name, variable in tables.items():
        if not isinstance(variable, DynamicVariable):
            raise TypeError(
                f"{name!r} is a dense variable, which does not record which of its rows changed: "
                "deltas can only contain DynamicVariables."
            )
    return dict(tables)


def described(tables: Mapping[str, DynamicVariable | Variable]) -> list[str]:
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
