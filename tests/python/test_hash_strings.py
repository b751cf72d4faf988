"""Strings as ids: layers with hash_strings=True, and readers of their dumps."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb.serving.string_hash import fingerprint64, ids_of_strings

WORDS = [["user 1", "ünïcode", "user 1"], ["", "x" * 500, "item"]]


def ids_of(strings):
    return tf.strings.to_hash_bucket_fast(tf.constant(strings), 2**63 - 1).numpy()


def test_the_hash_is_as_in_tensorflow():
    draw = random.Random(3)
    texts = [bytes(draw.choices(range(256), k=n)) for n in [*range(300), 1000, 4096]]
    np.testing.assert_array_equal(ids_of_strings(np.array(texts, object)), ids_of(texts))
    # Alone, without other texts around it.
    for text in texts[:130]:
        assert fingerprint64([text])[0] % (2**63 - 1) == ids_of([text])[0]
    assert len(fingerprint64([])) == 0


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag", "MultiTableEmbedding"])
def test_layers_look_up_the_hashes(kind):
    def make(**options):
        if kind == "MultiTableEmbedding":
            layer = de.layers.MultiTableEmbedding(4, 3, seed=1, **options)
            return layer, layer.tables
        layer = getattr(de.layers, kind)(4, seed=1, **options)
        return layer, [layer.table]

    (strings, tables), (numbers, _) = make(hash_strings=True), make()
    output = strings(tf.constant(WORDS), training=True)
    np.testing.assert_array_equal(output, numbers(ids_of(WORDS), training=True))
    assert sum(len(table) for table in tables) == (6 if kind == "MultiTableEmbedding" else 5)
    config = strings.get_config()
    assert config["hash_strings"] is True
    assert type(strings).from_config(config).hash_strings


@pytest.mark.parametrize("form", ["ragged", "sparse"])
def test_ragged_and_sparse_strings(form):
    layer = de.layers.EmbeddingBag(2, "sum", "ones", hash_strings=True)
    ids = tf.ragged.constant([["a", "b"], [], ["a"]])
    if form == "sparse":
        ids = ids.to_sparse()
    assert layer(ids, training=True).numpy().tolist() == [[2, 2], [0, 0], [1, 1]]


def test_a_padding_string_reads_as_zeros_and_masks():
    layer = de.layers.Embedding(2, initializer="ones", hash_strings=True, padding_id="")
    inputs = keras.Input([3], dtype="string")
    model = keras.Model(inputs, layer(inputs))
    output = model(tf.constant(WORDS), training=True).numpy()
    assert output[1, 0].tolist() == [0, 0]
    assert layer.compute_mask(tf.constant(WORDS)).numpy().tolist() == [[1, 1, 1], [0, 1, 1]]
    assert len(layer.table) == 4
    assert layer.get_config()["padding_id"] == ""


def test_a_model_of_strings_trains_saves_and_is_served(tmp_path):
    inputs = keras.Input([3], dtype="string")
    vectors = de.layers.Embedding(4, hash_strings=True, combiner="mean", name="words")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(vectors))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adagrad(0.5)), "mse")
    words, target = tf.constant(WORDS), tf.constant([1.0, -1.0])
    losses = model.fit(words, target, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 10
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(words), model(words))

    table = model.get_layer("words").table
    first = de.dump(tmp_path / "chain", model)
    reader = de.serving.Reader(tmp_path / "chain")
    expected = table.lookup(ids_of(WORDS), insert=False).numpy()
    arrays = (WORDS, np.array(WORDS), np.char.encode(WORDS, "utf-8"), np.array(WORDS, object))
    for keys in (*arrays, ids_of(WORDS)):
        np.testing.assert_array_equal(reader.lookup(keys), expected)
    assert reader.contains(["item", "other"]).tolist() == [True, False]
    new = model.get_layer("words")
    new(tf.constant([["new", "new", "new"]]), training=True)
    de.incremental_dump(tmp_path / "chain", model, since=first)
    assert reader.follow() == 1
    assert reader.contains("new")


def test_strings_where_none_are_expected(tmp_path):
    layer, plain = de.layers.Embedding(2, hash_strings=True), de.layers.Embedding(2)
    with pytest.raises(TypeError, match=r"got ids as int64.*this one is for strings"):
        layer(tf.constant([1], tf.int64))
    with pytest.raises(TypeError, match=r"got ids as string.*this one is for integers"):
        plain(tf.constant(["a"]))
    with pytest.raises(TypeError, match="Declare dtype='string' there"):
        layer(keras.Input([3], dtype="int64"))
    with pytest.raises(TypeError, match="needs hash_strings=True"):
        plain(keras.Input([3], dtype="string"))
    with pytest.raises(ValueError, match="keys of 64 bits"):
        de.layers.Embedding(2, hash_strings=True, key_type="int32")
    with pytest.raises(TypeError, match="padding_id must be an integer or None, or a string with"):
        de.layers.Embedding(2, padding_id="")
    with pytest.raises(TypeError, match=r"padding_id must be a string .*, got 0"):
        de.layers.EmbeddingBag(2, hash_strings=True, padding_id=0)
    with pytest.raises(ValueError, match="mask_zero=True is for integers"):
        de.layers.Embedding(2, hash_strings=True, mask_zero=True)
    plain(tf.constant([1], tf.int64), training=True)
    de.dump(tmp_path, plain.table)
    with pytest.raises(TypeError, match="must be integers"):
        de.serving.Reader(tmp_path).lookup(["a"])
