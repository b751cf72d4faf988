"""Exported layers: which weights, states and constants follow the snapshots, and which stay."""

import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from served_weights_helpers import IDS, apply, change, export, same

import tf_dynemb as de


class Reading(keras.layers.Layer):
    """A layer that reads its weight in a tf.function."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    @tf.function
    def scaled(self, inputs):
        return inputs * self.scale

    def call(self, inputs):
        return self.scaled(inputs)


class Foreign(keras.layers.Layer):
    """A layer with a variable that Keras does not know."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = tf.Variable(2.0, name="foreign")

    def call(self, inputs):
        return inputs * self.inner


class Counting(keras.layers.Layer):
    """A layer that counts its calls in a weight."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs + self.calls


REASONS = {
    Reading: "weight 'reads/scale' is read by a tf.function inside a layer",
    Foreign: "weight 'foreign:0' is not a keras.Variable",
    Counting: "a call of the model changes the weight 'reads/calls'",
}


@pytest.mark.parametrize("layer", REASONS, ids=lambda layer: layer.__name__)
def test_layers_whose_weights_cannot_follow(tmp_path, layer):
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))
    model = keras.Model(ids, keras.layers.Dense(2, name="out")(layer(name="reads")(vectors)))
    model(IDS)  # traces what is a tf.function
    with pytest.warns(UserWarning, match=REASONS[layer]):
        loaded, chain = export(model, tmp_path)
    before = loaded.serve(tf.constant(IDS)).numpy()
    assert json.loads((tmp_path / "model/assets/tf_dynemb.json").read_text()).get("dense") is None
    model.get_layer("out").kernel.assign(model.get_layer("out").kernel * 2)
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    if layer is not Counting:
        assert np.array_equal(loaded.serve(tf.constant(IDS)).numpy(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        de.export_saved_model(model, tmp_path / "again", dense=None)


@pytest.mark.parametrize("is_functional", [True, False])
def test_a_function_of_a_layer_that_was_traced_for_another_shape(tmp_path, is_functional):
    """It would be traced in the export, with tensors of its graph, and then fail in training."""
    ids = keras.Input((1,), dtype="int64")
    embedding, reads = de.layers.Embedding(4, combiner="sum", name="table"), Reading(name="reads")
    heads = [keras.layers.Dense(2, name=name) for name in ("one", "two")]

    def call(ids):
        vectors = reads(embedding(ids))
        return [head(vectors) for head in heads]

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [embedding, reads, *heads]

        def call(self, ids):
            return call(ids)

    model = keras.Model(ids, call(ids)) if is_functional else Subclassed()
    model(IDS)
    for _ in range(2):
        with pytest.warns(UserWarning, match=REASONS[Reading]):
            de.export_saved_model(model, tmp_path / "model")
    model.compile(de.OptimizerWrapper("adam"), ["mse", "mse"])
    labels = np.zeros([7, 2], np.float32)
    model.fit(IDS, [labels, labels], verbose=0)
    loaded = tf.saved_model.load(tmp_path / "model")
    assert len(loaded.serve(tf.constant(IDS))) == 2
    assert len(model(IDS[:3])) == 2


@pytest.mark.parametrize("kind", [keras.layers.GRU, keras.layers.LSTM])
def test_states_go_on(tmp_path, kind):
    ids = keras.Input((3,), batch_size=2, dtype="int64")
    vectors = de.layers.Embedding(4, name="table")(ids)
    model = keras.Model(ids, kind(3, stateful=True, name="states")(vectors))
    loaded, chain = export(model, tmp_path)
    inputs = np.arange(6).reshape(2, 3)
    assert all(same(loaded.serve, model, inputs) for _ in range(3))
    change(model)
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    assert all(same(loaded.serve, model, inputs) for _ in range(3))


class Late(keras.Model):
    """A model with a layer that training does not use."""

    def __init__(self):
        super().__init__()
        self.table = de.layers.Embedding(4, combiner="sum", name="table")
        self.out, self.calibrated = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, ids, training=False):
        score = self.out(self.table(ids))
        return score if training else self.calibrated(score)


def test_weights_that_the_export_makes(tmp_path):
    model = Late()
    model(IDS, training=True)
    with pytest.warns(UserWarning, match="was made by the export itself: call the model once"):
        de.export_saved_model(model, tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")
    assert same(loaded.serve, model)


def test_constants_that_layers_compute(tmp_path):
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))
    normalization = keras.layers.Normalization(name="norm")
    rng = np.random.default_rng(1)
    normalization.adapt(rng.normal(size=[50, 4]))
    model = keras.Model(ids, normalization(vectors))
    loaded, chain = export(model, tmp_path)
    assert same(loaded.serve, model)
    normalization.adapt(rng.normal(3, 2, size=[50, 4]))
    model.make_predict_function(force=True)
    assert not same(loaded.serve, model)
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    assert same(loaded.serve, model)


class Scaled(keras.layers.Layer):
    """A layer that computes a constant from its weight."""

    def build(self, shape):
        self.most = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)
        self.finalize_state()

    def finalize_state(self):
        self.factor = tf.convert_to_tensor(1 / self.most)

    def call(self, inputs):
        return inputs * self.factor


def test_constants_of_other_layers(tmp_path):
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))
    scaled = Scaled(name="scaled")
    model = keras.Model(ids, scaled(vectors))
    loaded, chain = export(model, tmp_path)
    scaled.most.assign([1.0, 2.0, 3.0, 4.0])
    scaled.finalize_state()
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    assert same(loaded.serve, model)


class Noise(keras.layers.Layer):
    """A layer that is random when it is not trained, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seeds)


def test_random_seeds_go_on(tmp_path):
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))
    model = keras.Model(ids, Noise()(keras.layers.Dense(2)(vectors)))
    loaded, _ = export(model, tmp_path)
    answers = [loaded.serve(tf.constant(IDS)).numpy().tobytes() for _ in range(3)]
    assert len(set(answers)) == 3
