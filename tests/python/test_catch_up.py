"""OptimizerWrapper(catch_up=True): rows are those that a dense variable would have."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from catch_up_helpers import DIM, NUM_IDS, OPTIMIZERS, Pair

import tf_dynemb as de


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_equal_a_dense_variable(name):
    pair = Pair(name)
    pair.step(range(NUM_IDS))
    pair.compile()  # the learning rate is a variable
    pair.train(40)
    pair.assert_equal()
    for optimizer in (pair.optimizer.core, pair.reference):
        optimizer.learning_rate = 0.003
    pair.train(30, ids=range(2, 7), first=40)
    pair.step(range(NUM_IDS), 99)
    pair.assert_equal()


def test_without_catch_up_rows_wait():
    table = de.DynamicVariable(1, 1.0)
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(0.5, weight_decay=0.5))
    table.lookup([1, 2])
    with tf.GradientTape() as tape:
        loss = 0.0 * tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    assert table.lookup([1, 2]).numpy().ravel().tolist() == [0.75, 1.0]


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd momentum", "sgd nesterov"])
def test_long_gaps(name):
    """Rows of ids that are not looked up for 1 to 10,000 steps, with a schedule."""
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, 12_000, 0.1)
    pair = Pair(name, schedule)
    pair.step(range(NUM_IDS))
    pair.step(range(NUM_IDS), 1)
    ids = tf.constant([0], tf.int64)

    @tf.function
    def steps(count):
        for _ in tf.range(count):
            for variable, optimizer in (
                (pair.table, pair.optimizer),
                (pair.dense, pair.reference),
            ):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, ids) ** 2)
                gradient = tape.gradient(loss, variable)
                if variable is pair.dense:
                    gradient = tf.convert_to_tensor(gradient)
                optimizer.apply_gradients([(gradient, variable)])

    done = 0
    for key, gap in enumerate((1, 10, 100, 1000, 10_000), start=1):
        steps(tf.constant(gap - done))
        done = gap
        got = pair.table.lookup([key]).numpy()
        np.testing.assert_allclose(got, pair.dense.numpy()[key : key + 1], rtol=1e-5, atol=1e-6)
    pair.assert_equal(rtol=1e-5)


class DenseEmbedding(keras.layers.Layer):
    """An embedding whose gradient is dense.

    The gradient of Keras's Embedding is a tf.IndexedSlices in which ids repeat, and Adam squares
    their gradients one by one.
    """

    def build(self, input_shape):
        self.vectors = self.add_weight([200, 8])

    def call(self, ids):
        return tf.one_hot(ids, 200) @ self.vectors


def test_models_train_as_with_a_dense_embedding():
    data = np.random.default_rng(2)
    ids = data.zipf(1.5, size=(640, 4)).clip(1, 200) - 1
    labels = (ids.sum(axis=1) % 2).astype(np.float32)
    validation = (ids[:64], labels[:64])
    start = data.normal(size=(200, 8), scale=0.1).astype(np.float32)
    losses = []
    for is_table in (False, True):
        keras.utils.set_random_seed(3)
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        if is_table:
            embedding = de.layers.Embedding(8, name="ids")
            optimizer = de.OptimizerWrapper(optimizer, catch_up=True)
        else:
            embedding = DenseEmbedding()
        model = keras.Sequential(
            [
                keras.Input([4], dtype="int64"),
                embedding,
                keras.layers.Flatten(),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )
        model.layers[-1].set_weights([np.full((32, 1), 0.1), np.zeros(1)])
        if is_table:
            embedding.table.upsert(range(200), start)
        else:
            embedding.set_weights([start])
        model.compile(optimizer, "binary_crossentropy", jit_compile=False)
        history = model.fit(
            ids, labels, 64, epochs=3, verbose=0, shuffle=False, validation_data=validation
        )
        losses.append([*history.history["loss"], *history.history["val_loss"]])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_accumulated_gradients_and_clipping():
    values = np.ones((4, DIM), np.float32)
    table, dense = de.DynamicVariable(DIM), tf.Variable(values)
    table.upsert(range(4), values)
    ids = tf.constant([[0, 1], [2, 2], [0, 0], [3, 1], [1, 1], [1, 1]], tf.int64)
    for variable in (table, dense):
        optimizer = keras.optimizers.Adam(
            0.1, weight_decay=0.1, gradient_accumulation_steps=2, clipnorm=0.3
        )
        if variable is table:
            optimizer = de.OptimizerWrapper(optimizer, catch_up=True)
        for batch in ids:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, batch) ** 2)
            gradient = tape.gradient(loss, variable)
            if variable is dense:
                gradient = tf.convert_to_tensor(gradient)
            optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(table.lookup(range(4)), dense, rtol=1e-5)


def test_a_table_without_gradients_has_no_steps():
    tables = [de.DynamicVariable(1, 1.0, name=name) for name in ("used", "unused")]
    adam = keras.optimizers.Adam(0.1, weight_decay=1.0, gradient_accumulation_steps=2)
    optimizer = de.OptimizerWrapper(adam, catch_up=True)
    optimizer.build(tables)
    for table in tables:
        table.lookup([1, 2])
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = 0.0 * tf.reduce_sum(tf.nn.embedding_lookup(tables[0], [1]))
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
    np.testing.assert_allclose(tables[0].lookup([1, 2]), [[0.9**2]] * 2, rtol=1e-6)
    assert tables[1].lookup([1, 2]).numpy().ravel().tolist() == [1.0, 1.0]


def test_each_optimizer_of_several_catches_up():
    wide, deep = de.DynamicVariable(1, 1.0, name="wide"), de.DynamicVariable(1, 1.0, name="deep")
    sgd = keras.optimizers.SGD(0.1, weight_decay=0.5)
    adam = keras.optimizers.Adam(0.1, weight_decay=1.0)
    multi = keras.optimizers.MultiOptimizer(lambda v: sgd if v.path == "wide" else adam)
    optimizer = de.OptimizerWrapper(multi, catch_up=True)
    for table in (wide, deep):
        table.lookup([1, 2])
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = sum(
                0.0 * tf.reduce_sum(tf.nn.embedding_lookup(table, [1])) for table in (wide, deep)
            )
        gradients = tape.gradient(loss, [wide, deep])
        optimizer.apply_gradients(zip(gradients, [wide, deep], strict=True))
    np.testing.assert_allclose(wide.lookup([1, 2]), [[0.95**3]] * 2, rtol=1e-6)
    np.testing.assert_allclose(deep.lookup([1, 2]), [[0.9**3]] * 2, rtol=1e-6)


def test_writes_are_of_rows_that_are_up_to_date():
    table = de.DynamicVariable(1, 1.0)
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(1.0, weight_decay=0.5), catch_up=True)
    optimizer.attach([table])
    table.lookup([1, 2, 3, 4])

    def step():
        with tf.GradientTape() as tape:
            loss = 0.0 * tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    step()
    table.scatter_add(tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([2], tf.int64)))
    table.upsert([3], [[8.0]])
    assert table.lookup([1, 2, 3, 4]).numpy().ravel().tolist() == [0.5, 1.5, 8.0, 0.5]
    step()
    small = table.export_if(l2_below=0.5)
    assert sorted(small.keys.numpy().tolist()) == [1, 4]
    assert small.vectors.numpy().ravel().tolist() == [0.25, 0.25]
    assert table.lookup([5]).numpy().item() == 1.0  # a new row
    table.erase([4])
    step()
    assert table.lookup([1, 2, 3, 4, 5]).numpy().ravel().tolist() == [0.125, 0.375, 2.0, 1.0, 0.5]


def test_optimizers_that_cannot():
    table = de.DynamicVariable(2)
    for optimizer in (
        keras.optimizers.Lion(),
        keras.optimizers.Ftrl(),
        keras.optimizers.Nadam(),
        keras.optimizers.SGD(use_ema=True),
    ):
        with pytest.raises(ValueError, match="catch_up=True"):
            de.OptimizerWrapper(optimizer, catch_up=True).build([table])
    bounded = de.DynamicVariable(2, constraint=keras.constraints.NonNeg())
    with pytest.raises(ValueError, match=r"catch_up=True.*constraint"):
        de.OptimizerWrapper(keras.optimizers.SGD(), catch_up=True).build([bounded])


def test_config():
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(), catch_up=True)
    config = keras.saving.serialize_keras_object(optimizer)
    assert keras.saving.deserialize_keras_object(config).catch_up
    del config["config"]["catch_up"]  # as an earlier version saved it
    assert not keras.saving.deserialize_keras_object(config).catch_up
