"""Models with dense weights that follow, and what the tests of them share."""

import keras
import numpy as np
import tensorflow as tf

import tf_dynemb as de


def dense_model(width=8, hidden="hidden", layers=1, table="table"):
    ids = keras.Input((1,), dtype="int64", name="ids")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name=table)(ids))
    for number in range(layers):
        vectors = keras.layers.Dense(width, "tanh", name=f"{hidden}{number or ''}")(vectors)
    return keras.Model(ids, keras.layers.Dense(1, name="out")(vectors))


IDS = np.arange(7)[:, None]


def change(model, seed=1):
    """Gives a model other rows and other weights."""
    rng = np.random.default_rng(seed)
    for table in de.named_tables(model).values():
        table.upsert(np.arange(9), rng.normal(size=[9, table.dimension]))
    for weight in de.filter_variables(model.weights)[1]:
        weight.assign(rng.uniform(0.5, 1.5, weight.shape).astype(weight.dtype))


def same(served, model, ids=IDS):
    """Whether two models give the same bits."""
    found, expected = served(tf.constant(ids)).numpy(), model.predict_on_batch(ids)
    return found.tobytes() == expected.tobytes()


def export(model, folder, **options):
    """Exports a model over a new chain; returns the loaded model and the chain."""
    de.dump(folder / "chain", options.pop("dumped", model))
    de.export_saved_model(model, folder / "model", "link", folder / "chain", **options)
    return tf.saved_model.load(folder / "model"), folder / "chain"


def apply(loaded, path):
    return int(loaded.apply_delta(tf.constant(str(path)))["applied"])
