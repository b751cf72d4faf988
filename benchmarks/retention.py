"""Quality and memory of a model whose tables forget, on ratings in the order of time.

The model predicts a rating as the mean, a bias of the user, a bias of the movie, and the product of
their vectors. Each batch of ratings is predicted first, and then trained on. The error is the root
mean square of the predictions for the second half of the ratings. The rows of both tables are:

- unbounded: all that come.
- a tenth: at most a tenth of them. Rows expire, by the time of the ratings, and a key gets a row at
  its second occurrence (`Frequency(2)`, a refused id reads as zeros). Also each of these alone.

The file has lines of `user::movie::rating::seconds`, such as ratings.dat of MovieTweetings
(github.com/sidooms/MovieTweetings).
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import tf_dynemb as de


class Outcome(NamedTuple):
    """The results of a run of the stream.

    Attributes:
        error: the root mean square error in the second half.
        rows: the rows of both tables at the end.
        megabytes: their rows and index, with the optimizer's state and the admission counters.
    """

    error: float
    rows: int
    megabytes: float


def read_ratings(path: Path) -> npt.NDArray[np.int64]:
    """Returns [ratings, 4]: users, movies, ratings and seconds since 1970, in the order of time."""
    numbers = np.array([line.split("::") for line in path.read_text().split()], np.int64)
    return numbers[np.argsort(numbers[:, 3], kind="stable")]


def run(ratings: npt.NDArray[np.int64], batch: int, dim: int, options: list[Any]) -> Outcome:
    """Streams all ratings; `options` has the table options of users and of movies."""
    tables = [
        de.DynamicVariable(1 + dim, "normal", name=name, seed=1, **table_options)
        for name, table_options in zip(("users", "movies"), options, strict=True)
    ]
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.05))
    mean = float(ratings[: len(ratings) // 10, 2].mean())
    uses_data_time = [table_options.get("ttl_clock") == "data" for table_options in options]

    @tf.function(reduce_retracing=True)
    def step(ids: Any, stars: Any, now: Any) -> Any:
        for table, uses in zip(tables, uses_data_time, strict=True):
            if uses:
                table.set_data_time(now)
        with tf.GradientTape() as tape:
            users, movies = (t.lookup(ids[:, i]) for i, t in enumerate(tables))
            product = tf.reduce_sum(users[:, 1:] * movies[:, 1:], 1)
            errors = mean + users[:, 0] + movies[:, 0] + product - stars
            loss = tf.reduce_mean(errors**2) / 2
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        return tf.reduce_sum(errors**2)

    squares, count = 0.0, 0
    for begin in range(0, len(ratings), batch):
        block = ratings[begin : begin + batch]
        stars = tf.constant(block[:, 2], tf.float32)
        total = step(tf.constant(block[:, :2]), stars, tf.constant(block[-1, 3]))
        if begin >= len(ratings) // 2:
            squares += float(total)
            count += len(block)
    held = [table.stats() for table in tables]
    counters = sum(
        2.8 * table_options["admission"].counters
        for table_options in options
        if "admission" in table_options
    )
    used = sum(stats["row_bytes"] + stats["index_bytes"] for stats in held) + counters
    return Outcome((squares / count) ** 0.5, sum(stats["size"] for stats in held), used / 1e6)


def main() -> None:
    """Prints the outcomes as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ratings", type=Path, help="the file")
    parser.add_argument("--batch", type=int, default=100, help="ratings per step")
    parser.add_argument("--dim", type=int, default=8, help="width of the vectors, without bias")
    parser.add_argument("--days", type=float, default=30, help="the ttl")
    arguments = parser.parse_args()
    ratings = read_ratings(arguments.ratings)
    tenths = [max(1, len(np.unique(ratings[:, c])) // 10) for c in (0, 1)]
    days = datetime.timedelta(days=arguments.days)
    ttl = {"ttl": days, "ttl_clock": "data", "ttl_since": "access"}

    def limited(**more: Any) -> list[Any]:
        """Options of tables of a tenth of the rows, with one counter per row."""
        limits = []
        for rows in tenths:
            table_options = {"max_capacity": rows, "init_capacity": rows, **more}
            if "admission" in table_options:
                table_options["admission"] = de.Frequency(2, counters=rows)
            limits.append(table_options)
        return limits

    def forgetting(**more: Any) -> list[Any]:
        """Options of tables without a limit."""
        return [{"init_capacity": 1, **more}] * 2

    kinds = {
        "unbounded": forgetting(),
        "ttl": forgetting(**ttl),
        "Frequency(2)": forgetting(admission=de.Frequency(2, counters=10_000)),
        "ttl, Frequency(2)": forgetting(**ttl, admission=de.Frequency(2, counters=10_000)),
        "a tenth": limited(),
        "a tenth, ttl": limited(**ttl),
        "a tenth, Frequency(2)": limited(admission=True),
        "a tenth, ttl, Frequency(2)": limited(**ttl, admission=True),
    }
    print("| tables | error | rows | MB |\n|---|---|---|---|")
    for name, options in kinds.items():
        outcome = run(ratings, arguments.batch, arguments.dim, options)
        print(f"| {name} | {outcome.error:.4f} | {outcome.rows} | {outcome.megabytes:.2f} |")


if __name__ == "__main__":
    main()
