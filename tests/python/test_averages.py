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
def test_rows_and_averages_are_as_in_keras(optimizer, options, frequency, in_function):
    def make():
        kind = getattr(keras.optimizers, optimizer)
        ema = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": frequency}
        return kind(0.1, **ema, **options)

    dense, reference = tf.Variable(START), make()
    train(dense, reference, lambda ids: ids, in_function)
    table, optimizer = de.DynamicVariable(DIM), de.OptimizerWrapper(make())
    table.upsert(np.arange(ROWS) * 7, START)
    train(table, optimizer, lambda ids: ids * 7, in_function)
    compare(table, dense)
    # The end of fit.
    before = table.lookup(np.arange(ROWS) * 7).numpy()
    reference.finalize_variable_values([dense])
    optimizer.finalize_variable_values([table])
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
    layer = de.layers.Embedding(DIM)
    model, run = fit(layer, de.OptimizerWrapper(sgd()), ids)
    layer.table.upsert(np.arange(ROWS), START)
    run()
    np.testing.assert_allclose(
        layer.table.lookup(np.arange(ROWS)), dense.get_weights()[0], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(model.predict(ids), reference.predict(ids), rtol=1e-4, atol=1e-5)


def swap_models(policy="float32", multi=False, dense_layers=True):
    """A model with a table, and Keras's with the same vectors, each with averages."""

    def optimizer():
        one = keras.optimizers.SGD(0.02, use_ema=True, ema_momentum=0.7)
        if not multi:
            return one
        other_optimizer = keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.6)
        return keras.optimizers.MultiOptimizer(
            lambda variable: one if "e/" in variable.path else other_optimizer
        )

    def model(embedding):
        inputs = keras.Input([4], dtype="int64")
        outputs = keras.layers.Flatten()(embedding(inputs))
        if dense_layers:
            outputs = keras.layers.Dense(1, kernel_initializer="ones", dtype=policy)(outputs)
        return keras.Model(inputs, outputs)

    layer = de.layers.Embedding(DIM, name="e", dtype=policy)
    dynamic, reference = (
        model(layer),
        model(keras.layers.Embedding(ROWS, DIM, name="e", dtype=policy)),
    )
    layer.table.upsert(np.arange(ROWS), START)
    reference.layers[1].set_weights([START])
    makes = [optimizer] * 2
    if policy == "mixed_float16":
        makes = [lambda: keras.optimizers.LossScaleOptimizer(optimizer())] * 2
    dynamic.compile(de.OptimizerWrapper(makes[0]()), "mse", metrics=["mse"])
    reference.compile(makes[1](), "mse", metrics=["mse"])
    return dynamic, reference


class Logged(keras.callbacks.Callback):
    """The vectors that a callback after SwapEMAWeights sees, as ModelCheckpoint would."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.seen = rows, []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((self.rows(), dict(logs or {})))


@pytest.mark.parametrize("on_epoch", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dense_layers": False},
        {"multi": True},
        {"policy": "mixed_float16"},
    ],
    ids=str,
)
def test_swap_ema_weights(options, on_epoch):
    dynamic, reference = swap_models(**options)
    rng = np.random.default_rng(4)
    ids = rng.integers(0, ROWS - 1, [40, 4])
    targets = rng.normal(size=dynamic.output_shape[1:] and [40, *dynamic.output_shape[1:]])
    table = dynamic.layers[1].table
    rows = {
        dynamic: lambda: table.lookup(np.arange(ROWS), insert=False).numpy(),
        reference: lambda: reference.layers[1].get_weights()[0],
    }
    seen = {}
    for model in (dynamic, reference):
        log = Logged(rows[model])
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)
        model.fit(
            ids,
            targets,
            batch_size=5,
            epochs=3,
            shuffle=False,
            verbose=0,
            validation_data=(ids, targets) if not on_epoch else None,
            callbacks=[swap, log],
        )
        before = rows[model]()
        swap = keras.callbacks.SwapEMAWeights()
        loss = model.evaluate(ids, targets, verbose=0, callbacks=[swap])
        np.testing.assert_array_equal(rows[model](), before)  # swapped back, to the bit
        seen[model] = [*log.seen, (rows[model](), {"loss": loss[0]})]
    tolerance = 1e-5 if "policy" not in options else 2e-2
    for (rows_a, logs_a), (rows_b, logs_b) in zip(seen[dynamic], seen[reference], strict=True):
        np.testing.assert_allclose(rows_a, rows_b, rtol=tolerance, atol=tolerance)
        for name in logs_b:
            assert logs_a[name] == pytest.approx(logs_b[name], rel=max(tolerance, 1e-4)), name
    values = [each[0] for each in seen[dynamic]]
    assert np.abs(values[0] - values[1]).max() > 1e-3


def test_swapping_keeps_what_others_have_changed():
    dynamic, _ = swap_models()
    ids = np.arange(ROWS - 4).reshape(2, -1)
    dynamic.fit(ids, np.ones([2, 1]), verbose=0)
    table = dynamic.layers[1].table
    before = table.lookup(np.arange(ROWS)).numpy()
    averages = dynamic.optimizer._stepper.averages
    dynamic.optimizer.core._iterations.assign_add(1)
    averages.swap(dynamic.optimizer.core)
    table.upsert([0], np.full([1, DIM], 9.0))
    table.erase([1])
    averages.swap(dynamic.optimizer.core)
    after = table.lookup(np.arange(ROWS), insert=False).numpy()
    np.testing.assert_array_equal(after[2:], before[2:])
    assert after[0].tolist() == [9.0] * DIM
    assert not table.contains([1])[0]


def test_a_callback_for_each_fit():
    """The last epoch leaves the averages in the model; the next callback begins from there."""
    dynamic, reference = swap_models()
    rng = np.random.default_rng(6)
    ids, targets = rng.integers(0, ROWS - 1, [20, 4]), rng.normal(size=[20, 1])
    for _ in range(2):
        for on_epoch in (True, False):
            losses = []
            for model in (dynamic, reference):
                swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)
                model.fit(ids, targets, batch_size=5, shuffle=False, verbose=0, callbacks=[swap])
                losses.append(model.evaluate(ids, targets, verbose=0, callbacks=[swap])[0])
            assert losses[0] == pytest.approx(losses[1], rel=1e-4)
