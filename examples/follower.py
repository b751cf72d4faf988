"""Follows the snapshots that `incremental_export.py` publishes, with NumPy and no TensorFlow.

`incremental_export.py` starts this script as a separate process. It opens the base, and then reads
each delta as it appears. With the state of each publication it predicts the ratings that the
trainer will see before the next one. Both scripts use this module to read ratings and to predict.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tf_dynemb.serving import Reader

FACTORS = 16
DIM = FACTORS + 1  # The last column of a vector is the bias.

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ratings:
    """Ratings in chronological order."""

    ids: Ids  # (rows, 2): user, movie
    ratings: Floats  # (rows,)

    def __len__(self) -> int:
        return len(self.ratings)

    def __getitem__(self, rows: slice) -> Ratings:
        return Ratings(self.ids[rows], self.ratings[rows])


def read_ratings(path: Path) -> Ratings:
    """Reads lines of user, movie, rating and time, separated by "::" or tabs; sorts by time."""
    lines = path.read_text(encoding="utf-8").replace("::", "\t").splitlines()
    if not lines[0][:1].isdigit():
        del lines[0]  # the names of the columns
    columns = np.loadtxt(lines, delimiter="\t", dtype=np.float64, ndmin=2)
    columns = columns[np.argsort(columns[:, 3], kind="stable")]
    return Ratings(columns[:, :2].astype(np.int64), columns[:, 2].astype(np.float32))


def predict(mean: float, users: Floats, movies: Floats) -> Floats:
    """Vectors of shape (rows, DIM) of users and of movies -> ratings of shape (rows,)."""
    products = np.einsum("ij,ij->i", users[:, :FACTORS], movies[:, :FACTORS])
    predicted: Floats = np.float32(mean) + users[:, FACTORS] + movies[:, FACTORS] + products
    return predicted


def rmse(predicted: Floats, ratings: Floats) -> float:
    """Returns the root mean square error."""
    return float(np.sqrt(np.mean(np.square(predicted - ratings, dtype=np.float64))))


def vectors_of(reader: Reader, ids: Ids) -> tuple[Floats, Floats]:
    """Returns the vectors of users and of movies at one state; zeros for absent ids."""
    columns = dict(zip(reader.tables, ids.T, strict=True))  # tables: in the order of the dump
    users, movies = reader.lookup_many(columns, default=0.0).values()
    return users, movies


def wait_for_next(reader: Reader, patience: float) -> float:
    """Waits for a new state; returns the time to follow it, in seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        began = time.perf_counter()
        if reader.follow():
            return time.perf_counter() - began
        time.sleep(0.002)
    raise TimeoutError(f"Nothing was published for {patience:.0f} s.")


def run(options: argparse.Namespace) -> None:
    """Predicts window n of the ratings with state n; prints a line of JSON for each state."""
    data = read_ratings(options.ratings)
    test = data[options.begin :]
    windows = -(-len(test) // options.window)
    reader = Reader(options.path)
    frozen = predict(options.mean, *vectors_of(reader, test.ids))
    parts = []
    for number in range(windows):
        seconds = wait_for_next(reader, options.patience) if number else 0.0
        followed = time.time()
        print(json.dumps({"id": reader.id, "followed": followed, "seconds": seconds}), flush=True)
        rows = slice(number * options.window, (number + 1) * options.window)
        parts.append(predict(options.mean, *vectors_of(reader, test.ids[rows])))
    np.savez(
        options.output,
        frozen=frozen,
        following=np.concatenate(parts),
        has_tensorflow="tensorflow" in sys.modules,
    )


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--path", type=Path, required=True, help="path of the snapshots")
    add("--ratings", type=Path, required=True, help="file with the ratings")
    add("--mean", type=float, required=True, help="constant added to every prediction")
    add("--begin", type=int, required=True, help="first row to predict, in chronological order")
    add("--window", type=int, required=True, help="rows to predict with each state")
    add("--output", type=Path, required=True, help=".npz file for the predictions")
    add("--patience", type=float, default=60.0, help="seconds to wait for a publication")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(parse_options())
