"""Pooled lookups of one table, for the layers with a combiner."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_dynemb.ids import bags
from tf_dynemb.ids.bags import Bags
from tf_dynemb.ids.types import Ids
from tf_dynemb.layers.base import TableLayer
from tf_dynemb.lookup.lookup_sparse import COMBINERS, lookup_bags
from tf_dynemb.variables.keras_weight import TableWeight


def check_combiner(combiner: Any, may_be_none: bool = False) -> str | None:
    """Returns the combiner, or raises a ValueError that names it."""
    if combiner is None and may_be_none:
        return None
    if combiner not in COMBINERS:
        raise ValueError(f"combiner must be one of {', '.join(COMBINERS)}, got {combiner!r}.")
    return str(combiner)


def pooled_shape(ids_shape: tuple[int | None, ...], dim: int) -> tuple[int | None, ...]:
    """Returns the shape of pooled vectors: ids.shape[:-1] + (dim,)."""
    if len(ids_shape) < 2:
        raise ValueError(f"A combiner needs ids of the shape [batch, ids], got {ids_shape}.")
    return (*ids_shape[:-1], dim)


def pool_ids(
    layer: TableLayer,
    weight: TableWeight,
    ids: Ids,
    weights: Ids | None,
    combiner: str,
    training: bool | None,
) -> tf.Tensor | tf.RaggedTensor:
    """Looks up ids in a layer's table and pools them along the last dimension.

    Args:
        layer: a TableLayer.
        weight: the layer's TableWeight.
        ids: ids of the key type: dense [..., H], RaggedTensor [..., (H)] or SparseTensor [B, H].
        weights: the weights of the ids, in the same form, or None.
        combiner: the combiner of the bags.
        training: whether unknown ids get a row.

    Returns:
        A tensor [..., dim] of the layer's compute dtype; a RaggedTensor for ragged ids of rank 3.
    """
    leading = None
    if isinstance(ids, tf.RaggedTensor) and ids.ragged_rank > 1:
        inner_weights = getattr(weights, "values", weights)
        inner = pool_ids(layer, weight, ids.values, inner_weights, combiner, training)
        return ids.with_values(inner)
    if tf.is_tensor(ids) and not isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
        if ids.shape.rank is None or ids.shape.rank < 2:
            raise ValueError(f"A combiner needs ids of the shape [batch, ids], got {ids.shape}.")
        if ids.shape.rank > 2:
            leading = (tf.shape(ids)[:-1], ids.shape[:-1])
            flat_shape = tf.stack([tf.reduce_prod(leading[0]), tf.shape(ids)[-1]])
            ids = tf.reshape(ids, flat_shape)
            weights = None if weights is None else tf.reshape(weights, flat_shape)
    feature = bags.create(ids, weights, layer.key_type, f"The ids of layer {layer.name}")
    feature = _drop_padding(layer, feature)
    insert = layer._insert(training)
    layer._regularize(weight, feature.keys, insert)
    pooled = lookup_bags([weight.value], [feature], [combiner], insert)[0]
    if leading is not None:
        pooled = tf.reshape(pooled, tf.concat([leading[0], [layer.dim]], 0))
        pooled.set_shape(leading[1].concatenate([layer.dim]))
    return tf.cast(pooled, layer.compute_dtype)


def _drop_padding(layer: TableLayer, feature: Bags) -> Bags:
    """Removes the padding ids, so that they do not affect the combiner."""
    if layer.padding_id is None:
        return feature
    keep = ~layer._is_padding(feature.keys)
    return dataclasses.replace(
        feature,
        keys=tf.boolean_mask(feature.keys, keep),
        bags=tf.boolean_mask(feature.bag_of_key(), keep)[:, tf.newaxis],
        weights=tf.boolean_mask(feature.weights, keep) if feature.has_weights else feature.weights,
    )
