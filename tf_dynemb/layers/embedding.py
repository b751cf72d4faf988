"""Embedding: one vector for each id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb._aliases import one_of
from tf_dynemb.ids.types import Ids
from tf_dynemb.layers.base import TableLayer
from tf_dynemb.layers.input_dtype import check_input_dtype
from tf_dynemb.layers.pooling import check_combiner, pool_ids, pooled_shape
from tf_dynemb.tables.options import LayerArguments, Signature, check_dimension
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.keras_weight import TableWeight

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The number of rows of `weights` that are inserted at once: `weights` can be larger than the memory
# of a table with rows in files.
_ROWS_AT_A_TIME = 1 << 16


@keras.saving.register_keras_serializable(package="tf_dynemb")
class Embedding(TableLayer):
    """Turns ids into vectors, as `keras.layers.Embedding` does, without a vocabulary.

    Any integer is an id. In training, an unknown id gets a row. Outside training, it reads as
    `default_vector`, or by default as the vector that it would start with. Train with
    `tf_dynemb.OptimizerWrapper`. `layer.table` is the `DynamicVariable`.

    Example:
    >>> layer = Embedding(4)
    >>> layer(tf.constant([[3, -1], [3, 7]]), training=True).shape
    TensorShape([2, 2, 4])
    >>> len(layer.table)
    3

    Args:
        dim: width of the vectors. It is the only positional argument: `Embedding(1000, 16)`, which
            in Keras means 1000 rows, is an error.
        initializer: the initializer of new vectors; see `DynamicVariable`.
        combiner: None: the output has a vector for each id. "sum", "mean", "sqrtn" or "max": the
            vectors along the last dimension of the ids are pooled into one.
        padding_id: an id that reads as zeros, has no gradient and gets no row. Layers that follow
            get a mask, false where the id is this one.
        default_vector: the vector of unknown ids outside training: a number or `dim` numbers.
        mask_zero: as in Keras: a mask for the layers that follow, false where the id is 0.
        key_type: the key type of the table: "int64", "int32" or "uint64".
        hash_strings: whether ids are strings, whose keys are their hashes, by
            `tf.strings.to_hash_bucket_fast(ids, 2**63 - 1)`. Readers of dumps accept strings too.
        embeddings_regularizer: a Keras regularizer. A call adds its loss for the rows of the batch,
            each distinct row once; rows outside the batch do not count.
        embeddings_constraint: a Keras constraint, applied to the rows that a step has updated.
        input_dim: accepted because Keras requires it, and has no effect: any integer is an id.
        output_dim: the name of `dim` in Keras.
        embeddings_initializer: the name of `initializer` in Keras.
        weights: as in Keras, a matrix [n, dim], or a list with one: the vectors of the ids 0 to
            n - 1, which get a row at once, except `padding_id`.
        **table_options: name, dtype, trainable and activity_regularizer of the layer; var_type and
            the fields of `TableOptions` for the table.

    Input: integers of any shape, dense or ragged (with a combiner also sparse [batch, ids]). Floats
    are accepted if they are whole and small enough to be exact.

    Output: ids.shape + [dim]; with a combiner, ids.shape[:-1] + [dim].

    Raises:
        ValueError, TypeError: an argument is invalid, or the ids have an unsuitable shape or type;
            the message names it.
        tf.errors.InvalidArgumentError: an id is a float that is not exact.
    """

    __signature__ = Signature(LayerArguments)

    def __init__(
        self,
        dim: int | None = None,
        *args: Any,
        initializer: Any = None,
        combiner: str | None = None,
        padding_id: int | str | None = None,
        default_vector: float | Sequence[float] | None = None,
        mask_zero: bool = False,
        key_type: tf.DType | str = "int64",
        hash_strings: bool = False,
        embeddings_regularizer: keras.regularizers.Regularizer | str | None = None,
        embeddings_constraint: keras.constraints.Constraint | str | None = None,
        input_dim: int | None = None,
        output_dim: int | None = None,
        embeddings_initializer: Any = None,
        weights: Any = None,
        **table_options: Unpack[LayerArguments],
    ) -> None:
        if args:
            raise TypeError(_positional(dim, args[0]))
        if input_dim is not None:
            check_dimension("input_dim", input_dim)
        dim = one_of("dim", dim, "output_dim", output_dim)
        if dim is None:
            raise TypeError("Embedding needs the width of the vectors: Embedding(16).")
        super().__init__(
            dim,
            initializer=one_of(
                "initializer", initializer, "embeddings_initializer", embeddings_initializer
            ),
            key_type=key_type,
            hash_strings=hash_strings,
            padding_id=padding_id,
            default_vector=default_vector,
            embeddings_regularizer=embeddings_regularizer,
            embeddings_constraint=embeddings_constraint,
            table_options=table_options,
        )
        self.combiner = check_combiner(combiner, may_be_none=True)
        self.mask_zero = bool(mask_zero)
        if self.mask_zero and self.hash_strings:
            raise ValueError(
                "mask_zero=True is for integers; with hash_strings=True: padding_id=''."
            )
        self.supports_masking = self.mask_zero or padding_id is not None
        matrix = None if weights is None else self._check_weights(weights, input_dim)
        self._weight = self._add_table("embeddings")
        if matrix is not None:
            self._create_rows(matrix)

    def _check_weights(self, weights: Any, input_dim: int | None) -> npt.NDArray[Any]:
        """Returns the matrix of `weights`; raises a ValueError if it does not fit."""
        if isinstance(weights, (list, tuple)) and len(weights) == 1:
            weights = weights[0]
        matrix = np.asarray(weights)
        rows = "n" if input_dim is None else input_dim
        fits = matrix.ndim == 2 and matrix.shape[1] == self.dim
        if not fits or matrix.shape[0] != (input_dim or matrix.shape[0]):
            raise ValueError(
                f"weights must be a matrix [{rows}, {self.dim}], or a list with one, got the shape "
                f"{list(matrix.shape)}."
            )
        if self.hash_strings:
            raise ValueError("weights are vectors of integers; with hash_strings=True use assign.")
        most = self.table_options.get("max_capacity")
        if most is not None and most < len(matrix):
            raise ValueError(f"weights has {len(matrix)} rows, more than max_capacity={most}.")
        return matrix

    def _create_rows(self, matrix: npt.NDArray[Any]) -> None:
        keys = np.arange(len(matrix)).astype(self.key_type.as_numpy_dtype)
        if self.padding_id is not None:
            kept = keys != self.padding_id
            keys, matrix = keys[kept], matrix[kept]
        with tf.init_scope():
            for begin in range(0, len(keys), _ROWS_AT_A_TIME):
                chunk = slice(begin, begin + _ROWS_AT_A_TIME)
                self.table.upsert(keys[chunk], tf.cast(matrix[chunk], self.table.dtype))

    @property
    def table(self) -> DynamicVariable:
        """The table, a `DynamicVariable`."""
        table: DynamicVariable = self._weight.value
        return table

    @property
    def embeddings(self) -> TableWeight:
        """The weight, as in Keras; it has no dense value. `tf_dynemb.export` has keys and rows."""
        return self._weight

    @property
    def output_dim(self) -> int:
        """The width of the vectors, as in Keras."""
        return self.dim

    @property
    def input_dim(self) -> int:
        """Raises AttributeError: any id has a row, or gets one."""
        raise AttributeError(
            f"Layer {self.name} has no input_dim, because any integer is an id: len(layer.table) "
            "is the number of ids that have a row now."
        )

    def call(self, inputs: Ids, training: bool | None = None) -> tf.Tensor | tf.RaggedTensor:
        """Looks up ids; see the class for shapes."""
        ids = self._ids(inputs)
        if self.combiner is not None:
            return pool_ids(self, self._weight, ids, None, self.combiner, training)
        if isinstance(ids, tf.SparseTensor):
            raise TypeError(f"Layer {self.name} needs a combiner for sparse ids.")
        if isinstance(ids, tf.RaggedTensor):
            flat = tf.reshape(ids.flat_values, [-1])
            return ids.with_flat_values(self._vectors([self._weight], [flat], training)[0])
        vectors = self._vectors([self._weight], [tf.reshape(ids, [-1])], training)[0]
        output = tf.reshape(vectors, tf.concat([tf.shape(ids), [self.dim]], 0))
        output.set_shape(ids.shape.concatenate([self.dim]))
        return output

    def compute_mask(self, inputs: Ids, mask: tf.Tensor | None = None) -> tf.Tensor | None:
        """Returns a mask that is False where the id is padding, or None if no id is.

        Padding is the `padding_id`, and 0 with `mask_zero`.
        """
        if self.combiner is not None:
            return None
        mask = None
        padding = {self._padding_argument, 0 if self.mask_zero else None} - {None}
        # Keras compares strings only while it builds a model.
        has_strings = self.hash_strings and not isinstance(inputs, keras.KerasTensor)
        not_equal = tf.not_equal if has_strings else keras.ops.not_equal
        for one in padding:
            part = not_equal(inputs, one)
            mask = part if mask is None else keras.ops.logical_and(mask, part)
        return mask

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns the shape of the output."""
        if self.combiner is not None:
            return pooled_shape(input_shape, self.dim)
        return (*input_shape, self.dim)

    def compute_output_spec(
        self, inputs: keras.KerasTensor, training: bool | None = None
    ) -> keras.KerasTensor:
        """Returns the shape and dtype of the output."""
        check_input_dtype(self, inputs)
        ragged = bool(getattr(inputs, "ragged", False)) and self.combiner is None
        return keras.KerasTensor(
            self.compute_output_shape(inputs.shape), dtype=self.compute_dtype, ragged=ragged
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "combiner": self.combiner, "mask_zero": self.mask_zero}


def _positional(first: Any, second: Any) -> str:
    """The message for a second positional argument, which Keras reads in another way."""
    if isinstance(second, int):
        right = f"Embedding({second}), or Embedding(input_dim={first!r}, output_dim={second})"
    else:
        second = repr(second) if isinstance(second, str) else "..."
        right = f"Embedding({first!r}, initializer={second})"
    return (
        f"Embedding({first!r}, {second}): the only positional argument is the width of the "
        f"vectors, because a table has no fixed number of rows. Write {right}."
    )
