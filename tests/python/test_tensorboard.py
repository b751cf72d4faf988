"""keras.callbacks.TensorBoard in models with tables."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

IDS, TARGETS = np.arange(60).reshape(20, 3), np.arange(20) % 2


class Bare(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="bare")
        self.table = de.DynamicVariable(4, name="rows")

    def call(self, ids):
        return tf.nn.embedding_lookup(self.table, ids)


def make(layer, dtype="int64"):
    layers = [keras.Input([3], dtype=dtype), layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam()), "mse")
    return model


class Summaries:
    """Takes the place of the package tensorboard, which need not be installed."""

    def __init__(self, callback):
        self.histograms, self.images = {}, {}
        self._as_array = lambda data: tf.cast(tf.convert_to_tensor(data), tf.float64).numpy()
        callback._summary_module = types.SimpleNamespace(
            create_file_writer=tf.summary.create_file_writer,
            record_if=tf.summary.record_if,
            scalar=lambda *args, **kwargs: None,
            graph=lambda *args, **kwargs: None,
            histogram=lambda name, data, step: self.histograms.update({name: self._as_array(data)}),
            image=lambda name, data, step: self.images.update({name: np.shape(data)}),
        )


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: de.layers.Embedding(4, name="ids"), "ids/embeddings"),
        (lambda: de.layers.Embedding(4, name="ids", dtype="mixed_float16"), "ids/embeddings"),
        (lambda: de.layers.Embedding(4, name="ids", dtype="bfloat16"), "ids/embeddings"),
        (lambda: de.layers.MultiTableEmbedding(4, tables=3, name="ids"), "ids/table_1"),
        (Bare, "bare/rows"),
    ],
)
def test_histograms_and_images(tmp_path, layer, name):
    model = make(layer())
    callback = keras.callbacks.TensorBoard(
        tmp_path, histogram_freq=1, write_images=True, update_freq=1, write_graph=True
    )
    summaries = Summaries(callback)
    model.fit(IDS, TARGETS, epochs=2, verbose=0, callbacks=[callback])
    (path,) = (path for path in summaries.histograms if name in path)
    held = {
        weight.path: np.asarray(tf.cast(de.export(weight.value)[1], tf.float64))
        for weight in model.layers[0].weights
    }
    (vectors,) = (vectors for path, vectors in held.items() if name in path)
    np.testing.assert_array_equal(np.sort(summaries.histograms[path], 0), np.sort(vectors, 0))
    assert any(name in path for path in summaries.images)


def test_a_sample_of_a_large_table_and_an_empty_table(tmp_path, monkeypatch):
    monkeypatch.setattr("tf_dynemb.variables.dynamic._SAMPLE", 10)
    layer = de.layers.Embedding(4)
    model = make(layer)
    callback = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1, write_images=True)
    summaries = Summaries(callback)
    callback.set_model(model)
    seen = []
    for ids in (IDS[:0], IDS):
        layer(tf.constant(ids), training=True)
        callback._log_weights(0)
        (name,) = (name for name in summaries.histograms if "embeddings" in name)
        seen.append(summaries.histograms[name])
    assert seen[0].tolist() == [[0.0] * 4]
    assert seen[1].shape == (10, 4)
    assert {tuple(row) for row in seen[1]} <= {
        tuple(row) for row in tf.cast(de.export(layer)[1], tf.float64).numpy()
    }
    assert len(layer.table) == 60
    with pytest.raises(NotImplementedError):  # elsewhere, a table is no tensor
        tf.convert_to_tensor(layer.weights[0])


def test_with_the_package(tmp_path):
    pytest.importorskip("tensorboard")
    callback = keras.callbacks.TensorBoard(
        tmp_path, histogram_freq=1, write_images=True, embeddings_freq=1, update_freq=1
    )
    model = make(de.layers.Embedding(4, name="ids"))
    model.fit(IDS, TARGETS, epochs=2, verbose=0, callbacks=[callback])
    tags = {
        value.tag
        for file in tmp_path.rglob("events*")
        for record in tf.compat.v1.train.summary_iterator(str(file))
        for value in record.summary.value
    }
    assert any("ids/embeddings/histogram" in tag for tag in tags)
