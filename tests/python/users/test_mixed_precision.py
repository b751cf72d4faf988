"""A user with mixed precision: float16 and bfloat16 compute, loss scaling, 16-bit rows."""

import keras
import numpy as np
import pytest
from user_helpers import check_same_losses, dense_layer, fill, initial_vectors, labels, numbers, raw

import tf_dynemb as de

IDS = numbers(64, 4, seed=40)
LABELS = labels([IDS])


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def model(embedding):
    keras.utils.set_random_seed(10)
    inputs = keras.Input([4], dtype="int64")
    x = keras.layers.Flatten()(embedding(inputs))
    x = dense_layer(8, activation="relu")(x)
    return keras.Model(inputs, dense_layer(1, activation="sigmoid", dtype="float32")(x))


def train(built, optimizer, inputs):
    built.compile(optimizer, "binary_crossentropy")
    fit = built.fit(inputs, LABELS, batch_size=16, epochs=4, shuffle=False, verbose=0)
    return fit.history["loss"]


def test_the_losses_are_as_in_keras_under_the_same_policy(policy):
    vectors = initial_vectors(8)
    dense = keras.layers.Embedding(40, 8)
    reference = model(dense)
    dense.set_weights([vectors])
    expected = train(reference, keras.optimizers.SGD(0.2), IDS)

    embedding = de.layers.Embedding(8)
    dynamic = model(embedding)
    fill(embedding.table, vectors)
    losses = train(dynamic, de.OptimizerWrapper(keras.optimizers.SGD(0.2)), raw(IDS))
    check_same_losses(losses, expected, rtol=2e-2)
    assert embedding.table.dtype == "float32"
    assert embedding.compute_dtype == policy.removeprefix("mixed_")


def test_rows_of_16_bits_train_as_well():
    losses = {}
    for dtype in ("float32", "bfloat16"):
        keras.utils.set_random_seed(11)
        inputs = keras.Input([4], dtype="int64")
        embedding = de.layers.Embedding(8, dtype=dtype, seed=1)
        x = keras.layers.Flatten()(embedding(inputs))
        x = keras.layers.Lambda(lambda x: keras.ops.cast(x, "float32"))(x)
        built = keras.Model(inputs, dense_layer(1, activation="sigmoid")(x))
        losses[dtype] = train(built, de.OptimizerWrapper(keras.optimizers.SGD(0.5)), raw(IDS))
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=5e-2)
    assert losses["bfloat16"][-1] < losses["bfloat16"][0]
