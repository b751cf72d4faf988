"""The common base of the layers: tables as weights, ids, saving."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb._warn import warn
from tf_dynemb.ids import bags, strings
from tf_dynemb.ids.bags import Bags
from tf_dynemb.ids.keys import cast_keys
from tf_dynemb.ids.types import Ids
from tf_dynemb.lookup.lookup_sparse import lookup_bags
from tf_dynemb.tables import content, initializers
from tf_dynemb.tables.cut import Rows
from tf_dynemb.tables.options import TableOptions, check_dimension, to_config
from tf_dynemb.tables.table import AutomaticName
from tf_dynemb.variables import model_inputs
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.keras_call import is_training
from tf_dynemb.variables.keras_weight import TableWeight

# Integers below this limit are represented exactly, each by a different float.
_EXACT_IN_FLOAT = {tf.float16: 2**11, tf.bfloat16: 2**8, tf.float32: 2**24, tf.float64: 2**53}


class TableLayer(keras.layers.Layer):  # type: ignore[misc]
    """A layer that owns tables.

    Rows are created only when the layer is trainable and `training` is true (or, if `training` is
    not given, under a gradient tape). A frozen layer only reads the rows that it has. XLA cannot
    compile a hash table, so the layer does not support it, and `jit_compile="auto"` leaves the
    model uncompiled.
    """

    def __init__(
        self,
        dim: int,
        *,
        initializer: Any,
        key_type: tf.DType | str,
        padding_id: int | str | None,
        default_vector: float | Sequence[float] | None,
        embeddings_regularizer: keras.regularizers.Regularizer | str | None,
        embeddings_constraint: keras.constraints.Constraint | str | None,
        table_options: Mapping[str, Any],
        hash_strings: bool = False,
        **kwargs: Any,
    ) -> None:
        table_options = dict(table_options)
        layer_options = {
            name: table_options.pop(name)
            for name in ("name", "dtype", "trainable", "activity_regularizer")
            if name in table_options
        }
        dim = check_dimension("dim", dim)
        if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
            warn(
                "TF_USE_LEGACY_KERAS is set, so tf.keras is Keras 2 (tf_keras). This is a layer of "
                "Keras 3: put it into models of `import keras`."
            )
        self._has_automatic_name = layer_options.get("name") is None
        super().__init__(**layer_options, **kwargs)
        self.dim = dim
        # A model's dtype policy casts vectors, never ids or bag weights.
        self.autocast = False
        self.supports_jit = False
        self.initializer = initializer
        self.key_type = tf.as_dtype(key_type)
        self.hash_strings = bool(hash_strings)
        if self.hash_strings and self.key_type == tf.int32:
            raise ValueError("hash_strings=True needs keys of 64 bits: key_type='int64'.")
        if self.hash_strings and padding_id is not None and not isinstance(padding_id, str):
            raise TypeError(
                f"padding_id must be a string with hash_strings=True, got {padding_id!r}."
            )
        self._padding_argument = padding_id
        if self.hash_strings and isinstance(padding_id, str):
            padding_id = strings.id_of_string(padding_id)
        self.padding_id = _check_padding(padding_id, self.key_type)
        self.default_vector = _check_default(default_vector, dim)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.table_options = table_options
        self._weights_of_tables: list[TableWeight] = []

    def _add_table(self, name: str, **options: Any) -> TableWeight:
        """Creates a table and tracks it as a weight; `options` override the layer's."""
        merged = {"initializer": self.initializer, **self.table_options, **options}
        dim = merged.pop("dim", self.dim)
        path = f"{self.name}/{name}"
        if self._has_automatic_name:
            path = AutomaticName(path)
        table = self._make_table(path, dim, merged)
        if self.default_vector is not None and dim != self.dim:
            if len(set(self.default_vector)) > 1:
                raise ValueError("Tables of several widths need one number as default_vector.")
            table.default_vector = self.default_vector[0]
        else:
            table.default_vector = self.default_vector
        table.padding_id = self.padding_id
        table.string_hash = strings.HASH if self.hash_strings else None
        weight = TableWeight(table, path)
        self._track_variable(weight)
        self._weights_of_tables.append(weight)
        return weight

    def _make_table(self, name: str, dim: int, options: dict[str, Any]) -> DynamicVariable:
        """Creates the variable of a table; `options` has the initializer and table options."""
        return DynamicVariable(
            dim,
            key_type=self.key_type,
            dtype=self.table_dtype,
            name=name,
            constraint=self.embeddings_constraint,
            **options,
        )

    @property
    def table_dtype(self) -> str:
        """The dtype of the rows: the dtype of variables, but float32 for float64.

        The output has the layer's compute dtype in any case.
        """
        return "float32" if self.variable_dtype == "float64" else str(self.variable_dtype)

    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        """Only marks the layer as built: tables do not depend on the input."""
        self.built = True

    def _insert(self, training: bool | None) -> bool:
        """Whether unknown ids get a row."""
        return is_training(training) and self.trainable

    def _ids(self, inputs: Ids) -> Ids:
        """The ids as a tensor of the key type (or a SparseTensor or RaggedTensor of it)."""
        if isinstance(inputs, tf.SparseTensor):
            sparse = tf.SparseTensor(inputs.indices, self._ids(inputs.values), inputs.dense_shape)
            return _with_static_shape(sparse, inputs.shape)
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._ids(inputs.flat_values))
        inputs = tf.convert_to_tensor(inputs)
        model_inputs.note(exact=not inputs.dtype.is_floating)
        if (inputs.dtype == tf.string) != self.hash_strings:
            raise TypeError(
                f"Layer {self.name} has hash_strings={self.hash_strings}, but got ids as "
                f"{inputs.dtype.name}. Integers and strings need a layer each; this one is for "
                f"{'strings' if self.hash_strings else 'integers'}."
            )
        if self.hash_strings:
            return tf.cast(strings.ids_of_strings(inputs), self.key_type)
        if not inputs.dtype.is_floating:
            return cast_keys(inputs, self.key_type, f"The ids of layer {self.name}")
        # Ids that were read as floats work where they are exact.
        limit = _EXACT_IN_FLOAT[inputs.dtype]
        message = (
            f"Layer {self.name} got an id as {inputs.dtype.name} that is not a whole number below "
            f"{limit}, the limit up to which {inputs.dtype.name} is exact. Pass integers."
        )
        exact = (tf.abs(inputs) < limit) & (tf.round(inputs) == inputs)
        check = tf.debugging.Assert(tf.reduce_all(exact), [message])
        with tf.control_dependencies([] if check is None else [check]):
            return tf.cast(tf.identity(inputs), self.key_type)

    def _is_padding(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.equal(ids, tf.constant(self.padding_id, self.key_type))

    def _vectors(
        self, tables: Sequence[TableWeight], ids: Sequence[tf.Tensor], training: bool | None
    ) -> list[tf.Tensor]:
        """Vectors of flat ids, `ids[i]` from `tables[i]`: [n, dim] of the compute dtype each.

        The padding id reads as zeros. Outside training, unknown ids read as the default vector.
        """
        insert = self._insert(training)
        if self.embeddings_regularizer is not None:
            for table, i in zip(tables, ids, strict=True):
                self._regularize(table, self._without_padding(i).keys, insert)
        features = [self._without_padding(i) for i in ids]
        variables = [table.value for table in tables]
        outputs = lookup_bags(variables, features, ["sum"] * len(features), insert)
        return [tf.cast(output, self.compute_dtype) for output in outputs]

    def _regularize(self, weight: TableWeight, keys: tf.Tensor, insert: bool) -> None:
        """Adds the loss of the rows of flat keys without padding, each distinct row once."""
        if self.embeddings_regularizer is None:
            return
        rows = weight.value.lookup(tf.unique(keys)[0], insert=insert)
        # Keras adds it to a loss of the dtype floatx.
        dtype = tf.float64 if keras.config.floatx() == "float64" else tf.float32
        self.add_loss(self.embeddings_regularizer(tf.cast(rows, dtype)))

    def _without_padding(self, ids: tf.Tensor) -> Bags:
        if self.padding_id is None:
            return bags.single(ids)
        keep = ~self._is_padding(ids)
        count = tf.size(ids, out_type=tf.int64)
        positions = tf.where(keep)[:, 0]
        return bags.at_positions(tf.boolean_mask(ids, keep), positions, count, ids.shape[0])

    def count_params(self) -> int:
        """Returns the number of floats in the vectors that all tables hold now."""
        tables = [weight.value for weight in self._weights_of_tables]
        return sum(len(table) * table.dimension for table in tables)

    def save_own_variables(self, store: MutableMapping[str, npt.NDArray[Any]]) -> None:
        """Writes the rows of each table, with optimizer state, for `model.save_weights`."""
        for i, weight in enumerate(self._weights_of_tables):
            saved = content.read_content(weight.value)
            for part, array in saved.rows._asdict().items():
                store[f"{i}_{part}"] = array
            store[f"{i}_info"] = np.frombuffer(saved.info.encode(), dtype=np.uint8)

    def load_own_variables(self, store: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replaces the rows of each table with the rows that `save_own_variables` wrote.

        Their optimizer state is loaded too if the optimizer is built, as with the optimizer's own
        variables in Keras.

        Raises:
            ValueError: the number of tables or the width of the vectors differs.
        """
        parts = (*Rows._fields, "info")
        count = len(self._weights_of_tables)
        if set(store.keys()) != {f"{i}_{part}" for i in range(count) for part in parts}:
            raise ValueError(
                f"Layer {self.name} has {count} tables, but the file holds {sorted(store.keys())} "
                "for it."
            )
        loaded = []
        for i, weight in enumerate(self._weights_of_tables):
            *arrays, info = (np.asarray(store[f"{i}_{part}"]) for part in parts)
            rows = Rows(*arrays)
            dim = weight.value.dimension
            if rows.vectors.shape[1:] != (dim,):
                raise ValueError(
                    f"Layer {self.name} has dim {dim}, but the file holds vectors of "
                    f"{rows.vectors.shape[1:]}."
                )
            keys = cast_keys(tf.convert_to_tensor(rows.keys), self.key_type, "keys in the file")
            rows = rows._replace(keys=keys.numpy())
            loaded.append((weight.value, content.Content(rows, info.tobytes().decode())))
        for table, saved in loaded:
            content.write_content(table, saved, adopt_state=False)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "dim": self.dim,
            "initializer": _serialize_initializer(self.initializer),
            "key_type": self.key_type.name,
            "padding_id": self._padding_argument,
            "hash_strings": self.hash_strings,
            "default_vector": self.default_vector,
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            **to_config(self.table_options),
        }


def check_table_options(options: dict[str, Any], dim: int, initializer: Any) -> None:
    """Raises a ValueError that names an option or initializer that no table accepts."""
    options = dict(options)
    TableOptions.create(options.pop("var_type", "hybrid"), options)
    initializers.create(initializer, dim)


def _serialize_initializer(initializer: Any) -> Any:
    if isinstance(initializer, (list, tuple)):
        return [_serialize_initializer(item) for item in initializer]
    if isinstance(initializer, keras.initializers.Initializer):
        return keras.initializers.serialize(initializer)
    return initializer


def _check_padding(padding_id: Any, key_type: tf.DType) -> int | None:
    if padding_id is None:
        return None
    if isinstance(padding_id, bool) or not hasattr(padding_id, "__index__"):
        raise TypeError(
            "padding_id must be an integer or None, or a string with hash_strings=True, got "
            f"{padding_id!r}."
        )
    number = int(padding_id)
    if not key_type.min <= number <= key_type.max:
        raise ValueError(f"padding_id={number} is not a {key_type.name}.")
    return number


def _check_default(default_vector: Any, dim: int) -> list[float] | None:
    if default_vector is None:
        return None
    vector = np.asarray(default_vector, dtype=np.float64)
    if vector.shape not in ((), (dim,)):
        raise ValueError(
            f"default_vector must be a number or a list of {dim} numbers, got the shape "
            f"{vector.shape}."
        )
    return [float(x) for x in np.broadcast_to(vector, (dim,))]


def _with_static_shape(sparse: tf.SparseTensor, shape: tf.TensorShape) -> tf.SparseTensor:
    if not tf.executing_eagerly():
        sparse._dense_shape_default = shape
    return sparse
