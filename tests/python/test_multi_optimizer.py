"""keras.optimizers.MultiOptimizer in the wrapper: Wide & Deep with Ftrl and Adam."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

K = keras.optimizers
ROWS = 30
rng = np.random.default_rng(0)
WIDE, DEEP = rng.normal(size=(ROWS, 1)), rng.normal(size=(ROWS, 4))
# Every step has every id once, because dense moments decay in all rows.
IDS = np.stack([rng.permutation(ROWS) for _ in range(6)]).astype(np.int64)
TARGETS = rng.normal(size=(6, 1)).astype(np.float32)


def model_of(wide, deep):
    inputs = keras.Input((ROWS,), dtype="int64")
    flat = keras.layers.Flatten()
    head = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(1), name="head"
    )
    weights = keras.layers.Dense(1, kernel_initializer="ones", name="wide_head")
    outputs = keras.layers.Add()([weights(flat(wide(inputs))), head(flat(deep(inputs)))])
    return keras.Model(inputs, outputs)


def make_model():
    wide, deep = de.layers.Embedding(1, name="wide"), de.layers.Embedding(4, name="deep")
    de.assign(wide.table, np.arange(ROWS), WIDE)
    de.assign(deep.table, np.arange(ROWS), DEEP)
    return model_of(wide, deep)


def make_reference():
    layers = [keras.layers.Embedding(ROWS, dim, name=n) for n, dim in (("wide", 1), ("deep", 4))]
    model = model_of(*layers)
    for layer, start in zip(layers, (WIDE, DEEP), strict=True):
        layer.embeddings.assign(start)
    return model


def multi(by_function=False):
    ftrl, adam, sgd = K.Ftrl(0.05), K.Adam(0.02), K.SGD(0.01)
    if by_function:
        return K.MultiOptimizer(lambda v: {"wide": ftrl, "deep": adam}.get(v.path[:4], sgd))
    return K.MultiOptimizer(K.OptimizerMap(sgd, {"wide/.*": ftrl, "deep/.*": adam}))


def losses(model, optimizer):
    model.compile(optimizer, "mse")
    history = model.fit(IDS, TARGETS, batch_size=1, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"]


def values(model):
    return [
        layer.table.lookup(np.arange(ROWS), insert=False).numpy()
        if hasattr(layer, "table")
        else layer.embeddings.numpy()
        for layer in model.layers
        if layer.name in ("wide", "deep")
    ]


@pytest.mark.parametrize("by_function", [False, True])
def test_each_table_has_its_optimizer(by_function):
    model, reference = make_model(), make_reference()
    optimizer = de.OptimizerWrapper(multi(by_function))
    np.testing.assert_allclose(
        losses(model, optimizer), losses(reference, multi(by_function)), rtol=1e-4
    )
    for got, expected in zip(values(model), values(reference), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    wide, deep = (model.get_layer(name).table for name in ("wide", "deep"))
    assert optimizer.state_spec(wide)[0] != optimizer.state_spec(deep)[0]
    assert int(optimizer.iterations) == 18
    assert [int(one.iterations) for one in optimizer.inner_optimizer.optimizers] == [18] * 3


def test_save_and_continue(tmp_path):
    def run(model, epochs):
        model.fit(IDS, TARGETS, batch_size=1, epochs=epochs, shuffle=False, verbose=0)

    model, whole = make_model(), make_model()
    for one in (model, whole):
        one.compile(de.OptimizerWrapper(multi()), "mse")
    run(whole, 3)
    run(model, 1)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    run(copy, 2)
    for got, expected in zip(values(copy), values(whole), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_raw_tables_by_their_names():
    first, second = (de.DynamicVariable(2, "ones", name=name) for name in ("first", "second"))
    optimizer = de.OptimizerWrapper(
        K.MultiOptimizer(K.OptimizerMap(K.SGD(1.0), {"second": K.SGD(0.25)}))
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(first.lookup([1])) + tf.reduce_sum(second.lookup([1]))
    grads = tape.gradient(loss, [first, second])
    optimizer.apply_gradients(zip(grads, [first, second], strict=True))
    assert first.lookup([1]).numpy().tolist() == [[0, 0]]
    assert second.lookup([1]).numpy().tolist() == [[0.75, 0.75]]


def test_dump_has_the_state_of_both(tmp_path):
    model = make_model()
    optimizer = de.OptimizerWrapper(multi())
    losses(model, optimizer)
    de.dump(tmp_path, model, optimizer)
    copy = make_model()
    restored = de.OptimizerWrapper(multi())
    copy.compile(restored, "mse")
    restored.build(copy.trainable_variables)
    de.load(tmp_path, copy, restored)
    assert int(restored.iterations) == 18
    assert [int(one.iterations) for one in restored.inner_optimizer.optimizers] == [18] * 3
    for got, expected in zip(values(copy), values(model), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_loss_scaling_is_refused():
    with pytest.raises(TypeError, match="cannot be combined with loss scaling"):
        de.OptimizerWrapper(K.LossScaleOptimizer(multi()))


def test_a_function_that_creates_optimizers():
    """As in Keras's own example: each variable keeps the optimizer of the first call."""

    def make(variable):
        return K.Adam(0.02) if "deep" in variable.path else K.Adagrad(0.05)

    model, reference = make_model(), make_reference()
    optimizer = de.OptimizerWrapper(K.MultiOptimizer(make))
    expected = losses(reference, K.MultiOptimizer(make))
    np.testing.assert_allclose(losses(model, optimizer), expected, rtol=1e-4)
    assert len(optimizer.inner_optimizer.optimizers) == len(model.trainable_variables)
