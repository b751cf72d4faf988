"""Trains Wide & Deep on Criteo's clicks with OneEmbedding's names, by Keras's `fit`.

    python examples/oneembedding/wide_and_deep.py             # small, synthetic clicks
    python examples/oneembedding/wide_and_deep.py --data_dir /data/criteo_parquet
    tf-dynemb run -np 2 examples/oneembedding/wide_and_deep.py

The flags and the model come from RecommenderSystems/wide_and_deep in OneFlow's models:

    2 crossed ids  ──> tables of width 1  ──> sum ──────────────────┐
    26 ids         ──> tables of width 16 ──┐                       ├──> sum ──> sigmoid
    dense features ─────────────────────────┴──> MLP ──> one number ┘

OneFlow's data has the crossed ids; here they are hashes of two ids each. Flags of its launcher
(nodes, ports, eager or graph) are not there.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the modules that all examples share

import clicks
import flags as shared
import keras
import numpy as np
import tensorflow as tf
import tqdm
from clicks import CROSSED, DENSE, SPARSE, Batch

import tf_dynemb as de
import tf_dynemb.oneembedding as one_embedding
from tf_dynemb import communicator

OF_ONEFLOW: dict[str, Any] = {
    "batch_size": 16384,
    "learning_rate": 1e-3,
    "deep_embedding_vec_size": 16,
    "deep_dropout_rate": 0.5,
    "hidden_units_num": 7,
    "hidden_size": 1024,
    "max_iter": 30000,
    "eval_batchs": 20,
    "print_interval": 1000,
    "table_size_array": list(shared.ROWS),
    "wide_vocab_size": 1_603_616,
}
SMALL: dict[str, Any] = {
    **OF_ONEFLOW,
    "batch_size": 512,
    "learning_rate": 1e-2,
    "deep_embedding_vec_size": 8,
    "deep_dropout_rate": 0.1,
    "hidden_units_num": 2,
    "hidden_size": 32,
    "max_iter": 90,
    "eval_batchs": 8,
    "print_interval": 30,
    "table_size_array": [min(rows, 200) for rows in shared.ROWS],
    "wide_vocab_size": 80_000,
}
EMBEDDINGS = ("wide_embedding", "deep_embedding")
PADDING = 0  # an id without a vector, as in OneFlow's model


def build(flags: argparse.Namespace) -> keras.Model:
    """Builds the model, for dense features, crossed ids and ids."""
    dense = keras.Input([DENSE], name="dense_fields")
    wide = keras.Input([len(CROSSED)], dtype="int64", name="wide_sparse_fields")
    deep = keras.Input([SPARSE], dtype="int64", name="deep_sparse_fields")
    wide_rows, deep_rows = [flags.wide_vocab_size] * len(CROSSED), flags.table_size_array
    wide_embedding = one_embedding.MultiTableEmbedding(
        "wide_embedding",
        embedding_dim=1,
        dtype=tf.float32,
        key_type=tf.int64,
        tables=shared.uniform_tables(wide_rows),
        store_options=shared.store_options(flags, sum(wide_rows)),
        padding_idx=PADDING,
        seed=flags.seed,
    )
    deep_embedding = one_embedding.MultiTableEmbedding(
        "deep_embedding",
        embedding_dim=flags.deep_embedding_vec_size,
        dtype=tf.float32,
        key_type=tf.int64,
        tables=shared.uniform_tables(deep_rows),
        store_options=shared.store_options(flags, sum(deep_rows)),
        padding_idx=PADDING,
        seed=flags.seed,
    )
    wide_scores = keras.ops.sum(wide_embedding(wide), axis=1)
    x = keras.layers.Flatten()(deep_embedding(deep))
    x = keras.layers.Concatenate()([x, keras.ops.log1p(dense)])
    for number in range(flags.hidden_units_num):
        x = keras.layers.Dense(flags.hidden_size, "relu", name=f"fc{number}")(x)
        x = keras.layers.Dropout(flags.deep_dropout_rate)(x)
    deep_scores = keras.layers.Dense(1, name="deep_scores")(x)
    scores = keras.layers.Add()([wide_scores, deep_scores])
    return keras.Model([dense, wide, deep], keras.layers.Activation("sigmoid")(scores))


def inputs(batches: Iterator[Batch]) -> Iterator[Any]:
    """Yields this rank's part of each batch, as `model.fit` takes it."""
    comm = communicator.get()
    for whole in batches:
        batch = whole.part(comm.rank, comm.size)
        yield (batch.dense, clicks.crosses(batch.sparse), batch.sparse), batch.labels[:, None]


class Progress(keras.callbacks.Callback):
    """A progress bar on rank 0, and a line for every `interval` steps."""

    def __init__(self, steps: int, interval: int) -> None:
        super().__init__()
        self.interval = interval
        self.bar = tqdm.tqdm(total=steps, desc="train", unit="batch")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.bar.update()
        if (batch + 1) % self.interval == 0:
            print(f"step {batch + 1}: mean loss {logs['loss']:.4f}", flush=True)

    def on_train_end(self, logs: Any = None) -> None:
        self.bar.close()


def save(model: keras.Model, folder: Path | None, name: str) -> None:
    """Saves the dense weights in a folder, and the embeddings as the snapshot `name`."""
    if folder is None:
        return
    for part in EMBEDDINGS:
        model.get_layer(part).save_snapshot(name)
    if communicator.get().rank == 0:
        (folder / name).mkdir(parents=True, exist_ok=True)
        weights = {v.path.replace("/", "."): v.numpy() for v in dense_variables(model)}
        np.savez(folder / name / "dense.npz", **weights)
        print(f"saved {folder / name}", flush=True)


def load(model: keras.Model, folder: Path) -> None:
    """Loads what `save` saved, with the same --persistent_path."""
    for part in EMBEDDINGS:
        model.get_layer(part).load_snapshot(folder.name, model.optimizer)
    with np.load(folder / "dense.npz") as weights:
        for variable in dense_variables(model):
            variable.assign(weights[variable.path.replace("/", ".")])


def dense_variables(model: keras.Model) -> list[Any]:
    """Returns the weights of the model that are in no table."""
    return de.filter_variables(model.trainable_variables)[1]


def run(flags: argparse.Namespace) -> None:
    """Trains and evaluates."""
    de.init()
    comm = communicator.get()
    keras.utils.set_random_seed(flags.seed)
    if flags.batch_size % comm.size:
        raise ValueError(f"--batch_size {flags.batch_size} is no multiple of {comm.size} ranks")
    train, test = shared.open_data(
        flags, flags.batch_size, flags.max_iter, flags.batch_size, flags.eval_batchs
    )
    model = build(flags)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(flags.learning_rate))
    model.compile(optimizer, "binary_crossentropy", metrics=["AUC"])
    if flags.model_load_dir:
        load(model, flags.model_load_dir)
        optimizer.learning_rate = flags.learning_rate  # not the snapshot's
    if flags.save_initial_model:
        save(model, flags.model_save_dir, "initial_checkpoint")
    callbacks: list[keras.callbacks.Callback] = [de.callbacks.SynchronizeRanks()]
    if comm.rank == 0 and flags.max_iter:
        callbacks.append(Progress(flags.max_iter, flags.print_interval))
    if flags.max_iter:
        model.fit(
            inputs(clicks.endless(train)),
            steps_per_epoch=flags.max_iter,
            shuffle=False,
            callbacks=callbacks,
            verbose=0,
        )
    scores = model.evaluate(
        inputs(itertools.islice(clicks.endless(test), flags.eval_batchs)),
        steps=flags.eval_batchs,
        callbacks=callbacks[:1],
        return_dict=True,
        verbose=0,
    )
    tables = [table for part in EMBEDDINGS for table in model.get_layer(part).tables]
    rows = comm.gather_objects(sum(len(table) for table in tables), "wide_and_deep/rows")
    if comm.rank == 0:
        print(f"test: loss {scores['loss']:.4f}, AUC {scores['AUC']:.5f}")
        print(f"rows of each rank: {', '.join(f'{count:,}' for count in rows)}")
    save(model, flags.model_save_dir, "final_checkpoint")


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shared.add_flags(parser)
    add("--batch_size", type=int, help="samples of a step, over all ranks")
    add("--learning_rate", type=float, help="learning rate of Adam")
    add("--deep_embedding_vec_size", type=int, help="width of the vectors of the deep part")
    add("--deep_dropout_rate", type=float, help="share of the deep part's units to drop")
    add("--hidden_units_num", type=int, help="number of hidden layers")
    add("--hidden_size", type=int, help="width of the hidden layers")
    add("--max_iter", type=int, help="number of steps; 0: only evaluate")
    add("--eval_batchs", type=int, help="number of batches of the evaluation")
    add("--print_interval", type=int, help="steps between two lines of output")
    add("--table_size_array", type=shared.numbers, help="distinct ids of each sparse feature")
    add("--wide_vocab_size", type=int, help="distinct pairs of ids of each crossed feature")
    return shared.with_defaults(parser, arguments, OF_ONEFLOW, SMALL)


if __name__ == "__main__":
    run(parse_flags())
