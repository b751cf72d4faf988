"""The gradient of a table's gradient, for second derivatives in one process.

DynembLookupSparseGrad adds up the gradients of bags for each unique key. With c_i the factor that
the combiner gives id i (`lookup.pool` has the formulas), key(i) its key and bag(i) its bag,

    sums[k] = Σ_{i: key(i) = k} c_i grads[bag(i)]

which is linear in `grads`. Given the gradient D of `sums`, the gradient of `grads` is therefore a
pooled lookup in D: for bag b, the sum of c_i D[key(i)] over its ids. For max, each column of a bag
has one id, which the lookup has chosen.
"""

from __future__ import annotations

import tensorflow as tf

from tf_dynemb import _ops


@tf.RegisterGradient("DynembLookupSparseGrad")  # type: ignore[untyped-decorator]
def _gradient(op: tf.Operation, *output_grads: tf.Tensor | None) -> list[tf.Tensor | None]:
    count = len(op.inputs) // 6
    keys, rows, bags, weights, argmax, grads = (
        op.inputs[i * count : (i + 1) * count] for i in range(6)
    )
    combiners = _ops.strings_of(op, "combiners")
    weight_grads: list[tf.Tensor | None] = [None] * count
    bag_grads: list[tf.Tensor | None] = [None] * count
    for i in range(count):
        if output_grads[count + i] is None:
            continue
        vectors = _rows_of(op.outputs[i], tf.convert_to_tensor(output_grads[count + i]), keys[i])
        has_weights = weights[i].shape[0] != 0
        with tf.GradientTape() as tape:
            tape.watch(weights[i])
            factors = weights[i] if has_weights else tf.ones_like(vectors[:, 0])
            vectors, factors = _without_refused(vectors, factors, rows[i])
            pooled = _pool(vectors, factors, bags[i], argmax[i], combiners[i], tf.shape(grads[i]))
            product = tf.reduce_sum(pooled * tf.cast(grads[i], tf.float32))
        bag_grads[i] = tf.cast(pooled, grads[i].dtype)
        if has_weights:
            weight_grads[i] = tape.gradient(product, weights[i])
    none: list[tf.Tensor | None] = [None] * count
    return [*none, *none, *none, *weight_grads, *none, *bag_grads]


def _without_refused(
    vectors: tf.Tensor, factors: tf.Tensor, rows: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the terms of ids: zeros for ids whose keys a table's admission has refused."""
    skipped = tf.equal(rows, _ops.SKIPPED_ROW)
    refused = skipped | tf.equal(rows, _ops.UNADMITTED_ROW)
    vectors = tf.where(refused[:, tf.newaxis], tf.zeros_like(vectors), vectors)
    return vectors, tf.where(skipped, tf.zeros_like(factors), factors)


def _rows_of(unique_keys: tf.Tensor, rows: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Returns the rows of keys [n], given the rows of the unique keys in any order."""
    if unique_keys.dtype == tf.uint64:  # which TensorFlow does not sort
        unique_keys, keys = (tf.bitcast(k, tf.int64) for k in (unique_keys, keys))
    order = tf.argsort(unique_keys)
    places = tf.searchsorted(tf.gather(unique_keys, order), tf.reshape(keys, [-1]))
    return tf.gather(rows, tf.gather(order, places))


def _pool(
    vectors: tf.Tensor,
    weights: tf.Tensor,
    bags: tf.Tensor,
    argmax: tf.Tensor,
    combiner: str,
    shape: tf.Tensor,
) -> tf.Tensor:
    """Pools vectors [nnz, dim] as a lookup does: [num_bags, dim]; `shape` is that."""
    products = vectors * weights[:, tf.newaxis]
    if combiner == "max":
        products = tf.pad(products, [[0, 1], [0, 0]])  # a batch can have no ids
        columns = tf.broadcast_to(tf.range(shape[1]), shape)
        chosen = tf.gather_nd(products, tf.stack([tf.maximum(argmax, 0), columns], axis=-1))
        return tf.where(argmax >= 0, chosen, tf.zeros_like(chosen))
    if bags.shape.rank == 2:
        segments = bags[:, 0]
    elif bags.shape.rank == 1:
        segments = tf.ragged.row_splits_to_segment_ids(bags)
    else:
        segments = tf.repeat(tf.range(tf.cast(shape[0], tf.int64)), bags)
    pooled = tf.math.unsorted_segment_sum(products, segments, shape[0])
    if combiner == "sum":
        return pooled
    norm = weights if combiner == "mean" else weights * weights
    norm = tf.math.unsorted_segment_sum(norm, segments, shape[0])[:, tf.newaxis]
    return tf.math.divide_no_nan(pooled, norm if combiner == "mean" else tf.sqrt(norm))
