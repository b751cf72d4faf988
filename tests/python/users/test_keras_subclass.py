"""A user who subclasses Model: ragged histories, mean pooling, callbacks, validation data."""

import keras
import numpy as np
import tensorflow as tf
from user_helpers import check_same_losses, dense_layer, fill, initial_vectors, labels, numbers, raw

import tf_dynemb as de

LENGTHS = np.arange(64) % 5 + 1
FLAT = numbers(LENGTHS.sum())
LABELS = labels([np.array([row.mean() for row in np.split(FLAT, np.cumsum(LENGTHS)[:-1])], int)])


class Ours(keras.Model):
    def __init__(self):
        super().__init__()
        self.histories = de.layers.EmbeddingBag(8, combiner="mean")
        self.head = dense_layer(1)

    def call(self, histories):
        return self.head(self.histories(histories))


class Reference(keras.Model):
    def __init__(self):
        super().__init__()
        self.histories = keras.layers.Embedding(40, 8)
        self.head = dense_layer(1)

    def call(self, histories):
        flat = self.histories(histories.flat_values)
        return self.head(tf.reduce_mean(histories.with_flat_values(flat), axis=1))


def dataset(flat):
    histories = tf.RaggedTensor.from_row_lengths(tf.constant(flat, tf.int64), LENGTHS)
    return tf.data.Dataset.from_tensor_slices((histories, LABELS)).ragged_batch(16)


def train(model, optimizer, flat):
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    data = dataset(flat)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True)
    return model.fit(data, validation_data=data, epochs=5, callbacks=[stop], verbose=0).history


def build(model, flat):
    keras.utils.set_random_seed(6)
    model(next(iter(dataset(flat)))[0])


def test_the_losses_are_as_in_keras():
    vectors = initial_vectors(8)
    reference, dynamic = Reference(), Ours()
    build(reference, FLAT)
    reference.histories.set_weights([vectors])
    expected = train(reference, keras.optimizers.SGD(0.5), FLAT)

    build(dynamic, raw(FLAT))
    fill(dynamic.histories.table, vectors)
    history = train(dynamic, de.OptimizerWrapper(keras.optimizers.SGD(0.5)), raw(FLAT))
    check_same_losses(history["loss"], expected["loss"])
    check_same_losses(history["val_loss"], expected["val_loss"])
    rows = reference.histories.get_weights()[0]
    np.testing.assert_allclose(dynamic.histories.table.lookup(raw(np.arange(40))), rows, atol=1e-6)
