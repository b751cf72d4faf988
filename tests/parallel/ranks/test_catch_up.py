"""Rows that make up for missed steps, in tables that are spread over ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import serving

NUM_IDS = 20
EVERYTHING = tf.range(NUM_IDS, dtype=tf.int64)


def adamw():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, beta_1=0.5)  # settled after 27 steps


class Pair:
    """A table, and the dense variable that each rank trains with the batches of all ranks."""

    def __init__(self, comm, mode):
        values = np.random.default_rng(1).normal(size=(NUM_IDS, 2)).astype(np.float32)
        self.comm = comm
        self.table = de.DynamicVariable(2, name="items", mode=mode)
        self.optimizer = de.OptimizerWrapper(adamw(), catch_up=True)
        self.optimizer.attach([self.table])
        de.assign(self.table, EVERYTHING, values)
        self.dense = tf.Variable(values)
        self.reference = adamw()
        self.reference.build([self.dense])

    def train(self, steps, seed):
        draw = np.random.default_rng(seed)
        for _ in range(steps):
            # Some rows have a gradient in hardly any step.
            ids = draw.zipf(1.8, size=(self.comm.size, 2)).clip(1, NUM_IDS) - 1
            factors = draw.normal(size=(self.comm.size, 2, 2)).astype(np.float32)
            with tf.GradientTape() as tape:
                vectors = self.table.lookup(tf.constant(ids[self.comm.rank]))
                loss = tf.reduce_sum(vectors * factors[self.comm.rank])
            gradient = tape.gradient(loss, self.table)
            self.optimizer.apply_gradients([(gradient, self.table)])
            with tf.GradientTape() as tape:
                vectors = tf.gather(self.dense, ids)
                loss = tf.reduce_sum(vectors * factors) / self.comm.size
            gradient = tf.convert_to_tensor(tape.gradient(loss, self.dense))
            self.reference.apply_gradients([(gradient, self.dense)])


@pytest.mark.parametrize("mode", [None, "localized:0"])
def test_rows_equal_a_dense_variable(comm, shared_path, mode):
    pair = Pair(comm, mode)
    for part in range(3):
        pair.train(15, part)
        got = pair.table.lookup(EVERYTHING, insert=False)
        np.testing.assert_allclose(got, pair.dense, 1e-5, 1e-5)
    path = shared_path / "chain"
    de.dump(path, [pair.table], pair.optimizer, quiet=True)
    reader = serving.Reader(path)
    follower = de.DynamicVariable(2, name="items")
    optimizer = de.OptimizerWrapper(adamw(), catch_up=True)
    de.load(path, [follower], optimizer, quiet=True)
    for part in range(3, 6):
        pair.train(30 if part == 4 else 10, part)
        de.incremental_dump(path, [pair.table], optimizer=pair.optimizer, quiet=True)
        reader.follow()
        de.apply_delta(path, [follower], optimizer)
        for got in (reader.lookup(EVERYTHING.numpy()), follower.lookup(EVERYTHING, insert=False)):
            np.testing.assert_allclose(got, pair.dense, 1e-5, 1e-5)
    again = de.DynamicVariable(2, name="items")
    optimizer = de.OptimizerWrapper(adamw(), catch_up=True)
    de.load(path, [again], optimizer, quiet=True)
    pair.table, pair.optimizer = again, optimizer
    pair.train(10, 6)
    np.testing.assert_allclose(again.lookup(EVERYTHING), pair.dense, 1e-5, 1e-5)
