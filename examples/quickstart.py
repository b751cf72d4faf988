"""Trains a click-model-like classifier on the Adult data with a hash-table embedding.

The model is plain Keras. With `--embedding dynamic` its embedding is `de.layers.Embedding`, which
takes any 64-bit ids. With `--embedding keras` it is `keras.layers.Embedding`, which needs a
vocabulary. The rest is the same, so the two can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import adult
import keras
import matplotlib
import numpy as np
import numpy.typing as npt
from clock import TrainingClock
from network import DIM, INITIAL_STDDEV, probability_of

import tf_dynemb as de


class DynamicTable:
    """The embedding as a hash table, which takes any id and grows."""

    def __init__(self, seed: int) -> None:
        initializer = keras.initializers.RandomNormal(stddev=INITIAL_STDDEV, seed=seed)
        self.layer = de.layers.Embedding(DIM, initializer=initializer, name="embedding")

    def optimizer(self, learning_rate: float) -> Any:
        """Adam for the rows of the table and for the dense weights."""
        return de.OptimizerWrapper(keras.optimizers.Adam(learning_rate))

    def inputs(self, ids: adult.Ids) -> adult.Ids:
        """Returns the model's inputs: the ids themselves."""
        return ids

    def export(self) -> tuple[npt.NDArray, npt.NDArray]:
        """Keys of shape (rows,) and vectors of shape (rows, DIM)."""
        keys, vectors = de.export(self.layer.table)
        return keys.numpy(), vectors.numpy()

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of the table."""
        return dict(self.layer.table.stats())


class FixedTable:
    """The baseline: a table of fixed size, with a row per id of the training vocabulary."""

    def __init__(self, seed: int, vocabulary: adult.Ids) -> None:
        self._vocabulary = vocabulary
        initializer = keras.initializers.RandomNormal(stddev=INITIAL_STDDEV, seed=seed)
        self.layer = keras.layers.Embedding(
            len(vocabulary) + 1, DIM, embeddings_initializer=initializer, name="embedding"
        )

    def optimizer(self, learning_rate: float) -> Any:
        """Adam for all weights."""
        return keras.optimizers.Adam(learning_rate)

    def inputs(self, ids: adult.Ids) -> adult.Ids:
        """Returns the model's inputs: row numbers."""
        return adult.row_numbers(ids, self._vocabulary)

    def export(self) -> tuple[npt.NDArray, npt.NDArray]:
        """Keys of shape (rows,) and vectors of shape (rows, DIM)."""
        return self._vocabulary, self.layer.get_weights()[0][1:]

    def statistics(self) -> dict[str, Any]:
        """The size of the table."""
        return {"rows": len(self._vocabulary) + 1}


def build_model(embedding: keras.layers.Layer, fields: int) -> keras.Model:
    """Ids of shape (batch, fields) -> probability of shape (batch, 1)."""
    ids = keras.Input((fields,), dtype="int64", name="ids")
    return keras.Model(ids, probability_of(embedding(ids)))


def train(
    model: keras.Model,
    table: DynamicTable | FixedTable,
    data: adult.Adult,
    options: argparse.Namespace,
) -> tuple[dict[str, list[float]], TrainingClock]:
    """Trains until the validation AUC stops rising; leaves the best epoch's weights in the model.

    Returns:
        The history of each metric by epoch, and the clock that timed the training.
    """
    best = options.output_dir / "best.weights.h5"
    clock = TrainingClock(len(data.train))
    callbacks = [
        clock,
        keras.callbacks.EarlyStopping("val_auc", mode="max", patience=options.patience),
        keras.callbacks.ModelCheckpoint(
            best, "val_auc", mode="max", save_best_only=True, save_weights_only=True
        ),
    ]
    model.compile(
        optimizer=table.optimizer(options.learning_rate),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )
    history = model.fit(
        table.inputs(data.train.ids),
        data.train.labels,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(table.inputs(data.validation.ids), data.validation.labels),
        validation_batch_size=4096,
        callbacks=callbacks,
        verbose=0 if options.quiet else 1,
    )
    model.load_weights(best)
    return history.history, clock


def plot_history(history: dict[str, list[float]], path: Path) -> None:
    """Writes a PNG with the loss and the AUC by epoch."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    epochs = np.arange(1, len(history["loss"]) + 1)
    best = 1 + int(np.argmax(history["val_auc"]))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, metric, label in zip(axes, ("loss", "auc"), ("logloss", "AUC"), strict=True):
        axis.plot(epochs, history[metric], marker=".", label="training")
        axis.plot(epochs, history[f"val_{metric}"], marker=".", label="validation")
        axis.axvline(best, color="grey", linewidth=0.8, linestyle="--", label="best epoch")
        axis.set(xlabel="epoch", ylabel=label)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def read_vector(path: Path, key: int) -> npt.NDArray:
    """Reads one vector of an exported table with numpy alone."""
    with np.load(path) as table:
        return table["vectors"][table["keys"] == key][0]


def publish(
    model: keras.Model,
    table: DynamicTable,
    data: adult.Adult,
    key: int,
    options: argparse.Namespace,
) -> None:
    """Dumps the table, trains on the held-out rows, and publishes a delta, which a reader follows.

    The reader needs numpy only: it could be another process, on another machine.
    """
    path = options.output_dir / "tables"
    shutil.rmtree(path, ignore_errors=True)
    tables = {"adult": table.layer.table}
    de.dump(path, tables, optimizer=model.optimizer)
    reader = de.serving.Reader(path)
    before = reader.lookup(key)

    model.fit(data.validation.ids, data.validation.labels, options.batch_size, verbose=0)
    de.incremental_dump(path, tables, optimizer=model.optimizer)
    reader.follow()
    assert np.array_equal(reader.lookup(key), table.layer.table.lookup(key))
    print(f"\n{path}: read with numpy, one key's vector changed from\n  {before[:4]}... to")
    print(f"  {reader.lookup(key)[:4]}...")
    for snapshot in de.storage.Chain.open(path).snapshots:
        size = sum(file.stat().st_size for file in snapshot.directory.iterdir())
        rows = snapshot.manifest.tables[0].shards[0].rows
        print(f"  {snapshot.manifest.kind:6} {rows:6} rows {size:9,} bytes")


# The files that a run leaves in its folder; only a hash table has a dump.
FILES = {
    "best.weights.h5": "the weights of the best epoch",
    "embedding.npz": "keys and vectors, for numpy",
    "metrics.json": "the figures of this run",
    "training.png": "loss and AUC by epoch",
}
DUMP = {"tables": "a dump and a delta, for serving and for more training"}


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def shown(path: str) -> str:
    """A path as it is typed in the current folder."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def next_commands(options: argparse.Namespace) -> dict[str, str]:
    """Three commands that a reader may want to run after this, and what they show."""
    python, script = shown(sys.executable), shown(__file__)
    if options.embedding == "keras":
        loop = os.path.join(os.path.dirname(script), "custom_loop.py")
        compared = {
            f"{python} {script}": "a hash table in its place",
            f"{python} {loop}": "your own training loop",
        }
    else:
        compared = {
            f"{python} {script} --embedding keras": "keras.layers.Embedding in its place",
            f"{python} -m tf_dynemb inspect {options.output_dir}/tables": "the dump and its delta",
        }
    return {**compared, "make serve-example": "a server that follows a trainer"}


def summary(
    measured: dict[str, float], rows: int, seconds: float, options: argparse.Namespace
) -> list[str]:
    """Returns the lines that a person reads at the end: score, time, files, and what is next.

    Args:
        measured: the figures of the run.
        rows: the rows of the table.
        seconds: the time of all that the run has done.
        options: the options of the run.
    """
    folder, epochs = options.output_dir, measured["epochs"]
    lines = ["", "Summary", "", *adult.report(measured, f"this run ({options.embedding})"), ""]
    lines += [
        f"trained  {epochs:.0f} epoch{'s' * (epochs > 1)} in {measured['seconds']:.1f} s, "
        f"{measured['rows_per_second']:,.0f} rows/s; {seconds:.1f} s with all the rest",
        f"table    {rows:,} rows of {DIM} floats",
        f"files    in {folder}:",
    ]
    files = FILES if options.embedding == "keras" else {**FILES, **DUMP}
    lines += [
        f"  {name:16}{size_of(folder / name):>10,} bytes  {what}" for name, what in files.items()
    ]
    commands = next_commands(options)
    width = max(map(len, commands)) + 3
    lines += ["next"] + [f"  {command:{width}}{what}" for command, what in commands.items()]
    return lines


def run(options: argparse.Namespace) -> dict[str, float]:
    """Trains, scores and exports; returns the measured figures."""
    started = time.perf_counter()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(options.seed)
    data = adult.load(options.data, options.seed)
    table: DynamicTable | FixedTable
    if options.embedding == "dynamic":
        table = DynamicTable(options.seed)
    else:
        table = FixedTable(options.seed, adult.vocabulary_of(data.train.ids))
    model = build_model(table.layer, len(data.fields))

    began = time.perf_counter()
    history, clock = train(model, table, data, options)
    seconds = time.perf_counter() - began

    probabilities = model.predict(table.inputs(data.test.ids), batch_size=4096, verbose=0)[:, 0]
    measured = adult.score(data.test.labels, probabilities)
    epochs = len(history["loss"])
    measured |= {"rows_per_second": clock.rows_per_second(), "seconds": seconds, "epochs": epochs}
    print("\ntable (figures that are 0 are left out):")
    for name, value in table.statistics().items():
        if value:
            print(f"  {name:28}{value}")

    keys, vectors = table.export()
    exported = options.output_dir / "embedding.npz"
    np.savez(exported, keys=keys, vectors=vectors)
    key = adult.category_id(data.fields, "education", "Bachelors")
    vector = read_vector(exported, key)
    print(f"\n{exported}: {len(keys)} keys and vectors")
    print(f"education = Bachelors, key {key}:\n  {np.array2string(vector, precision=4)}")
    if isinstance(table, DynamicTable):
        publish(model, table, data, key, options)

    plot_history(history, options.output_dir / "training.png")
    metrics = options.output_dir / "metrics.json"
    metrics.write_text(json.dumps({"seed": options.seed, **measured}, indent=2) + "\n")
    print("\n".join(summary(measured, len(keys), time.perf_counter() - started, options)))
    return measured


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--embedding", choices=("dynamic", "keras"), default="dynamic", help="embedding layer")
    add("--seed", type=int, default=0, help="seed of the split, the initial weights and the order")
    add("--epochs", type=int, default=50, help="maximum passes over the training rows")
    add("--patience", type=int, default=4, help="stop after this many epochs without a better AUC")
    add("--batch-size", type=int, default=256, help="rows per training step")
    add("--learning-rate", type=float, default=1e-3, help="learning rate of Adam")
    add("--data", type=Path, default=adult.DEFAULT_PATH, help="Parquet file with the Adult data")
    add(
        "--output-dir",
        type=Path,
        default=Path("outputs/quickstart"),
        help="folder for the best weights, the curve, the exported table and the figures",
    )
    add("--quiet", action="store_true", help="show no progress bar")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(parse_options())
