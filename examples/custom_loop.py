"""Trains the quickstart's model in a custom training loop.

The loop has one table per field, one fused lookup for all tables, a GradientTape, and one optimizer
for tables and dense weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import adult
import keras
import numpy as np
import tensorflow as tf
from network import DIM, INITIAL_STDDEV, probability_of

import tf_dynemb as de


class Trainer:
    """The tables, the dense network and the optimizer, with methods to train and predict."""

    def __init__(self, fields: tuple[str, ...], learning_rate: float, seed: int) -> None:
        self.tables = [
            de.DynamicVariable(
                dimension=DIM,
                initializer=keras.initializers.RandomNormal(
                    stddev=INITIAL_STDDEV, seed=seed + number
                ),
                name=field,
            )
            for number, field in enumerate(fields)
        ]
        vectors = keras.Input((len(fields), DIM), name="vectors")
        self.dense = keras.Model(vectors, probability_of(vectors))
        self.optimizer = de.OptimizerWrapper(keras.optimizers.Adam(learning_rate))
        self._loss = keras.losses.BinaryCrossentropy()

    def vectors(self, ids: tf.Tensor, insert: bool) -> tf.Tensor:
        """Ids of shape (batch, fields) -> vectors of shape (batch, fields, DIM)."""
        columns = tf.unstack(ids, axis=1)  # SparseTensor and RaggedTensor work as well.
        pooled = de.lookup_sparse(self.tables, columns, combiners="sum", insert=insert)
        return tf.stack(pooled, axis=1)

    @tf.function(reduce_retracing=True)
    def step(self, ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Trains on one batch and returns its loss."""
        with tf.GradientTape() as tape:
            probability = self.dense(self.vectors(ids, insert=True), training=True)
            loss = self._loss(labels[:, None], probability)
        variables = [*self.tables, *self.dense.trainable_variables]
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function(reduce_retracing=True)
    def predict(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the probabilities of one batch, without inserting unknown ids."""
        return self.dense(self.vectors(ids, insert=False), training=False)[:, 0]

    def snapshot(self) -> tuple[list[tuple[tf.Tensor, tf.Tensor]], list[np.ndarray]]:
        """Copies of the tables' keys and vectors, and of the dense weights."""
        return [de.export(table) for table in self.tables], self.dense.get_weights()

    def restore(self, saved: tuple[list[tuple[tf.Tensor, tf.Tensor]], list[np.ndarray]]) -> None:
        """Restores a snapshot."""
        rows, weights = saved
        for table, (keys, vectors) in zip(self.tables, rows, strict=True):
            de.assign(table, keys, vectors)
        self.dense.set_weights(weights)


def batches(
    split: adult.Split, size: int, random: np.random.Generator | None = None
) -> Iterator[tuple[adult.Ids, adult.Floats]]:
    """Yields ids and labels in batches, shuffled if a generator is given."""
    order = np.arange(len(split)) if random is None else random.permutation(len(split))
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield split.ids[rows], split.labels[rows]


def evaluate(trainer: Trainer, split: adult.Split) -> dict[str, float]:
    """Returns AUC, accuracy and logloss on the rows of a split."""
    parts = [trainer.predict(tf.constant(ids)).numpy() for ids, _ in batches(split, 4096)]
    return adult.score(split.labels, np.concatenate(parts))


def run(options: argparse.Namespace) -> dict[str, float]:
    """Trains until the validation AUC stops rising, and scores the best epoch."""
    keras.utils.set_random_seed(options.seed)
    random = np.random.default_rng(options.seed)
    data = adult.load(options.data, options.seed)
    trainer = Trainer(data.fields, options.learning_rate, options.seed)

    best, best_auc, waited = trainer.snapshot(), 0.0, 0
    for epoch in range(1, options.epochs + 1):
        began = time.perf_counter()
        losses = [
            trainer.step(tf.constant(ids), tf.constant(labels))
            for ids, labels in batches(data.train, options.batch_size, random)
        ]
        loss = float(tf.reduce_mean(losses))
        rate = len(data.train) / (time.perf_counter() - began)
        auc = evaluate(trainer, data.validation)["auc"]
        print(f"epoch {epoch:2}: loss {loss:.4f}, validation AUC {auc:.4f}, {rate:,.0f} rows/s")
        if auc > best_auc:
            best, best_auc, waited = trainer.snapshot(), auc, 0
        else:
            waited += 1
            if waited == options.patience:
                break
    trainer.restore(best)

    measured = evaluate(trainer, data.test)
    print()
    print("\n".join(adult.report(measured, "this run (custom loop)")))
    print("\nrows of each table:")
    for field, table in zip(data.fields, trainer.tables, strict=True):
        print(f"  {field:24}{len(table)}")
    return measured


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the split, the initial weights and the order")
    add("--epochs", type=int, default=50, help="maximum passes over the training rows")
    add("--patience", type=int, default=4, help="stop after this many epochs without a better AUC")
    add("--batch-size", type=int, default=256, help="rows per training step")
    add("--learning-rate", type=float, default=1e-3, help="learning rate of Adam")
    add("--data", default=adult.DEFAULT_PATH, help="Parquet file with the Adult data")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(parse_options())
