"""For the trainings in users/: ids as logs contain them, and the same model with dense embeddings.

Every training runs twice: with tables of this package, and with `keras.layers.Embedding` or
`tf.Variable` over consecutive row numbers. Both start from the same vectors, so their losses must
agree in every step. Where Keras steps the reference from sparse gradients, the optimizer is SGD:
others treat each repetition of an id in a batch separately in Keras, or decay all rows.
"""

import keras
import numpy as np

ROWS = 40


def raw(numbers):
    """The id of each row number: large, as in logs, and some of them negative."""
    numbers = np.asarray(numbers, np.int64)
    return np.where(numbers % 3 == 0, -1, 1) * (numbers * 1_000_003 + 2**40)


def initial_vectors(dim, rows=ROWS, seed=0):
    return np.random.default_rng(seed).uniform(-0.5, 0.5, [rows, dim]).astype(np.float32)


def fill(table, vectors, ids=raw):
    """Gives the row numbers of `vectors` their rows in a table."""
    table.upsert(ids(np.arange(len(vectors))), vectors)


def dense_layer(units, seed=1, **options):
    """A Dense layer that starts with the same weights in both models."""
    return keras.layers.Dense(
        units, kernel_initializer=keras.initializers.GlorotUniform(seed), **options
    )


def numbers(*shape, low=0, high=ROWS, seed=1):
    """Row numbers with the skew of real ids: some are frequent, many are rare."""
    draws = np.random.default_rng(seed).zipf(1.3, shape) - 1
    return low + draws % (high - low)


def labels(features, seed=2):
    """0 or 1 for each sample, which a model can learn from the row numbers of its features."""
    scores = np.random.default_rng(seed).normal(size=ROWS)
    sums = sum(scores[f].reshape(len(f), -1).mean(axis=1) for f in features)
    return (sums > np.median(sums)).astype(np.float32)


def check_same_losses(losses, reference, rtol=1e-5):
    """The losses equal the reference's, and fall."""
    np.testing.assert_allclose(losses, reference, rtol=rtol)
    assert losses[-1] < losses[0]
