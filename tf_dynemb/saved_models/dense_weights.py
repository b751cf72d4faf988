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
from tf_dynemb.format import safetensors
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
    def of(cls, model: keras.layers.Layer, part_of: Any) -> Weights:
        """Returns the weights of a model.

        Args:
            model: the model.
            part_of: what is dumped; None: the model.

        Raises:
            ValueError: `part_of` lacks a weight of the model.
            VariableReadError: a weight cannot be dumped.
        """
        dumped = dense_variables(model if part_of is None else part_of).weights
        for name, each in dumped.items():
            dtype = tf.as_dtype(each.dtype).name
            if dtype not in safetensors.DTYPES or not safetensors.is_name(name):
                raise VariableReadError(f"{_described(each)} is {dtype}, and cannot be dumped")
        if part_of is None:
            return cls(dumped, dumped)
        names = {id(unwrap(each)): name for name, each in dumped.items()}
        read = {}
        for each in dense_variables(model).weights.values():
            if id(unwrap(each)) not in names:
                raise ValueError(
                    "part_of must be the dumped model, which contains the exported one; it lacks "
                    f"{_described(each)}."
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
                of_model, of_snapshot = here.get(name, "missing"), there.get(name, "missing")
                raise ValueError(
                    f"{source} has the dense weights of another model: {name!r} is "
                    f"{of_model} in the model, and {of_snapshot} in the snapshot. If the model is "
                    "a part of what is dumped, pass that as part_of; to keep the weights as they "
                    "are now, pass dense=None."
                )
        return True


class _Scope(keras.StatelessScope):  # type: ignore[misc]
    """Keras's scope, with the variables that were changed in it."""

    def __init__(self, values: list[tuple[keras.Variable, tf.Tensor]]) -> None:
        super().__init__(values)
        self.changed: dict[int, tuple[keras.Variable, tf.Tensor]] = {}

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        super().add_update(update)
        self.changed[id(update[0])] = update


@contextlib.contextmanager
def reading(
    model: keras.layers.Layer, weights: Mapping[str, Weight], table: DynamicVariable
) -> Iterator[None]:
    """A context in a function that is traced, in which a model reads the weights of a snapshot.

    The model must have been traced with the same arguments before. A `tf.function` in a layer would
    otherwise be traced here, and then have tensors of this graph for ever.

    Args:
        model: the model.
        weights: its dense weights, by their names in the snapshots.
        table: a table of the model.

    Raises:
        VariableReadError: the graph needs the variable of a weight.
    """
    known = {id(unwrap(each)) for each in weights.values()}
    for each in dense_variables(model).weights.values():
        if id(unwrap(each)) not in known:
            raise VariableReadError(
                f"{_described(each)} was made by the export itself: call the model once with "
                "training=False before"
            )
    read = {name: each for name, each in weights.items() if isinstance(each, keras.Variable)}
    values = _ops.library().dynemb_served_weights(
        table.handle,
        names=list(read),
        dtypes=[tf.as_dtype(each.dtype) for each in read.values()],
        shapes=[each.shape for each in read.values()],
    )
    # Such as Normalization: they compute constants from their weights.
    finished = [
        layer
        for layer in model._flatten_layers()
        if hasattr(layer, "finalize_state") and layer.weights
    ]
    scope = _Scope(list(zip(read.values(), values, strict=True)))
    try:
        with scope:
            for layer in finished:
                layer.finalize_state()
            yield
    finally:
        with tf.init_scope():
            for layer in finished:
                layer.finalize_state()
    captured = {id(each) for each in tf.compat.v1.get_default_graph().external_captures}
    for each in weights.values():
        if id(each) in scope.changed:
            raise VariableReadError(f"a call of the model changes {_described(each)}")
        if id(unwrap(each).handle) in captured:
            raise VariableReadError(
                f"{_described(each)} is read by a tf.function inside a layer, or past Keras"
                if isinstance(each, keras.Variable)
                else f"{_described(each)} is not a keras.Variable"
            )
    for variable, value in scope.changed.values():  # such as random seeds
        unwrap(variable).assign(value)


def _described(weight: Weight) -> str:
    return f"the weight {weight.path if isinstance(weight, keras.Variable) else weight.name!r}"
