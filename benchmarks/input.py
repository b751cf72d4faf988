"""From a file to the end of a training step: what input costs, and who waits for whom.

Samples as Criteo's have 26 strings of 8 characters, 13 numbers and a label. Each form of them is
read by the fastest pipeline of `tf.data` or pyarrow that its users write without operators of
others, in batches:

- tfrecord: one `tf.train.Example` for a sample, with a feature for each column, parsed by batches.
- tfrecord, one feature: the same, but the 26 strings are one feature.
- csv: lines of text, `tf.io.decode_csv` on batches.
- parquet: pyarrow, columns of strings.
- parquet, keys: pyarrow, columns of int64, which are hashes of the strings.
- npy, keys: memory-mapped arrays of int64 and float32, as `numpy.save` writes them.

Strings are hashed by the layer (`hash_strings=True`), within the step; "hashed in input" calls the
same hash in the pipeline. Three figures for each, in samples a second and in turns: the input
alone, the step alone (on batches that are in memory), and both together with `prefetch`. The last
column is the share of the time together in which the training loop waits for a batch.

    python -m benchmarks.input
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import tf_dynemb as de
from benchmarks.harness import describe_machine, use_threads
from benchmarks.workload import Draws

FIELDS, NUMBERS, DIM = 26, 13, 16
NAMES = [f"C{i}" for i in range(FIELDS)]
NUMBER_NAMES = [f"I{i}" for i in range(NUMBERS)]
MOST_KEY = 2**63 - 1  # as in tf_dynemb.layers
Array = npt.NDArray[Any]
Batch = tuple[Any, Any, Any]  # ids [samples, FIELDS], numbers, labels


def draw(samples: int, vocabulary: int) -> tuple[Array, Array, Array]:
    """Returns row numbers [samples, FIELDS], each column from its own vocabulary, and the rest."""
    columns = [Draws(vocabulary, 1.05, seed).take(samples) for seed in range(FIELDS)]
    rows = np.stack([FIELDS * rows + i for i, rows in enumerate(columns)], axis=1)
    rng = np.random.default_rng(0)
    numbers = rng.random([samples, NUMBERS], np.float32)
    return rows, numbers, (rng.random([samples, 1]) < 0.25).astype(np.float32)


def strings_of(rows: Array) -> Array:
    """Returns 8 characters for each row number, as bytes."""
    mixed = (rows.astype(np.uint64) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    return np.char.mod(b"%08x", mixed)


class Files:
    """A data set in all forms.

    Args:
        folder: where the files go.
        samples: their number, a multiple of the batch.
        batch: the samples of a batch.
        vocabulary: the values of each column.
    """

    def __init__(self, folder: Path, samples: int, batch: int, vocabulary: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._folder, self._batch = folder, batch
        rows, numbers, labels = draw(samples, vocabulary)
        strings = strings_of(rows)
        keys = tf.strings.to_hash_bucket_fast(strings, MOST_KEY).numpy()
        for name, array in (("keys", keys), ("numbers", numbers), ("labels", labels)):
            np.save(folder / f"{name}.npy", array)
        for form, ids in (("strings", strings), ("keys", keys)):
            columns = {n: pa.array(ids[:, i].tolist()) for i, n in enumerate(NAMES)}
            columns |= {n: pa.array(numbers[:, i]) for i, n in enumerate(NUMBER_NAMES)}
            columns["label"] = pa.array(labels[:, 0])
            pq.write_table(pa.table(columns), folder / f"{form}.parquet", row_group_size=8 * batch)
        with (folder / "lines.csv").open("wb") as file:
            for line, given, label in zip(strings, numbers, labels[:, 0], strict=True):
                texts = [b"%d" % label, *(b"%.6f" % each for each in given), *line]
                file.write(b",".join(texts) + b"\n")
        for form in ("columns", "one"):
            with tf.io.TFRecordWriter(str(folder / f"{form}.tfrecord")) as writer:
                for line, given, label in zip(strings, numbers, labels[:, 0], strict=True):
                    writer.write(_example(line, given, label, form == "columns"))

    def forms(self) -> dict[str, Callable[[], Iterator[Batch]]]:
        """Returns what begins to read each form; batches are on the way ahead of the reader."""
        hashed = {
            f"{name}, hashed in input": lambda made=made: iter(made(_hashed))
            for name, made in (("tfrecord, one feature", self._one_feature), ("csv", self._lines))
        }
        return {
            "tfrecord": lambda: iter(self._columns()),
            "tfrecord, one feature": lambda: iter(self._one_feature()),
            "csv": lambda: iter(self._lines()),
            **hashed,
            "parquet": lambda: iter(self._parquet("strings", tf.string)),
            "parquet, keys": lambda: iter(self._parquet("keys", tf.int64)),
            "npy, keys": lambda: iter(self._arrays()),
        }

    def _columns(self) -> tf.data.Dataset:
        spec = {name: tf.io.FixedLenFeature([], tf.string) for name in NAMES}
        spec |= {name: tf.io.FixedLenFeature([], tf.float32) for name in (*NUMBER_NAMES, "label")}

        def parse(records: Any) -> Batch:
            found = tf.io.parse_example(records, spec)
            ids = tf.stack([found[name] for name in NAMES], axis=1)
            numbers = tf.stack([found[name] for name in NUMBER_NAMES], axis=1)
            return ids, numbers, found["label"][:, tf.newaxis]

        return self._records("columns", parse)

    def _one_feature(self, then: Callable[..., Batch] | None = None) -> tf.data.Dataset:
        spec = {
            "ids": tf.io.FixedLenFeature([FIELDS], tf.string),
            "numbers": tf.io.FixedLenFeature([NUMBERS], tf.float32),
            "label": tf.io.FixedLenFeature([1], tf.float32),
        }

        def parse(records: Any) -> Batch:
            found = tf.io.parse_example(records, spec)
            batch = found["ids"], found["numbers"], found["label"]
            return batch if then is None else then(*batch)

        return self._records("one", parse)

    def _records(self, form: str, parse: Callable[[Any], Batch]) -> tf.data.Dataset:
        records = tf.data.TFRecordDataset(str(self._folder / f"{form}.tfrecord"))
        batches = records.batch(self._batch, drop_remainder=True)
        return _ahead(batches.map(parse, tf.data.AUTOTUNE))

    def _lines(self, then: Callable[..., Batch] | None = None) -> tf.data.Dataset:
        defaults = [[0.0]] * (1 + NUMBERS) + [[""]] * FIELDS

        def parse(lines: Any) -> Batch:
            label, *rest = tf.io.decode_csv(lines, defaults)
            batch = (
                tf.stack(rest[NUMBERS:], axis=1),
                tf.stack(rest[:NUMBERS], axis=1),
                label[:, tf.newaxis],
            )
            return batch if then is None else then(*batch)

        lines = tf.data.TextLineDataset(str(self._folder / "lines.csv"))
        batches = lines.batch(self._batch, drop_remainder=True)
        return _ahead(batches.map(parse, tf.data.AUTOTUNE))

    def _parquet(self, form: str, dtype: tf.DType) -> tf.data.Dataset:
        import pyarrow.parquet as pq

        def batches() -> Iterator[tuple[Array, Array, Array]]:
            file = pq.ParquetFile(self._folder / f"{form}.parquet")
            for each in file.iter_batches(self._batch):
                columns = [each[n].to_numpy(zero_copy_only=False) for n in NAMES]
                numbers = np.stack([each[n].to_numpy() for n in NUMBER_NAMES], axis=1)
                yield np.stack(columns, axis=1), numbers, each["label"].to_numpy()[:, np.newaxis]

        return self._generated(batches, dtype)

    def _arrays(self) -> tf.data.Dataset:
        def batches() -> Iterator[tuple[Array, Array, Array]]:
            ids, numbers, labels = (
                np.load(self._folder / f"{name}.npy", mmap_mode="r")
                for name in ("keys", "numbers", "labels")
            )
            for begin in range(0, len(ids), self._batch):
                end = begin + self._batch
                yield ids[begin:end], numbers[begin:end], labels[begin:end]

        return self._generated(batches, tf.int64)

    def _generated(self, batches: Callable[[], Iterator[Any]], dtype: tf.DType) -> tf.data.Dataset:
        signature = (
            tf.TensorSpec([None, FIELDS], dtype),
            tf.TensorSpec([None, NUMBERS], tf.float32),
            tf.TensorSpec([None, 1], tf.float32),
        )
        return _ahead(tf.data.Dataset.from_generator(batches, output_signature=signature))


def _example(line: Array, numbers: Array, label: float, columns: bool) -> bytes:
    def strings(values: list[bytes]) -> tf.train.Feature:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

    def floats(values: list[float]) -> tf.train.Feature:
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    if columns:
        features = {name: strings([each]) for name, each in zip(NAMES, line.tolist(), strict=True)}
        features |= {
            name: floats([each]) for name, each in zip(NUMBER_NAMES, numbers.tolist(), strict=True)
        }
    else:
        features = {"ids": strings(line.tolist()), "numbers": floats(numbers.tolist())}
    features["label"] = floats([label])
    made = tf.train.Example(features=tf.train.Features(feature=features))
    return bytes(made.SerializeToString())


def _hashed(ids: Any, numbers: Any, labels: Any) -> Batch:
    return tf.strings.to_hash_bucket_fast(ids, MOST_KEY), numbers, labels


def _ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    return batches.prefetch(2)


class Training:
    """A model with 26 tables and a small tower, and its step."""

    def __init__(self, hash_strings: bool) -> None:
        ids = keras.Input([FIELDS], dtype="string" if hash_strings else "int64")
        numbers = keras.Input([NUMBERS])
        tables = de.layers.MultiTableEmbedding(
            DIM, FIELDS, initializer="uniform", hash_strings=hash_strings
        )
        x = keras.layers.Concatenate()([keras.layers.Flatten()(tables(ids)), numbers])
        for units in (64, 32):
            x = keras.layers.Dense(units, "relu")(x)
        self._model = keras.Model([ids, numbers], keras.layers.Dense(1)(x))
        self._optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.01))
        self._loss = keras.losses.BinaryCrossentropy(from_logits=True)
        self._optimizer.build(self._model.trainable_variables)
        self._step = tf.function(self._train, reduce_retracing=True)

    def __call__(self, batch: Batch) -> None:
        """Takes a step, and waits for its end."""
        self._step(*batch).numpy()

    def _train(self, ids: Any, numbers: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss(labels, self._model([ids, numbers], training=True))
        variables = self._model.trainable_variables
        self._optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


def measure(
    begin: Callable[[], Iterator[Batch]], training: Training, batch: int
) -> tuple[float, float, float, float]:
    """Returns samples a second of the input, of steps and of both, and the share of waiting."""
    began, count, kept = time.perf_counter(), 0, []
    for each in begin():
        count += 1
        kept = [*kept[-3:], each]
    alone = count * batch / (time.perf_counter() - began)
    for each in kept:
        training(each)
    began = time.perf_counter()
    for number in range(count):
        training(kept[number % len(kept)])
    steps = count * batch / (time.perf_counter() - began)
    began, waited, batches = time.perf_counter(), 0.0, begin()
    while True:
        asked = time.perf_counter()
        got = next(batches, None)
        waited += time.perf_counter() - asked
        if got is None:
            break
        training(got)
    seconds = time.perf_counter() - began
    return alone, steps, count * batch / seconds, waited / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=32, help="of the data set")
    parser.add_argument("--batch", type=int, default=8192, help="samples of a batch")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="values of a column")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    use_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="input_") as folder:
        files = Files(
            Path(folder), options.batches * options.batch, options.batch, options.vocabulary
        )
        trainings = {hashes: Training(hashes) for hashes in (False, True)}
        figures: dict[str, list[tuple[float, float, float, float]]] = {}
        for number in range(options.repeats + 1):
            for name, begin in files.forms().items():
                is_strings = next(begin())[0].dtype == tf.string
                found = measure(begin, trainings[is_strings], options.batch)
                if number:  # the first turn creates rows, and traces
                    figures.setdefault(name, []).append(found)
    print(describe_machine())
    print(f"\n{'samples a second':40}{'input':>10}{'step':>10}{'both':>10}{'waits':>8}")
    for name, found in figures.items():
        alone, steps, both, waits = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"{name:40}{alone:10,.0f}{steps:10,.0f}{both:10,.0f}{waits:8.0%}")


if __name__ == "__main__":
    main()
