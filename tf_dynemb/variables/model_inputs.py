"""The inputs of calls of Keras models, so that models are exported with the inputs that they take.

Keras remembers only the shapes of the first call of a subclassed model, and exports all of its
inputs with the dtype of its vectors. Ids then arrive as float32, which holds integers only up to
2^24. A lookup therefore notes the arguments of all models that are being called around it, and
`model.export` uses them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dynemb._warn import warn

# Keras sets these itself.
_NOT_INPUTS = ("self", "training", "mask")
_LAYER_CALL = inspect.unwrap(keras.layers.Layer.__call__).__code__


class Inputs(NamedTuple):
    """The arguments of a model's calls.

    Attributes:
        arguments: for each parameter of `call` that was passed, its structure; tensors are
            `tf.TypeSpec`s.
        exact: whether the ids of a lookup were integers or strings, not floats.
        form: `_form` of the last call that was noted. Every table of a model notes each call.
    """

    arguments: Mapping[str, Any]
    exact: bool
    form: tuple[Any, ...] | None


_known: weakref.WeakKeyDictionary[keras.Model, Inputs] = weakref.WeakKeyDictionary()


def note(exact: bool = True) -> None:
    """Notes the arguments of the models that are being called.

    Args:
        exact: whether the ids of the lookup that calls this are integers or strings. Calls with
            ids as floats count only as long as there are no others.
    """
    for model, args, kwargs in _models_being_called():
        form = _form(exact, args, kwargs)
        known = _known.get(model)
        if known is not None and form is not None and known.form == form:
            continue
        if known is not None and known.exact and not exact:
            continue
        try:
            bound = inspect.signature(model.call).bind(*args, **kwargs)
        except TypeError:
            continue  # The model's call will raise it.
        arguments: Mapping[str, Any] = {
            name: keras.tree.map_structure(_spec_of, value)
            for name, value in _by_name(bound).items()
            if name not in _NOT_INPUTS
        }
        if known is not None and known.exact == exact:
            arguments = _merged(known.arguments, arguments)
        if known is None:
            _replace_export(model)
        _known[model] = Inputs(arguments, exact, form)


def signature(model: keras.Model) -> tuple[list[str], list[Any]]:
    """Returns the inputs of a model for an exported function.

    Returns:
        (names, specs): the parameters of `call`, and the structure of `tf.TypeSpec`s of each.

    Raises:
        ValueError: they are not known; the message says what to pass.
    """
    inputs = getattr(_functional(model), "_inputs_struct", None)
    if inputs is not None:
        return ["inputs"], [keras.tree.map_structure(as_spec, inputs)]
    known = _known.get(model)
    if known is None:
        raise ValueError(
            f"The inputs of model {model.name!r} are not known, because it has not been called "
            "since it was created or loaded. Call it once with a batch of ids in their usual dtype "
            "(model(ids)), or pass input_signature, such as input_signature=["
            "tf.TensorSpec([None, 3], tf.int64)]."
        )
    if not known.exact:
        warn(
            f"Model {model.name!r} was called with ids as floats only, and is exported with them: "
            "it refuses ids that floats do not hold exactly, from 2^24 on in float32. Call it with "
            "integers before, or pass input_signature."
        )
    names, specs = [], []
    for name, structure in known.arguments.items():
        if any(isinstance(leaf, tf.TypeSpec) for leaf in keras.tree.flatten(structure)):
            names.append(name)
            specs.append(_named(structure, name))
    return names, specs


def as_spec(value: Any) -> Any:
    """Returns the `tf.TypeSpec` of a model's input, for batches of any size."""
    if isinstance(value, tf.TypeSpec):
        return value
    shape, dtype = _any_batch(value.shape), value.dtype
    if dtype is None:
        raise ValueError(f"input_signature has an input without a dtype: {value!r:.120}.")
    if getattr(value, "sparse", False):
        return tf.SparseTensorSpec(shape, dtype)
    if getattr(value, "ragged", False):
        return tf.RaggedTensorSpec(shape, dtype, len(shape) - 1)
    return tf.TensorSpec(shape, dtype, name=getattr(value, "name", None))


def write(
    model: keras.Model,
    path: str,
    input_signature: Any = None,
    endpoints: Mapping[str, tf.types.experimental.PolymorphicFunction] | None = None,
    verbose: bool = False,
    reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Writes a SavedModel with the endpoint `serve`, the call of a model, as Keras does.

    The outputs of the signature `serving_default` have the names of the model's outputs: the keys
    of a dict, or the names of the outputs of a functional model with several.

    Args:
        model: the model.
        path: the folder of the SavedModel.
        input_signature: as in `model.export`. Default: `signature(model)`.
        endpoints: further endpoints by name.
        verbose: whether Keras prints the endpoints.
        reading: returns a context for the trace of the model's call, such as one that replaces
            reads of variables. The model is traced without it before.
    """
    if input_signature is None:
        names, specs = signature(model)
    else:
        specs = list(keras.tree.map_structure(as_spec, input_signature))
        names = _parameters(model)[: len(specs)]
    archive = keras.export.ExportArchive()
    archive.track(model)
    if reading is not contextlib.nullcontext:
        _function(model, names, specs).get_concrete_function()
    serve = _function(model, names, specs, reading)
    serve.get_concrete_function()  # an error of `reading` is raised as it is
    archive.add_endpoint("serve", serve)
    outputs = getattr(_functional(model), "_outputs_struct", None)
    if isinstance(outputs, (list, tuple)):
        archive.add_endpoint("serving_default", _function(model, names, specs, reading, True))
    for name, endpoint in (endpoints or {}).items():
        archive.add_endpoint(name, endpoint)
    archive.write_out(str(path), verbose=verbose)


def _functional(model: keras.Model) -> keras.Model:
    """The functional model that a model is or consists of, or another model."""
    return model._functional if isinstance(model, keras.Sequential) else model


def _function(
    model: keras.Model,
    names: list[str],
    specs: list[Any],
    reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    by_output: bool = False,
) -> tf.types.experimental.PolymorphicFunction:
    """The call of a model as a `tf.function`, with its parameters; `by_output`: as a dict."""

    def serve(*inputs: Any) -> Any:
        with reading():
            if len(names) < len(inputs):  # The call has *args.
                outputs = model(*inputs, training=False)
            else:
                outputs = model(**dict(zip(names, inputs, strict=True)), training=False)
        if not by_output:
            return outputs
        return dict(zip(_functional(model).output_names, outputs, strict=True))

    if len(names) == len(specs):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return tf.function(serve, input_signature=specs, autograph=False)


def _models_being_called() -> Iterator[tuple[keras.Model, tuple[Any, ...], dict[str, Any]]]:
    # Keras keeps neither the models nor their arguments, but the stack has both.
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _LAYER_CALL:
            found = frame.f_locals
            if isinstance(found["self"], keras.Model):
                yield found["self"], found["args"], found["kwargs"]
        frame = frame.f_back  # type: ignore[assignment]


def _form(exact: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The note of a call, in a form that is quick to create and to compare; None: unknown.

    It is known if the arguments are dense tensors, and dicts of them.
    """
    form: list[Any] = [exact]
    for name, value in (*enumerate(args), *kwargs.items()):
        if name in _NOT_INPUTS:
            continue
        for key, leaf in value.items() if isinstance(value, dict) else ((None, value),):
            if not isinstance(leaf, tf.Tensor):
                return None
            form.append((name, key, leaf.dtype, leaf.shape))
    return tuple(form)


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments by name, including the arguments in *args and **kwargs."""
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            arguments.update({f"{name}_{i}": one for i, one in enumerate(value)})
        else:
            arguments[name] = value
    return arguments


def _parameters(model: keras.Model) -> list[str]:
    """The names of the parameters of a model's call that take inputs by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name
        for name, parameter in inspect.signature(model.call).parameters.items()
        if parameter.kind in kinds and name not in _NOT_INPUTS
    ]


def _spec_of(value: Any) -> Any:
    """The spec of a tensor for batches of any size; other objects unchanged."""
    if isinstance(value, keras.KerasTensor):
        spec = as_spec(value)
        return tf.TensorSpec(spec.shape, spec.dtype) if type(spec) is tf.TensorSpec else spec
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec(_any_batch(value.shape), value.dtype)
    if isinstance(value, tf.RaggedTensor):
        splits = value.row_splits.dtype
        shape = _any_batch(value.shape)
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, splits)
    if tf.is_tensor(value):
        return tf.TensorSpec(_any_batch(value.shape), value.dtype)
    return value


def _is_not_dense(value: keras.KerasTensor) -> bool:
    return bool(getattr(value, "sparse", False) or getattr(value, "ragged", False))


def _any_batch(shape: tf.TensorShape | Sequence[int | None]) -> list[int | None] | tf.TensorShape:
    shape = tf.TensorShape(shape)
    return [None, *shape[1:]] if shape.rank else shape


def _merged(known: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of two calls: dimensions that differ are free, ids have the wider dtype."""
    try:
        keras.tree.assert_same_structure(dict(known), dict(new))
    except (TypeError, ValueError):
        return new
    merged: Mapping[str, Any] = keras.tree.map_structure(_merged_spec, dict(known), dict(new))
    return merged


def _merged_spec(known: Any, new: Any) -> Any:
    if type(known) is not type(new) or not isinstance(new, tf.TypeSpec):
        return new
    dtype = new.dtype
    if known.dtype.is_integer and dtype.is_integer and known.dtype.size > dtype.size:
        dtype = known.dtype
    if known.shape.rank is None or known.shape.rank != new.shape.rank:
        shape = new.shape
    else:
        shape = known.shape.most_specific_compatible_shape(new.shape)
    if isinstance(new, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, dtype, new.ragged_rank, new.row_splits_dtype)
    return type(new)(shape, dtype)


def _named(structure: Any, name: str) -> Any:
    """Names the dense inputs in a dict by their keys, and others by the parameter."""
    flat = []
    for path, leaf in keras.tree.flatten_with_path(structure):
        keys = [key for key in path if isinstance(key, str)]
        if type(leaf) is tf.TensorSpec:
            leaf = tf.TensorSpec(leaf.shape, leaf.dtype, name=keys[-1] if keys else name)
        flat.append(leaf)
    return keras.tree.pack_sequence_as(structure, flat)


def _replace_export(model: keras.Model) -> None:
    """Makes the exports of a model have the inputs that are noted, unless Keras does it itself."""
    inputs = keras.tree.flatten(getattr(_functional(model), "_inputs_struct", None))
    if inputs != [None] and not any(map(_is_not_dense, inputs)):
        return
    if type(model).export is keras.Model.export:
        model.export = types.MethodType(_export, model)
    model._trackable_children = types.MethodType(_trackable_children, model)


def _trackable_children(
    model: keras.Model, save_type: str = "checkpoint", **kwargs: Any
) -> dict[str, Any]:
    """For `tf.saved_model.save`: its default signature has the inputs that are noted, too."""
    if save_type != "savedmodel":
        return dict(type(model)._trackable_children(model, save_type, **kwargs))
    # From the shapes, Keras would make a signature of vectors.
    shapes, model._build_shapes_dict = model._build_shapes_dict, None
    try:
        children = dict(type(model)._trackable_children(model, save_type, **kwargs))
    finally:
        model._build_shapes_dict = shapes
    default = _function(model, *signature(model))
    default.get_concrete_function()
    return {**children, "_default_save_signature": default}


def _export(
    model: keras.Model,
    filepath: str,
    format: str = "tf_saved_model",
    verbose: bool | None = None,
    input_signature: Any = None,
    **kwargs: Any,
) -> None:
    """Same as `keras.Model.export`, with the inputs that the model was called with."""
    if input_signature is None and format == "tf_saved_model" and not kwargs:
        write(model, filepath, verbose=verbose is not False)
        return
    if input_signature is None:
        input_signature = signature(model)[1]
    keras.Model.export(model, filepath, format, verbose, input_signature, **kwargs)
