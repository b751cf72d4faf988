"""Tables with an eviction strategy, and what they hold."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import tf_dynemb as de


def make(strategy, capacity=None, dimension=2, **options):
    return de.DynamicVariable(
        dimension, evict_strategy=strategy, max_capacity=capacity, name="items", **options
    )


def held(table, keys):
    keys = np.asarray(keys)
    return keys[table.contains(tf.constant(keys, tf.int64)).numpy()].tolist()


def scores(table, keys):
    return table.scores(tf.constant(keys, tf.int64)).numpy().tolist()
