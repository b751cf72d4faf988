"""Threads that use a table with rows in files at the same time."""

import threading

import keras
import numpy as np
import tensorflow as tf
from file_pairs import DIM, in_files

import tf_dynemb as de


def run_threads(*targets):
    errors = []

    def run(target):
        try:
            target()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_no_write_is_lost(tmp_path):
    """Writers of the same keys, readers, and dumps, while rows move between memory and files."""
    table = in_files(tmp_path / "rows", DIM, initializer="zeros", rows=200, name="t")
    table.upsert(range(100), tf.zeros([100, DIM]))
    stop = threading.Event()

    def add(seed):
        rng = np.random.default_rng(seed)
        for _ in range(15):
            order = rng.permutation(800).reshape(16, 50)
            for ids in order:
                table.scatter_add(tf.IndexedSlices(tf.ones([50, DIM]), ids))

    def read():
        rng = np.random.default_rng(9)
        while not stop.is_set():
            vectors = table.lookup(rng.integers(0, 900, 50), insert=False).numpy()
            assert (vectors == vectors[:, :1]).all()  # no half of a write
            assert (vectors == np.round(vectors)).all()

    def dump():
        while not stop.is_set():
            de.dump(tmp_path / "dump", table)
            vectors = de.serving.Reader(tmp_path / "dump").lookup(np.arange(800))
            assert (vectors == vectors[:, :1]).all()

    def write():
        run_threads(lambda: add(1), lambda: add(2))
        stop.set()

    run_threads(write, read, dump)
    keys, vectors = de.export(table)
    assert len(keys) == 800
    np.testing.assert_array_equal(vectors, np.full([800, DIM], 30))
    assert table.stats()["file_hits"] > 1000


def test_steps_of_several_threads(tmp_path):
    """Rows of a step may leave memory, because of another thread, between its two operators."""
    table = in_files(tmp_path / "rows", DIM, initializer="zeros", rows=200)
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(1.0))

    def train(seed):
        rng = np.random.default_rng(seed)
        for ids in rng.permutation(1000).reshape(20, 50):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table.lookup(ids))
            gradient = tape.gradient(loss, table)
            with lock:
                optimizer.apply_gradients([(gradient, table)])

    lock = threading.Lock()
    run_threads(*(lambda n=n: train(n) for n in range(3)))
    keys, vectors = de.export(table)
    assert len(keys) == 1000
    np.testing.assert_array_equal(vectors, np.full([1000, DIM], -3))
    assert table.stats()["dropped_gradients"] == 0
