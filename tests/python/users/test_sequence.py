"""A user with sequences: padded ids, a mask, a recurrent layer and attention."""

import keras
import numpy as np
import pytest
from user_helpers import check_same_losses, dense_layer, fill, initial_vectors, labels, numbers, raw

import tf_dynemb as de

LENGTHS = np.arange(48) % 6 + 1
PADDED = np.where(np.arange(6) < LENGTHS[:, np.newaxis], numbers(48, 6, low=1), 0)
LABELS = labels([PADDED])


def ids_of(numbers):
    return np.where(np.asarray(numbers) == 0, 0, raw(numbers))


def model(embedding, encoder):
    keras.utils.set_random_seed(7)
    inputs = keras.Input([6], dtype="int64")
    x = embedding(inputs)
    if encoder == "gru":
        x = keras.layers.GRU(8)(x)
    else:
        x = keras.layers.MultiHeadAttention(2, 4)(x, x)
        x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, dense_layer(1, activation="sigmoid")(x))


def train(built, optimizer, inputs):
    built.compile(optimizer, "binary_crossentropy")
    fit = built.fit(inputs, LABELS, batch_size=12, epochs=4, shuffle=False, verbose=0)
    return fit.history["loss"]


@pytest.mark.parametrize("encoder", ["gru", "attention"])
def test_the_losses_are_as_in_keras_with_mask_zero(encoder):
    vectors = initial_vectors(8)
    vectors[0] = 0.0  # padding reads as zeros here
    dense = keras.layers.Embedding(40, 8, mask_zero=True)
    reference = model(dense, encoder)
    dense.set_weights([vectors])
    expected = train(reference, keras.optimizers.SGD(0.5), PADDED)

    embedding = de.layers.Embedding(8, padding_id=0)
    dynamic = model(embedding, encoder)
    fill(embedding.table, vectors[1:], lambda rows: raw(rows + 1))
    losses = train(dynamic, de.OptimizerWrapper(keras.optimizers.SGD(0.5)), ids_of(PADDED))
    check_same_losses(losses, expected)
    assert not embedding.table.contains([0])[0]
