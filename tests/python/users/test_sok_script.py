"""A user of SOK: its names, several tables in one lookup, SparseTensors, dump and load."""

import keras
import numpy as np
import tensorflow as tf
from user_helpers import check_same_losses, fill, initial_vectors, labels, numbers, raw

import tf_dynemb as sok

DIMS = (4, 8)
IDS = [numbers(6, 16, 3, seed=10 + i) for i in range(2)]  # steps, batch, ids
LABELS = labels([ids.reshape(96, 3) for ids in IDS]).reshape(6, 16)
COMBINERS = ["mean", "sum"]


def sparse(ids):
    """The ids without zeros, which pad, as in SOK's scripts."""
    return tf.sparse.from_dense(tf.constant(ids, tf.int64))


def train(step):
    losses = []
    for _ in range(5):
        for i in range(6):
            losses.append(float(step(i, tf.constant(LABELS[i]))))
    return losses


def head():
    return tf.Variable(initial_vectors(sum(DIMS), rows=1, seed=9))


def loss_of(pooled, weights, labels):
    logits = tf.reduce_sum(tf.concat(pooled, axis=1) * weights, axis=1)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def test_the_losses_are_as_in_tensorflow_and_a_load_continues(tmp_path):
    dense = [tf.Variable(initial_vectors(dim)) for dim in DIMS]
    weights = head()
    reference = keras.optimizers.Adagrad(0.3)

    def reference_step(i, labels):
        with tf.GradientTape() as tape:
            pooled = [
                tf.nn.embedding_lookup_sparse(v, sparse(ids[i]), None, combiner=combiner)
                for v, ids, combiner in zip(dense, IDS, COMBINERS, strict=True)
            ]
            loss = loss_of(pooled, weights, labels)
        gradients = tape.gradient(loss, [*dense, weights])
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        reference.apply_gradients(zip(gradients, [*dense, weights], strict=True))
        return loss

    expected = train(reference_step)

    sok.init()
    tables = [
        sok.DynamicVariable(
            dimension=dim,
            var_type="hybrid",
            name=f"table_{i}",
            init_capacity=1024,
            max_capacity=4096,
            evict_strategy=["kLfu", "kEpochLfu"][i],
        )
        for i, dim in enumerate(DIMS)
    ]
    for table, dim in zip(tables, DIMS, strict=True):
        fill(table, initial_vectors(dim))
    our_weights = head()
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(0.3))

    @tf.function
    def gradients_of(ids, labels):
        with tf.GradientTape() as tape:
            pooled = sok.lookup_sparse(tables, ids, combiners=COMBINERS)
            loss = loss_of(pooled, our_weights, labels)
        variables = [*tables, our_weights]
        sok_variables, other_variables = sok.filter_variables(variables)
        gradients = tape.gradient(loss, [*sok_variables, *other_variables])
        optimizer.apply_gradients(zip(gradients, [*sok_variables, *other_variables], strict=True))
        return loss

    def our_step(i, labels):
        ids = [sparse(each[i]) for each in IDS]
        return gradients_of([s.with_values(tf.constant(raw(s.values))) for s in ids], labels)

    check_same_losses(train(our_step), expected)

    sok.dump(str(tmp_path), tables, optimizer)
    before = [table.lookup(raw(np.arange(40))).numpy() for table in tables]
    expected_more = float(our_step(0, tf.constant(LABELS[0])))
    after = [table.lookup(raw(np.arange(40))).numpy() for table in tables]
    sok.load(str(tmp_path), tables, optimizer)
    for table, vectors in zip(tables, before, strict=True):
        np.testing.assert_array_equal(table.lookup(raw(np.arange(40))), vectors)
    our_weights.assign(weights)  # one step less than ours
    assert abs(float(our_step(0, tf.constant(LABELS[0]))) - expected_more) < 1e-5
    for table, vectors in zip(tables, after, strict=True):
        np.testing.assert_allclose(table.lookup(raw(np.arange(40))), vectors, atol=1e-6)
