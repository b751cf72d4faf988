"""Variables that are read inside the call of a Keras layer.

Keras 3 tracks only its own variables when they become attributes of a layer, so `self.table =
DynamicVariable(...)` adds nothing to the layer's weights. A lookup makes up for it: inside the call
of a layer or model, it finds the layers that have the variable as an attribute, and adds it to
their weights, once for each outermost layer or model. The weights are therefore complete after the
first call, as in any layer that Keras builds at its first call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import record

from tf_dynemb._warn import warn
from tf_dynemb.variables import model_inputs
from tf_dynemb.variables.keras_weight import keras_weight


def is_active() -> bool:
    """Whether a Keras layer or model is being called."""
    return _call() is not None


def track(variable: tf.Variable) -> None:
    """Adds a variable to the weights of the layers, among those being called, that have it."""
    call = _call()
    if call is None:
        return
    model_inputs.note()
    entry = call.entry_layer
    if not hasattr(variable, "_keras_models"):
        variable._keras_models = weakref.WeakSet()
        variable._is_warned_of = False
    if entry in variable._keras_models:
        return
    name = variable.name.split(":")[0]
    owners = [
        layer
        for layer in entry._flatten_layers()
        if any(value is variable for value in _attributes(layer))
    ]
    for layer in owners:
        _add_weight(layer, keras_weight(variable, f"{layer.path}/{name}"))
    if owners or any(w._value is variable for w in entry.variables):
        variable._keras_models.add(entry)
    elif getattr(entry, "compiled", False) and not variable._is_warned_of:
        variable._is_warned_of = True
        warn(
            f"{name} is looked up in a call of {entry.name!r}, but no layer has it as an "
            "attribute. `fit` does not train it: assign it to an attribute of the layer that "
            "uses it."
        )


def inserts(variable: tf.Variable, insert: bool | None) -> bool:
    """Returns whether a lookup gives unknown keys a row.

    Args:
        variable: a DynamicVariable.
        insert: the argument of the lookup. None: yes; inside the call of a Keras layer, only if
            the variable is trainable and the layer is called for training, as layers of this
            package do; never if the steps of optimizers insert.
    """
    if insert is not None or variable.inserts_in_steps:
        return bool(insert)
    call = _call()
    if call is None:
        return True
    return is_training(getattr(call, "training", None)) and bool(variable.trainable)


def is_training(training: Any) -> bool:
    """Returns the `training` of a layer's call as a bool.

    Keras passes no `training` to a model whose `call` does not take it, not even in `fit`. In that
    case a recording tape means training: without a row the gradient would be lost.
    """
    return bool(record.could_possibly_record() if training is None else training)


def _call() -> Any:
    """Keras's data about the outermost layer that is being called, or None."""
    return global_state.get_global_attribute("current_call_ctx")


def _attributes(holder: keras.layers.Layer) -> Iterator[tf.Variable]:
    """Yields the attributes of a layer or module, also in its lists, dicts and tf.Modules."""
    pending = [value for name, value in vars(holder).items() if name != "_layers"]
    seen = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple, set)):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, tf.Variable):
            yield value
        elif isinstance(value, tf.Module):
            pending.extend(vars(value).values())


def _add_weight(layer: keras.layers.Layer, weight: keras.Variable) -> None:
    if any(
        other is weight for other in (*layer._trainable_variables, *layer._non_trainable_variables)
    ):
        return
    tracker = layer._tracker
    locked = tracker.locked
    # A layer is locked once it is built.
    tracker.unlock()
    layer._track_variable(weight)
    if locked:
        layer._lock_state()
