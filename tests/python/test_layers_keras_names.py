"""The layers accept the argument names of `keras.layers.Embedding`, and refuse ambiguous calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

IDS = np.array([[0, 1, 2], [2, 2, 1]])
VOCABULARY, DIM = 3, 4


def test_names_of_keras():
    layer = de.layers.Embedding(input_dim=1000, output_dim=DIM, embeddings_initializer="ones")
    np.testing.assert_array_equal(layer(IDS, training=True), np.ones((2, 3, DIM)))
    copy = de.layers.Embedding.from_config(layer.get_config())
    assert copy.dim == DIM
    np.testing.assert_array_equal(copy(IDS + 5000), np.ones((2, 3, DIM)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: de.layers.Embedding(1000, 16),
            r"Embedding\(16\), or Embedding\(input_dim=1000, output_dim=16\)",
        ),
        (lambda: de.layers.Embedding(16, "ones"), r"Embedding\(16, initializer='ones'\)"),
        (lambda: de.layers.Embedding(1000, output_dim=16), "dim=1000 and output_dim=16"),
        (lambda: de.layers.Embedding(input_dim=1000), r"Embedding\(16\)"),
        (
            lambda: de.layers.Embedding(2, initializer="ones", embeddings_initializer="zeros"),
            "initializer='ones' and embeddings_initializer='zeros'",
        ),
        (lambda: de.layers.Embedding(input_dim="x", output_dim=2), "input_dim.*'x'"),
    ],
)
def test_ambiguous_calls(call, message):
    with pytest.raises(TypeError, match=message) as error:
        call()
    assert len(str(error.value)) <= 400


def layers():
    """Returns each kind of layer with a regularizer, and a function that calls it on IDS."""
    options = {"initializer": "normal", "embeddings_regularizer": keras.regularizers.L2(0.5)}
    padded = de.layers.Embedding(DIM, padding_id=9, **options)
    bag = de.layers.EmbeddingBag(DIM, "sum", **options)
    return {
        "embedding": (de.layers.Embedding(DIM, **options), lambda layer: layer(IDS, training=True)),
        "padding": (padded, lambda layer: layer(np.append(IDS, [[9, 9, 9]], 0), training=True)),
        "pooled": (
            bag,
            lambda layer: layer(tf.ragged.constant([[0, 1, 2], [], [2]]), training=True),
        ),
        "tables": (
            de.layers.MultiTableEmbedding(DIM, 1, [0, 0, 0], **options),
            lambda layer: layer(IDS, training=True),
        ),
    }


@pytest.mark.parametrize("kind", ["embedding", "padding", "pooled", "tables"])
def test_regularizer_counts_each_distinct_row_once(kind):
    layer, call = layers()[kind]
    call(layer)
    table = layer.tables[0] if kind == "tables" else layer.table
    rows = table.lookup(tf.constant([0, 1, 2], tf.int64), insert=False)
    assert len(table) == 3
    (loss,) = layer.losses
    np.testing.assert_allclose(loss, 0.5 * np.sum(rows.numpy() ** 2), rtol=1e-5)


@pytest.mark.parametrize("eager", [False, True])
def test_regularizer_trains_like_keras(eager):
    """Every batch has every row, so the rows of the batch are the whole matrix of Keras."""
    start = np.random.default_rng(1).normal(size=(VOCABULARY, DIM)).astype(np.float32)
    targets = np.array([[1.0], [-1.0]])
    histories = []
    for dynamic in (False, True):
        options = {"embeddings_regularizer": "l2"}
        if dynamic:
            layer = de.layers.Embedding(input_dim=VOCABULARY, output_dim=DIM, **options)
            layer.table.upsert(tf.range(VOCABULARY, dtype=tf.int64), start)
            optimizer = de.OptimizerWrapper(keras.optimizers.SGD(0.1))
        else:
            layer = keras.layers.Embedding(
                VOCABULARY,
                DIM,
                embeddings_initializer=keras.initializers.Constant(start),
                **options,
            )
            optimizer = keras.optimizers.SGD(0.1)
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int64"),
                layer,
                keras.layers.Flatten(),
                keras.layers.Dense(1, kernel_initializer="ones"),
            ]
        )
        model.compile(optimizer, "mse", run_eagerly=eager)
        fitted = model.fit(IDS, targets, epochs=5, verbose=0)
        histories.append([*fitted.history["loss"], model.evaluate(IDS, targets, verbose=0)])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5)


def test_regularizer_survives_a_config():
    layer = de.layers.EmbeddingBag(2, embeddings_regularizer=keras.regularizers.L1(0.25))
    copy = de.layers.EmbeddingBag.from_config(layer.get_config())
    assert copy.embeddings_regularizer.get_config() == {"l1": 0.25}


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
def test_weights(as_list, dtype, key_type):
    """A trained layer of Keras becomes one of this package."""
    ids = np.array([[0, 3, 9], [5, 5, 1]])
    reference = keras.layers.Embedding(10, 4, dtype=dtype)
    expected = reference(ids)
    (matrix,) = reference.get_weights()
    layer = de.layers.Embedding(
        input_dim=10,
        output_dim=4,
        weights=[matrix] if as_list else matrix,
        dtype=dtype,
        key_type=key_type,
    )
    if dtype == "float64":  # the rows are float32
        expected = tf.cast(tf.cast(expected, tf.float32), tf.float64)
    np.testing.assert_array_equal(layer(ids.astype(key_type)), expected)
    assert len(layer.table) == 10
    assert "weights" not in layer.get_config()  # as in Keras


def test_weights_and_padding():
    matrix = np.arange(12.0).reshape(6, 2)
    layer = de.layers.Embedding(2, weights=[matrix], padding_id=0, max_capacity=6)
    assert layer(np.array([[0, 1, 5]])).numpy().tolist() == [[[0, 0], [2, 3], [10, 11]]]
    assert not layer.table.contains([0])[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [np.ones([3, 2])]}, r"matrix \[n, 4\].*got the shape \[3, 2\]"),
        ({"weights": np.ones([4])}, r"matrix \[n, 4\].*got the shape \[4\]"),
        ({"weights": [np.ones([3, 4])] * 2}, r"got the shape \[2, 3, 4\]"),
        ({"weights": np.ones([3, 4]), "input_dim": 5}, r"matrix \[5, 4\]"),
        ({"weights": np.ones([3, 4]), "hash_strings": True}, "vectors of integers"),
        ({"weights": np.ones([3, 4]), "max_capacity": 2}, "3 rows, more than max_capacity=2"),
    ],
)
def test_weights_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        de.layers.Embedding(4, **options)
