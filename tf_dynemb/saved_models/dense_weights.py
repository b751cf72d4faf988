"""Dense weights of exported models that come from the snapshots, as the rows of tables do.

The graph of such a model has one operator that reads all weights of one snapshot, in the place of
reads of variables. Keras replaces the reads while it traces the model (`keras.StatelessScope`),
which only works for variables that Keras reads itself: those of a `tf.Module`, and those that a
`tf.function` inside a layer reads, stay in the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dynemb import _ops, storage
from tf_dynemb.dense.names import Weight, dense_variables
from tf_dynemb.storage import safetensors
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.unwrap import unwrap


class VariableReadError(Exception):
    """A graph would need the variable of a dense weight."""


class Weights(NamedTuple):
    """The dense weights of an exported model, by their names in dumps.

    Attributes:
        dumped: those of the model that is dumped.
        read: those of them that the exported model reads.
    """

    dumped: dict[str, Weight]
    read: dict[str, Weight]

    @classmethod
    def of(cls, model: keras.layers.Layer, part_of: keras.layers.Layer | None) -> Weights:
        """Returns the weights of a model.

        Args:
            model: the model.
            part_of: the model that is dumped; None: the same.

        Raises:
            ValueError: `part_of` lacks a weight of the model.
            VariableReadError: a weight cannot be dumped.
        """
        dumped = dense_variables(model if part_of is None else part_of).weights
        for name, each in dumped.items():
            dtype = tf.as_dtype(each.dtype).name
            if dtype not in safetensors.DTYPES or not safetensors.is_name(name):
                raise VariableReadError(f"the weight {name!r} is {dtype}, which dumps cannot have")
        if part_of is None:
            return cls(dumped, dumped)
        names = {id(unwrap(each)): name for name, each in dumped.items()}
        read = {}
        for name, each in dense_variables(model).weights.items():
            if id(unwrap(each)) not in names:
                raise ValueError(
                    f"part_of must be the model that is dumped, of which the exported one is a "
                    f"part; it does not have the weight {name!r}."
                )
            read[names[id(unwrap(each))]] = each
        return cls(dumped, read)

    def are_at(self, path: Any) -> bool:
        """Returns whether snapshots have these weights; False: they have no dense weights.

        Args:
            path: the path of the snapshots.

        Raises:
            ValueError: they have the weights of another model.
            DataLossError, FileNotFoundError: as `Chain.open`.
        """
        source = storage.Chain.open(path).dense_source
        arrays = None if source is None else source.dense("weights")
        if source is None or arrays is None:
            return False
        here = {
            name: f"{tf.as_dtype(each.dtype).name} {list(each.shape)}"
            for name, each in self.dumped.items()
        }
        there = {name: f"{each.dtype} {list(each.values.shape)}" for name, each in arrays.items()}
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise ValueError(
                    f"{source.directory} has the dense weights of a model of another structure: "
                    f"{name!r} is {here.get(name, 'missing')} in the model, and "
                    f"{there.get(name, 'missing')} in the snapshot. If the model is a part of the "
                    "one that is dumped, pass part_of; to keep the weights as they are now, pass "
                    "dense=None."
                )
        return True


@contextlib.contextmanager
def reading(
    model: keras.layers.Layer, weights: Mapping[str, Weight], table: DynamicVariable
) -> Iterator[None]:
    """A context in a function that is traced, in which a model reads the weights of a snapshot.

    Args:
        model: the model.
        weights: its dense weights, by their names in the snapshots.
        table: a table of the model.

    Raises:
        VariableReadError: the function needs a variable of a weight.
    """
    names = [name for name, each in weights.items() if isinstance(each, keras.Variable)]
    replaced = [weights[name] for name in names]
    values = _ops.library().dynemb_served_weights(
        table.handle,
        names=names,
        dtypes=[tf.as_dtype(each.dtype) for each in replaced],
        shapes=[each.shape for each in replaced],
    )
    normalizations = [
        layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Normalization)
    ]
    scope = keras.StatelessScope(list(zip(replaced, values, strict=True)))
    try:
        with scope:
            for layer in normalizations:
                layer.finalize_state()  # computes constants from the weights
            yield
    finally:
        with tf.init_scope():
            for layer in normalizations:
                layer.finalize_state()
    for name, each, value in zip(names, replaced, values, strict=True):
        if scope.get_current_value(each) is not value:
            raise VariableReadError(f"a call of the model changes the weight {name!r}")
    captured = {id(each) for each in tf.compat.v1.get_default_graph().external_captures}
    for name, each in weights.items():
        if id(unwrap(each).handle) in captured:
            raise VariableReadError(
                f"the weight {name!r} is read by a tf.function in a layer, or is not Keras's"
            )
    for variable in model.variables:  # such as the states of random seeds
        changed = scope.get_current_value(variable)
        if changed is not None and all(variable is not each for each in replaced):
            unwrap(variable).assign(changed)
