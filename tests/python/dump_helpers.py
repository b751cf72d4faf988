"""Tables and steps for tests of dumps."""

import datetime

import tensorflow as tf

import tf_dynemb as de

UTC = datetime.timezone.utc


def vectors_of(table):
    keys, values = de.export(table)
    values = tf.cast(values, tf.float32)
    return dict(zip(keys.numpy().tolist(), map(tuple, values.numpy().tolist()), strict=True))


def make(name="t", dim=2, **kwargs):
    return de.DynamicVariable(dim, name=name, initializer="normal", **kwargs)


def step(optimizer, tables, ids):
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(tf.nn.embedding_lookup(t, ids) ** 2) for t in tables)
    optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
