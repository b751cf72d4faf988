"""Rows in files that make up for missed steps: they have the bits of rows in memory."""

import gc

import keras
import numpy as np
import pytest
import table_reader
import tensorflow as tf
from file_pairs import DIM, Pair, check_same, draw, in_files

import tf_dynemb as de

K = keras.optimizers
OPTIMIZERS = {
    "adamw": lambda lr: K.AdamW(lr, weight_decay=0.02),
    "nesterov": lambda lr: K.SGD(lr, momentum=0.8, nesterov=True, weight_decay=0.02),
    "adagrad": lambda lr: K.Adagrad(lr, weight_decay=0.02),
}
SCHEDULE = K.schedules.ExponentialDecay(0.01, 10, 0.9)


def pair_of(folder, optimizer="adamw", learning_rate=0.01, **options):
    return Pair(
        folder, lambda: OPTIMIZERS[optimizer](learning_rate), states=2, catch_up=True, **options
    )


def rows_without_marks(table):
    """The rows of a table. Their marks depend on the tick of the table's first step."""
    rows = table_reader.rows_of(table)
    assert len(set(rows.state[:, -1])) == 1  # exported rows have all steps
    rows.state[:, -1] = 0
    return rows


def check(pair):
    found, expected = (rows_without_marks(table) for table in pair.tables)
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.vectors, expected.vectors)
    np.testing.assert_array_equal(found.state, expected.state)
    assert pair.files.stats()["file_rows"] > len(pair.files) // 2


# With 16 bits, rounding draws its numbers by the step, of which both tables have other ones.
@pytest.mark.parametrize(
    ("name", "learning_rate"), [("adamw", SCHEDULE), ("nesterov", 0.01), ("adagrad", SCHEDULE)]
)
def test_training_has_the_bits_of_memory(tmp_path, name, learning_rate):
    pair = pair_of(tmp_path, name, learning_rate)
    pair.train(steps=20)
    check(pair)
    rng = np.random.default_rng(3)
    values = rng.normal(size=(30, DIM)).astype(np.float32)
    for seed in range(4):
        ids = draw(rng, 30, 600)
        pair.both(lambda table, ids=ids: table.lookup(ids))
        pair.both(lambda table, ids=ids: table.lookup(ids + 1, insert=False))
        pair.both(lambda table, ids=ids: table.upsert(ids, values))
        bags = tf.RaggedTensor.from_row_lengths(ids, [10, 20])
        pair.both(lambda table, bags=bags: de.lookup_sparse(table, bags, combiners="sum"))
        pair.train(steps=4, seed=seed)
        check(pair)
    for optimizer in pair.optimizers:  # all rows are brought up to date
        optimizer.core.weight_decay = 0.05
    pair.train(steps=4)
    check(pair)


def test_rows_equal_a_dense_variable(tmp_path):
    table = in_files(tmp_path, DIM, states=3, name="t")
    rows = 300
    values = np.random.default_rng(1).normal(size=(rows, DIM)).astype(np.float32)
    dense = tf.Variable(values)
    optimizers = (
        de.OptimizerWrapper(OPTIMIZERS["adamw"](0.01), catch_up=True),
        K.AdamW(0.01, weight_decay=0.02),
    )
    optimizers[0].attach([table])
    optimizers[1].build([dense])
    for first in range(0, rows, 60):
        table.upsert(range(first, first + 60), values[first : first + 60])
    assert table.stats()["file_rows"] > rows // 2
    for step in range(60):
        ids = tf.constant([step % 7, 7 + step, 100 + step * step % 200], tf.int64)
        for variable, optimizer in zip((table, dense), optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, ids) ** 2)
            gradient = (
                tf.convert_to_tensor(tape.gradient(loss, variable))
                if variable is dense
                else (tape.gradient(loss, variable))
            )
            optimizer.apply_gradients([(gradient, variable)])
    found = table_reader.rows_of(table)
    np.testing.assert_allclose(found.vectors, dense.numpy(), 1e-5, 1e-5)
    for first in range(0, rows, 60):
        np.testing.assert_allclose(
            table.lookup(range(first, first + 60)), dense[first : first + 60], 1e-5, 1e-5
        )


@pytest.mark.parametrize("learning_rate", [0.01, SCHEDULE], ids=["constant", "schedule"])
def test_dumps_and_deltas(tmp_path, learning_rate):
    """A table in files is dumped; its dumps are loaded, followed, and read without TensorFlow."""
    pair = pair_of(tmp_path / "files", learning_rate=learning_rate)
    followers = [
        in_files(tmp_path / "follower", DIM, 100, 3, name="t"),
        de.DynamicVariable(DIM, var_type="host", name="t"),
    ]
    optimizers = [
        de.OptimizerWrapper(OPTIMIZERS["adamw"](learning_rate), catch_up=True) for _ in followers
    ]
    pair.train(steps=15)
    de.dump(tmp_path / "d", pair.files, pair.optimizers[0], quiet=True)
    for table, optimizer in zip(followers, optimizers, strict=True):
        de.load(tmp_path / "d", table, optimizer)
    for seed in range(3):
        pair.train(steps=12, seed=seed, ids=500)
        de.incremental_dump(tmp_path / "d", pair.files, optimizer=pair.optimizers[0], quiet=True)
        for table, optimizer in zip(followers, optimizers, strict=True):
            de.apply_delta(tmp_path / "d", table, optimizer=optimizer)
        check_same(*followers)
        expected = table_reader.rows_of(pair.files)
        found = table_reader.rows_of(followers[0])
        np.testing.assert_array_equal(found.keys, expected.keys)
        np.testing.assert_allclose(found.vectors, expected.vectors, 2e-6, 2e-6)
        reader = de.serving.Reader(tmp_path / "d")
        np.testing.assert_allclose(reader.lookup(found.keys), expected.vectors, 2e-6, 2e-6)
    check(pair)


def test_a_checkpoint(tmp_path):
    pair = pair_of(tmp_path / "files")
    pair.train(steps=15)
    saved = tf.train.Checkpoint(table=pair.files, optimizer=pair.optimizers[0])
    path = saved.save(str(tmp_path / "c"))
    table = in_files(tmp_path / "other", DIM, 100, 2, name="t", seed=5, initializer="normal")
    optimizer = de.OptimizerWrapper(OPTIMIZERS["adamw"](0.01), catch_up=True)
    restored = tf.train.Checkpoint(table=table, optimizer=optimizer).restore(path)
    restored.assert_existing_objects_matched()
    pair.files, pair.tables = table, (table, pair.memory)
    pair.optimizers[0] = optimizer
    pair.train(steps=10, seed=1)
    expected, found = (table_reader.rows_of(each) for each in (pair.memory, table))
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_allclose(found.vectors, expected.vectors, 2e-6, 2e-6)


def test_a_table_that_survives_its_process(tmp_path):
    """The flush has the steps that its rows have missed."""
    options = {"name": "t", "persistent": True}
    pair = pair_of(tmp_path, learning_rate=SCHEDULE, **options)
    for _ in range(2):
        pair.train(steps=12)
        pair.files.flush()
        iterations = int(pair.optimizers[0].iterations)
        pair.files = pair.optimizers[0] = None
        pair.tables = (None, pair.memory)
        gc.collect()
        pair.files = in_files(tmp_path, DIM, 100, 2, seed=5, initializer="normal", **options)
        pair.tables = (pair.files, pair.memory)
        pair.optimizers[0] = de.OptimizerWrapper(OPTIMIZERS["adamw"](SCHEDULE), catch_up=True)
        pair.optimizers[0].iterations.assign(iterations)
        check(pair)
    pair.train(steps=8, seed=2)
    check(pair)


def test_a_keras_model(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 900, (640, 3)), rng.random((640, 1)).astype(np.float32)
    results = []
    for options in (
        {"var_type": "file", "file_path": str(tmp_path), "max_dram_for_vectors": 1e-3},
        {},
    ):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,), dtype="int64")
        embedding = de.layers.Embedding(DIM, name="ids", seed=1, **options)
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(embedding(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile(de.OptimizerWrapper("adam", catch_up=True), loss="mse")
        history = model.fit(
            x, y, 32, epochs=2, shuffle=False, verbose=0, validation_data=(x[:64], y[:64])
        )
        results.append([*history.history["loss"], *history.history["val_loss"]])
        if options:
            assert embedding.table.stats()["file_hits"] > 500
    assert results[0] == results[1]
