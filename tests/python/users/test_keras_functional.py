"""A user of Keras's functional API: two categorical features and a dense one, fit, save, load."""

import keras
import numpy as np
from user_helpers import check_same_losses, dense_layer, fill, initial_vectors, labels, numbers, raw

import tf_dynemb as de

USERS, ITEMS = numbers(96), numbers(96, seed=3)
AGE = np.random.default_rng(4).normal(size=[96, 1]).astype(np.float32)
LABELS = labels([USERS, ITEMS])


def model(make_embedding):
    keras.utils.set_random_seed(5)
    user = keras.Input([], dtype="int64", name="user")
    item = keras.Input([], dtype="int64", name="item")
    age = keras.Input([1], name="age")
    vectors = [make_embedding(name)(ids) for name, ids in (("users", user), ("items", item))]
    x = keras.layers.Concatenate()([*vectors, age])
    x = dense_layer(16, activation="relu")(x)
    return keras.Model([user, item, age], dense_layer(1, activation="sigmoid")(x))


def train(built, optimizer, ids):
    built.compile(optimizer, "binary_crossentropy", metrics=["auc"])
    inputs = {"user": ids(USERS), "item": ids(ITEMS), "age": AGE}
    history = built.fit(inputs, LABELS, batch_size=16, epochs=4, shuffle=False, verbose=0)
    return inputs, history.history


def test_the_losses_are_as_in_keras_and_the_model_survives_a_save(tmp_path):
    start = {"users": initial_vectors(8), "items": initial_vectors(8, seed=1)}

    dense = model(lambda name: keras.layers.Embedding(40, 8, name=name))
    for name, vectors in start.items():
        dense.get_layer(name).set_weights([vectors])
    _, expected = train(dense, keras.optimizers.SGD(0.5), lambda ids: ids)

    dynamic = model(lambda name: de.layers.Embedding(output_dim=8, name=name))
    for name, vectors in start.items():
        fill(dynamic.get_layer(name).table, vectors)
    inputs, history = train(dynamic, de.OptimizerWrapper(keras.optimizers.SGD(0.5)), raw)
    check_same_losses(history["loss"], expected["loss"])
    np.testing.assert_allclose(history["auc"], expected["auc"], atol=1e-6)

    predictions = dynamic.predict(inputs, verbose=0)
    dynamic.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(inputs, verbose=0), predictions)
    # The next epoch continues with the same optimizer state.
    more = [
        each.fit(inputs, LABELS, batch_size=16, shuffle=False, verbose=0).history["loss"]
        for each in (dynamic, loaded)
    ]
    assert more[0] == more[1]
