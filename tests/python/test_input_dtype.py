"""Ids reach the layers with all their bits, or an error says so when the model is built."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

LARGE = 2**33 + 5
IDS = np.array([[1, LARGE, -LARGE], [2**24 + 1, 2**53 + 1, 7]], np.int64)
TARGETS = np.zeros((2, 1), np.float32)
LAYERS = {
    "embedding": lambda **kwargs: de.layers.Embedding(4, **kwargs),
    "pooled": lambda **kwargs: de.layers.Embedding(4, combiner="sum", **kwargs),
    "bag": lambda **kwargs: de.layers.EmbeddingBag(4, **kwargs),
    "multi_table": lambda **kwargs: de.layers.MultiTableEmbedding(4, tables=3, **kwargs),
}


def keys_of(layer):
    tables = layer.tables if hasattr(layer, "tables") else [layer.table]
    return sorted(key for table in tables for key in de.export(table)[0].numpy().tolist())


def sequential(layer, *first):
    return keras.Sequential([*first, layer, keras.layers.Flatten(), keras.layers.Dense(1)])


def train(model, ids=IDS):
    model.compile(de.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
    model.fit(ids, TARGETS, verbose=0)


@pytest.mark.parametrize(
    ("kind", "policy"), [*((kind, "mixed_float16") for kind in LAYERS), ("embedding", "float32")]
)
def test_sequential_without_an_input(kind, policy):
    layer = LAYERS[kind](dtype=policy)
    train(sequential(layer))
    assert keys_of(layer) == sorted(set(IDS.ravel().tolist()))


@pytest.mark.parametrize("declared", [None, "float32", "int32", "int64"])
def test_sequential_with_an_input(declared):
    layer = LAYERS["embedding"]()
    train(sequential(layer, keras.Input((3,), dtype=declared)))
    assert keys_of(layer) == sorted(set(IDS.ravel().tolist()))


def test_sequential_that_is_built_by_its_shape(tmp_path):
    layer = LAYERS["embedding"]()
    model = sequential(layer)
    model.build((None, 3))
    train(model)
    assert keys_of(layer) == sorted(set(IDS.ravel().tolist()))
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    assert keys_of(copy.layers[0]) == keys_of(layer)
    np.testing.assert_array_equal(copy.predict(IDS, verbose=0), model.predict(IDS, verbose=0))


def test_subclassed_model_without_an_input():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = de.layers.Embedding(4, combiner="mean")
            self.head = keras.layers.Dense(1)

        def call(self, ids):
            return self.head(self.layer(ids))

    model = Model()
    train(model)
    assert keys_of(model.layer) == sorted(set(IDS.ravel().tolist()))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("declared", [None, "float32", "float16", "int32", "uint32", "int8"])
def test_input_that_would_cut_ids(kind, declared):
    inputs = keras.Input((3,), dtype=declared, name="users")
    layer = LAYERS[kind](name="rows")
    with pytest.raises(TypeError) as error:
        layer(inputs)
    text = str(error.value)
    assert "layer rows are int64, but keras.Input 'users' casts them" in text
    assert "dtype='int64'" in text
    assert len(text) <= 400
    assert inputs.dtype == (declared or "float32")


@pytest.mark.parametrize("declared", [None, "int32"])
def test_sequential_inside_a_model_with_an_input_that_would_cut_ids(declared):
    tower = sequential(LAYERS["embedding"]())
    with pytest.raises((TypeError, ValueError), match=r"users|found dtype=float32") as error:
        tower(keras.Input((3,), dtype=declared, name="users"))
    assert len(str(error.value)) <= 400


def test_sequential_inside_a_model():
    layer = LAYERS["embedding"]()
    inputs = keras.Input((3,), dtype="int64")
    train(keras.Model(inputs, sequential(layer)(inputs)))
    assert keys_of(layer) == sorted(set(IDS.ravel().tolist()))


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32"])
def test_sequential_takes_data_of_narrower_integers(dtype):
    layer = LAYERS["embedding"]()
    train(sequential(layer), np.array([[1, 2, 3], [4, 5, 6]], dtype))
    assert keys_of(layer) == [1, 2, 3, 4, 5, 6]


def test_sequential_refuses_floats():
    for ids in ([[1.5, 2.0, 3.0]], [[1.0, 2.0, 3.0]]):
        with pytest.raises(ValueError, match="expected dtype=integers, found dtype=float32"):
            sequential(LAYERS["embedding"]())(np.array(ids, np.float32))


def test_input_that_a_dense_layer_shares_stays_float():
    inputs = keras.Input((3,))
    with pytest.raises(TypeError, match="casts them"):
        de.layers.Embedding(4)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
    assert float(model(np.full((1, 3), 0.5))[0, 0]) == 1.5


@pytest.mark.parametrize(("key_type", "declared"), [("int32", "int32"), ("uint64", "uint64")])
def test_input_of_the_key_type(key_type, declared):
    layer = de.layers.Embedding(4, key_type=key_type)
    inputs = keras.Input((3,), dtype=declared)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs))))
    train(model, np.array([[1, 2, 3], [4, 5, 6]], key_type))
    assert keys_of(layer) == [1, 2, 3, 4, 5, 6]


def test_ids_that_other_layers_computed():
    """Only inputs are checked: a layer's int32 output has lost nothing."""
    layer = de.layers.Embedding(4)
    inputs = keras.Input((3,), dtype="int64")
    hashed = keras.layers.Lambda(lambda x: tf.cast(x % 100, tf.int32))(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(layer(hashed))))
    train(model)
    assert keys_of(layer) == sorted(set((IDS % 100).ravel().tolist()))
