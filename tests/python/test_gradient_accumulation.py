"""gradient_accumulation_steps with tables, against keras.layers.Embedding."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

K = keras.optimizers
ROWS, DIM, STEPS = 12, 3, 3
rng = np.random.default_rng(0)
START = rng.normal(size=(ROWS, DIM)).astype(np.float32)
# Every update has every id, because dense moments decay in all rows. The number of steps is no
# multiple of STEPS.
IDS = np.concatenate([rng.permutation(ROWS).reshape(STEPS, -1) for _ in range(8)])[:-1]
TARGETS = rng.normal(size=(len(IDS), 1)).astype(np.float32)

OPTIMIZERS = {
    "sgd": lambda **o: K.SGD(0.1, **o),
    "sgd_clipnorm": lambda **o: K.SGD(0.5, clipnorm=0.05, **o),
    "sgd_clipvalue": lambda **o: K.SGD(0.5, clipvalue=0.02, **o),
    "adam": lambda **o: K.Adam(0.05, **o),
    "adagrad": lambda **o: K.Adagrad(0.1, **o),
    "nadam": lambda **o: K.Nadam(0.05, **o),
}


def fit(embedding, optimizer, eagerly=False):
    start = keras.initializers.GlorotUniform(1)
    model = keras.Sequential(
        [
            keras.Input((ROWS // STEPS,), dtype="int64"),
            embedding,
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer=start),
        ]
    )
    if hasattr(embedding, "table"):
        de.assign(embedding.table, np.arange(ROWS), START)
    else:
        embedding.embeddings.assign(START)
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    history = model.fit(IDS, TARGETS, batch_size=1, shuffle=False, verbose=0)
    return history.history["loss"]


@pytest.mark.parametrize(
    ("name", "eagerly"), [*((name, False) for name in OPTIMIZERS), ("sgd", True), ("nadam", True)]
)
def test_same_rows_as_keras(name, eagerly):
    layer, reference_layer = de.layers.Embedding(DIM), keras.layers.Embedding(ROWS, DIM)
    options = {"gradient_accumulation_steps": STEPS}
    optimizer = de.OptimizerWrapper(OPTIMIZERS[name](**options))
    reference = OPTIMIZERS[name](**options)
    losses = fit(layer, optimizer, eagerly)
    np.testing.assert_allclose(losses, fit(reference_layer, reference), rtol=1e-4)
    got = layer.table.lookup(np.arange(ROWS), insert=False).numpy()
    np.testing.assert_allclose(got, reference_layer.embeddings.numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(got - START).max() > 1e-3
    assert int(optimizer.iterations) == int(reference.iterations) == len(IDS) // STEPS


def test_repeated_keys_and_steps_without_a_gradient():
    table, other = (de.DynamicVariable(1, "zeros", name=name) for name in ("a", "b"))
    optimizer = de.OptimizerWrapper(K.SGD(1.0, gradient_accumulation_steps=2))
    optimizer.build([table, other])
    for tables in ([table], [table, other], [other], [other]):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(t.lookup([1, 1, 2])) for t in tables)
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
    # Means over two steps: of `table` both in the first pair, of `other` one, then both.
    assert table.lookup([1, 2]).numpy().ravel().tolist() == [-2.0, -1.0]
    assert other.lookup([1, 2]).numpy().ravel().tolist() == [-1.0 - 2.0, -0.5 - 1.0]
