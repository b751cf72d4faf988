"""Functions that take tables also take Keras variables, layers and models of tables."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

IDS = np.array([[1, 2], [3, 1]])


def two_tables():
    first = de.layers.Embedding(2, name="first")
    second = de.layers.EmbeddingBag(3, name="second")
    inputs = keras.Input((2,), dtype="int64")
    features = [keras.layers.Flatten()(first(inputs)), second(inputs)]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(features)))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    model.fit(IDS, np.ones((2, 1)), verbose=0)
    return model, first, second


def rows_of(table):
    keys, vectors = (tensor.numpy() for tensor in de.export(table))
    return dict(zip(keys.tolist(), vectors.tolist(), strict=True))


def test_dump_and_load_of_a_model(tmp_path):
    model, first, second = two_tables()
    watermark = de.dump(tmp_path, model, model.optimizer)
    assert set(de.serving.Reader(tmp_path).tables) == {"first/embeddings", "second/embeddings"}
    model.fit(IDS + 10, np.ones((2, 1)), verbose=0)
    de.incremental_dump(tmp_path, model, since=watermark)
    copy, first_copy, second_copy = two_tables()
    de.load(tmp_path, copy)
    assert rows_of(first_copy) == rows_of(first.table)
    assert rows_of(second_copy) == rows_of(second.table)


def test_dump_of_a_layer_and_of_its_weight(tmp_path):
    _, first, second = two_tables()
    de.dump(tmp_path / "layer", first)
    de.dump(tmp_path / "weight", first.weights[0])
    de.dump(tmp_path / "list", [first, second.table])
    de.dump(tmp_path / "dict", {"users": first, "items": second.weights[0]})
    keys = np.array([1, 2, 3])
    for name, table in [
        ("layer", None),
        ("weight", None),
        ("list", "first/embeddings"),
        ("dict", "users"),
    ]:
        reader = de.serving.Reader(tmp_path / name)
        np.testing.assert_array_equal(reader.lookup(keys, table), first.table.lookup(keys))


def test_export_and_assign_of_a_layer():
    _, first, _ = two_tables()
    assert rows_of(first) == rows_of(first.weights[0]) == rows_of(first.table)
    de.assign(first, [50], [[1.0, 2.0]])
    assert rows_of(first)[50] == [1.0, 2.0]


def test_layers_without_or_with_too_many_tables(tmp_path):
    model, _, _ = two_tables()
    with pytest.raises(ValueError, match="has several tables: 'first/embeddings', 'second/"):
        de.export(model)
    with pytest.raises(ValueError, match="has 2 tables; a name is for one"):
        de.dump(tmp_path, {"users": model})
    dense = keras.layers.Dense(1, name="dense")
    dense.build((None, 2))
    for call in (lambda: de.dump(tmp_path, dense), lambda: de.export(dense)):
        with pytest.raises(ValueError, match="dense has no tables among its weights"):
            call()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="var must be a DynamicVariable"):
        de.export(dense.kernel)


@pytest.mark.parametrize("graph", [False, True])
def test_return_exists(graph):
    table = de.DynamicVariable(2, "ones")
    table.lookup([1])
    look_up = tf.function(table.lookup) if graph else table.lookup
    ids = tf.constant([[1, 2], [2, 3]], tf.int64)
    for insert, expected in [
        (False, [[True, False], [False, False]]),
        (True, [[True, False], [False, False]]),
        (True, [[True, True], [True, True]]),
    ]:
        vectors, exists = look_up(ids, insert=insert, return_exists=True)
        assert exists.numpy().tolist() == expected
        assert vectors.numpy().tolist() == np.ones((2, 2, 2)).tolist()
    vectors, exists = look_up(ids + 10, insert=False, default_value=[5.0, 6.0], return_exists=True)
    assert not exists.numpy().any()
    assert vectors.numpy().tolist() == [[[5, 6]] * 2] * 2


def test_every_number_of_stats_is_documented():
    table = de.DynamicVariable(2)
    for name in table.stats():
        assert f"`{name}`" in de.DynamicVariable.stats.__doc__, name


def test_stats_count_ids():
    table = de.DynamicVariable(2, max_capacity=100)
    table.lookup([1, 1, 2])
    table.lookup([1, 3, 3], insert=False)
    table.erase([2, 9])
    stats = table.stats()
    assert (stats["misses"], stats["hits"], stats["inserts"], stats["erased"]) == (5, 1, 2, 1)
    assert stats["size"] == 1
