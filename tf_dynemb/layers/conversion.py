"""from_keras and to_keras: models with `keras.layers.Embedding`, and models with tables.

Both return a copy (`copying.py`) in which embedding layers are replaced, one for one and by name.
The number of a row in a Keras matrix becomes the key of the row in a table. Then everything before
the embedding stays as it is, and predictions have the same bits. The optimizer's states go the same
way (`optimizers/moments.py`): the row of a moment becomes a part of the state of the table's row.

Two things can differ on purpose:

- `from_keras(remove_lookups=True)` makes keys of what a `StringLookup` or `IntegerLookup` in front
  has mapped to rows, so that new values get rows. It is done only if the copy computes the same.
- `to_keras` needs a matrix with a row for each id up to the largest. Where most of them would not
  be used, an `IntegerLookup` in front numbers the ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf_dynemb import communicator
from tf_dynemb._warn import warn
from tf_dynemb.layers.base import TableLayer
from tf_dynemb.layers.converted_ids import ConvertedIds, RemovedLookups, indices
from tf_dynemb.layers.copying import ModelCopy, check_copied, layers_of
from tf_dynemb.layers.embedding import Embedding
from tf_dynemb.layers.matrix import Matrix, check_to_keras
from tf_dynemb.optimizers import moments, native
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.tables import initializers

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tf_dynemb.tables.options import TableArguments

_TO_TABLE = (
    "Convert its layers one by one: tf_dynemb.layers.Embedding(dim, "
    "weights=[keras_layer.get_weights()[0]]), with mask_zero and name as before."
)
_TO_MATRIX = "Convert its layers one by one: tf_dynemb.export(layer) has the rows of a table."
_ROWS_AT_A_TIME = 1 << 16


def from_keras(
    model: keras.Model,
    *,
    remove_lookups: bool = False,
    catch_up: bool | None = None,
    **table_options: Unpack[TableArguments],
) -> keras.Model:
    """Returns a copy of a Keras model whose `keras.layers.Embedding` layers are tables.

    Each becomes a `tf_dynemb.layers.Embedding` of the same name, with a row for each id from 0 to
    input_dim - 1. It has the vectors, mask_zero, dtype policy, regularizer, constraint, trainable
    and initializer (for new ids) of the layer. All other layers, also in models inside the model,
    are copied with their weights and vocabularies. The model itself is unchanged. Predictions have
    the same bits.

    If the model is compiled, the copy is compiled with the same loss, metrics and optimizer, the
    latter in an `OptimizerWrapper`, which continues where the optimizer is: with its steps, its
    learning rate and its moments, including the moments of the rows.

    Layers that contain an embedding, subclasses of `keras.layers.Embedding`, and layers with LoRA
    or quantized vectors stay as they are, with a warning.

    Args:
        model: a Functional or Sequential model, built.
        remove_lookups: whether a `StringLookup` or `IntegerLookup` directly in front of an
            embedding is removed, so that strings or integers themselves are the ids, and new ones
            get rows. Ids outside the vocabulary that have no row read as the vector of the lookup's
            only index for them. Without it, indices are the ids, and the vocabulary stays fixed.
        catch_up: as in `OptimizerWrapper`. Keras moves all rows in each step; a table does so with
            catch_up=True. None: True if the optimizer moves rows without a gradient and tables
            support it.
        **table_options: the fields of `TableOptions` except `var_type`, for all tables.

    Returns:
        The copy. Inputs that feed only embeddings take int64.

    Raises:
        ValueError: the model is subclassed, is not built or has no embedding to convert, or a
            lookup cannot be removed exactly; the message says what to do.
        TypeError: `model` is not a Keras model.
    """
    _check_model(model, _TO_TABLE)
    layers = list(layers_of(model))
    kept = [reason for layer in layers if (reason := _why_kept(layer))]
    found = [layer for layer in layers if _is_converted(layer)]
    for layer in layers:
        if isinstance(layer, TableLayer):
            raise ValueError(
                f"Layer {layer.name!r} has a table already. Convert a model before you put tables "
                "into it, or replace the other embeddings by tf_dynemb.layers.Embedding(dim, "
                "weights=[keras_layer.get_weights()[0]])."
            )
    if not found:
        raise ValueError(
            f"The model {model.name!r} has no keras.layers.Embedding that can become a table. "
            + " ".join(kept)
        )
    for reason in kept:
        warn(reason)
    lookups = RemovedLookups(model, found) if remove_lookups else None
    made: dict[int, tuple[Embedding, ConvertedIds]] = {}

    def replace(layer: keras.layers.Layer) -> list[keras.layers.Layer] | None:
        if lookups is not None and lookups.is_removed(layer):
            return []
        if not _is_converted(layer):
            return None
        ids = lookups.ids_of(layer) if lookups is not None else indices(layer)
        made[id(layer)] = _to_table(layer, ids, table_options), ids
        return [made[id(layer)][0]]

    def takes_ids(layer: keras.layers.Layer) -> bool:
        return _is_converted(layer) or (lookups is not None and lookups.is_removed(layer))

    copied = ModelCopy(model, replace, takes_ids, _TO_TABLE)
    if not model.compiled:
        return copied.model
    optimizer = _copy_optimizer(model)
    if optimizer is None:
        return copied.model
    tables = [(layer, *made[id(layer)]) for layer in found]
    core = moments.core_of(optimizer)
    if catch_up is None:
        catch_up = _needs_catch_up(core, [layer for layer, _, _ in tables])
    wrapper = OptimizerWrapper(optimizer, catch_up=catch_up)
    _compile(model, copied.model, wrapper)
    before = moments.core_of(model.optimizer)
    if not before.built:
        return copied.model
    pairs = copied.variable_pairs()
    both = [*pairs, *((layer.embeddings, copied_layer.table) for layer, copied_layer, _ in tables)]
    _exclude(
        before,
        wrapper,
        [copied_layer for variable, copied_layer in both if _is_excluded(before, variable)],
    )
    wrapper.build(copied.model.trainable_variables)
    moments.copy_dense(model.optimizer, wrapper.inner_optimizer, pairs)
    fresh = []
    for layer, copied_layer, ids in tables:
        states = moments.dense_states(before, layer.embeddings)
        if states:
            moments.set_row_states(
                copied_layer.table, ids.keys, [state[ids.rows] for state in states]
            )
        elif states is None and layer.trainable:
            fresh.append(layer.name)
    _warn_of_fresh(before, fresh)
    return copied.model


def to_keras(model: keras.Model) -> keras.Model:
    """Returns a copy of a model in which `tf_dynemb.layers.Embedding` is `keras.layers.Embedding`.

    The inverse of `from_keras`: vectors, all other weights, and if the model is compiled, loss,
    metrics and the optimizer inside the `OptimizerWrapper` with its moments.

    Ids stay what they are if none is negative and the largest is at most twice the number of rows
    plus 1000. Ids in between that have no row get what the table returns for them. Otherwise a
    `keras.layers.IntegerLookup` in front numbers the ids that have a row, and all others share one
    vector: the table's `default_vector`, the vector that all new rows start with, or zeros.

    Args:
        model: a Functional or Sequential model, built.

    Returns:
        The copy.

    Raises:
        ValueError: the model is subclassed, is not built, or has no table; or one of its layers has
            strings as ids, a combiner, or several tables; the message says what to do.
        RuntimeError: several ranks hold the rows.
        TypeError: `model` is not a Keras model.
    """
    _check_model(model, _TO_MATRIX)
    if communicator.get().size > 1:
        raise RuntimeError(
            "to_keras needs all rows in one process: dump the model on all ranks, load it in one "
            "process, and convert it there."
        )
    layers = [layer for layer in layers_of(model) if isinstance(layer, TableLayer)]
    if not layers:
        raise ValueError(f"The model {model.name!r} has no tf_dynemb.layers.Embedding.")
    for layer in layers:
        check_to_keras(layer)
    made: dict[int, Matrix] = {}

    def replace(layer: keras.layers.Layer) -> list[keras.layers.Layer] | None:
        if not isinstance(layer, TableLayer):
            return None
        made[id(layer)] = Matrix(layer)
        return made[id(layer)].layers

    copied = ModelCopy(model, replace, lambda layer: isinstance(layer, TableLayer), _TO_MATRIX)
    optimizer = model.optimizer if model.compiled else None
    if not isinstance(optimizer, OptimizerWrapper):
        return copied.model
    plain_optimizer = _copy_optimizer(model)
    if plain_optimizer is None:
        return copied.model
    _compile(model, copied.model, plain_optimizer)
    if not optimizer.built:
        return copied.model
    pairs = copied.variable_pairs()
    before, after = moments.core_of(optimizer), moments.core_of(plain_optimizer)
    matrices = [(layer, made[id(layer)]) for layer in layers]
    excluded = [
        copied_variable for variable, copied_variable in pairs if _is_excluded(before, variable)
    ]
    for layer, matrix in matrices:
        if not optimizer.decays(layer.table):
            excluded.append(matrix.embedding.embeddings)
    _exclude(before, plain_optimizer, excluded)
    plain_optimizer.build(copied.model.trainable_variables)
    moments.copy_dense(optimizer.inner_optimizer, plain_optimizer, pairs)
    fresh = []
    for layer, matrix in matrices:
        spec = optimizer.state_spec(layer.table)
        if not spec[1] or not layer.trainable:
            continue
        if moments.has_row_states(before) and layer.table.state_spec == spec:
            moments.set_dense_states(after, matrix.embedding.embeddings, matrix.states())
        else:
            fresh.append(layer.name)
    _warn_of_fresh(before, fresh)
    return copied.model


def _check_model(model: keras.Model, by_hand: str) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"model must be a keras.Model, got {model!r:.100}.")
    check_copied(model, by_hand)


def _is_converted(layer: keras.layers.Layer) -> bool:
    return type(layer) is keras.layers.Embedding and _why_kept(layer) is None


def _why_kept(layer: keras.layers.Layer) -> str | None:
    """Why an embedding stays Keras's, a sentence; None if the layer has none, or can be a table."""
    if type(layer) is keras.layers.Embedding:
        if getattr(layer, "lora_enabled", False):
            return (
                f"Layer {layer.name!r} has LoRA and stays as it is: save and load the model, which "
                "merges its vectors, and convert it then."
            )
        if getattr(layer, "quantization_mode", None):
            return f"Layer {layer.name!r} is quantized and stays as it is."
        return None
    if isinstance(layer, keras.layers.Layer) and not isinstance(layer, TableLayer):
        for inner in layer._flatten_layers():
            if isinstance(inner, keras.layers.Embedding):
                return (
                    f"The vectors of layer {layer.name!r}, a {type(layer).__name__}, stay as they "
                    "are: only keras.layers.Embedding itself becomes a table."
                )
    return None


def _to_table(
    layer: keras.layers.Layer, ids: ConvertedIds, table_options: Mapping[str, Any]
) -> Embedding:
    """Returns the layer with a table."""
    matrix = np.asarray(layer.embeddings)
    initializer = layer.embeddings_initializer
    try:
        initializers.create(initializer, layer.output_dim)
    except ValueError:
        warn(
            f"New ids of layer {layer.name!r} start from 'uniform': its initializer "
            f"{type(initializer).__name__} is not one for rows of any id."
        )
        initializer = "uniform"
    if layer.variable_dtype == "float64":
        warn(
            f"The vectors of layer {layer.name!r} are float64; rows of tables are float32. "
            "Predictions differ by their rounding."
        )
    embedding = Embedding(
        layer.output_dim,
        initializer=initializer,
        embeddings_regularizer=layer.embeddings_regularizer,
        embeddings_constraint=layer.embeddings_constraint,
        name=layer.name,
        dtype=layer.dtype_policy,
        activity_regularizer=layer.activity_regularizer,
        trainable=layer.trainable,
        **ids.options,
        **table_options,
    )
    most = table_options.get("max_capacity")
    if most is not None and most < len(ids.keys):
        raise ValueError(
            f"max_capacity={most} is less than the {len(ids.keys)} rows of layer {layer.name!r}."
        )
    for begin in range(0, len(ids.keys), _ROWS_AT_A_TIME):
        chunk = slice(begin, begin + _ROWS_AT_A_TIME)
        embedding.table.upsert(
            ids.keys[chunk], tf.cast(matrix[ids.rows[chunk]], embedding.table.dtype)
        )
    return embedding


def _copy_optimizer(model: keras.Model) -> keras.optimizers.Optimizer | None:
    """Returns a fresh copy of a model's optimizer; None, with a warning, if the user must do it."""
    optimizer = model.optimizer
    if isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer.inner_optimizer
    reason = None
    if isinstance(moments.core_of(optimizer), getattr(keras.optimizers, "MultiOptimizer", ())):
        reason = "its MultiOptimizer selects by variables, and the copy has new ones"
    elif type(model).compile is not keras.Model.compile or not hasattr(model, "_compile_config"):
        reason = "its class overrides compile()"
    if reason is not None:
        warn(f"The copy of {model.name!r} is not compiled, because {reason}. Compile it.")
        return None
    return moments.fresh(optimizer)


def _compile(
    model: keras.Model, copied: keras.Model, optimizer: keras.optimizers.Optimizer
) -> None:
    """Compiles a copy as a model is compiled, with another optimizer."""
    arguments = {
        name: keras.tree.map_structure(_fresh_metric, value)
        for name, value in model._compile_config.config.items()
    }
    arguments.update(optimizer=optimizer, jit_compile="auto")
    copied.compile(**arguments)


def _fresh_metric(value: Any) -> Any:
    if isinstance(value, keras.Metric):  # it has state
        return type(value).from_config(value.get_config())
    return value


def _is_excluded(core: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether a user has excluded a variable from weight decay, not by its name."""
    return core._var_key(variable) in (getattr(core, "_exclude_from_weight_decay", None) or ())


def _exclude(
    before: keras.optimizers.Optimizer,
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
) -> None:
    """Excludes variables, and the names that `before` excludes, from weight decay."""
    pattern = getattr(before, "_exclude_from_weight_decay_pattern", None)
    if variables or pattern is not None:
        if not isinstance(optimizer, OptimizerWrapper):
            optimizer = moments.core_of(optimizer)
        names = None if pattern is None else [pattern.pattern]
        optimizer.exclude_from_weight_decay(var_list=variables, var_names=names)


def _needs_catch_up(core: keras.optimizers.Optimizer, layers: list[keras.layers.Layer]) -> bool:
    """Whether rows must make up for steps to move as in Keras; warns if they cannot."""
    if not moments.moves_rows_without_gradient(core):
        return False
    form = native.native_form(core, catch_up=True)
    why = None
    if form is None or "catch_up" not in form.flags:
        why = f"tables cannot do so with {type(core).__name__}"
    elif core.use_ema:
        why = "tables cannot do so with use_ema"
    elif any(layer.embeddings_constraint is not None for layer in layers):
        why = "tables cannot do so with an embeddings_constraint"
    if why is not None:
        warn(
            f"{type(core).__name__} moves all rows in each step in Keras, and only the batch's "
            f"rows in the copy: {why} (catch_up)."
        )
    return why is None


def _warn_of_fresh(core: keras.optimizers.Optimizer, layers: list[str]) -> None:
    if layers:
        warn(
            f"The states of {type(core).__name__} for the rows of {', '.join(layers)} are reset: "
            "their place in a row is known for SGD, Adagrad, Adam, AdamW, Adamax, RMSprop, "
            "Adadelta, Ftrl and Lion."
        )
    if core.use_ema:
        warn("The averages of rows (use_ema) are reset.")
    # Not `iterations`, which counts the steps with an update.
    if int(core._iterations) % (core.gradient_accumulation_steps or 1):
        warn("The gradients of rows that were accumulated for the next step are lost.")
