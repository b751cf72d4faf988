"""The dense part of the examples' model: DLRM's dot products and a small network."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

DIM = 8
INITIAL_STDDEV = 0.01
UNITS = (256, 128)
DROPOUT = 0.3


def probability_of(vectors: Any) -> Any:
    """Maps one vector per field to a probability, with Keras layers.

    Args:
        vectors: a Keras tensor of shape (batch, fields, DIM).

    Returns:
        A Keras tensor of shape (batch, 1).
    """
    layers = keras.layers
    fields = vectors.shape[1]
    first, second = np.triu_indices(fields, k=1)
    products = layers.Flatten(name="products")(layers.Dot(axes=2)([vectors, vectors]))
    pairs = keras.ops.take(products, first * fields + second, axis=1)
    x = layers.Concatenate(name="features")([layers.Flatten(name="flat")(vectors), pairs])
    for units in UNITS:
        x = layers.Dense(units, activation="relu")(x)
        x = layers.Dropout(DROPOUT)(x)
    return layers.Dense(1, activation="sigmoid", name="probability")(x)
