"""The Keras layers: padding, bags, several tables, shapes, configurations."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_helpers import BCE, DIM, FEATURES, VOCABULARY, make_data

import tf_dynemb as de

K = keras.optimizers


def test_tape_inserts_rows_without_a_training_argument():
    layer = de.layers.Embedding(DIM)
    layer(np.array([1]))
    assert len(layer.table) == 0
    with tf.GradientTape():
        layer(np.array([1]))
        layer(np.array([2]), training=False)
    assert de.export(layer.table)[0].numpy().tolist() == [1]


def test_padding_id_has_zeros_no_row_and_no_gradient():
    layer = de.layers.Embedding(2, initializer="ones", padding_id=-1)
    with tf.GradientTape() as tape:
        out = layer(tf.constant([[1, -1], [-1, -1], [2, 1]], tf.int64), training=True)
    assert out.numpy()[..., 0].tolist() == [[1, 0], [0, 0], [1, 1]]
    assert sorted(de.export(layer.table)[0].numpy().tolist()) == [1, 2]
    assert sorted(tape.gradient(out, layer.weights[0]).indices.numpy().tolist()) == [1, 2]


@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
def test_bags_ignore_padding(form):
    layer = de.layers.EmbeddingBag(1, "mean", "zeros", padding_id=0)
    de.assign(layer.table, [1, 2, 3], [[1.0], [2.0], [6.0]])
    ids = tf.constant([[1, 3, 0], [0, 0, 0], [2, 0, 2]], tf.int64)
    weights = tf.constant([[1.0, 3.0, 9.0], [1.0, 1.0, 1.0], [2.0, 5.0, 2.0]])
    if form == "ragged":
        ids, weights = (tf.RaggedTensor.from_tensor(t) for t in (ids, weights))
    elif form == "sparse":
        every = tf.ones([3, 3], tf.bool)
        ids, weights = (
            tf.SparseTensor(tf.where(every), tf.reshape(t, [-1]), [3, 3]) for t in (ids, weights)
        )
    assert layer(ids).numpy().ravel().tolist() == [3.5, 0, 2]
    assert layer(ids, weights=weights).numpy().ravel().tolist() == [4.75, 0, 2]
    assert len(layer.table) == 3


def test_default_vector_outside_training():
    layer = de.layers.Embedding(2, initializer="ones", default_vector=[7.0, 8.0], padding_id=9)
    bag = de.layers.EmbeddingBag(2, "sum", "ones", default_vector=0.5)
    layer(tf.constant([1]), training=True)
    bag(tf.constant([[1]]), training=True)
    assert layer(tf.constant([1, 5, 9])).numpy().tolist() == [[1, 1], [7, 8], [0, 0]]
    assert bag(tf.constant([[1, 5]])).numpy().tolist() == [[1.5, 1.5]]
    assert layer(tf.constant([5]), training=True).numpy().tolist() == [[1, 1]]
    assert len(bag.table) == 1


def test_combiner_and_shapes():
    ids = tf.constant([[[1, 2], [2, 2]]], tf.int64)
    layer = de.layers.Embedding(3, initializer="ones", combiner="sum")
    assert layer(ids).shape == (1, 2, 3)
    assert float(layer(ids)[0, 0, 0]) == 2.0
    assert layer.compute_output_shape((None, 5, 2)) == (None, 5, 3)
    ragged = tf.ragged.constant([[1], [2, 3]], dtype=tf.int64)
    assert layer(ragged).shape == (2, 3)
    sequence = de.layers.Embedding(3)(ragged)
    assert isinstance(sequence, tf.RaggedTensor)
    assert sequence.shape.as_list() == [2, None, 3]


def test_mask_zero():
    layer = de.layers.Embedding(3, mask_zero=True)
    out = layer(tf.constant([[1, 0]]))
    assert keras.src.backend.get_keras_mask(out).numpy().tolist() == [[True, False]]


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_bag_in_a_model(kind):
    ids, labels = make_data()
    inputs = keras.Input(
        (None,) if kind != "dense" else (FEATURES,),
        dtype="int64",
        ragged=kind == "ragged",
        sparse=kind == "sparse",
    )
    layer = de.layers.EmbeddingBag(DIM, "sum")
    outputs = keras.layers.Dense(1)(layer(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(de.OptimizerWrapper(K.Adam(0.05)), BCE)
    data = tf.constant(ids)
    if kind == "ragged":
        data = tf.RaggedTensor.from_tensor(data)
    elif kind == "sparse":
        data = tf.SparseTensor(tf.where(data > -1), tf.reshape(data, [-1]), data.shape)
    dataset = tf.data.Dataset.from_tensor_slices((data, labels)).batch(32)
    history = model.fit(dataset, epochs=4, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert len(layer.table) == VOCABULARY


def test_bag_weights_have_a_gradient():
    layer = de.layers.EmbeddingBag(1, "sum", "zeros")
    de.assign(layer.table, [1, 2], [[1.0], [5.0]])
    weights = tf.Variable([[1.0, 2.0]])
    with tf.GradientTape() as tape:
        out = layer(tf.constant([[1, 2]]), weights=weights)
    assert tape.gradient(out, weights).numpy().tolist() == [[1.0, 5.0]]


def test_features_share_rows_only_within_a_table():
    layer = de.layers.MultiTableEmbedding(
        2,
        tables=[{"initializer": "1"}, {"initializer": 2.0, "max_capacity": 100}],
        feature_tables=[0, 1, 1],
    )
    ids = tf.constant([[5, 5, 6], [5, 6, 6]], tf.int64)
    out = layer(ids, training=True)
    assert out.shape == (2, 3, 2)
    assert out.numpy()[..., 0].tolist() == [[1, 2, 2], [1, 2, 2]]
    assert [len(table) for table in layer.tables] == [1, 2]
    assert layer.tables[1].options.max_capacity == 100


def test_multi_table_agrees_with_single_tables():
    rng = np.random.default_rng(0)
    ids = rng.integers(-5, 5, (16, 4))
    layer = de.layers.MultiTableEmbedding(3, tables=3, feature_tables=[2, 0, 0, 1], padding_id=-5)
    upstream = rng.normal(size=(16, 4, 3)).astype(np.float32)
    with tf.GradientTape() as tape:
        out = layer(tf.constant(ids), training=True)
        loss = tf.reduce_sum(out * upstream)
    grads = tape.gradient(loss, layer.trainable_weights)
    for f, t in enumerate([2, 0, 0, 1]):
        expected = layer.tables[t].lookup(ids[:, f], insert=False).numpy()
        expected[ids[:, f] == -5] = 0
        np.testing.assert_array_equal(out[:, f], expected)
    for t, grad in enumerate(grads):
        features = [f for f, of in enumerate([2, 0, 0, 1]) if of == t]
        for key, value in zip(grad.indices.numpy(), grad.values.numpy(), strict=True):
            expected = sum(upstream[ids[:, f] == key, f].sum(0) for f in features)
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
            assert key != -5


@pytest.mark.parametrize("traced", [False, True])
def test_multi_table_with_table_ids(traced):
    layer = de.layers.MultiTableEmbedding(
        1, tables=[{"initializer": float(i)} for i in range(3)], feature_tables=[0]
    )
    call = tf.function(layer) if traced else layer
    ids = tf.constant([[1, 1], [1, 2]], tf.int64)
    out = call(ids, table_ids=tf.constant([[0, 1], [2, 2]]), training=True)
    assert out.numpy()[..., 0].tolist() == [[0, 1], [2, 2]]
    assert [len(table) for table in layer.tables] == [1, 1, 2]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="table_ids"):
        call(ids, table_ids=tf.constant([[0, 1], [2, 3]]), training=True)


def test_multi_table_in_a_model(tmp_path):
    ids, labels = make_data()
    inputs = keras.Input((FEATURES,), dtype="int64")
    layer = de.layers.MultiTableEmbedding(DIM, tables=FEATURES)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(de.OptimizerWrapper(K.Adagrad(0.1)), BCE)
    history = model.fit(ids, labels, epochs=4, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    model.save(str(tmp_path / "model.keras"))
    loaded = keras.models.load_model(str(tmp_path / "model.keras"))
    np.testing.assert_allclose(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: de.layers.Embedding(
            3,
            initializer=keras.initializers.RandomNormal(0.0, 2.0, seed=5),
            combiner="max",
            padding_id=0,
            default_vector=1.5,
            key_type="int32",
            name="users",
            max_capacity=9,
            seed=4,
            embeddings_constraint=keras.constraints.NonNeg(),
            dtype="bfloat16",
            trainable=False,
        ),
        lambda: de.layers.EmbeddingBag(3, "sqrtn", ["1", 2.0, keras.initializers.Ones()]),
        lambda: de.layers.MultiTableEmbedding(3, [{"max_capacity": 7}, {}], [1, 0, 0]),
    ],
)
def test_config_round_trip(layer):
    layer = layer()
    copy = keras.layers.deserialize(keras.layers.serialize(layer))
    assert copy.get_config() == layer.get_config()
    table, other = layer.weights[0].value, copy.weights[0].value
    assert table.options == other.options
    assert (table.dtype, table.key_type) == (other.dtype, other.key_type)
    np.testing.assert_array_equal(
        tf.cast(table.lookup([5]), tf.float32), tf.cast(other.lookup([5]), tf.float32)
    )


def test_float_ids_must_be_exact():
    layer = de.layers.Embedding(2)
    mixed = de.layers.Embedding(2, dtype="mixed_bfloat16")
    mixed(np.array([[1001.0]], np.float32), training=True)  # ids are not cast to the compute dtype
    assert de.export(mixed.table)[0].numpy().tolist() == [1001]
    for ids in ([[2.0**24]], [[1.5]], [[np.nan]]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="not a whole number below"):
            layer(np.array(ids, np.float32))


def test_keras_weight_holds_the_table():
    layer = de.layers.Embedding(DIM, name="users")
    (weight,) = layer.trainable_weights
    assert isinstance(weight, keras.Variable)
    assert weight.value is layer.table
    assert weight.path == "users/embeddings"
    layer(np.array([[1, 2]]), training=True)
    assert layer.count_params() == 2 * DIM
    assert weight.shape == (2, DIM)
    assert not layer.supports_jit
