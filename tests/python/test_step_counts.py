"""Files: the state of rows and the step count of their optimizer belong together."""

from __future__ import annotations

import warnings

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from row_memory import host_memory

import tf_dynemb as de

K = keras.optimizers
IDS = np.array([[1], [2]])


class Factorization(keras.Model):
    """A model whose trainable variables are tables only."""

    def __init__(self):
        super().__init__()
        self.users = de.layers.Embedding(4, name="users")
        self.items = de.layers.Embedding(4, name="items")

    def call(self, ids):
        return keras.ops.sum(self.users(ids) * self.items(ids), axis=-1)


def make(optimizer):
    keras.utils.set_random_seed(1)
    model = Factorization()
    model.compile(de.OptimizerWrapper(optimizer), "mse")
    model(IDS)
    return model


def train(model, steps):
    for _ in range(steps):
        model.train_on_batch(IDS, np.array([[1.0], [-1.0]]))


def rows(model):
    return [model.users.table.peek([1, 2]).numpy(), model.items.table.peek([1, 2]).numpy()]


def fresh_copy(model, optimizer):
    """A model with the same vectors, and an optimizer that has not stepped."""
    copy = make(optimizer)
    for name in ("users", "items"):
        keys, vectors = de.export(getattr(model, name).table)
        de.assign(getattr(copy, name).table, keys, vectors)
    return copy


OPTIMIZERS = {
    "adam": lambda: K.Adam(0.01),
    "generic": lambda: K.Nadam(0.01),
    "multi": lambda: K.MultiOptimizer(K.OptimizerMap(K.Adam(0.02), {"users/.*": K.Adam(0.01)})),
}


def trained_and_saved(optimizer, steps, folder):
    """Returns a trained model, whose weights are in `x.weights.h5`."""
    model = make(optimizer)
    train(model, steps)
    model.save_weights(folder / "x.weights.h5")
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_is_not_built_starts_afresh_with_its_rows(tmp_path, name):
    trained = trained_and_saved(OPTIMIZERS[name](), 50, tmp_path)
    model = make(OPTIMIZERS[name]())
    with pytest.warns(UserWarning, match="is not built. To load both, call optimizer.build"):
        model.load_weights(tmp_path / "x.weights.h5")
    assert int(model.optimizer.iterations) == 0
    expected = fresh_copy(trained, OPTIMIZERS[name]())
    for each in (model, expected):
        train(each, 3)
    np.testing.assert_allclose(rows(model), rows(expected), rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_built_optimizer_continues(tmp_path, name):
    trained = trained_and_saved(OPTIMIZERS[name](), 50, tmp_path)
    model = make(OPTIMIZERS[name]())
    model.optimizer.build(model.trainable_variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_weights(tmp_path / "x.weights.h5")
    assert int(model.optimizer.iterations) == 50
    for each in (model, trained):
        train(each, 3)
    np.testing.assert_array_equal(rows(model), rows(trained))


@pytest.mark.parametrize("former", [lambda: K.SGD(0.01), lambda: K.SGD(0.01, momentum=0.9)])
def test_the_step_count_of_another_optimizer_is_not_taken_over(tmp_path, former):
    trained = trained_and_saved(former(), 50, tmp_path)
    model = make(K.Adam(0.01))
    model.optimizer.build(model.trainable_variables)
    with pytest.warns(UserWarning, match=r"This optimizer keeps \[\['adam', "):
        model.load_weights(tmp_path / "x.weights.h5")
    assert int(model.optimizer.iterations) == 0
    expected = fresh_copy(trained, K.Adam(0.01))
    for each in (model, expected):
        train(each, 3)
    np.testing.assert_allclose(rows(model), rows(expected), rtol=1e-5)


def test_an_optimizer_without_state_needs_no_build(tmp_path):
    trained_and_saved(K.SGD(0.01), 5, tmp_path)
    model = make(K.SGD(0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_weights(tmp_path / "x.weights.h5")
    assert int(model.optimizer.iterations) == 5


def test_variables_are_saved_once(tmp_path):
    model = trained_and_saved(K.LossScaleOptimizer(K.Adam(0.01)), 2, tmp_path)
    with h5py.File(tmp_path / "x.weights.h5") as file:
        assert list(file["optimizer"]) == ["vars"]
        assert len(file["optimizer/vars"]) == len(model.optimizer.variables) + 1


def test_files_of_before_have_the_variables_of_the_wrapped_optimizer_too(tmp_path):
    model = trained_and_saved(K.Adam(0.01), 5, tmp_path)
    path = tmp_path / "x.weights.h5"
    with h5py.File(path, "r+") as file:
        del file["optimizer/vars/states"]
        file.copy("optimizer/vars", "optimizer/core/vars")
    other = make(K.Adam(0.01))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(path)
    assert int(other.optimizer.iterations) == 5
    for each in (model, other):
        train(each, 2)
    np.testing.assert_array_equal(rows(other), rows(model))


def stepped(table, optimizer, steps=1):
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    return table.peek([1]).numpy()


@pytest.mark.parametrize("make_optimizer", [K.Adam, K.Adamax, K.Nadam])
@pytest.mark.parametrize("remedy", [None, "checkpoint", "assign"])
def test_restored_state_without_a_step_count_warns(tmp_path, make_optimizer, remedy):
    first, second = (de.DynamicVariable(2, "ones", name="items") for _ in range(2))
    steps, goes_on = (de.OptimizerWrapper(make_optimizer(0.01)) for _ in range(2))
    stepped(first, steps, 5)
    with_optimizer = remedy == "checkpoint"
    saved = tf.train.Checkpoint(t=first, **({"o": steps} if with_optimizer else {}))
    path = saved.save(str(tmp_path / "c"))
    tf.train.Checkpoint(t=second, **({"o": goes_on} if with_optimizer else {})).restore(path)
    if remedy == "assign":
        goes_on.iterations.assign(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = stepped(second, goes_on)
    said = [str(warning.message) for warning in caught if "restored state" in str(warning.message)]
    assert len(said) == (remedy is None)
    if remedy is None:
        assert "'items:0'" in said[0]
        assert "optimizer.iterations.assign(steps)" in said[0]
    elif make_optimizer is not K.Nadam or with_optimizer:  # Nadam has another variable
        np.testing.assert_allclose(got, stepped(first, steps), rtol=1e-6)


@pytest.mark.parametrize("make_optimizer", [K.Adagrad, K.RMSprop])
def test_state_that_needs_no_step_count_does_not_warn(tmp_path, make_optimizer):
    first, second = (de.DynamicVariable(2, "ones", name="items") for _ in range(2))
    stepped(first, de.OptimizerWrapper(make_optimizer(0.01)), 5)
    path = tf.train.Checkpoint(t=first).save(str(tmp_path / "c"))
    tf.train.Checkpoint(t=second).restore(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(second, de.OptimizerWrapper(make_optimizer(0.01)))


def test_a_persistent_table_without_its_step_count_warns(tmp_path):
    options = {"var_type": "file", "file_path": str(tmp_path), "persistent": True}
    options["max_dram_for_vectors"] = host_memory(100, 2, states=2)
    table = de.DynamicVariable(2, name="items", **options)
    stepped(table, de.OptimizerWrapper(K.Adam(0.01)), 3)
    table.flush()
    del table
    again = de.DynamicVariable(2, name="items", **options)
    with pytest.warns(UserWarning, match="restored state"):
        stepped(again, de.OptimizerWrapper(K.Adam(0.01)))


def test_a_load_with_the_optimizer_does_not_warn(tmp_path):
    first, second = (de.DynamicVariable(2, "ones", name="items") for _ in range(2))
    steps, goes_on = (de.OptimizerWrapper(K.Adam(0.01)) for _ in range(2))
    stepped(first, steps, 5)
    de.dump(tmp_path / "d", [first], steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        de.load(tmp_path / "d", [second], goes_on)
        got = stepped(second, goes_on)
    np.testing.assert_array_equal(got, stepped(first, steps))
