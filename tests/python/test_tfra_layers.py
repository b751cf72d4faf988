"""TFRA's Keras layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dynemb import tfra

IDS = tf.constant([[23, 12, 0], [9, 13, 10]], tf.int64)


def fill(layer, count=100):
    keys = np.arange(count)
    layer.params.upsert(keys, np.stack([keys, keys * 2], axis=1).astype(np.float32))


@pytest.mark.parametrize("kind", ["Embedding", "BasicEmbedding", "HvdAllToAllEmbedding"])
def test_one_vector_for_each_id(kind):
    layer = getattr(tfra.keras.layers, kind)(embedding_size=2, initializer="zeros", name="user")
    fill(layer, 20)
    assert layer(IDS).numpy().tolist() == [
        [[0, 0], [12, 24], [0, 0]],
        [[9, 18], [13, 26], [10, 20]],
    ]
    assert int(layer.params.size()) == 20
    assert layer.params.name == "user-parameter:0"
    ragged = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2, 3], tf.int64), [2, 0, 1])
    assert layer(ragged).to_list() == [[[1, 2], [2, 4]], [], [[3, 6]]]


@pytest.mark.parametrize("combiner", ["sum", "mean", "min", "max", "prod", "std"])
@pytest.mark.parametrize("shape", [[6], [2, 3], [1, 2, 3]])
def test_squashed(combiner, shape):
    layer = tfra.keras.layers.SquashedEmbedding(2, combiner=combiner)
    fill(layer)
    ids = tf.reshape(IDS, shape)
    vectors = np.stack([ids.numpy(), 2 * ids.numpy()], axis=-1).astype(np.float32)
    axes = tuple(range(1, len(shape))) if len(shape) > 1 else 0
    if combiner == "std" and len(shape) > 2:
        expected = vectors.std(axis=1).std(axis=1)  # one dimension after the other, as in TFRA
    else:
        expected = getattr(np, combiner)(vectors, axis=axes)
    output = layer(ids)
    np.testing.assert_allclose(output, expected, rtol=1e-5)
    assert output.shape == layer.compute_output_shape(ids.shape)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrt_n"])
def test_field_wise(combiner):
    layer = tfra.keras.layers.FieldWiseEmbedding(
        2, 3, slot_map_fn=lambda ids: ids % 3, combiner=combiner
    )
    fill(layer)
    output = layer(IDS).numpy()
    expected = np.zeros([2, 3, 2], np.float32)
    counts = np.zeros([2, 3, 1], np.float32)
    for row, ids in enumerate(IDS.numpy()):
        for i in ids:
            expected[row, i % 3] += [i, 2 * i]
            counts[row, i % 3] += 1
    counts = np.maximum(counts, 1)
    divisor = {"sum": 1, "mean": counts, "sqrt_n": np.sqrt(counts)}[combiner]
    np.testing.assert_allclose(output, expected / divisor, rtol=1e-6)


def test_a_field_out_of_range_is_an_error():
    layer = tfra.keras.layers.FieldWiseEmbedding(2, 3, lambda ids: ids)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"numbers in \[0, 3\)"):
        layer(IDS)
    with pytest.raises(ValueError, match="slot_map_fn must be callable"):
        tfra.keras.layers.FieldWiseEmbedding(2, 3)


def test_a_model_trains_saves_and_loads(tmp_path):
    inputs = keras.Input([3], dtype="int64")
    x = tfra.keras.layers.SquashedEmbedding(4, name="ids", init_capacity=0, bp_v2=True)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    layer = model.get_layer("ids")
    optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.05), synchronous=True)
    model.compile(optimizer, "mse")
    ids, target = np.arange(60).reshape(20, 3) + 2**40, np.linspace(-1, 1, 20)
    fit = model.fit(ids, target, epochs=20, verbose=0)
    assert fit.history["loss"][-1] < fit.history["loss"][0] / 4
    assert int(layer.params.size()) == 60
    expected = model.predict(ids + 1, verbose=0)  # also an id without a row
    assert int(layer.params.size()) == 60

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(ids + 1, verbose=0), expected)
    assert isinstance(loaded.optimizer, tfra.DynamicEmbeddingOptimizer)
    both = [m.fit(ids, target, shuffle=False, verbose=0).history["loss"] for m in (model, loaded)]
    assert both[0] == both[1]


def test_the_config_has_the_policy_by_name():
    layer = tfra.keras.layers.Embedding(
        2, tf.int32, max_norm=1.0, restrict_policy=tfra.FrequencyRestrictPolicy, max_capacity=7
    )
    with pytest.raises(ValueError, match="restrict_policy must be a class or one of Timestamp"):
        tfra.keras.layers.Embedding(2, restrict_policy="timestamp")
    creator = tfra.HkvHashTableCreator(tfra.HkvHashTableConfig(max_capacity=9))
    limited = tfra.keras.layers.Embedding(2, kv_creator=creator, checkpoint=False)
    loaded = tfra.keras.layers.Embedding.from_config(limited.get_config())
    assert loaded.params.options.max_capacity == 9
    assert loaded.params._serialize_to_tensors() == {}
    config = layer.get_config()
    assert config["restrict_policy"] == "FrequencyRestrictPolicy"
    other = tfra.keras.layers.Embedding.from_config(config)
    assert isinstance(other.params.restrict_policy, tfra.FrequencyRestrictPolicy)
    assert other.params.key_dtype == tf.int32
    assert other.params.options.max_capacity == 7
    assert other.get_config() == config


def test_max_norm_clips_before_pooling():
    clipped = tfra.keras.layers.FieldWiseEmbedding(
        2, 1, lambda ids: ids * 0, max_norm=1.0, initializer="zeros"
    )
    clipped.params.upsert([1, 2], [[3.0, 4.0], [0.0, 0.5]])
    np.testing.assert_allclose(clipped(tf.constant([[1, 2]], tf.int64)), [[[0.6, 1.3]]])
    single = tfra.keras.layers.Embedding(2, max_norm=1.0, initializer="zeros")
    single.params.upsert([1], [[3.0, 4.0]])
    np.testing.assert_allclose(single(tf.constant([1], tf.int64)), [[0.6, 0.8]], rtol=1e-6)


def test_string_keys_are_hashed():
    layer = tfra.keras.layers.Embedding(2, key_dtype=tf.string)
    numbers = tf.strings.to_hash_bucket_fast(["a", "b"], 2**63 - 1)
    layer.params.upsert(numbers, [[1.0, 2.0], [3.0, 4.0]])
    assert layer(tf.constant(["b", "a"])).numpy().tolist() == [[3.0, 4.0], [1.0, 2.0]]
    other = tfra.keras.layers.Embedding.from_config(layer.get_config())
    assert other.get_config() == layer.get_config()


def test_16_bit_values():
    layer = tfra.keras.layers.Embedding(2, value_dtype=tf.float16)
    assert layer.params.value_dtype == tf.float16
    assert layer(IDS).dtype == tf.float16
