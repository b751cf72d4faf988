"""Copies of Keras models in which some layers are replaced: the part that conversions share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from tf_dynemb._warn import warn
from tf_dynemb.layers.base import TableLayer


class ModelCopy:
    """A copy of a Functional or Sequential model, also of the models inside it.

    A layer of the copy has the name, the arguments and the variables of the original. Layers that
    are used several times are copied once. The original is unchanged.

    Args:
        model: the model, built.
        replace: returns the layers, called one after another, that take the place of a layer; [] to
            remove it, None to copy it.
        takes_ids: whether a layer takes ids, which an input of floats or of few bits would cut off.
            A model's input that feeds only such layers has the dtype int64 in the copy.
        by_hand: what to do with a model that cannot be copied, for the error.

    Attributes:
        model: the copy.
        pairs: (layer, its copy), for all layers that were copied.

    Raises:
        ValueError: the model is neither Functional nor Sequential, or it is not built.
    """

    def __init__(
        self,
        model: keras.Model,
        replace: Callable[[keras.layers.Layer], Sequence[keras.layers.Layer] | None],
        takes_ids: Callable[[keras.Operation], bool],
        by_hand: str,
    ) -> None:
        self._replace = replace
        self._takes_ids = takes_ids
        self._by_hand = by_hand
        self._copies: dict[int, list[Callable[..., Any]]] = {}
        self.pairs: list[tuple[keras.layers.Layer, keras.layers.Layer]] = []
        self.model = self._model(model)
        for layer, copied in self.pairs:
            for variable, copied_variable in zip(layer.variables, copied.variables, strict=True):
                copied_variable.assign(variable)
                copied_variable.trainable = variable.trainable
            for inner in _all_layers(copied):
                if isinstance(inner, keras.layers.Normalization) and inner.built:
                    inner.finalize_state()

    def variable_pairs(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """Returns (variable, its copy), for all variables that were copied."""
        return [
            pair
            for layer, copied in self.pairs
            for pair in zip(layer.variables, copied.variables, strict=True)
        ]

    def _model(self, model: keras.Model) -> keras.Model:
        check_copied(model, self._by_hand)
        if isinstance(model, keras.Sequential):
            copied = self._sequential(model)
        else:
            copied = self._functional(model)
        if not model.trainable:
            copied.trainable = False
        return copied

    def _sequential(self, model: keras.Sequential) -> keras.Sequential:
        (source,) = model.inputs
        layers = [new for layer in model.layers for new in self._layers(layer)]
        return type(model)([self._input(model, source), *layers], name=model.name)

    def _functional(self, model: keras.Model) -> keras.Model:
        inputs = keras.tree.map_structure(lambda x: self._input(model, x), model.input)
        for operation in _mask_operations(model):
            self._copies[operation] = [_no_mask]
        # Not the model itself: clone_model would compile the copy with the model's optimizer.
        uncompiled = keras.Model(model.input, model.output, name=model.name)
        copied = keras.models.clone_model(
            uncompiled, inputs, clone_function=_Chain.of(self._layers), call_function=self._call
        )
        if type(model) in (keras.Model, Functional):
            return copied
        return type(model)(copied.input, copied.output, name=model.name)

    def _input(self, model: keras.Model, tensor: keras.KerasTensor) -> keras.KerasTensor:
        layer = tensor._keras_history.operation
        dtype = tensor.dtype
        if _cuts_ids(dtype) and self._feeds_ids(model, tensor) == "only":
            dtype = "int64"
        return keras.Input(
            batch_shape=layer.batch_shape,
            dtype=dtype,
            name=layer.name,
            sparse=getattr(layer, "sparse", None),
            ragged=getattr(layer, "ragged", None),
            optional=getattr(layer, "optional", False),
        )

    def _feeds_ids(self, model: keras.Model, tensor: keras.KerasTensor) -> str:
        """Whether an input feeds layers that take ids: "only" these, "also" these, or "not"."""
        found = {
            self._reads_ids(layer, number) for layer, number in consumers_of(model, tensor)
        } or {False}
        return "not" if found == {False} else "only" if found == {True} else "also"

    def _reads_ids(self, layer: keras.Operation, number: int) -> bool:
        """Whether the input of a layer with this number takes ids, and nothing else."""
        if isinstance(layer, (keras.Sequential, Functional)):
            return self._feeds_ids(layer, layer.inputs[number]) == "only"
        return self._takes_ids(layer)

    def _layers(self, layer: keras.Operation) -> list[Callable[..., Any]]:
        """Returns the layers that take the place of a layer, the same ones in each call."""
        if id(layer) not in self._copies:
            self._copies[id(layer)] = self._make(layer)
        return self._copies[id(layer)]

    def _make(self, layer: keras.Operation) -> list[Callable[..., Any]]:
        if isinstance(layer, (keras.Sequential, Functional)):
            return [self._model(layer)]
        replaced = self._replace(layer) if isinstance(layer, keras.layers.Layer) else None
        if replaced is not None:
            return list(replaced)
        copied = _fresh(layer)
        if isinstance(layer, keras.layers.Layer):
            _copy_assets(layer, copied)
            self.pairs.append((layer, copied))
        return [copied]

    def _call(self, chain: _Chain, *args: keras.KerasTensor, **kwargs: Any) -> keras.KerasTensor:
        *before, last = chain.layers or [lambda ids: ids]
        for layer in before:
            args = (layer(*args),)
        if _takes_integers(last):
            args = (self._as_ids(args[0], last), *args[1:])
        return last(*args, **kwargs)

    def _as_ids(self, value: keras.KerasTensor, layer: keras.layers.Layer) -> keras.KerasTensor:
        """Casts an input that also feeds other layers, as Keras's Embedding does."""
        source = getattr(getattr(value, "_keras_history", None), "operation", None)
        if not isinstance(source, keras.layers.InputLayer) or not _cuts_ids(value.dtype):
            return value
        warn(
            f"The input {source.name!r} also feeds layers that take no ids. Ids reach "
            f"{layer.name!r} as {value.dtype}: give them a separate input with dtype='int64' "
            "if they can be large."
        )
        return keras.ops.cast(value, "int64")


class _Chain:
    """Layers that clone_model takes for one; `ModelCopy._call` calls them."""

    def __init__(self, layers: list[Callable[..., Any]]) -> None:
        self.layers = layers

    @staticmethod
    def of(
        layers: Callable[[keras.Operation], list[Callable[..., Any]]],
    ) -> Callable[[keras.Operation], _Chain]:
        """Returns a `clone_function`."""
        return lambda layer: _Chain(layers(layer))


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Takes the place of an operation that computes a mask."""


def check_copied(model: keras.Model, by_hand: str) -> None:
    """Raises a ValueError if a model cannot be copied."""
    functional = isinstance(model, Functional) and not isinstance(model, keras.Sequential)
    known = keras.Sequential if isinstance(model, keras.Sequential) else Functional
    constructor = type(model).__init__ in (keras.Model.__init__, known.__init__)
    if not (functional or isinstance(model, keras.Sequential)) or not constructor:
        raise ValueError(
            f"The model {getattr(model, 'name', model)!r} is a {type(model).__name__}: only "
            f"Functional and Sequential models can be converted. {by_hand}"
        )
    if not model.built or getattr(model, "inputs", None) is None:
        raise ValueError(
            f"The model {model.name!r} is not built, so that it has no vectors. Call it on data "
            "before it is converted."
        )


def consumers_of(
    model: keras.Model, tensor: keras.KerasTensor
) -> Iterator[tuple[keras.Operation, int]]:
    """Yields the layers of a model that a tensor feeds, and the number of it among their inputs.

    Operations that compute masks are left out: the copies of the layers make their own.
    """
    masks = _mask_operations(model)
    for node in nodes_of(model):
        for number, x in enumerate(node.input_tensors):
            if x is tensor and id(node.operation) not in masks:
                yield node.operation, number


def nodes_of(model: keras.Model) -> list[Any]:
    """Returns the calls of layers and operations in a Functional or Sequential model."""
    functional = model._functional if isinstance(model, keras.Sequential) else model
    return [node for nodes in functional._nodes_by_depth.values() for node in nodes]


def _mask_operations(model: keras.Model) -> set[int]:
    """The ids of the operations that compute nothing but masks which layers pass on by themselves.

    A layer with `mask_zero` adds an operation on its ids to the model. It becomes an argument of
    the layers that use the mask, as if the user had passed it.
    """
    nodes = nodes_of(model)
    masks = {
        id(mask)
        for node in nodes
        for x in node.outputs
        if (mask := getattr(x, "_keras_mask", None)) is not None
    }
    found = {
        id(node.operation): node
        for node in nodes
        if not isinstance(node.operation, keras.layers.Layer)
        and all(id(x) in masks for x in node.outputs)
    }
    while True:
        others = {
            key
            for key, node in found.items()
            if any(x is y for x in node.outputs for y in model.outputs)
            or any(
                not _is_only_mask(x, reader)
                for x in node.outputs
                for reader in nodes
                if id(reader.operation) not in found and any(x is y for y in reader.input_tensors)
            )
        }
        if not others:
            return set(found)
        for key in others:
            del found[key]


def _is_only_mask(tensor: keras.KerasTensor, node: Any) -> bool:
    """Whether a tensor is for a layer only the mask of one of its inputs."""
    if any(x is tensor for x in keras.tree.flatten(node.arguments.args)):
        return False
    return any(getattr(x, "_keras_mask", None) is tensor for x in node.input_tensors)


def layers_of(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields the layers of a model and of the models inside it, each once."""
    seen: set[int] = set()
    todo = [model]
    while todo:
        one = todo.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (keras.Sequential, Functional)):
            todo = [*one.layers, *todo]
        else:
            yield one


def _all_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    return list(layer._flatten_layers())


def _takes_integers(layer: keras.layers.Layer) -> bool:
    """Whether a layer refuses ids as floats."""
    if isinstance(layer, keras.Sequential):
        layer = layer.layers[0]
    return isinstance(layer, TableLayer)


def _cuts_ids(dtype: tf.DType) -> bool:
    dtype = tf.as_dtype(dtype)
    return bool(dtype.is_floating or (dtype.is_integer and dtype.size < 8))


def _copy_assets(layer: keras.layers.Layer, copied: keras.layers.Layer) -> None:
    """Copies what layers have beside variables: vocabularies that `adapt` has found."""
    # Before they are built: layers call lookups without a vocabulary differently.
    pairs = [[x for x in _all_layers(y) if hasattr(x, "save_assets")] for y in (layer, copied)]
    for one, other in zip(*pairs, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            one.save_assets(folder)
            other.load_assets(folder)


def _fresh(layer: keras.Operation) -> keras.Operation:
    """Returns a layer or operation with the same arguments, not built."""
    if type(layer) is not keras.layers.Lambda:
        return type(layer).from_config(layer.get_config())
    # Its config has the function as bytes, which Keras does not load.
    return keras.layers.Lambda(
        layer.function,
        output_shape=layer._output_shape,
        mask=layer.mask,
        arguments=layer.arguments,
        name=layer.name,
        dtype=layer.dtype_policy,
        trainable=layer.trainable,
    )
