"""Seeds of initial vectors: from the table, its name, Keras's global seed, or a dump."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from dump_helpers import make

import tf_dynemb as de


def initial(table):
    return table.lookup([1, 2**40, -7], insert=False).numpy().tolist()


def model(**options):
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            de.layers.Embedding(8, **options),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def trained(stock: bool) -> list[float]:
    keras.utils.set_random_seed(7)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 100, (64, 3))
    made = model()
    if stock:
        made = keras.Sequential([made.inputs[0], keras.layers.Embedding(100, 8), *made.layers[1:]])
    optimizer = keras.optimizers.Adam(0.01)
    made.compile(optimizer if stock else de.OptimizerWrapper(optimizer), "mse")
    labels = (ids.sum(1) % 2).astype("float32")
    return made.fit(ids, labels, epochs=2, verbose=0).history["loss"]


def test_a_model_that_is_made_twice_in_one_process():
    assert trained(stock=True) == trained(stock=True)
    assert trained(stock=False) == trained(stock=False)


SETTERS = [keras.utils.set_random_seed, tf.random.set_seed]


@pytest.mark.parametrize("set_seed", SETTERS)
def test_tables_without_names(set_seed):
    def tables(seed):
        set_seed(seed)
        return [initial(de.DynamicVariable(4)) for _ in range(3)]

    first = tables(1)
    _ = de.DynamicVariable(4)  # a name more that is taken
    assert tables(1) == first
    assert tables(2) != first
    assert len({str(each) for each in first}) == 3


def test_other_random_numbers_change_nothing():
    keras.utils.set_random_seed(1)
    before = initial(de.DynamicVariable(4))
    keras.utils.set_random_seed(1)
    tf.random.normal([3])
    assert initial(de.DynamicVariable(4)) == before


def test_a_name_counts_not_the_order():
    keras.utils.set_random_seed(1)
    a, b = initial(make("a")), initial(make("b"))
    keras.utils.set_random_seed(1)
    assert (initial(make("b")), initial(make("a"))) == (b, a)
    keras.utils.set_random_seed(2)
    assert initial(make("a")) != a


def test_without_a_global_seed_the_name_counts():
    assert initial(make("a")) == initial(make("a"))
    assert initial(make("a")) != initial(make("b"))
    assert initial(de.DynamicVariable(4)) != initial(de.DynamicVariable(4))
    unnamed = de.DynamicVariable(4)
    named = de.DynamicVariable(4, name=unnamed.name.removesuffix(":0"))
    assert initial(named) == initial(unnamed)


def test_layers_with_and_without_names():
    def vectors(**options):
        keras.utils.set_random_seed(3)
        return [initial(model(**options).layers[0].table) for _ in range(2)]

    first, second = vectors()
    assert first != second
    assert vectors() == [first, second]
    named, again = vectors(name="users")
    assert named == again
    seeded, again = vectors(seed=5)
    assert seeded == again


def test_an_initializer_with_a_seed():
    def vectors():
        return initial(de.DynamicVariable(4, initializer=keras.initializers.RandomNormal(seed=3)))

    keras.utils.set_random_seed(1)
    first = vectors()
    keras.utils.set_random_seed(2)
    assert vectors() == first


SCRIPT = """
import keras, tf_dynemb as de
keras.utils.set_random_seed(11)
layers = [de.layers.Embedding(4), de.layers.MultiTableEmbedding(2, 4)]
tables = [de.DynamicVariable(4), layers[0].table, *layers[1].tables]
print([table.attributes["seed"] for table in tables])
"""


def test_new_processes():
    command = [sys.executable, "-c", SCRIPT]
    outputs = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(outputs) == 1


# Loads


def by_dump(table, other, path):
    de.dump(path, {"t": table})
    de.load(path, {"t": other})


def by_checkpoint(table, other, path):
    saved = tf.train.Checkpoint(t=table).write(str(path / "c"))
    tf.train.Checkpoint(t=other).read(saved).assert_consumed()


WAYS = [by_dump, by_checkpoint]


@pytest.mark.parametrize("load", WAYS)
def test_rows_that_come_after_a_load_begin_as_in_the_dumped_table(tmp_path, load):
    table, other = make(seed=1), make(seed=2)
    table.lookup([100])
    assert initial(other) != initial(table)
    load(table, other, tmp_path)
    assert initial(other) == initial(table)
    assert other.lookup([5]).numpy().tolist() == table.lookup([5]).numpy().tolist()
    assert other.attributes["seed"] == 1
    # Its own dump, and a copy of it, have the seed too.
    de.dump(tmp_path / "again", {"t": other})
    reader = de.serving.Reader(tmp_path / "again")
    assert reader.lookup([1, 2**40, -7]).tolist() == initial(table)
    third = make(seed=3)
    load(other, third, tmp_path)
    assert initial(third) == initial(table)


@pytest.mark.parametrize("load", WAYS)
def test_another_initializer_keeps_its_seed(tmp_path, load):
    table, other = make(seed=1), de.DynamicVariable(2, name="t", initializer="uniform", seed=2)
    before = initial(other)
    load(table, other, tmp_path)
    assert initial(other) == before
    assert other.attributes["seed"] == 2


def test_rounding_goes_on_as_in_the_dumped_table(tmp_path):
    """Stochastic rounding depends on the seed, too."""

    def step(table, optimizer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(table.lookup(tf.range(64)), tf.float32) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    def pair(seed):
        table = make(dim=8, dtype=tf.bfloat16, seed=seed)
        optimizer = de.OptimizerWrapper(keras.optimizers.SGD(1e-3))
        step(table, optimizer)
        return table, optimizer

    (table, optimizer), (second_table, second_optimizer) = pair(1), pair(2)
    de.dump(tmp_path, table, optimizer)
    de.load(tmp_path, second_table, second_optimizer)
    step(table, optimizer)
    step(second_table, second_optimizer)
    keys = tf.range(64)
    assert np.array_equal(table.lookup(keys).numpy(), second_table.lookup(keys).numpy())


def test_a_model_that_is_loaded_from_a_file(tmp_path):
    keras.utils.set_random_seed(1)
    saved = model()
    saved(np.ones((1, 3), np.int64), training=True)
    saved.save(tmp_path / "m.keras")
    keras.utils.set_random_seed(2)
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert initial(loaded.layers[0].table) == initial(saved.layers[0].table)
