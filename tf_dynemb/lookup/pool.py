"""Pooling with TensorFlow's own operations, for vectors that our operators do not pool."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_dynemb.ids.bags import Bags


def pool(vectors: Any, bags: Bags, combiner: str) -> Any:
    """Pools the vectors v of each bag into one.

    The weights w are 1 if none are given:

    - sum: Σ w v
    - mean: Σ w v / Σ w
    - sqrtn: Σ w v / sqrt(Σ w²)
    - max: max w v

    These are the formulas of `cc/lookup/combiner.h` and, except for max, of
    `tf.nn.embedding_lookup_sparse`. Empty bags give zeros.

    Args:
        vectors: [nnz, dim], in the order of `bags.keys`.
        bags: the bags of these vectors.
        combiner: sum, mean, sqrtn or max.

    Returns:
        [num_bags, dim] of the dtype of `vectors`. 16-bit vectors are pooled in float32.
    """
    dtype = vectors.dtype
    if dtype.size < 4:
        vectors = tf.cast(vectors, tf.float32)
    segments, count = bags.bag_of_key(), bags.num_bags
    if bags.has_weights:
        weights = tf.cast(bags.weights, vectors.dtype)[:, tf.newaxis]
        vectors = vectors * weights
    else:
        weights = tf.ones_like(vectors[:, :1])
    if combiner == "max":
        pooled = tf.math.unsorted_segment_max(vectors, segments, count)
        # The maximum of an empty bag is the lowest number of the dtype.
        nonempty = tf.math.unsorted_segment_sum(tf.ones_like(segments), segments, count) > 0
        pooled = tf.where(nonempty[:, tf.newaxis], pooled, tf.zeros_like(pooled))
    else:
        pooled = tf.math.unsorted_segment_sum(vectors, segments, count)
        if combiner == "mean":
            norm = tf.math.unsorted_segment_sum(weights, segments, count)
            pooled = tf.math.divide_no_nan(pooled, norm)
        elif combiner == "sqrtn":
            norm = tf.sqrt(tf.math.unsorted_segment_sum(weights * weights, segments, count))
            pooled = tf.math.divide_no_nan(pooled, norm)
    return tf.cast(pooled, dtype)


def clip_norms(vectors: Any, max_norm: float | None) -> Any:
    """Scales vectors [n, dim] whose L2 norm is above `max_norm` to that norm; None: no limit.

    The formula is the same as in `tf.clip_by_norm`, v · max_norm / max(‖v‖, max_norm), and so is
    the gradient. 16-bit vectors are scaled in float32.
    """
    if max_norm is None:
        return vectors
    wide = tf.cast(vectors, tf.float32) if vectors.dtype.size < 4 else vectors
    return tf.cast(tf.clip_by_norm(wide, max_norm, axes=[-1]), vectors.dtype)
