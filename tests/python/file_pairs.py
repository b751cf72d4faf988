"""A table with most of its rows in files, and the same table in memory: every call goes to both."""

from __future__ import annotations

import gpu
import keras
import numpy as np
import table_reader
import tensorflow as tf
from row_memory import device_memory, host_memory

import tf_dynemb as de

K = keras.optimizers
# Rows are written when there is a MB of them: with this width, most steps read from the files.
DIM = 384


def in_files(folder, dim=4, rows=100, states=0, dtype=tf.float32, **options):
    """A table of which memory holds about `rows` rows; on a device, in two tiers."""
    limit = host_memory(rows, dim, states, dtype)
    limits = {"var_type": "file", "max_dram_for_vectors": limit}
    if gpu.ON:
        on_device = rows // 3
        limits = {
            "var_type": "hybrid",
            "max_hbm_for_vectors": device_memory(on_device, dim, states, dtype),
            "max_dram_for_vectors": device_memory(rows - on_device, dim, states, dtype),
        }
    options = {**limits, **options}
    return de.DynamicVariable(dim, file_path=str(folder), dtype=dtype, **options)


def as_numpy(result):
    """A result as nested tuples of bytes and numbers, to compare."""
    if isinstance(result, (tuple, list)):
        return tuple(as_numpy(part) for part in result)
    if isinstance(result, tf.IndexedSlices):
        return as_numpy((result.indices, result.values))
    if tf.is_tensor(result):
        return result.numpy().tobytes()
    return result


def check_same(files, memory, most_in_files=True):
    """The rows of both have the same bits."""
    found, expected = table_reader.rows_of(files), table_reader.rows_of(memory)
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.vectors, expected.vectors)
    np.testing.assert_array_equal(found.state, expected.state)
    assert found.same(expected)
    assert len(files) == len(memory) == len(found.keys)
    if most_in_files:
        assert files.stats()["file_rows"] > len(files) // 2


class Pair:
    """Two equal tables. `files` keeps most rows in files as soon as it has several hundred."""

    def __init__(
        self, folder, optimizer=None, dim=DIM, rows=100, states=0, catch_up=False, **options
    ):
        options = {"name": "t", "seed": 5, "initializer": "normal", **options}
        dtype = options.pop("dtype", tf.float32)
        self.files = in_files(folder, dim, rows, states, dtype, **options)
        file_options = ("var_type", "max_hbm_for_vectors", "max_dram_for_vectors", "persistent")
        options = {k: v for k, v in options.items() if k not in file_options}
        self.memory = de.DynamicVariable(dim, var_type="host", dtype=dtype, **options)
        self.tables = (self.files, self.memory)
        self.optimizers = None
        if optimizer is not None:
            self.optimizers = [
                de.OptimizerWrapper(optimizer(), catch_up=catch_up) for _ in self.tables
            ]

    def both(self, call):
        """Makes a call on each table, and returns the result, which must be the same."""
        results = [call(table) for table in self.tables]
        assert as_numpy(results[0]) == as_numpy(results[1])
        return results[0]

    def step(self, ids, seed=0):
        """A step of the optimizer, with another gradient for each id."""
        factors = np.random.default_rng(seed).normal(size=(len(ids), self.files.dimension))
        for table, optimizer in zip(self.tables, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                vectors = tf.cast(table.lookup(ids), tf.float32)
                loss = tf.reduce_sum(vectors * factors.astype(np.float32) + vectors**2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    def train(self, steps=25, batch=40, ids=600, seed=0):
        rng = np.random.default_rng(seed)
        for step in range(steps):
            self.step(draw(rng, batch, ids), step)

    def check(self, most_in_files=True):
        check_same(self.files, self.memory, most_in_files)
        if most_in_files and self.files.dimension == DIM:
            assert self.files.stats()["file_reads"] > 0


def draw(rng, n, ids):
    """Ids of which a part is frequent; large numbers, and negative ones."""
    numbers = np.where(rng.random(n) < 0.3, rng.integers(0, 10, n), rng.integers(0, ids, n))
    return (numbers - ids // 2) * 1_000_003


def train_flush_and_compare(folder):
    """Trains a table in files and one in memory; a flush of the first one has the same rows."""
    options = {"name": "t", "persistent": True}
    pair = Pair(folder, lambda: K.Adam(0.01), states=2, **options)
    pair.train()
    pair.check()
    pair.files.flush()
    pair.train(steps=3, seed=1)
    pair.check()
    pair.files.flush()
    again = in_files(folder, DIM, states=2, initializer="normal", seed=5, **options)
    check_same(again, pair.memory)
