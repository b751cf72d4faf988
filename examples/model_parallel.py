"""Trains the quickstart's model on several ranks: the table is spread over them.

    tf-dynemb run -np 2 examples/model_parallel.py

Each rank trains on its part of every batch. A row of the table is held by its owner, and its vector
is sent to the ranks that look it up. Every rank has a copy of the dense weights, whose gradients
are averaged. The ranks therefore train as one process would on whole batches; without a launcher,
this script is that process.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import adult
import keras
import numpy as np
import tensorflow as tf
from clock import TrainingClock
from network import DIM, INITIAL_STDDEV, probability_of
from scoring import score_of_all

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.communicator import Communicator


def build_model(fields: int, options: argparse.Namespace) -> tuple[keras.Model, keras.layers.Layer]:
    """Returns the quickstart's model, compiled, and its embedding."""
    embedding = de.layers.Embedding(
        DIM,
        initializer=keras.initializers.RandomNormal(stddev=INITIAL_STDDEV, seed=options.seed),
        exchange_dtype=options.exchange_dtype,
        name="embedding",
    )
    ids = keras.Input((fields,), dtype="int64", name="ids")
    model = keras.Model(ids, probability_of(embedding(ids)))
    model.compile(
        optimizer=de.OptimizerWrapper(keras.optimizers.Adam(options.learning_rate)),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model, embedding


def part_of_batches(
    split: adult.Split, batch_size: int, comm: Communicator, seed: int | None = None
) -> tf.data.Dataset:
    """Returns this rank's part of every batch: ids and labels.

    All ranks get the same number of batches, and parts of the same size. Rows that cannot be
    divided evenly are dropped; if the data is shuffled, each epoch drops others.

    Args:
        split: all of the data, on every rank.
        batch_size: over all ranks; a multiple of their number.
        comm: the ranks.
        seed: if given, shuffles in each epoch, in the same way on all ranks.
    """
    if batch_size % comm.size:
        raise ValueError(f"--batch-size {batch_size} is no multiple of {comm.size} ranks")
    data = tf.data.Dataset.from_tensor_slices((split.ids, split.labels))
    if seed is not None:
        data = data.shuffle(len(split), seed=seed)
    data = data.take(len(split) // comm.size * comm.size).batch(batch_size)
    return data.map(
        lambda ids, labels: (ids[comm.rank :: comm.size], labels[comm.rank :: comm.size])
    ).prefetch(2)


def predict_part(
    model: keras.Model, split: adult.Split, comm: Communicator
) -> tuple[adult.Floats, adult.Floats]:
    """Returns labels and probabilities of this rank's part of the rows."""
    ids, labels = split.ids[comm.rank :: comm.size], split.labels[comm.rank :: comm.size]
    # Lookups are collective, so all ranks need equally many rows: some repeat a row.
    missing = -(-len(split) // comm.size) - len(labels)
    ids = np.concatenate([ids, ids[:missing]])
    return labels, model.predict(ids, batch_size=4096, verbose=0)[: len(labels), 0]


def run(options: argparse.Namespace) -> dict[str, float] | None:
    """Trains, scores and dumps; rank 0 returns the measured figures."""
    de.init()  # joins the ranks that a launcher has started
    comm = communicator.get()
    keras.utils.set_random_seed(options.seed + comm.rank)  # dropout differs between ranks
    data = adult.load(options.data, options.seed)
    model, embedding = build_model(len(data.fields), options)

    clock = TrainingClock(len(data.train))
    history = model.fit(
        part_of_batches(data.train, options.batch_size, comm, options.seed),
        epochs=options.epochs,
        validation_data=part_of_batches(data.validation, 4096 * comm.size, comm),
        shuffle=False,  # the dataset shuffles
        callbacks=[
            de.callbacks.SynchronizeRanks(),  # first: the others use the metrics of all ranks
            clock,
            keras.callbacks.EarlyStopping(
                "val_auc", mode="max", patience=options.patience, restore_best_weights=True
            ),
        ],
        verbose=0 if options.quiet else 2,
    )

    measured = score_of_all(comm, *predict_part(model, data.test, comm))
    rows = comm.gather_objects(len(embedding.table), "model_parallel/rows")
    tables, path = {"adult": embedding.table}, options.output_dir / "tables"
    de.dump(path, tables, optimizer=model.optimizer, overwrite=True)  # from an earlier run
    if measured is not None:
        measured |= {"rows_per_second": clock.rows_per_second(), "epochs": len(history.epoch)}
        report(measured, rows, embedding.table, data, options)
    return measured


def report(
    measured: dict[str, float],
    rows: list[int],
    table: de.DynamicVariable,
    data: adult.Adult,
    options: argparse.Namespace,
) -> None:
    """Prints the figures, the bytes sent, and a vector from the dump of all ranks."""
    ranks = len(rows)
    print("\n" + "\n".join(adult.report(measured, f"this run ({ranks} rank{'s' * (ranks > 1)})")))
    print(f"\ntrained {measured['epochs']} epochs, {measured['rows_per_second']:,.0f} rows/s")
    print(f"rows of the table on each rank: {', '.join(map(str, rows))}")
    if ranks > 1:
        stats = table.stats()
        sent = (
            f"{what}s {stats[f'{what}_bytes_sent']:,}" for what in ("key", "vector", "gradient")
        )
        print(f"bytes that rank 0 sent: {', '.join(sent)}")

    path = options.output_dir / "tables"
    reader = de.serving.Reader(path)
    key = adult.category_id(data.fields, "education", "Bachelors")
    print(f"\n{path}: read with numpy, the vector of education = Bachelors, key {key}, is")
    print(f"  {np.array2string(reader.lookup(key), precision=4)}")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the split, the initial weights and the order")
    add("--epochs", type=int, default=50, help="maximum passes over the training rows")
    add("--patience", type=int, default=4, help="stop after this many epochs without a better AUC")
    add("--batch-size", type=int, default=256, help="rows per training step, over all ranks")
    add("--learning-rate", type=float, default=1e-3, help="learning rate of Adam")
    add(
        "--exchange-dtype",
        choices=("float16", "bfloat16", "int8"),
        help="type of vectors and gradients in messages; by default their own",
    )
    add("--data", type=Path, default=adult.DEFAULT_PATH, help="Parquet file with the Adult data")
    add(
        "--output-dir",
        type=Path,
        default=Path("outputs/model_parallel"),
        help="folder for the dump of the table, shared by all ranks",
    )
    add("--quiet", action="store_true", help="print no line per epoch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(parse_options())
