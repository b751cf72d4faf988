"""Helpers for the tests of the Keras layers: data, and models around an embedding."""

import keras
import numpy as np

VOCABULARY, DIM, FEATURES = 48, 4, 3


def make_data(n=512, seed=0, batches="random"):
    """Ids [n, FEATURES] and labels.

    batches: "random"; "distinct": no id twice in 16 rows; "every": each id once in 16 rows.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, (n, FEATURES))
    if batches == "every":
        ids = np.stack([rng.permutation(VOCABULARY) for _ in range(n // 16)]).reshape(n, FEATURES)
    elif batches == "distinct":
        ids = np.stack([rng.choice(200, 48, replace=False) for _ in range(n // 16)])
        ids = ids.reshape(n, FEATURES)
    labels = (rng.random(n) < 1 / (1 + np.exp(-(ids % 7 - 3).sum(1)))).astype(np.float32)
    return ids.astype(np.int64), labels


def functional(embedding):
    inputs = keras.Input((FEATURES,), dtype="int64")
    x = keras.layers.Flatten()(embedding(inputs))
    x = keras.layers.Dense(
        8, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(1)
    )(x)
    outputs = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(2), dtype="float32"
    )(x)
    return keras.Model(inputs, outputs)


def sequential(embedding):
    return keras.Sequential(
        [
            keras.Input((FEATURES,), dtype="int64"),
            embedding,
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


class Subclassed(keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.head = keras.layers.Dense(1)

    def call(self, ids):
        return self.head(keras.ops.sum(self.embedding(ids), axis=1))


MODELS = {"functional": functional, "sequential": sequential, "subclassed": Subclassed}
BCE = keras.losses.BinaryCrossentropy(from_logits=True)


def vectors_of(layer, ids=None):
    ids = np.arange(VOCABULARY) if ids is None else ids
    return layer.table.lookup(ids, insert=False).numpy()
