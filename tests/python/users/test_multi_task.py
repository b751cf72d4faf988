"""A user with two tasks over shared tables: two heads, loss weights, an optimizer for each part."""

import keras
import numpy as np
from user_helpers import check_same_losses, dense_layer, fill, initial_vectors, labels, numbers, raw

import tf_dynemb as de

USERS, ITEMS = numbers(80, seed=30), numbers(80, seed=31)
CLICKS = labels([USERS, ITEMS])
PURCHASES = CLICKS * labels([ITEMS], seed=9)


def model(make_embedding):
    keras.utils.set_random_seed(9)
    user = keras.Input([], dtype="int64", name="user")
    item = keras.Input([], dtype="int64", name="item")
    x = keras.layers.Concatenate()([make_embedding("users")(user), make_embedding("items")(item)])
    shared = dense_layer(12, activation="relu", name="shared")(x)
    click = dense_layer(1, activation="sigmoid", name="click")(shared)
    purchase = dense_layer(1, activation="sigmoid", name="purchase")(shared)
    return keras.Model([user, item], {"click": click, "purchase": purchase})


def optimizers():
    return {"dense": keras.optimizers.Adam(0.01), "tables": keras.optimizers.SGD(0.5)}


def train(built, optimizer, ids):
    built.compile(
        optimizer,
        {"click": "binary_crossentropy", "purchase": "binary_crossentropy"},
        loss_weights={"click": 1.0, "purchase": 0.5},
    )
    fit = built.fit(
        {"user": ids(USERS), "item": ids(ITEMS)},
        {"click": CLICKS, "purchase": PURCHASES},
        batch_size=16,
        epochs=5,
        shuffle=False,
        verbose=0,
    )
    return fit.history


def multi():
    parts = optimizers()
    return keras.optimizers.MultiOptimizer(
        lambda variable: parts["tables" if "embeddings" in variable.path else "dense"]
    )


def test_the_losses_of_both_tasks_are_as_in_keras():
    start = {"users": initial_vectors(6, seed=4), "items": initial_vectors(6, seed=5)}
    dense = model(lambda name: keras.layers.Embedding(40, 6, name=name))
    for name, vectors in start.items():
        dense.get_layer(name).set_weights([vectors])
    expected = train(dense, multi(), lambda ids: ids)

    dynamic = model(lambda name: de.layers.Embedding(6, name=name))
    for name, vectors in start.items():
        fill(dynamic.get_layer(name).table, vectors)
    history = train(dynamic, de.OptimizerWrapper(multi()), raw)
    for loss in ("loss", "click_loss", "purchase_loss"):
        check_same_losses(history[loss], expected[loss])
    rows = dense.get_layer("users").get_weights()[0]
    table = dynamic.get_layer("users").table
    np.testing.assert_allclose(table.lookup(raw(np.arange(40))), rows, atol=1e-5)
