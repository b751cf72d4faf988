"""Models that Keras builds by data are exported with the inputs that they were called with."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb.variables.unwrap import tables_of

BIG = [2**24 + 1, 2**53 + 1, -7, 2**62]
IDS = np.array([[each, 5] for each in BIG])


def trained(model, *inputs, **kwargs):
    """Gives each table of a model rows that tell the ids apart, and returns its answer."""
    model(*inputs, training=True, **kwargs)
    for table in tables_of(model):
        keys = de.export(table)[0]
        table.upsert(keys, np.random.default_rng(1).normal(size=[len(keys), table.dimension]))
    return model(*inputs, training=False, **kwargs)


def export(how, model, path, **kwargs):
    if how == "keras":
        model.export(path, verbose=False, **kwargs)
    else:
        de.export_saved_model(model, path, **kwargs)
    loaded = tf.saved_model.load(path)
    loaded.serve.model = loaded  # a function alone does not keep its variables
    return loaded


def specs_of(loaded):
    return loaded.signatures["serving_default"].structured_input_signature[1]


def assert_same(answer, expected):
    # Dense layers round batches of another size in another way.
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), answer, expected
    )


class Subclassed(keras.Model):
    def __init__(self, layer=None):
        super().__init__()
        self.ids = layer or de.layers.Embedding(4)
        self.head = keras.layers.Dense(1)

    def call(self, inputs):
        vectors = self.ids(inputs)
        return self.head(tf.reduce_sum(vectors, 1) if len(vectors.shape) > 2 else vectors)


class Bare(keras.layers.Layer):
    """A layer of a user, with a table as its attribute."""

    def __init__(self):
        super().__init__()
        self.table = de.DynamicVariable(4)

    def call(self, ids):
        return de.lookup_sparse(self.table, ids, combiners="sum")


class TwoTowers(keras.Model):
    """Models inside a model, with two arguments."""

    def __init__(self):
        super().__init__()
        self.user = Subclassed()
        self.item = keras.Sequential([de.layers.Embedding(4), keras.layers.Flatten()])
        self.head = keras.layers.Dense(1)

    def call(self, users, items, training=None):
        return {"score": self.head(self.item(items)) + self.user(users)}


class Weighted(keras.Model):
    """Dense features, and an argument that is passed by its name after one that is not."""

    def __init__(self):
        super().__init__()
        self.bag = de.layers.EmbeddingBag(4)

    def call(self, inputs, scale=2.0, weights=None):
        return self.bag(inputs["ids"], weights) * scale + inputs["dense"]


def sequential(layer):
    return keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])


MODELS = {
    "subclassed": Subclassed,
    "bare": lambda: Subclassed(Bare()),
    "sequential": lambda: sequential(de.layers.Embedding(4)),
    "multi_table": lambda: sequential(de.layers.MultiTableEmbedding(4, tables=2)),
}


@pytest.mark.parametrize("how", ["keras", "ours"])
@pytest.mark.parametrize("kind", MODELS)
def test_large_ids(tmp_path, kind, how):
    model = MODELS[kind]()
    answer = trained(model, IDS)
    loaded = export(how, model, tmp_path / "model")
    (spec,) = specs_of(loaded).values()
    assert (spec.dtype, spec.shape.as_list()) == (tf.int64, [None, 2])
    assert_same(loaded.serve(tf.constant(IDS)), answer)
    assert_same(loaded.serve(tf.constant(IDS[:1])), answer[:1])
    with pytest.raises((TypeError, ValueError)):  # nothing casts them in silence
        loaded.serve(tf.constant(IDS, tf.float32))


@pytest.mark.parametrize("how", ["keras", "ours"])
def test_after_fit(tmp_path, how):
    model = Subclassed()
    model.compile(de.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
    model.fit(IDS, np.arange(1, 5.0)[:, None], epochs=3, verbose=0)
    answer = model.predict(IDS, verbose=0)
    loaded = export(how, model, tmp_path / "model")
    assert_same(loaded.serve(tf.constant(IDS)), answer)
    assert list(specs_of(loaded)) == ["inputs"]


@pytest.mark.parametrize("how", ["keras", "ours"])
def test_strings(tmp_path, how):
    words = tf.constant([["a", "b"], ["", "ü"]])
    for i, make in enumerate((Subclassed, sequential)):
        model = make(de.layers.Embedding(4, hash_strings=True))
        answer = trained(model, words)
        assert_same(export(how, model, tmp_path / str(i)).serve(words), answer)


@pytest.mark.parametrize("how", ["keras", "ours"])
@pytest.mark.parametrize("layer", [de.layers.EmbeddingBag, Bare])
def test_sparse_and_ragged_ids(tmp_path, layer, how):
    ragged = tf.RaggedTensor.from_row_splits(tf.constant(BIG, tf.int64), [0, 3, 3, 4])
    for i, ids in enumerate((ragged, ragged.to_sparse())):
        model = Subclassed(layer(4) if layer is not Bare else Bare())
        answer = trained(model, ids)
        assert_same(export(how, model, tmp_path / str(i)).serve(ids), answer)


@pytest.mark.parametrize("how", ["keras", "ours"])
def test_several_inputs(tmp_path, how):
    users, items = tf.constant(IDS), tf.constant(IDS[:, :1] + 1)
    model = TwoTowers()
    answer = trained(model, users, items)
    loaded = export(how, model, tmp_path / "model")
    assert_same(loaded.serve(users, items), answer)
    assert set(specs_of(loaded)) == {"users", "items"}
    assert_same(loaded.signatures["serving_default"](users=users, items=items), answer)
    # The models inside are separate models.
    for name, ids in (("user", users), ("item", items)):
        tower = getattr(model, name)
        inner = export(how, tower, tmp_path / name)
        assert_same(inner.serve(ids), tower(ids))


@pytest.mark.parametrize("how", ["keras", "ours"])
def test_a_dict_and_an_argument_by_name(tmp_path, how):
    rng = np.random.default_rng(0)
    inputs = {"ids": IDS, "dense": rng.normal(size=[4, 1]).astype(np.float32)}
    weights = rng.uniform(size=[4, 2]).astype(np.float32)
    model = Weighted()
    answer = trained(model, inputs, weights=weights)
    loaded = export(how, model, tmp_path / "model")
    tensors = {name: tf.constant(value) for name, value in inputs.items()}
    assert_same(loaded.serve(tensors, weights=tf.constant(weights)), answer)
    specs = specs_of(loaded)
    assert set(specs) == {"ids", "dense", "weights"}
    assert (specs["ids"].dtype, specs["dense"].dtype) == (tf.int64, tf.float32)


@pytest.mark.parametrize("how", ["keras", "ours"])
def test_a_dict_of_features(tmp_path, how):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = de.layers.MultiTableEmbedding(4, 2, {"user": 0, "item": 1})

        def call(self, inputs):
            return self.layer(inputs)

    inputs = {"user": tf.constant(IDS), "item": tf.constant(IDS[:, :1])}
    model = Model()
    answer = trained(model, inputs)
    loaded = export(how, model, tmp_path / "model")
    assert_same(loaded.serve(inputs), answer)
    assert_same(loaded.signatures["serving_default"](**inputs), answer)


def test_lengths_that_differ_are_free_and_ids_have_the_wider_dtype(tmp_path):
    model = Subclassed()
    trained(model, np.int32(IDS % 100))
    answer = trained(model, np.hstack([IDS, IDS[::-1]]))
    model(np.int32(IDS % 100))
    (spec,) = specs_of(export("keras", model, tmp_path / "model")).values()
    assert (spec.dtype, spec.shape.as_list()) == (tf.int64, [None, None])
    loaded = tf.saved_model.load(tmp_path / "model")
    assert_same(loaded.serve(tf.constant(np.hstack([IDS, IDS[::-1]]))), answer)


@pytest.mark.parametrize("as_array", [np.asarray, tf.constant])
@pytest.mark.parametrize(
    ("second", "dtype", "length"),
    [
        (np.int32(IDS % 100), tf.int32, 2),
        (IDS, tf.int64, 2),
        (np.int32([[1], [2]]), tf.int32, None),
    ],
)
def test_two_calls(tmp_path, as_array, second, dtype, length):
    """A call is noted if it differs from the last one in its shape alone, or its dtype alone."""
    model = Subclassed()
    for ids in (np.int32(IDS % 100), second):
        model(as_array(ids))
    (spec,) = specs_of(export("keras", model, tmp_path / "model")).values()
    assert (spec.dtype, spec.shape.as_list()) == (dtype, [None, length])


def test_ids_that_were_only_ever_floats(tmp_path):
    model = Subclassed()
    small = np.array([[1.0, 2.0], [3.0, 2.0**24 - 1]])
    answer = trained(model, small)
    with pytest.warns(UserWarning, match="with ids as floats only"):
        loaded = export("keras", model, tmp_path / "floats")
    assert_same(loaded.serve(tf.constant(small, tf.float32)), answer)
    model(small.astype(np.int64))
    model(small)
    (spec,) = specs_of(export("keras", model, tmp_path / "integers")).values()
    assert spec.dtype == tf.int64


@keras.saving.register_keras_serializable("test_model_inputs")
class Saved(Subclassed):
    def get_config(self):
        return {}

    @classmethod
    def from_config(cls, config):
        return cls()


def test_a_model_that_was_loaded(tmp_path):
    model = Saved()
    answer = trained(model, IDS)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="has not been called since it was created or loaded"):
        de.export_saved_model(copy, tmp_path / "a")
    with pytest.raises(ValueError, match="never called"):
        copy.export(tmp_path / "a", verbose=False)
    spec = [tf.TensorSpec([None, 2], tf.int64)]
    assert_same(export("ours", copy, tmp_path / "b", input_signature=spec).serve(IDS), answer)
    copy(IDS)
    assert_same(export("keras", copy, tmp_path / "c").serve(IDS), answer)


def test_outputs_by_their_names(tmp_path):
    inputs = keras.Input([2], dtype="int64", name="ids")
    flat = keras.layers.Flatten()(de.layers.Embedding(4)(inputs))
    outputs = [keras.layers.Dense(1, name=name)(flat) for name in ("click", "buy")]
    model = keras.Model(inputs, outputs)
    answer = trained(model, IDS)
    loaded = export("ours", model, tmp_path / "list")
    named = loaded.signatures["serving_default"](ids=tf.constant(IDS))
    assert_same(named, dict(zip(("click", "buy"), answer, strict=True)))
    assert_same(loaded.serve(tf.constant(IDS)), answer)
    model = keras.Model(inputs, dict(zip("ab", outputs, strict=True)))
    loaded = export("ours", model, tmp_path / "dict")
    named = loaded.signatures["serving_default"](ids=tf.constant(IDS))
    assert_same(named, dict(zip("ab", answer, strict=True)))


def test_an_export_of_the_users_own_is_called(tmp_path):
    class Model(Subclassed):
        def export(self, *args, **kwargs):
            return "own"

    model = Model()
    trained(model, IDS)
    assert model.export(tmp_path / "model") == "own"


@pytest.mark.parametrize("ids", [IDS, IDS.astype(str)])
def test_the_default_signature_of_tensorflow(tmp_path, ids):
    model = Subclassed(de.layers.Embedding(4, hash_strings=ids.dtype != np.int64))
    answer = trained(model, tf.constant(ids))
    tf.saved_model.save(model, tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")
    served = loaded.signatures["serving_default"](inputs=tf.constant(ids))
    assert_same(served, {"output_0": answer})
    tf.train.Checkpoint(model).save(tmp_path / "checkpoint")


def test_calls_in_functions_of_the_user(tmp_path):
    model = Subclassed()
    step = tf.function(lambda ids: model(ids, training=True))
    step(tf.constant(IDS))
    assert_same(export("keras", model, tmp_path / "model").serve(IDS), model(IDS))
