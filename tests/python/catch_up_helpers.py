"""A table whose rows make up for missed steps, and the dense variable that it must be equal to."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tf_dynemb as de

NUM_IDS = 12
DIM = 3

OPTIMIZERS = {
    "sgd decay": lambda lr: keras.optimizers.SGD(lr, weight_decay=0.02),
    "sgd momentum": lambda lr: keras.optimizers.SGD(lr, momentum=0.9),
    "sgd nesterov": lambda lr: keras.optimizers.SGD(
        lr, momentum=0.8, nesterov=True, weight_decay=0.02
    ),
    "adagrad": lambda lr: keras.optimizers.Adagrad(lr, weight_decay=0.02),
    "adam": lambda lr: keras.optimizers.Adam(lr),
    "amsgrad": lambda lr: keras.optimizers.Adam(lr, amsgrad=True),
    "adamw": lambda lr: keras.optimizers.AdamW(lr, weight_decay=0.02),
    "adamax": lambda lr: keras.optimizers.Adamax(lr),
    "rmsprop": lambda lr: keras.optimizers.RMSprop(lr, momentum=0.9, centered=True, epsilon=1e-3),
    "adadelta": lambda lr: keras.optimizers.Adadelta(lr, weight_decay=0.02),
}


class Pair:
    """A table with a wrapper, and a dense variable with the same optimizer, without a wrapper."""

    def __init__(self, name="adamw", learning_rate=0.01, **options):
        values = np.random.default_rng(1).normal(size=(NUM_IDS, DIM)).astype(np.float32)
        self.table = de.DynamicVariable(DIM, name="items", **options)
        self.optimizer = de.OptimizerWrapper(OPTIMIZERS[name](learning_rate), catch_up=True)
        self.optimizer.attach([self.table])
        self.table.upsert(range(NUM_IDS), values)
        self.dense = tf.Variable(values)
        self.reference = OPTIMIZERS[name](learning_rate)
        self.reference.build([self.dense])

    def step(self, ids=(), seed=0):
        """Steps both; each id of a batch has its own gradient."""
        self._step(tf.constant(list(ids), tf.int64), tf.constant(seed))

    def compile(self):
        """Makes later steps run faster. The hyperparameters must then stay as they are."""
        signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int32)]
        self._step = tf.function(self._step, input_signature=signature)

    def _step(self, ids, seed):
        factors = tf.random.stateless_normal([tf.size(ids), DIM], [seed, 1])
        for variable, optimizer in ((self.table, self.optimizer), (self.dense, self.reference)):
            with tf.GradientTape() as tape:
                vectors = tf.cast(tf.nn.embedding_lookup(variable, ids), tf.float32)
                loss = tf.reduce_sum(vectors * factors)
            gradient = tape.gradient(loss, variable)
            if variable is self.dense:
                gradient = tf.convert_to_tensor(gradient)
            optimizer.apply_gradients([(gradient, variable)])

    def train(self, steps, ids=range(3), first=0):
        """Steps with one or two of some ids."""
        ids = list(ids)
        for step in range(first, first + steps):
            self.step({ids[step % len(ids)], ids[(step * step + 1) % len(ids)]}, step)

    def assert_equal(self, table=None, rtol=2e-6):
        """Reads all rows in each way, and compares them with the dense variable."""
        table = self.table if table is None else table
        expected = self.dense.numpy()
        keys, values = de.export(table)
        order = np.argsort(keys.numpy())
        np.testing.assert_allclose(values.numpy()[order], expected, rtol, rtol)
        np.testing.assert_allclose(
            table.lookup(range(NUM_IDS), insert=False).numpy(), expected, rtol, rtol
        )
        bags = tf.ragged.constant([[i, i] for i in range(NUM_IDS)], dtype=tf.int64)
        np.testing.assert_allclose(
            de.lookup_sparse(table, bags, combiners="mean").numpy(), expected, rtol, rtol
        )
        np.testing.assert_allclose(table.lookup(range(NUM_IDS)).numpy(), expected, rtol, rtol)
