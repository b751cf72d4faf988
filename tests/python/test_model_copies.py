"""Copies of compiled models: clone_model, pickle, deepcopy, also after files were written."""

import copy
import pickle

import keras
import numpy as np
import pytest

import tf_dynemb as de

IDS, TARGETS = np.arange(60).reshape(20, 3), np.arange(20) % 2


def layers():
    return [de.layers.Embedding(4), keras.layers.Flatten(), keras.layers.Dense(1)]


def functional():
    inputs = outputs = keras.Input([3], dtype="int64")
    for layer in layers():
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


MODELS = {
    "built by data": lambda: keras.Sequential(layers()),
    "sequential": lambda: keras.Sequential([keras.Input([3], dtype="int64"), *layers()]),
    "functional": functional,
}
COPIES = {
    "clone_model": keras.models.clone_model,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("file", [None, "model.h5", "model.keras"])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_copy_trains(tmp_path, kind, how, file):
    model = MODELS[kind]()
    optimizer = keras.optimizers.Adam(0.125)
    model.compile(de.OptimizerWrapper(optimizer, catch_up=True), keras.losses.MeanSquaredError())
    model.fit(IDS, TARGETS, verbose=0)
    if file is not None:
        model.save(tmp_path / file)
        model.save(tmp_path / file)
        loaded = keras.models.load_model(tmp_path / file)
        np.testing.assert_array_equal(loaded.predict(IDS), model.predict(IDS))
        assert isinstance(loaded.optimizer, de.OptimizerWrapper)
    other = COPIES[how](model)
    assert isinstance(other.optimizer, de.OptimizerWrapper)
    assert other.optimizer.catch_up
    assert float(other.optimizer.core.learning_rate) == 0.125
    assert type(other.loss) is type(model.loss)
    if how == "clone_model":
        other.set_weights(model.get_weights())
    np.testing.assert_array_equal(other.predict(IDS), model.predict(IDS))
    before = len(model.layers[-3].table)
    other.fit(IDS + 100, TARGETS, verbose=0)
    assert len(other.layers[-3].table) == 120
    assert len(model.layers[-3].table) == before  # separate tables
    model.fit(IDS, TARGETS, verbose=0)
