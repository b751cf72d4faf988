"""A trainer that restarts: what `load` says about the state of the optimizer."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
from dump_helpers import make, step

import tf_dynemb as de

IDS = np.arange(64).reshape(32, 2)
LABELS = np.arange(32.0) % 2


def compiled(optimizer):
    keras.utils.set_random_seed(1)
    table = de.layers.Embedding(4, name="ids")
    layers = [keras.Input((2,), dtype="int64"), table, keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(de.OptimizerWrapper(optimizer), "mse")
    return model


def train(model):
    return model.fit(IDS, LABELS, shuffle=False, verbose=0).history["loss"]


def state_warnings(call, *args, **kwargs):
    """Calls a function; returns its warnings about fresh state."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args, **kwargs)
    return [str(each.message) for each in caught if "fresh state" in str(each.message)]


@pytest.fixture
def path(tmp_path):
    """A dump of a model with Adam's state."""
    model = compiled(keras.optimizers.Adam(0.1))
    train(model)
    de.dump(tmp_path, model, model.optimizer)
    return tmp_path


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: [model]])
def test_a_compiled_model_that_loses_its_state_is_told(path, wrap):
    (message,) = state_warnings(de.load, path, wrap(compiled(keras.optimizers.Adam(0.1))))
    assert "'ids/embeddings'" in message
    assert "optimizer=model.optimizer" in message


def test_tables_that_an_optimizer_trains_are_told(tmp_path):
    table, optimizer = make(), de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
    step(optimizer, [table], [1, 2])
    de.dump(tmp_path, table, optimizer)
    assert len(state_warnings(de.load, tmp_path, table)) == 1


def test_nobody_is_told_who_loses_nothing(path, tmp_path_factory):
    model = compiled(keras.optimizers.Adam(0.1))
    assert not state_warnings(de.load, path, model, model.optimizer)
    assert not state_warnings(de.load, path, compiled(keras.optimizers.SGD(0.1)))  # keeps no state
    assert not state_warnings(de.load, path, {"ids/embeddings": make(dim=4)})
    without = tmp_path_factory.mktemp("without")
    de.dump(without, model)
    assert not state_warnings(de.load, without, compiled(keras.optimizers.Adam(0.1)))
