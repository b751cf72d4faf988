"""What serving loses that follows a training in part, on ratings in the order of time.

A model of two tables and dense layers is trained on a stream of ratings. Each hour, it is trained
on the ratings that have come, and published as a delta. Before that, these ratings are predicted
(progressive validation) by four models:

- frozen: the model that was exported after the first part of the ratings.
- rows: the same dense weights, with the rows of the last delta.
- whole: the rows and the dense weights of the last delta.
- trainer: the model that is trained.

The error is the root mean square from the export on. `whole` must equal `trainer`, to the last bit.

The file has lines of `user::movie::rating::seconds`, such as ratings.dat of MovieTweetings
(github.com/sidooms/MovieTweetings).

    python -m benchmarks.online ratings.dat --figure docs/figures/online.svg
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import tf_dynemb as de
from benchmarks.harness import describe_machine
from benchmarks.retention import read_ratings

HOUR = 3600
FOLLOWERS = ("frozen", "rows", "whole", "trainer")
COLORS = dict(zip(FOLLOWERS, ("#9aa5b1", "#d98e4a", "#2f5d8c", "#222222"), strict=True))


class Outcome(NamedTuple):
    """The results of a run of the stream.

    Attributes:
        errors: for each model, the squared error of each rating after the export.
        publications: the number of deltas.
        publish_ms: the median time of `incremental_dump`.
        apply_ms: the median time of `apply_delta`.
        delta_bytes: the median size of a delta.
    """

    errors: dict[str, npt.NDArray[np.float64]]
    publications: int
    publish_ms: float
    apply_ms: float
    delta_bytes: float


def build(mean: float, dim: int, optimizer: str = "adagrad", rate: float = 0.02) -> keras.Model:
    """Returns a compiled model: tables of users and movies, and dense layers on their vectors."""
    inputs = [keras.Input((), dtype="int64", name=name) for name in ("user", "movie")]
    vectors = [
        de.layers.Embedding(dim, initializer="normal", name=f"{each.name}_table")(each)
        for each in inputs
    ]
    crossed = [*vectors, keras.layers.Multiply()(vectors)]
    hidden = keras.layers.Concatenate()(crossed)
    for number, width in enumerate((64, 32)):
        hidden = keras.layers.Dense(width, activation="relu", name=f"hidden_{number}_relu")(hidden)
        hidden = keras.layers.BatchNormalization(name=f"hidden_{number}_norm")(hidden)
    initializer = keras.initializers.Constant(mean)
    rating = keras.layers.Dense(1, bias_initializer=initializer, name="rating")(hidden)
    model = keras.Model(inputs, rating)
    optimizer = keras.optimizers.get(optimizer)
    optimizer.learning_rate = rate
    model.compile(de.OptimizerWrapper(optimizer), "mse")
    return model


def hours(ratings: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Returns the ratings of each hour that has some."""
    return np.split(ratings, np.flatnonzero(np.diff(ratings[:, 3] // HOUR)) + 1)


def newest(path: Path) -> Path:
    """Returns the directory of the last snapshot at a path."""
    return max(child for child in path.iterdir() if child.name[0].isdigit())


def _function(model: keras.Model) -> Any:
    ids = tf.TensorSpec([None], tf.int64)
    return tf.function(lambda *args: model(list(args), training=False), input_signature=[ids, ids])


def run(ratings: npt.NDArray[np.int64], share: float, most: int, dim: int, path: Path) -> Outcome:
    """Streams all ratings; the model is exported after a share of them."""
    keras.utils.set_random_seed(1)
    before, after = np.split(ratings, [int(share * len(ratings))])
    mean = float(before[:, 2].mean())
    models = {name: build(mean, dim) for name in FOLLOWERS}
    trainer = models["trainer"]
    errors: dict[str, list[Any]] = {name: [] for name in FOLLOWERS}
    times: dict[str, list[float]] = {"publish": [], "apply": []}
    sizes: list[int] = []

    def train(ratings_of_hour: npt.NDArray[np.int64]) -> None:
        for first in range(0, len(ratings_of_hour), most):
            batch = ratings_of_hour[first : first + most]
            trainer.train_on_batch([batch[:, 0], batch[:, 1]], batch[:, 2:3].astype(np.float32))

    predict = {name: _function(model) for name, model in models.items()}
    for of_hour in hours(before):
        train(of_hour)
    de.dump(path, trainer, trainer.optimizer, quiet=True)
    for name in FOLLOWERS[:-1]:
        de.load(path, models[name], dense="weights", quiet=True)
    for of_hour in hours(after):
        for name in FOLLOWERS:
            predicted = predict[name](of_hour[:, 0], of_hour[:, 1]).numpy()
            errors[name].append((predicted[:, 0] - of_hour[:, 2]) ** 2)
        train(of_hour)
        began = time.perf_counter()
        de.incremental_dump(path, trainer, dense="weights", quiet=True)
        published = time.perf_counter()
        de.apply_delta(path, models["whole"], dense="weights")
        times["apply"].append(time.perf_counter() - published)
        times["publish"].append(published - began)
        de.apply_delta(path, models["rows"], dense=None)
        last = newest(path)
        sizes.append(sum(file.stat().st_size for file in last.iterdir()))
    return Outcome(
        {name: np.concatenate(each) for name, each in errors.items()},
        len(sizes),
        1e3 * float(np.median(times["publish"])),
        1e3 * float(np.median(times["apply"])),
        float(np.median(sizes)),
    )


def draw(outcome: Outcome, seconds: npt.NDArray[np.int64], file: Path) -> None:
    """Draws the errors, averaged over the last two weeks, by time."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    days = (seconds - seconds[0]) / (24 * HOUR)
    figure, axes = plt.subplots(figsize=(8, 3.2))
    ends = np.arange(14, days[-1], 1)
    lasts = np.searchsorted(days, ends)
    firsts = np.searchsorted(days, ends - 14)
    for name in FOLLOWERS[:-1]:
        sums = np.concatenate([[0], np.cumsum(outcome.errors[name])])
        rmse = np.sqrt((sums[lasts] - sums[firsts]) / (lasts - firsts))
        axes.plot(ends, rmse, label=name, color=COLORS[name], linewidth=2)
    axes.set_xlabel("days since the export")
    axes.set_ylabel("RMSE, last 14 days")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "tf_dynemb"}):
        figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ratings", type=Path, help="user::movie::rating::seconds")
    parser.add_argument("--share", type=float, default=0.5, help="share of the ratings before")
    parser.add_argument("--batch", type=int, default=256, help="the most ratings of a step")
    parser.add_argument("--dim", type=int, default=16, help="dimension of both tables")
    parser.add_argument("--figure", type=Path, help="file for a plot, SVG")
    options = parser.parse_args()
    ratings = read_ratings(options.ratings)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(ratings, options.share, options.batch, options.dim, Path(folder, "chain"))
    print(describe_machine())
    for name, errors in outcome.errors.items():
        print(f"{name:8} RMSE {np.sqrt(errors.mean()):.4f}")
    is_equal = np.array_equal(outcome.errors["whole"], outcome.errors["trainer"])
    print(f"whole equals trainer: {is_equal}")
    print(
        f"{outcome.publications} deltas of {outcome.delta_bytes / 1e3:.0f} KB: published in "
        f"{outcome.publish_ms:.1f} ms, applied in {outcome.apply_ms:.1f} ms (medians)"
    )
    if options.figure is not None:
        draw(outcome, ratings[-len(outcome.errors["frozen"]) :, 3], options.figure)


if __name__ == "__main__":
    main()
