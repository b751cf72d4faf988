"""Tables whose rows expire, for the tests of expiry."""

import datetime

import numpy as np
import tensorflow as tf

import tf_dynemb as de

DAY = datetime.timedelta(days=1)


def make(ttl=3, **options):
    return de.DynamicVariable(2, "uniform", name="items", seed=1, ttl=ttl, **options)


def held(table, keys):
    """Returns the keys that have a row."""
    return np.array(keys)[table.contains(keys).numpy()].tolist()


def step(table, keys=()):
    """An inserting lookup."""
    return table.lookup(tf.constant(list(keys), tf.int64)).numpy()
