"""use_ema=True: moving averages of rows, against Keras's of a dense variable."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

ROWS, DIM, STEPS = 12, 3, 11
START = np.random.default_rng(1).normal(size=[ROWS, DIM]).astype(np.float32)
BATCHES = [np.random.default_rng(i).integers(0, ROWS - 1, 5) for i in range(STEPS)]


def train(variable, optimizer, ids, in_function=True):
    def step(ids, target):
        with tf.GradientTape() as tape:
            vectors = tf.nn.embedding_lookup(variable, ids)
            loss = tf.reduce_sum((vectors - target) ** 2)
        gradient = tape.gradient(loss, variable)
        if variable.shape[0] is not None:
            gradient = tf.convert_to_tensor(gradient)
        optimizer.apply_gradients([(gradient, variable)])

    step = tf.function(step) if in_function else step
    for number, batch in enumerate(BATCHES):
        step(tf.constant(ids(batch), tf.int64), tf.constant(float(number)))


def compare(table, dense, rows=slice(None)):
    keys = np.arange(ROWS)[rows] * 7
    np.testing.assert_allclose(
        table.lookup(keys, insert=False), dense.numpy()[rows], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("in_function", [True, False])
@pytest.mark.parametrize("frequency", [None, 1, 4])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("SGD", {}),
        ("Adagrad", {}),
        ("SGD", {"gradient_accumulation_steps": 2}),
        ("SGD", {"clipnorm": 0.5}),
    ],
)
def test_rows_and_averages_are_those_of_keras(optimizer, options, frequency, in_function):
    def make():
        kind = getattr(keras.optimizers, optimizer)
        ema = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": frequency}
        return kind(0.1, **ema, **options)

    dense, reference = tf.Variable(START), make()
    train(dense, reference, lambda ids: ids, in_function)
    table, ours = de.DynamicVariable(DIM), de.OptimizerWrapper(make())
    table.upsert(np.arange(ROWS) * 7, START)
    train(table, ours, lambda ids: ids * 7, in_function)
    compare(table, dense)
    # What fit does at its end.
    before = table.lookup(np.arange(ROWS) * 7).numpy()
    reference.finalize_variable_values([dense])
    ours.finalize_variable_values([table])
    compare(table, dense)
    if frequency is None:
        assert np.abs(table.lookup(np.arange(ROWS) * 7) - before).max() > 0.01
    np.testing.assert_array_equal(table.lookup([7 * (ROWS - 1)])[0], START[-1])  # never stepped


def test_rows_that_are_created_erased_and_created_again():
    table = de.DynamicVariable(DIM, 1.0)
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
    dense = tf.Variable(np.ones([ROWS, DIM], np.float32))
    reference = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    train(table, optimizer, lambda ids: ids * 7)
    train(dense, reference, lambda ids: ids)
    table.erase([0])
    optimizer.finalize_variable_values([table])
    reference.finalize_variable_values([dense])
    assert not table.contains([0])[0]
    stepped = np.unique(np.concatenate(BATCHES))
    compare(table, dense, stepped[stepped > 0])
    # 0 begins again with its initial vector, and its average with it.
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.sparse_read([0]))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    optimizer.finalize_variable_values([table])
    np.testing.assert_allclose(table.lookup([0]), np.full([1, DIM], 0.5 * 1.0 + 0.5 * 0.9))


def test_a_row_that_something_else_changed_begins_again():
    table = de.DynamicVariable(DIM, 1.0)
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))

    def step(key):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.sparse_read([key]))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    for _ in range(4):
        step(0)
        step(1)
        step(2)
    table.erase([0])
    table.upsert([1], [[5.0] * DIM])
    for key in range(3):
        step(key)
    optimizer.finalize_variable_values([table])
    # After k further steps of other rows, an average is half as far from the value k times.
    expected = [0.9 + 0.05 / 4, 4.9 + 0.05 / 2]
    np.testing.assert_allclose(table.lookup([0, 1]).numpy()[:, 0], expected, rtol=1e-6)


def test_steps_that_are_repeated_begin_again():
    """As if an earlier state had been restored: numbers of steps come a second time."""
    table = de.DynamicVariable(DIM, 1.0)
    table.lookup([2])
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5))

    def step(gradient):
        slices = tf.IndexedSlices(tf.fill([1, DIM], gradient), tf.constant([2], tf.int64))
        optimizer.apply_gradients([(slices, table)])

    for _ in range(30):
        step(0.0)
    optimizer.core.iterations.assign(3)
    step(1.0)
    optimizer.finalize_variable_values([table])
    np.testing.assert_allclose(table.lookup([2]).numpy(), np.full([1, DIM], 0.75))


def test_fit_ends_with_the_averages():
    def fit(layer, optimizer, ids):
        keras.utils.set_random_seed(3)
        inputs = keras.Input([2], dtype="int64")
        x = keras.layers.Flatten()(layer(inputs))
        head = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(1))
        model = keras.Model(inputs, head(x))
        return model, lambda: (
            model.compile(optimizer, "mse"),
            model.fit(ids, np.arange(8.0) / 8, batch_size=4, epochs=3, shuffle=False, verbose=0),
        )

    ids = np.array([[0, 1], [2, 3], [4, 5], [6, 7], [0, 2], [1, 3], [4, 6], [5, 7]])
    sgd = lambda: keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7)  # noqa: E731
    dense = keras.layers.Embedding(ROWS, DIM)
    reference, run = fit(dense, sgd(), ids)
    dense.set_weights([START])
    run()
    ours = de.layers.Embedding(DIM)
    model, run = fit(ours, de.OptimizerWrapper(sgd()), ids)
    ours.table.upsert(np.arange(ROWS), START)
    run()
    np.testing.assert_allclose(
        ours.table.lookup(np.arange(ROWS)), dense.get_weights()[0], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(model.predict(ids), reference.predict(ids), rtol=1e-4, atol=1e-5)
