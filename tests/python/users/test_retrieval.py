"""A user with two towers: in-batch softmax over items, and a search over exported vectors."""

import keras
import numpy as np
import tensorflow as tf
from user_helpers import check_same_losses, dense_layer, fill, initial_vectors, numbers, raw

import tf_dynemb as de

USERS = numbers(5, 16, seed=20)
ITEMS = np.stack([np.random.default_rng(i).permutation(40)[:16] for i in range(5)])


class TwoTowers(keras.Model):
    def __init__(self, users, items):
        super().__init__()
        self.users, self.items = users, items
        self.tower = dense_layer(8, use_bias=False)

    def call(self, inputs):
        return self.tower(self.users(inputs["user"])), self.items(inputs["item"])

    def train_step(self, data):
        with tf.GradientTape() as tape:
            users, items = self(data, training=True)
            scores = tf.matmul(users, items, transpose_b=True)
            target = tf.range(tf.shape(scores)[0])
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(target, scores)
            loss = tf.reduce_mean(loss)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"softmax_loss": loss}


def train(model, optimizer, ids):
    keras.utils.set_random_seed(8)
    model.tower.build([None, 8])
    model.compile(optimizer)
    batch = {"user": ids(USERS.reshape(-1)), "item": ids(ITEMS.reshape(-1))}
    fit = model.fit(batch, batch_size=16, epochs=6, shuffle=False, verbose=0)
    return fit.history["softmax_loss"]


def test_the_losses_are_as_in_keras_and_exports_find_the_items(tmp_path):
    start = initial_vectors(8, seed=1), initial_vectors(8, seed=2)
    dense = TwoTowers(keras.layers.Embedding(40, 8), keras.layers.Embedding(40, 8))
    for layer, vectors in zip((dense.users, dense.items), start, strict=True):
        layer.build()
        layer.set_weights([vectors])
    expected = train(dense, keras.optimizers.SGD(0.5), lambda ids: ids)

    dynamic = TwoTowers(de.layers.Embedding(8), de.layers.Embedding(8))
    for layer, vectors in zip((dynamic.users, dynamic.items), start, strict=True):
        fill(layer.table, vectors)
    check_same_losses(train(dynamic, de.OptimizerWrapper(keras.optimizers.SGD(0.5)), raw), expected)

    # Serving: item vectors without TensorFlow, from a dump.
    de.dump(tmp_path, dynamic)
    reader = de.serving.Reader(tmp_path)
    name = dynamic.items.table.name.removesuffix(":0")
    items = reader.lookup(raw(np.arange(40)), name)
    users = dynamic.tower(dense.users.get_weights()[0]).numpy()
    best = np.argsort(-users @ items.T, axis=1)
    best_dense = np.argsort(-users @ dense.items.get_weights()[0].T, axis=1)
    np.testing.assert_array_equal(best[:, :5], best_dense[:, :5])
