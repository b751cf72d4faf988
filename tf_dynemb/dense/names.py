"""The dense variables of a model, by names that are the same in every process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import unwrap

Weight: TypeAlias = "tf.Variable | keras.Variable"

# How the names of random seeds begin.
SEEDS = "seeds/"


class Dense(NamedTuple):
    """Dense variables by name.

    Attributes:
        weights: the weights of a model, trainable or not, without the state of metrics.
        training: what only training needs: the states of random seeds, and the variables of the
            optimizer, other than the number of steps. None: not wanted.
    """

    weights: dict[str, Weight]
    training: dict[str, Weight] | None

    @property
    def parts(self) -> dict[str, dict[str, Weight]]:
        """The variables by the names of the parts on disk; empty if there are none."""
        if not self.weights and not self.training:
            return {}
        training = {} if self.training is None else {"training": self.training}
        return {"weights": self.weights, **training}


def dense_variables(variables: Any) -> Dense:
    """Returns the dense variables of models and of dicts of variables, without an optimizer's.

    A weight's name is the way to it: the attributes, the keys and positions in dicts and lists, or
    the name that a layer of a functional or sequential model was given (without one, or with one
    that Keras could have chosen, `layers/POSITION`), and then the weight's own name in its layer,
    such as `tower/0/kernel`.

    Args:
        variables: a Keras layer or model, a `tf.Module`, a dict of names and variables, or several
            of these in a dict or list. Anything else, such as a table, has none.
    """
    weights: dict[str, Weight] = {}
    seeds: dict[str, Weight] = {}
    if isinstance(variables, (list, tuple)) and len(variables) == 1:
        (variables,) = variables
    seen: set[int] = set()
    if isinstance(variables, (Mapping, list, tuple, keras.layers.Layer, tf.Module)):
        for name, variable, is_seed in _walk(variables, "", seen):
            named = seeds if is_seed else weights
            named[_free(f"{SEEDS}{name}" if is_seed else name, named)] = variable
    others = variables.variables if isinstance(variables, keras.layers.Layer) else ()
    for number, variable in enumerate(others):
        if is_dense(variable) and id(variable) not in seen:
            weights[f"variables/{number}"] = variable
    return Dense(weights, seeds)


def optimizer_variables(
    optimizer: OptimizerWrapper,
    weights: Mapping[str, Weight],
    tables: Mapping[str, DynamicVariable | Variable],
) -> dict[str, Weight]:
    """Returns the variables of an optimizer that is built, except its number of steps, by name.

    Those that belong to a weight have its name.

    Args:
        optimizer: the optimizer.
        weights: the dense weights by name.
        tables: the tables by name. The optimizer can have variables for them that are not in rows.
    """
    core = optimizer.core
    names = {id(unwrap(each)): name for name, each in [*tables.items(), *weights.items()]}
    trained = [
        names.get(id(unwrap(each)), "") for each in getattr(core, "_trainable_variables", ())
    ]
    named: dict[str, Weight] = {}
    # Keras's lists have an element for each trained variable; their names can be the same.
    for attribute, values in vars(core).items():
        if isinstance(values, (list, tuple)) and len(values) == len(trained):
            for name, variable in zip(trained, values, strict=True):
                if is_dense(variable) and attribute != "_trainable_variables" and name:
                    named[f"optimizer/{name}/{attribute.strip('_')}"] = variable
    groups = {"": [*optimizer.inner_optimizer.variables, *_attributes_of(core)]}
    for name, table in tables.items():
        if isinstance(table, DynamicVariable):
            groups[f"{name}/"] = optimizer.shared_variables(table)
    seen = {id(each) for each in [core._iterations, *named.values()]}
    for group, variables in groups.items():
        for variable in variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                # Keras numbers variables that belong to no weight.
                own = re.sub(r"_\d+$", "", variable.name)
                named[_free(f"optimizer/{group}{own}", named)] = variable
    return named


def _attributes_of(optimizer: keras.optimizers.Optimizer) -> list[Weight]:
    """Returns attributes that are variables; Nadam in a LossScaleOptimizer does not list one."""
    return [each for each in vars(optimizer).values() if isinstance(each, keras.Variable)]


def is_dense(variable: Any) -> bool:
    """Whether an object is a variable that is not of this package."""
    inner = unwrap(variable)
    return isinstance(inner, (tf.Variable, keras.Variable)) and not isinstance(
        inner, (DynamicVariable, Variable)
    )


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """Returns the name, with a number if it is taken."""
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name} {number}"
    return free


def _walk(node: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Weight, bool]]:
    """Yields the dense variables in an object, their names, and whether they are random seeds."""
    if id(node) in seen:
        return
    seen.add(id(node))
    children: Iterator[tuple[str, Any]] | list[tuple[str, Any]] = []
    if is_dense(node):
        yield path, node, False
    elif isinstance(node, (keras.random.SeedGenerator, tf.random.Generator)):
        seen.add(id(node.state))
        yield path, node.state, True
    elif isinstance(node, (keras.optimizers.Optimizer, keras.metrics.Metric)):
        return
    elif isinstance(node, keras.layers.Layer):
        children = _in_layer(node)
    elif isinstance(node, Mapping):
        children = [(str(name), node[name]) for name in node]
    elif isinstance(node, (list, tuple)):
        children = [(str(number), each) for number, each in enumerate(node)]
    elif isinstance(node, tf.Module):
        children = _attributes(node)
    for name, child in children:
        yield from _walk(child, "/".join(filter(None, (path, name))), seen)


def _in_layer(layer: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    """Yields the weights, random seeds and layers that a layer has itself, by name."""
    weights = [*layer._trainable_variables, *layer._non_trainable_variables]
    for number, weight in enumerate(weights):
        # Keras numbers weights without a name.
        is_automatic = re.fullmatch(r"variable(_\d+)?", weight.name)
        yield f"weights/{number}" if is_automatic else weight.name, weight
    for seeds in layer._seed_generators:
        yield "seed_generator", seeds
    if vars(layer).keys() & {"_operations", "_functional"}:  # it is functional, or sequential
        for number, child in enumerate(layer.layers):
            yield f"layers/{number}" if has_automatic_name(child) else child.name, child
    inner = {id(child) for child in layer._layers}
    for name, value in _attributes(layer):
        if name not in ("_layers", "_functional", "_operations", "_metrics"):
            yield from _parts_in(value, name, inner)
    for number, child in enumerate(layer._layers):
        yield f"layers/{number}", child


def _attributes(node: Any) -> list[tuple[str, Any]]:
    """Returns the attributes of a layer or module, public ones first, without TensorFlow's own."""
    own = [item for item in vars(node).items() if not item[0].startswith(("_self_", "_tf_"))]
    return sorted(own, key=lambda item: (item[0][:1] == "_", item[0]))


def _parts_in(value: Any, name: str, layers: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields what an attribute of a layer has, also in lists and dicts, that has variables.

    Args:
        value: the attribute.
        name: its name.
        layers: the ids of the layers that Keras has found in the layer.
    """
    if isinstance(value, keras.layers.Layer):
        if id(value) in layers:
            yield name, value
    elif isinstance(value, (tf.Variable, tf.Module, tf.random.Generator)):  # Keras skips these
        yield name, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _parts_in(value[key], f"{name}/{key}", layers)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _parts_in(each, f"{name}/{number}", layers)


def has_automatic_name(layer: keras.layers.Layer) -> bool:
    """Whether a layer has a name that Keras could have chosen, such as dense_3."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", type(layer).__name__)
    name = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return re.fullmatch(rf"{re.escape(name)}(_\d+)?", layer.name) is not None
