"""TFRA's lookup functions, over the lookups of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.lookup.lookup_sparse import check_max_norm, lookup_sparse
from tf_dynemb.lookup.pool import clip_norms
from tf_dynemb.tfra.modes import is_inference
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.unwrap import dynamic

COMBINERS = ("mean", "sqrtn", "sum")


@_ops.not_converted
def embedding_lookup(
    params: DynamicVariable | Sequence[DynamicVariable],
    ids: TensorLike,
    partition_strategy: Any = None,
    name: str | None = None,
    validate_indices: Any = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
) -> Any:
    """Reads one vector for each id. Unknown ids read as their initial vectors and get no row.

    Args:
        params: a `Variable`, or a list of one.
        ids: integers of any shape; repeated ids are looked up once.
        partition_strategy: unused, like name and validate_indices.
        name: unused.
        validate_indices: unused.
        max_norm: vectors of a larger L2 norm are scaled to this norm, as in
            `tf.nn.embedding_lookup`; None: they are not.
        return_trainable: whether to also return the object to differentiate with respect to: the
            variable itself, in `tf.function` too.

    Returns:
        ids.shape + [dim]; with `return_trainable`, a tuple of it and the variable.

    Raises:
        TypeError: `params` is not a variable, or the ids are not integers.
        ValueError: `params` has several elements.
    """
    table = _single(params)
    read = clip_norms(table.lookup(ids, insert=False), check_max_norm(max_norm))
    return (_by_mode(read), table) if return_trainable else _by_mode(read)


# A lookup of repeated ids reads and trains each row once already.
embedding_lookup_unique = embedding_lookup


@_ops.not_converted
def embedding_lookup_sparse(
    params: DynamicVariable | Sequence[DynamicVariable],
    sp_ids: tf.SparseTensor,
    sp_weights: tf.SparseTensor | None,
    partition_strategy: Any = None,
    name: str | None = None,
    combiner: str = "mean",
    max_norm: float | None = None,
    return_trainable: bool = False,
) -> Any:
    """Looks up ids and pools the vectors of each row of a SparseTensor.

    Args:
        params: a `Variable`, or a list of one.
        sp_ids: a SparseTensor [batch, ids] of integers.
        sp_weights: weights of the ids, a SparseTensor of the same shape; None: all are 1.
        partition_strategy: unused, like name.
        name: unused.
        combiner: "mean", "sqrtn" or "sum".
        max_norm: as in `embedding_lookup`.
        return_trainable: as in `embedding_lookup`.

    Returns:
        [batch, dim], zeros for a row without ids; with `return_trainable`, a tuple of it and the
        variable.

    Raises:
        TypeError: ids or weights are not SparseTensors.
        ValueError: the combiner is another.
    """
    table = _single(params)
    _check_sparse(sp_ids, sp_weights, combiner)
    pooled = _pooled(table, sp_ids, sp_weights, combiner, max_norm)
    return (_by_mode(pooled), table) if return_trainable else _by_mode(pooled)


@_ops.not_converted
def safe_embedding_lookup_sparse(
    embedding_weights: DynamicVariable | Sequence[DynamicVariable],
    sparse_ids: tf.SparseTensor,
    sparse_weights: tf.SparseTensor | None = None,
    combiner: str = "mean",
    default_id: int | None = None,
    name: str | None = None,
    partition_strategy: Any = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
) -> Any:
    """Same as `embedding_lookup_sparse`, for rows without ids and ids of any rank.

    Args:
        embedding_weights: a `Variable`, or a list of one.
        sparse_ids: a SparseTensor [d_0, ..., d_n] of integers; every value is an id.
        sparse_weights: None, or weights. With "mean" and "sqrtn", ids whose weight is not positive
            are left out.
        combiner: "mean", "sqrtn" or "sum", along the last dimension.
        default_id: the id that a row without ids reads as. None: zeros.
        name: unused, like partition_strategy.
        partition_strategy: unused.
        max_norm: as in `embedding_lookup`.
        return_trainable: as in `embedding_lookup`.

    Returns:
        [d_0, ..., d_n-1, dim]; with `return_trainable`, a tuple of it and the variable.
    """
    table = _single(embedding_weights)
    _check_sparse(sparse_ids, sparse_weights, combiner)
    shape = tf.cast(sparse_ids.dense_shape, tf.int64)
    rows = tf.reduce_prod(shape[:-1])
    ids = tf.sparse.reshape(sparse_ids, tf.stack([rows, shape[-1]]))
    weights = None
    if sparse_weights is not None:
        weights = tf.SparseTensor(ids.indices, sparse_weights.values, ids.dense_shape)
        if combiner != "sum":
            positive = weights.values > 0
            ids = tf.sparse.retain(ids, positive)
            weights = tf.sparse.retain(weights, positive)
    if default_id is not None:
        ids, _ = tf.sparse.fill_empty_rows(ids, tf.constant(default_id, ids.dtype))
        if weights is not None:
            weights, _ = tf.sparse.fill_empty_rows(weights, tf.ones([], weights.dtype))
    pooled = _pooled(table, ids, weights, combiner, max_norm)
    pooled = tf.reshape(pooled, tf.concat([shape[:-1], [table.dimension]], 0))
    return (_by_mode(pooled), table) if return_trainable else _by_mode(pooled)


def _single(params: DynamicVariable | Sequence[DynamicVariable]) -> DynamicVariable:
    if isinstance(params, (list, tuple)):
        if len(params) != 1:
            raise ValueError(f"params must be one Variable, got a list of {len(params)}.")
        params = params[0]
    table = dynamic(params, "params")
    if not table.inserts_in_steps:
        raise TypeError(
            f"params must be a Variable of tf_dynemb.tfra, got {table.name}, whose rows are "
            "created by the lookups of tf_dynemb itself."
        )
    return table


def _check_sparse(ids: Any, weights: Any, combiner: Any) -> None:
    if combiner not in COMBINERS:
        raise ValueError(f"combiner must be one of {', '.join(COMBINERS)}, got {combiner!r}.")
    if not isinstance(ids, tf.SparseTensor):
        raise TypeError(f"sparse ids must be a SparseTensor, got {ids!r:.80}.")
    if weights is not None and not isinstance(weights, tf.SparseTensor):
        raise TypeError(f"sparse weights must be a SparseTensor or None, got {weights!r:.80}.")


def _pooled(
    table: DynamicVariable,
    ids: tf.SparseTensor,
    weights: tf.SparseTensor | None,
    combiner: str,
    max_norm: float | None,
) -> tf.Tensor:
    if weights is not None and not weights.dtype.is_floating:
        weights = tf.cast(weights, tf.float32)
    return lookup_sparse(table, ids, weights, combiner, insert=False, max_norm=max_norm)


def _by_mode(vectors: tf.Tensor) -> tf.Tensor:
    return tf.stop_gradient(vectors) if is_inference() else vectors
