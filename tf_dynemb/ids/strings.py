"""Ids of strings, for layers with `hash_strings=True`."""

from __future__ import annotations

import tensorflow as tf

# The hash of `tf_dynemb.serving.string_hash`, which computes it without TensorFlow.
HASH = "farmhash64"
_BUCKETS = 2**63 - 1


def ids_of_strings(strings: tf.Tensor) -> tf.Tensor:
    """Returns the ids of a tensor of strings, int64 in [0, 2^63 - 1), in its shape."""
    return tf.strings.to_hash_bucket_fast(strings, _BUCKETS)


def id_of_string(text: str | bytes) -> int:
    """Returns the id of one string."""
    with tf.init_scope():
        return int(ids_of_strings(tf.constant(text)))
