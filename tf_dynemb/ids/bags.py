"""Bags: one form for the SparseTensor, RaggedTensor and dense ids that a lookup accepts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.ids.keys import as_keys, cast_keys, without_strings
from tf_dynemb.ids.types import Ids, TensorLike


@dataclasses.dataclass(frozen=True)
class Bags:
    """The ids of one feature, grouped into bags that are each pooled into one vector.

    Attributes:
        keys: [nnz], of the table's key type.
        bags: the bag of each key, int64, in a form that depends on its rank (docs/operators.md):
            [nnz, >=1] with the bag in the first column; [num_bags + 1] row splits; or a scalar, the
            number of keys per bag.
        weights: float32 [nnz], or [0] if there are none.
        num_bags: int64 scalar.
        static_num_bags: `num_bags` as an int if it is known when tracing, otherwise None.
    """

    keys: tf.Tensor
    bags: tf.Tensor
    weights: tf.Tensor
    num_bags: tf.Tensor
    static_num_bags: int | None

    @property
    def has_weights(self) -> bool:
        """Whether weights were given."""
        return self.weights.shape.rank is None or self.weights.shape[0] != 0

    def bag_of_key(self) -> tf.Tensor:
        """Returns the bag of each key: int64 [nnz]."""
        if self.bags.shape.rank == 2:
            return self.bags[:, 0]
        if self.bags.shape.rank == 1:
            return tf.ragged.row_splits_to_segment_ids(self.bags)
        return tf.repeat(tf.range(self.num_bags), self.bags)

    def of_ids(self, mask: tf.Tensor) -> Bags:
        """Returns the same bags with only the ids for which `mask`, bool [nnz], is true."""
        weights = tf.boolean_mask(self.weights, mask) if self.has_weights else self.weights
        bag_of_key = tf.boolean_mask(self.bag_of_key(), mask)
        return dataclasses.replace(
            self,
            keys=tf.boolean_mask(self.keys, mask),
            bags=bag_of_key[:, tf.newaxis],
            weights=weights,
        )


def no_weights() -> tf.Tensor:
    """Returns the tensor that represents the absence of weights."""
    return tf.zeros([0], tf.float32)


def single(keys: tf.Tensor) -> Bags:
    """Returns bags of one key each, for a lookup without pooling.

    Args:
        keys: [n].
    """
    shape = _shape_of(keys)
    with _ops.on_host():
        num_bags = shape[0]
    return Bags(keys, _ops.one_each(), no_weights(), num_bags, keys.shape[0])


def at_positions(
    keys: tf.Tensor, positions: tf.Tensor, count: tf.Tensor, static_count: int | None
) -> Bags:
    """Returns bags of at most one key: vectors at `positions`, zeros elsewhere.

    Args:
        keys: [n].
        positions: int64 [n], in [0, count).
        count: int64 scalar, the number of bags.
        static_count: `count` as an int if it is known when tracing, otherwise None.
    """
    return Bags(keys, positions[:, tf.newaxis], no_weights(), count, static_count)


def create(
    ids: Ids | TensorLike,
    weights: Ids | TensorLike | None,
    key_type: tf.DType,
    name: str = "sp_ids",
    string_hash: str | None = None,
) -> Bags:
    """Creates bags from the ids and weights that a user passes.

    Args:
        ids: SparseTensor of rank 2 or more (the first dimension is the bag), RaggedTensor of two
            dimensions, or dense [B, H] or [B].
        weights: None, or of the kind and shape of `ids`, floating point.
        key_type: the key type of the table.
        name: the name of the argument, for errors.
        string_hash: the hash that makes a key of a string; None: strings are errors.

    Raises:
        TypeError, ValueError: the ids or weights are invalid; the message names the argument.
    """
    ids = without_strings(ids, key_type, name, string_hash)
    if isinstance(ids, tf.SparseTensor):
        return _from_sparse(ids, weights, key_type, name)
    if isinstance(ids, tf.RaggedTensor):
        return _from_ragged(ids, weights, key_type, name)
    return _from_dense(ids, weights, key_type, name)


def _from_sparse(ids: tf.SparseTensor, weights: Any, key_type: tf.DType, name: str) -> Bags:
    if ids.shape.rank is not None and ids.shape.rank < 2:
        raise ValueError(f"{name} must have rank 2, got a SparseTensor of the shape {ids.shape}.")
    keys = cast_keys(ids.values, key_type, name)
    if weights is not None:
        if not isinstance(weights, tf.SparseTensor):
            raise TypeError(
                f"sp_weights must be a SparseTensor, as {name} is, got a {type(weights).__name__}."
            )
        _check_compatible(name, ids.shape, weights.shape)
        weights = _as_weights(weights.values, keys, name)
    with _ops.on_host():
        num_bags = ids.dense_shape[0]
    return Bags(
        keys,
        ids.indices,
        no_weights() if weights is None else weights,
        num_bags,
        tf.compat.dimension_value(ids.shape[0]) if ids.shape.rank is not None else None,
    )


def _from_ragged(ids: tf.RaggedTensor, weights: Any, key_type: tf.DType, name: str) -> Bags:
    if ids.ragged_rank != 1 or ids.values.shape.rank != 1:
        raise ValueError(
            f"{name} must be a RaggedTensor of two dimensions, got the shape {ids.shape}."
        )
    keys = cast_keys(ids.values, key_type, name)
    with _ops.on_host():
        splits = tf.cast(ids.row_splits, tf.int64)
        num_bags = tf.cast(ids.nrows(), tf.int64)
    if weights is not None:
        if not isinstance(weights, tf.RaggedTensor):
            raise TypeError(
                f"sp_weights must be a RaggedTensor, as {name} is, got a {type(weights).__name__}."
            )
        if weights.ragged_rank != 1 or weights.values.shape.rank != 1:
            raise ValueError(f"sp_weights must have the shape of {name}, got {weights.shape}.")
        _check_compatible(name, ids.shape, weights.shape)
        same = _static_all_equal(splits, tf.cast(weights.row_splits, tf.int64))
        if same is False:
            raise ValueError(f"sp_weights must have the row lengths of {name}.")
        weights = _as_weights(weights.values, keys, name)
    return Bags(
        keys,
        splits,
        no_weights() if weights is None else weights,
        num_bags,
        tf.compat.dimension_value(ids.shape[0]),
    )


def _from_dense(ids: Any, weights: Any, key_type: tf.DType, name: str) -> Bags:
    ids = as_keys(ids, key_type, name)
    if ids.shape.rank not in (1, 2):
        raise ValueError(f"Dense {name} must have the shape [B] or [B, H], got {ids.shape}.")
    if weights is not None:
        if isinstance(weights, (tf.SparseTensor, tf.RaggedTensor)):
            raise TypeError(
                f"sp_weights must be dense, as {name} is, got a {type(weights).__name__}."
            )
        weights = tf.convert_to_tensor(weights)
        _check_compatible(name, ids.shape, weights.shape)
        if not _as_float(weights):
            raise TypeError(f"sp_weights must be floating point, got {weights.dtype.name}.")
        weights = tf.reshape(tf.cast(weights, tf.float32), [-1])
    keys = tf.reshape(ids, [-1])
    shape = _shape_of(ids)
    with _ops.on_host():
        hotness = _ops.one_each() if ids.shape.rank == 1 else shape[1]
        num_bags = shape[0]
    return Bags(
        keys,
        hotness,
        no_weights() if weights is None else weights,
        num_bags,
        tf.compat.dimension_value(ids.shape[0]),
    )


def _shape_of(ids: tf.Tensor) -> tf.Tensor:
    """Returns the shape of ids, int64, in the host's memory, wherever the ids are."""
    if ids.shape.is_fully_defined():
        with _ops.on_host():
            return tf.constant(ids.shape.as_list(), tf.int64)
    return tf.shape(ids, out_type=tf.int64)


def _as_weights(values: tf.Tensor, keys: tf.Tensor, name: str) -> tf.Tensor:
    if not _as_float(values):
        raise TypeError(f"sp_weights must be floating point, got {values.dtype.name}.")
    if not values.shape.is_compatible_with(keys.shape):
        raise ValueError(
            f"sp_weights has {values.shape[0]} values, but {name} has {keys.shape[0]}."
        )
    return tf.cast(values, tf.float32)


def _as_float(values: tf.Tensor) -> bool:
    return bool(values.dtype.is_floating)


def _check_compatible(name: str, ids: tf.TensorShape, weights: tf.TensorShape) -> None:
    if not ids.is_compatible_with(weights):
        raise ValueError(f"sp_weights must have the shape of {name}, {ids}, got {weights}.")


def _static_all_equal(a: tf.Tensor, b: tf.Tensor) -> bool | None:
    """Returns whether two tensors are equal; None if that is not known when tracing."""
    a, b = tf.get_static_value(a), tf.get_static_value(b)
    return None if a is None or b is None else bool(np.array_equal(a, b))
