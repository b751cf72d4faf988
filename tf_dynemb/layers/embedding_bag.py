"""EmbeddingBag: the vectors of a sample's ids, pooled into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_dynemb.ids.types import Ids
from tf_dynemb.layers.base import TableLayer
from tf_dynemb.layers.input_dtype import check_input_dtype
from tf_dynemb.layers.pooling import check_combiner, pool_ids, pooled_shape
from tf_dynemb.tables.options import LayerArguments, Signature
from tf_dynemb.variables.dynamic import DynamicVariable

if TYPE_CHECKING:
    from typing_extensions import Unpack


@keras.saving.register_keras_serializable(package="tf_dynemb")
class EmbeddingBag(TableLayer):
    """Pools the vectors of the ids of each sample, for multi-valued features of any length.

    Example:
    >>> layer = EmbeddingBag(4, combiner="sum")
    >>> layer(tf.ragged.constant([[3, -1, 3], []], dtype=tf.int64), training=True).shape
    TensorShape([2, 4])

    Args:
        dim: width of the vectors.
        combiner: "mean", "sum", "sqrtn" or "max".
        initializer: the initializer of new vectors; see `DynamicVariable`.
        padding_id: an id that is left out of its bag and gets no row.
        default_vector: the vector of unknown ids outside training: a number or `dim` numbers.
        key_type: the key type of the table: "int64", "int32" or "uint64".
        hash_strings: whether ids are strings, whose keys are their hashes, by
            `tf.strings.to_hash_bucket_fast(ids, 2**63 - 1)`. Readers of dumps accept strings too.
        embeddings_regularizer: a Keras regularizer. A call adds its loss for the rows of the batch,
            each distinct row once; rows outside the batch do not count.
        embeddings_constraint: a Keras constraint, applied to the rows that a step has updated.
        **table_options: name, dtype, trainable and activity_regularizer of the layer; var_type and
            the fields of `TableOptions` for the table.

    Input: ids, dense [..., H], ragged [..., (ids)] or sparse [batch, ids]. `weights=...` is
    optional: floating point, of the same kind and shape as the ids. The weights have a gradient.

    Output: [..., dim], ragged for ragged ids of rank 3; an empty bag gives zeros.

    Raises:
        ValueError, TypeError: an argument is invalid, or the ids have an unsuitable shape or type;
            the message names it.
        tf.errors.InvalidArgumentError: an id is a float that is not exact.
    """

    __signature__ = Signature(LayerArguments)

    def __init__(
        self,
        dim: int,
        combiner: str = "mean",
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
        self.combiner = check_combiner(combiner)
        self._weight = self._add_table("embeddings")

    @property
    def table(self) -> DynamicVariable:
        """The table, a `DynamicVariable`."""
        table: DynamicVariable = self._weight.value
        return table

    def call(
        self, inputs: Ids, weights: Ids | None = None, training: bool | None = None
    ) -> tf.Tensor | tf.RaggedTensor:
        """Looks up and pools ids; see the class for shapes."""
        ids = self._ids(inputs)
        if weights is not None and not isinstance(weights, (tf.SparseTensor, tf.RaggedTensor)):
            weights = tf.convert_to_tensor(weights)
        return pool_ids(self, self._weight, ids, weights, str(self.combiner), training)

    def compute_output_shape(
        self,
        inputs_shape: tuple[int | None, ...],
        weights_shape: tuple[int | None, ...] | None = None,
    ) -> tuple[int | None, ...]:
        """Returns the shape of the output."""
        return pooled_shape(inputs_shape, self.dim)

    def compute_output_spec(
        self,
        inputs: keras.KerasTensor,
        weights: keras.KerasTensor | None = None,
        training: bool | None = None,
    ) -> keras.KerasTensor:
        """Returns the shape and dtype of the output."""
        check_input_dtype(self, inputs)
        return keras.KerasTensor(pooled_shape(inputs.shape, self.dim), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "combiner": self.combiner}
