"""DynamicVariable and Variable as plain attributes of Keras layers and models."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

ROWS, DIM = 40, 4
IDS = keras.Input((), dtype="int64")
START = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)


def dynamic():
    table = de.DynamicVariable(DIM, initializer="zeros", name="users")
    de.assign(table, np.arange(ROWS, dtype=np.int64), START)
    return table


def static():
    return de.Variable(START, name="items")


class Rows(keras.layers.Layer):
    """A layer as users of SOK and TFRA write it. It takes no `training`."""

    def __init__(self, make, read, **kwargs):
        super().__init__(**kwargs)
        self.rows = make()
        self.read = read

    def call(self, ids):
        return self.read(self.rows, ids)


class Model(keras.Model):
    """The variable is an attribute of the model itself, in a container."""

    def __init__(self, make, read, container):
        super().__init__()
        self.held = container(make())
        self.find = read
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, ids, training=None):
        (rows,) = self.held.values() if isinstance(self.held, dict) else self.held
        return self.dense(self.find(rows, ids))


class Holder(tf.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def __iter__(self):
        return iter([self.value])


READS = {
    "embedding_lookup": tf.nn.embedding_lookup,
    "lookup_sparse": lambda rows, ids: de.lookup_sparse(rows, ids, combiners="sum"),
    "gather": tf.gather,
}
MAKES = {"dynamic": dynamic, "static": static}
CONTAINERS = {
    "list": lambda v: [v],
    "tuple": lambda v: (v,),
    "dict": lambda v: {"a": v},
    "module": Holder,
}


def data(seed=1, count=64):
    rng = np.random.default_rng(seed)
    return rng.integers(0, ROWS, count), rng.normal(size=(count, 1)).astype(np.float32)


def fit(model, **kwargs):
    model.compile(de.OptimizerWrapper(keras.optimizers.SGD(0.05)), "mse")
    ids, targets = data()
    return model.fit(ids, targets, batch_size=16, epochs=3, shuffle=False, verbose=0, **kwargs)


@functools.cache
def losses_of_keras():
    embedding = keras.layers.Embedding(ROWS, DIM)
    model = keras.Sequential([embedding, keras.layers.Dense(1, kernel_initializer="ones")])
    model.build((None,))
    embedding.embeddings.assign(START)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    ids, targets = data()
    history = model.fit(ids, targets, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"]


def values(rows):
    if isinstance(rows, de.DynamicVariable):
        return rows.lookup(np.arange(ROWS), insert=False).numpy()
    return rows.numpy()


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("make", MAKES)
def test_layer_trains_as_keras_embedding(make, read):
    layer = Rows(MAKES[make], READS[read])
    model = keras.Sequential([IDS, layer, keras.layers.Dense(1, kernel_initializer="ones")])
    history = fit(model)
    np.testing.assert_allclose(history.history["loss"], losses_of_keras(), rtol=1e-4)
    assert len(layer.trainable_variables) == 1
    assert de.filter_variables(model.trainable_variables)[0] == layer.trainable_variables


@pytest.mark.parametrize(
    ("make", "container"), [*(("dynamic", name) for name in CONTAINERS), ("static", "list")]
)
def test_model_trains_as_keras_embedding(make, container):
    model = Model(MAKES[make], tf.nn.embedding_lookup, CONTAINERS[container])
    history = fit(model)
    np.testing.assert_allclose(history.history["loss"], losses_of_keras(), rtol=1e-4)
    assert len(model.trainable_variables) == 3


def test_functional_model_has_the_weight_at_once():
    layer = Rows(dynamic, tf.nn.embedding_lookup)
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    assert len(model.trainable_variables) == 3
    assert model.count_params() == ROWS * DIM + DIM + 1
    model.summary(print_fn=lambda *args, **kwargs: None)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("model_takes_training", [True, False])
def test_only_training_inserts(read, model_takes_training):
    if model_takes_training:
        model = Model(dynamic, READS[read], CONTAINERS["list"])
        (rows,) = model.held
    else:
        layer = Rows(dynamic, READS[read])
        model = keras.Sequential([IDS, layer, keras.layers.Dense(1)])
        rows = layer.rows
    fit(model)
    assert len(rows) == ROWS
    unknown = np.arange(1000, 1016)
    targets = np.zeros((16, 1), np.float32)
    model.predict(unknown, verbose=0)
    model.evaluate(unknown, targets, verbose=0)
    model(unknown)
    assert len(rows) == ROWS
    model.fit(unknown, targets, verbose=0)
    assert len(rows) == ROWS + 16
    # Outside any layer, a lookup inserts.
    READS[read](rows, tf.constant([5000, 5001], tf.int64))
    assert len(rows) == ROWS + 18


@pytest.mark.parametrize("make", MAKES)
def test_frozen_layer_neither_trains_nor_inserts(make):
    layer = Rows(MAKES[make], tf.nn.embedding_lookup)
    layer.trainable = False
    model = keras.Sequential([IDS, layer, keras.layers.Dense(1, kernel_initializer="ones")])
    fit(model)
    assert len(model.trainable_variables) == 2
    assert len(model.non_trainable_variables) == 1
    np.testing.assert_array_equal(values(layer.rows), START)
    if make == "dynamic":
        model.fit(np.arange(1000, 1016), np.zeros((16, 1)), verbose=0)
        assert len(layer.rows) == ROWS
    layer.trainable = True
    fit(model)
    assert len(model.trainable_variables) == 3
    assert np.abs(values(layer.rows) - START).max() > 1e-3


def test_a_frozen_table_beside_a_trained_one():
    class Both(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.frozen, self.trained = dynamic(), dynamic()
            self.frozen.trainable = False
            self.matrix = static()

        def call(self, ids):
            tables = [self.frozen, self.matrix, self.trained]
            low_ids = tf.where(ids < ROWS, ids, 0)
            return tf.concat(de.lookup_sparse(tables, [ids, low_ids, ids], combiners="sum"), 1)

    layer = Both()
    model = keras.Sequential([IDS, layer, keras.layers.Dense(1)])
    fit(model)
    model.fit(np.arange(1000, 1016), np.zeros((16, 1)), verbose=0)
    assert len(layer.frozen) == ROWS
    assert len(layer.trained) == ROWS + 16
    np.testing.assert_array_equal(values(layer.frozen), START)
    assert np.abs(values(layer.trained) - START).max() > 1e-3
    assert np.abs(values(layer.matrix) - START).max() > 1e-3
    assert len(layer.trainable_variables) == 2


@pytest.mark.parametrize("make", MAKES)
def test_shared_by_two_layers_is_one_weight(make):
    rows = MAKES[make]()
    first = Rows(lambda: rows, tf.nn.embedding_lookup)
    second = Rows(lambda: rows, tf.nn.embedding_lookup)
    inputs = keras.Input((), dtype="int64")
    outputs = keras.layers.Dense(1)(keras.layers.Add()([first(inputs), second(inputs)]))
    model = keras.Model(inputs, outputs)
    assert len(model.trainable_variables) == 3
    assert first.trainable_variables[0] is second.trainable_variables[0]


@pytest.mark.parametrize("make", MAKES)
def test_custom_loop_with_the_variable_twice(make):
    """A script that adds its tables to the model's weights does not apply their gradient twice."""
    layer = Rows(MAKES[make], tf.nn.embedding_lookup)
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(1.0))
    ids = tf.constant([3, 5], tf.int64)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True))
        variables = [*layer.trainable_variables, layer.rows]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    expected = START.copy()
    expected[[3, 5]] -= 2.0
    np.testing.assert_allclose(values(layer.rows), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", MAKES)
def test_weights_are_saved_and_restored(make, tmp_path):
    def build():
        layer = Rows(MAKES[make], tf.nn.embedding_lookup)
        model = keras.Sequential([IDS, layer, keras.layers.Dense(1)])
        model(np.arange(4))
        return model

    model, copy = build(), build()
    fit(model)
    rows, other = model.layers[0].rows, copy.layers[0].rows
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    copy.load_weights(path)
    np.testing.assert_array_equal(values(other), values(rows))
    weights = model.get_weights()
    trained = values(rows)
    model.fit(*data(2), verbose=0)
    assert np.abs(values(rows) - trained).max() > 0
    model.set_weights(weights)
    np.testing.assert_array_equal(values(rows), trained)


def test_early_stopping_restores_rows():
    model = Model(dynamic, tf.nn.embedding_lookup, CONTAINERS["list"])
    stop = keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True, mode="max")
    first = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: after.append(values(model.held[0]))
    )
    after = []
    fit(model, callbacks=[first, stop])
    assert len(after) == 2
    np.testing.assert_array_equal(values(model.held[0]), after[0])


def test_variable_that_no_layer_has():
    table = dynamic()
    read = keras.layers.Lambda(lambda ids: tf.nn.embedding_lookup(table, ids))
    model = keras.Sequential([IDS, read, keras.layers.Dense(1)])
    with pytest.warns(UserWarning, match="no layer has it as an attribute. `fit` does not train"):
        fit(model)


def test_layers_of_this_package_warn_of_nothing():
    model = keras.Sequential([de.layers.Embedding(DIM), keras.layers.Dense(1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model)
    assert len(model.trainable_variables) == 3


def test_an_attribute_that_is_set_after_the_first_call():
    class Late(keras.layers.Layer):
        def call(self, ids):
            return tf.nn.embedding_lookup(table, ids)

    table = dynamic()
    layer = Late()
    model = keras.Sequential([IDS, layer, keras.layers.Dense(1, kernel_initializer="ones")])
    assert len(model.trainable_variables) == 2
    layer.rows = table
    history = fit(model)
    assert len(model.trainable_variables) == 3
    np.testing.assert_allclose(history.history["loss"], losses_of_keras(), rtol=1e-4)
