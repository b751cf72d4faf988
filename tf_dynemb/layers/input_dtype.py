"""The dtypes of Keras inputs that carry ids.

A Keras model casts its data to the dtype of its inputs before any layer sees them. Ids of 64 bits
then lose bits in silence: in an int32 input above 2^31, in a float32 input above 2^24. So the dtype
is checked when the model is built.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tf_dynemb.layers.base import TableLayer


class _Integers(str):
    """A dtype that equals every integer dtype, for `keras.layers.InputSpec`."""

    def __eq__(self, other: object) -> bool:
        return bool(keras.backend.is_int_dtype(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)


def check_input_dtype(layer: TableLayer, ids: Any) -> None:
    """Checks the ids with which a model calls a layer when it is built.

    The input of a `keras.Sequential` feeds only the first layer, and Keras gives it the dtype of
    vectors if the user declares none. Such an input takes the layer's key type, or strings, and the
    model accepts nothing else.

    Args:
        layer: a TableLayer.
        ids: a KerasTensor, or a list or dict of them.

    Raises:
        TypeError: an input would cast ids to a dtype that cannot hold all values of the key type.
    """
    key_type = layer.key_type
    for tensor in keras.tree.flatten(ids):
        source = getattr(getattr(tensor, "_keras_history", None), "operation", None)
        if not isinstance(source, keras.layers.InputLayer):
            continue
        dtype = tf.as_dtype(tensor.dtype)
        model = _sequential_around(source)
        if layer.hash_strings:
            if model is not None and dtype.is_floating:
                source._dtype = tensor._dtype = "string"
                _accept_only(model, layer)
            elif dtype != tf.string:
                raise TypeError(
                    f"Layer {layer.name} has hash_strings=True, but keras.Input {source.name!r} "
                    f"has the dtype {dtype.name}. Declare dtype='string' there."
                )
            continue
        if dtype == tf.string:
            raise TypeError(
                f"keras.Input {source.name!r} has the dtype string: layer {layer.name} needs "
                "hash_strings=True."
            )
        cuts = dtype.is_floating or (dtype.is_integer and dtype.size < key_type.size)
        if model is not None:
            if cuts:
                source._dtype = tensor._dtype = key_type.name
            _accept_only(model, layer)
        elif cuts:
            other = f", or key_type={dtype.name!r} in the layer" if dtype == tf.int32 else ""
            raise TypeError(
                f"The ids of layer {layer.name} are {key_type.name}, but keras.Input "
                f"{source.name!r} casts them to {dtype.name}. Declare dtype={key_type.name!r} "
                f"there{other}."
            )


def _sequential_around(source: keras.layers.InputLayer) -> keras.Sequential | None:
    """Returns the Sequential that is being built and begins with this InputLayer, or None."""
    scopes = global_state.get_global_attribute("name_scope_stack") or []
    for model in (scope.caller for scope in scopes):
        if isinstance(model, keras.Sequential) and model._layers[:1] == [source]:
            return model
    return None


def _accept_only(model: keras.Sequential, layer: TableLayer) -> None:
    """Makes a Sequential refuse floats, and the inputs of models around it that would cut ids.

    Otherwise Keras would cast both to the dtype of the Sequential's input.
    """
    if model.input_spec is not None and "compute_output_spec" in vars(model):
        return
    model.autocast = False
    model.input_spec = keras.layers.InputSpec(dtype=layer.key_type.name)
    model.input_spec.dtype = "string" if layer.hash_strings else _Integers("integers")
    compute_output_spec = model.compute_output_spec

    def checked(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        check_input_dtype(layer, inputs)
        return compute_output_spec(inputs, *args, **kwargs)

    model.compute_output_spec = checked
