"""A user with a custom loop: a tf.function, tapes, a schedule, a table that grows."""

import keras
import numpy as np
import tensorflow as tf
from user_helpers import check_same_losses, initial_vectors, labels, numbers, raw

import tf_dynemb as de

IDS = numbers(8, 12, 3)  # steps, batch, ids
LABELS = labels([IDS.reshape(96, 3)]).reshape(8, 12)


def train(variable, wrap, ids):
    head = tf.Variable(initial_vectors(4, rows=3, seed=8))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 4, 0.9)
    optimizer = wrap(keras.optimizers.SGD(schedule, clipnorm=1.0))

    @tf.function
    def step(ids, labels):
        with tf.GradientTape() as tape:
            vectors = tf.nn.embedding_lookup(variable, ids)
            logits = tf.reduce_sum(vectors * head, axis=[1, 2])
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        variables = [variable, head]
        gradients = tape.gradient(loss, variables)
        if isinstance(variable, tf.Variable) and variable.shape[0] is not None:
            # Keras clips a sparse gradient by its repeated rows; a table's counts each row once.
            gradients[0] = tf.convert_to_tensor(gradients[0])
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    batches = list(zip(ids, LABELS, strict=True)) * 4
    return [float(step(tf.constant(i), tf.constant(y))) for i, y in batches]


def test_the_losses_equal_a_dense_variable():
    vectors = initial_vectors(4)
    expected = train(tf.Variable(vectors), lambda optimizer: optimizer, IDS)

    table = de.DynamicVariable(4, name="users")
    table.upsert(raw(np.arange(40)), vectors)
    check_same_losses(train(table, de.OptimizerWrapper, raw(IDS)), expected)


def test_a_table_that_starts_empty():
    table = de.DynamicVariable(4, initializer="uniform", seed=3)
    twin = de.DynamicVariable(4, initializer="uniform", seed=3)
    vectors = twin.lookup(raw(np.arange(40)), insert=False)
    expected = train(tf.Variable(vectors), lambda optimizer: optimizer, IDS)
    check_same_losses(train(table, de.OptimizerWrapper, raw(IDS)), expected)
    assert len(table) == len(np.unique(IDS))
