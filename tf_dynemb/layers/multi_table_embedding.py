"""MultiTableEmbedding: many features, each with its own table or a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_dynemb.ids.types import Ids, TensorLike
from tf_dynemb.layers.base import TableLayer, check_table_options
from tf_dynemb.layers.input_dtype import check_input_dtype
from tf_dynemb.tables.options import LayerArguments, Signature, check_dimension, to_config
from tf_dynemb.variables.dynamic import DynamicVariable

if TYPE_CHECKING:
    from typing_extensions import Unpack


@keras.saving.register_keras_serializable(package="tf_dynemb")
class MultiTableEmbedding(TableLayer):
    """One vector for each feature of a sample, from several tables, in one operator.

    The same id in two tables has two rows. Features that share a table share rows.

    Example:
    >>> layer = MultiTableEmbedding(4, tables=2, feature_tables=[0, 1, 1])
    >>> layer(tf.constant([[5, 5, 6], [5, 6, 6]]), training=True).shape
    TensorShape([2, 3, 4])
    >>> [len(table) for table in layer.tables]
    [1, 2]

    Args:
        dim: width of the vectors.
        tables: the number of tables, or a list with a dict of options for each: "dim",
            "initializer" and the table options below, which override the layer's.
        feature_tables: the table of each feature (column of the ids, or item of a list), or a dict
            with the table of each feature by its name. Default: one table each.
        initializer: the initializer of new vectors; see `DynamicVariable`.
        padding_id: an id that reads as zeros, has no gradient and gets no row.
        default_vector: the vector of unknown ids outside training: a number or `dim` numbers.
        key_type: the key type of the tables: "int64", "int32" or "uint64".
        hash_strings: whether ids are strings, whose keys are their hashes, by
            `tf.strings.to_hash_bucket_fast(ids, 2**63 - 1)`. Readers of dumps accept strings too.
        embeddings_regularizer: a Keras regularizer. A call adds its loss for the rows of the batch,
            each distinct row once; rows outside the batch do not count.
        embeddings_constraint: a Keras constraint, applied to the rows that a step has updated.
        **table_options: name, dtype, trainable and activity_regularizer of the layer; var_type and
            the fields of `TableOptions` for all tables.

    Input: ids [batch, features]; or a list, or a dict by the names of `feature_tables`, with one
    dense or ragged tensor of ids for each feature; or ids of any shape and `table_ids=...`,
    integers of the same shape that name the table of each id.

    Output: [batch, features, dim]; for a list or dict, the same structure with ids.shape + [dim of
    the feature's table]; with `table_ids`, ids.shape + [dim].

    Raises:
        ValueError, TypeError: an argument is invalid, or the ids have an unsuitable shape or type;
            the message names it.
        tf.errors.InvalidArgumentError: an id is a float that is not exact, or a table id is not the
            number of a table.
    """

    __signature__ = Signature(LayerArguments)

    def __init__(
        self,
        dim: int,
        tables: int | Sequence[dict[str, Any]],
        feature_tables: Sequence[int] | dict[str, int] | None = None,
        initializer: Any = None,
        *,
        padding_id: int | str | None = None,
        default_vector: float | Sequence[float] | None = None,
        key_type: tf.DType | str = "int64",
        hash_strings: bool = False,
        embeddings_regularizer: keras.regularizers.Regularizer | str | None = None,
        embeddings_constraint: keras.constraints.Constraint | str | None = None,
        **table_options: Unpack[LayerArguments],
    ) -> None:
        options = _options_of_tables(tables)
        names = list(feature_tables) if isinstance(feature_tables, dict) else []
        if isinstance(feature_tables, dict):
            feature_tables = list(feature_tables.values())
        self_features = _check_features(feature_tables, len(options))
        super().__init__(
            dim,
            initializer=initializer,
            key_type=key_type,
            hash_strings=hash_strings,
            padding_id=padding_id,
            default_vector=default_vector,
            embeddings_regularizer=embeddings_regularizer,
            embeddings_constraint=embeddings_constraint,
            table_options=table_options,
        )
        self._tables_argument = tables
        self.feature_tables = self_features
        self._feature_names = names
        for overrides in options:
            merged = {**self.table_options, **overrides}
            table_dim = check_dimension("dim", merged.pop("dim", dim))
            check_table_options(merged, table_dim, merged.pop("initializer", initializer))
        self._weights = [
            self._add_table(f"table_{i}", **overrides) for i, overrides in enumerate(options)
        ]

    @property
    def tables(self) -> list[DynamicVariable]:
        """The tables, a list of `DynamicVariable`."""
        return [weight.value for weight in self._weights]

    def call(
        self,
        inputs: Ids | Sequence[Ids] | dict[str, Ids],
        table_ids: TensorLike | None = None,
        training: bool | None = None,
    ) -> tf.Tensor | list[Ids] | dict[str, Ids]:
        """Looks up ids; see the class for shapes."""
        if isinstance(inputs, (list, tuple, dict)):
            if table_ids is not None:
                raise ValueError(f"Layer {self.name} takes table_ids only with one tensor of ids.")
            return self._by_feature(inputs, training)
        ids = self._ids(inputs)
        if isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
            raise TypeError(
                f"Layer {self.name} needs dense ids, or a list or dict with a tensor for each "
                f"feature, got a {type(ids).__name__}."
            )
        self._check_one_width("one tensor of ids")
        if table_ids is not None:
            return self._by_table_ids(ids, tf.convert_to_tensor(table_ids), training)
        features = len(self.feature_tables)
        if ids.shape.rank != 2 or ids.shape[1] not in (None, features):
            raise ValueError(
                f"Layer {self.name} needs ids of the shape [batch, {features}], got {ids.shape}."
            )
        columns = tf.unstack(tf.ensure_shape(ids, [None, features]), axis=1)
        output = tf.stack(self._flat_vectors(columns, training), axis=1)
        output.set_shape([ids.shape[0], features, self.dim])
        return output

    def _by_feature(
        self, inputs: Sequence[Ids] | dict[str, Ids], training: bool | None
    ) -> list[Ids] | dict[str, Ids]:
        """Vectors of a list or dict of features, each dense or ragged, in the same structure."""
        features = [self._ids(ids) for ids in self._in_order(inputs)]
        flat = []
        for ids in features:
            if isinstance(ids, tf.SparseTensor):
                raise TypeError(f"Layer {self.name} needs dense or ragged ids, got a SparseTensor.")
            values = ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids
            flat.append(tf.reshape(values, [-1]))
        outputs = []
        for f, (ids, vectors) in enumerate(
            zip(features, self._flat_vectors(flat, training), strict=True)
        ):
            if isinstance(ids, tf.RaggedTensor):
                outputs.append(ids.with_flat_values(vectors))
            else:
                dim = self._dim_of(f)
                output = tf.reshape(vectors, tf.concat([tf.shape(ids), [dim]], 0))
                output.set_shape(ids.shape.concatenate([dim]))
                outputs.append(output)
        if isinstance(inputs, dict):
            return dict(zip(self._feature_names, outputs, strict=True))
        return outputs

    def _flat_vectors(self, flat: Sequence[tf.Tensor], training: bool | None) -> list[tf.Tensor]:
        """Vectors [n, dim] of the flat ids [n] of each feature, in one lookup."""
        used = sorted(set(self.feature_tables))
        groups = [[f for f, t in enumerate(self.feature_tables) if t == table] for table in used]
        vectors = self._vectors(
            [self._weights[table] for table in used],
            [tf.concat([flat[f] for f in group], 0) for group in groups],
            training,
        )
        by_feature: list[tf.Tensor] = [None] * len(flat)
        for group, values in zip(groups, vectors, strict=True):
            sizes = tf.stack([tf.size(flat[f]) for f in group])
            for f, part in zip(group, tf.split(values, sizes, num=len(group)), strict=True):
                by_feature[f] = part
        return by_feature

    def _in_order(self, inputs: Any) -> list[Any]:
        """The features of a list, or of a dict in the order of `feature_tables`."""
        if isinstance(inputs, dict):
            if not self._feature_names:
                raise ValueError(
                    f"Layer {self.name} got a dict of features, so feature_tables must be a dict "
                    "with the table of each."
                )
            if set(inputs) != set(self._feature_names):
                raise ValueError(
                    f"Layer {self.name} needs the features {self._feature_names}, got "
                    f"{list(inputs)}."
                )
            return [inputs[name] for name in self._feature_names]
        if len(inputs) != len(self.feature_tables):
            raise ValueError(
                f"Layer {self.name} has {len(self.feature_tables)} features, got {len(inputs)}."
            )
        return list(inputs)

    def _dim_of(self, feature: int) -> int:
        return int(self._weights[self.feature_tables[feature]].value.dimension)

    def _check_one_width(self, what: str) -> None:
        widths = sorted({weight.value.dimension for weight in self._weights})
        if len(widths) > 1:
            raise ValueError(
                f"Layer {self.name} has tables of the widths {widths}. Pass a list or dict with a "
                f"tensor for each feature, not {what}."
            )

    def _by_table_ids(
        self, ids: tf.Tensor, table_ids: tf.Tensor, training: bool | None
    ) -> tf.Tensor:
        if not table_ids.dtype.is_integer:
            raise TypeError(f"table_ids must be integers, got {table_ids.dtype.name}.")
        if not ids.shape.is_compatible_with(table_ids.shape):
            raise ValueError(
                f"table_ids must have the shape of the ids, {ids.shape}, got {table_ids.shape}."
            )
        count = len(self._weights)
        flat, flat_tables = tf.reshape(ids, [-1]), tf.cast(tf.reshape(table_ids, [-1]), tf.int32)
        with tf.control_dependencies(
            [
                tf.debugging.assert_non_negative(flat_tables, "table_ids must be >= 0."),
                tf.debugging.assert_less(flat_tables, count, f"table_ids must be below {count}."),
            ]
        ):
            flat_tables = tf.identity(flat_tables)
        positions = tf.dynamic_partition(tf.range(tf.size(flat)), flat_tables, count)
        parts = tf.dynamic_partition(flat, flat_tables, count)
        vectors = self._vectors(self._weights, parts, training)
        output = tf.dynamic_stitch(positions, vectors)
        output = tf.reshape(output, tf.concat([tf.shape(ids), [self.dim]], 0))
        output.set_shape(ids.shape.concatenate([self.dim]))
        return output

    def compute_output_shape(self, inputs_shape: Any, table_ids_shape: Any = None) -> Any:
        """Returns the shape of the output."""
        if isinstance(inputs_shape, dict):
            return {
                name: (*inputs_shape[name], self._dim_of(f))
                for f, name in enumerate(self._feature_names)
            }
        if isinstance(inputs_shape, list) and inputs_shape and _is_shape(inputs_shape[0]):
            return [(*shape, self._dim_of(f)) for f, shape in enumerate(inputs_shape)]
        return (*inputs_shape, self.dim)

    def compute_output_spec(
        self, inputs: Any, table_ids: keras.KerasTensor | None = None, training: bool | None = None
    ) -> Any:
        """Returns the shape and dtype of the output."""
        check_input_dtype(self, inputs)
        if isinstance(inputs, (list, tuple, dict)):
            specs = [
                keras.KerasTensor(
                    (*ids.shape, self._dim_of(f)),
                    dtype=self.compute_dtype,
                    ragged=bool(getattr(ids, "ragged", False)),
                )
                for f, ids in enumerate(self._in_order(inputs))
            ]
            is_dict = isinstance(inputs, dict)
            return dict(zip(self._feature_names, specs, strict=True)) if is_dict else specs
        self._check_one_width("one tensor of ids")
        return keras.KerasTensor((*inputs.shape, self.dim), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        tables = self._tables_argument
        return {
            **super().get_config(),
            "tables": tables if isinstance(tables, int) else [to_config(one) for one in tables],
            "feature_tables": dict(zip(self._feature_names, self.feature_tables, strict=True))
            if self._feature_names
            else list(self.feature_tables),
        }


def _is_shape(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _options_of_tables(tables: Any) -> list[dict[str, Any]]:
    if isinstance(tables, int) and not isinstance(tables, bool):
        tables = [{}] * tables
    if not isinstance(tables, (list, tuple)) or not all(isinstance(one, dict) for one in tables):
        raise TypeError(f"tables must be a number or a list of dicts of options, got {tables!r}.")
    if not tables:
        raise ValueError("tables is empty: at least one table is needed.")
    return [dict(one) for one in tables]


def _check_features(feature_tables: Any, count: int) -> list[int]:
    if feature_tables is None:
        return list(range(count))
    for table in feature_tables:
        if isinstance(table, bool) or not isinstance(table, int) or not 0 <= table < count:
            raise ValueError(
                f"feature_tables must be numbers of tables below {count}, got {table!r}."
            )
    if not len(feature_tables):
        raise ValueError("feature_tables is empty: at least one feature is needed.")
    return list(feature_tables)
