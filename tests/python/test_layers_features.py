"""Layers with ragged ids of rank 3, lists and dicts of features, masks from padding; .h5 files."""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

RAGGED3 = tf.ragged.constant([[[1, 2], [3]], [[], [4, 4, 1]]], dtype=tf.int64)


def rows(table, ids):
    return table.lookup(ids, insert=False).numpy()


@pytest.mark.parametrize("make", [de.layers.EmbeddingBag, de.layers.Embedding])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_ragged_ids_of_rank_3_are_pooled_along_the_last_dimension(make, combiner):
    layer = make(2, combiner=combiner)
    output = layer(RAGGED3, training=True)
    assert isinstance(output, tf.RaggedTensor)
    assert output.shape.as_list() == [2, None, 2]
    for sample, bags in zip(output, RAGGED3.to_list(), strict=True):
        for vector, ids in zip(sample.numpy(), bags, strict=True):
            expected = rows(layer.table, np.array(ids, np.int64)).sum(0)
            if combiner == "mean" and ids:
                expected /= len(ids)
            np.testing.assert_allclose(vector, expected, rtol=1e-6)


def test_weights_of_ragged_ids_of_rank_3():
    layer = de.layers.EmbeddingBag(2, "sum")
    layer(RAGGED3, training=True)
    weights = RAGGED3.with_flat_values(tf.range(6, dtype=tf.float32))
    output = layer(RAGGED3, weights=weights)
    one, two, three, four = rows(layer.table, [1, 2, 3, 4])
    np.testing.assert_allclose(output[0, 0], 0 * one + 1 * two, rtol=1e-6)
    np.testing.assert_allclose(output[0, 1], 2 * three, rtol=1e-6)
    np.testing.assert_allclose(output[1, 1], 3 * four + 4 * four + 5 * one, rtol=1e-5)


FEATURES = {
    "user": np.array([[5], [6]]),
    "items": tf.ragged.constant([[7, 5], [8]], dtype=tf.int64),
    "city": np.array([1, 2]),
}


def multi():
    return de.layers.MultiTableEmbedding(
        4,
        tables=[{"dim": 3}, {}],
        feature_tables={"user": 1, "items": 1, "city": 0},
    )


@pytest.mark.parametrize("kind", [dict, list])
def test_features_of_several_widths(kind):
    layer = multi()
    inputs = dict(FEATURES) if kind is dict else list(FEATURES.values())
    outputs = layer(inputs, training=True)
    assert type(outputs) is kind
    if kind is dict:
        assert list(outputs) == list(FEATURES)
        outputs = list(outputs.values())
    user, items, city = outputs
    assert (user.shape, city.shape) == ((2, 1, 4), (2, 3))
    assert isinstance(items, tf.RaggedTensor)
    small, large = layer.tables
    assert (len(small), len(large)) == (2, 4)
    np.testing.assert_array_equal(user, rows(large, FEATURES["user"]))
    np.testing.assert_array_equal(items.flat_values, rows(large, [7, 5, 8]))
    np.testing.assert_array_equal(city, rows(small, FEATURES["city"]))
    assert layer.count_params() == 2 * 3 + 4 * 4


def test_dict_of_features_in_a_model(tmp_path):
    inputs = {
        "user": keras.Input((1,), dtype="int64", name="user"),
        "city": keras.Input((), dtype="int64", name="city"),
        "items": keras.Input((2,), dtype="int64", name="items"),
    }
    outputs = multi()(inputs)
    assert {name: output.shape for name, output in outputs.items()} == {
        "user": (None, 1, 4),
        "items": (None, 2, 4),
        "city": (None, 3),
    }
    flat = [keras.layers.Flatten()(outputs[name]) for name in inputs]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(flat)))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    data = {"user": FEATURES["user"], "city": FEATURES["city"], "items": np.array([[7, 5], [8, 8]])}
    model.fit(data, np.ones((2, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(copy.predict(data, verbose=0), model.predict(data, verbose=0))


def test_features_that_do_not_fit():
    layer = multi()
    for inputs, message in [
        (
            {"user": np.array([1])},
            r"needs the features \['user', 'items', 'city'\], got \['user'\]",
        ),
        ([np.array([1])], "has 3 features, got 1"),
        (np.array([[1, 2, 3]]), r"tables of the widths \[3, 4\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer(inputs)
    unnamed = de.layers.MultiTableEmbedding(4, tables=3)
    with pytest.raises(ValueError, match="feature_tables must be a dict"):
        unnamed(dict(FEATURES))
    with pytest.raises(ValueError, match="one number as default_vector"):
        de.layers.MultiTableEmbedding(2, tables=[{"dim": 3}], default_vector=[1.0, 2.0])


def test_mask_from_padding_id():
    ids = np.array([[7, -1, 0]])
    for options, expected in [
        ({}, None),
        ({"padding_id": -1}, [[True, False, True]]),
        ({"mask_zero": True}, [[True, True, False]]),
        ({"padding_id": -1, "mask_zero": True}, [[True, False, False]]),
        ({"padding_id": 0, "mask_zero": True}, [[True, True, False]]),
    ]:
        output = de.layers.Embedding(2, **options)(ids)
        mask = keras.src.backend.get_keras_mask(output)
        assert (mask if mask is None else mask.numpy().tolist()) == expected


def test_averages_skip_padding():
    layer = de.layers.Embedding(2, padding_id=-1)
    model = keras.Sequential([layer, keras.layers.GlobalAveragePooling1D()])
    layer(np.array([[7, 8]]), training=True)
    expected = rows(layer.table, [7, 8]).mean(0)
    np.testing.assert_allclose(model(np.array([[7, -1, 8, -1]]))[0], expected, rtol=1e-6)


def test_h5_files_have_the_rows(tmp_path):
    model = keras.Sequential(
        [de.layers.Embedding(2), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(de.OptimizerWrapper(keras.optimizers.SGD(0.1)), keras.losses.MeanSquaredError())
    ids = np.array([[1, 2**40], [3, 1]])
    model.fit(ids, np.ones((2, 1)), verbose=0)
    model.save(tmp_path / "model.h5")
    copy = keras.models.load_model(tmp_path / "model.h5")
    assert len(copy.layers[0].table) == 3
    np.testing.assert_array_equal(copy(ids), model(ids))


CONTROL = {
    "map_fn": lambda t, ids: tf.map_fn(t.lookup, ids, fn_output_signature=tf.float32),
    "scan": lambda t, ids: tf.scan(lambda a, i: a + t.lookup(i), ids, tf.zeros([2, 2])),
    "while_loop": lambda t, ids: tf.while_loop(
        lambda i, a: i < 2, lambda i, a: (i + 1, a + t.lookup(ids[i])), [0, tf.zeros([2, 2])]
    )[1],
    "cond": lambda t, ids: tf.cond(
        ids[0, 0] > 0, lambda: de.lookup_sparse(t, ids, combiners="sum"), lambda: tf.zeros([2, 2])
    ),
}


@pytest.mark.parametrize("name", CONTROL)
def test_gradients_through_control_flow(name):
    table = de.DynamicVariable(2, "ones")
    ids = tf.constant([[1, 2], [2, 3]], tf.int64)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(CONTROL[name](table, ids))
        return tape.gradient(loss, table)

    # Eagerly there are no graphs of loops, and the gradient is exact.
    grad = step(ids)
    sums = np.zeros(4)
    np.add.at(sums, grad.indices.numpy(), grad.values.numpy()[:, 0])
    assert sums[1] > 0
    assert sums[2] > 0
    with pytest.raises(NotImplementedError, match="Look up the ids before it") as error:
        tf.function(step)(ids)
    assert len(str(error.value)) <= 600
    # Without a gradient they work.
    assert tf.function(lambda ids: CONTROL[name](table, ids))(ids).shape[-1] == 2


def test_a_table_made_inside_a_function_is_warned_of():
    @tf.function
    def lost(ids):
        return de.DynamicVariable(2, "ones", name="lost").lookup(ids)

    with (
        pytest.warns(UserWarning, match=r"'lost' was made inside a tf\.function and is destroyed"),
        pytest.raises(tf.errors.NotFoundError),
    ):
        lost(tf.constant([1], tf.int64))


def test_a_table_that_a_function_keeps_is_not_warned_of():
    def use():
        kept = []

        @tf.function
        def lookup(ids):
            if not kept:
                kept.append(de.DynamicVariable(2, "ones", name="kept"))
            return kept[0].lookup(ids)

        assert lookup(tf.constant([1], tf.int64)).numpy().tolist() == [[1, 1]]
        assert len(kept[0]) == 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use()
        gc.collect()
