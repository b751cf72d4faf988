"""Hit rates of the eviction strategies on ratings in the order of time.

A table holds a share of the ids of a column, users or movies. The ratings are looked up in batches,
as in training. A hit is an id that had a row; the hit rate is measured in the second half of the
ratings. An unbounded table has the highest rate that is possible.

The file has lines of `user::movie::rating::seconds`, such as ratings.dat of MovieTweetings
(github.com/sidooms/MovieTweetings).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tensorflow as tf

import tf_dynemb as de

STRATEGIES = ("lru", "lfu", "epoch_lfu")


def read_ids(path: Path) -> npt.NDArray[np.int64]:
    """Returns [ratings, 2]: users and movies, in the order of time."""
    numbers = np.array([line.split("::") for line in path.read_text().split()], np.int64)
    return numbers[np.argsort(numbers[:, 3], kind="stable"), :2]


def hit_rate(
    ids: npt.NDArray[np.int64], batch: int, capacity: int | None, strategy: str, epochs: int
) -> float:
    """Looks up all ids, and returns the share of the second half's ids that had a row."""
    steps = -(-len(ids) // batch)
    epoch_steps = max(1, steps // epochs) if strategy == "epoch_lfu" else None
    table = de.DynamicVariable(
        1, max_capacity=capacity, evict_strategy=strategy, epoch_steps=epoch_steps
    )
    before = {"hits": 0, "misses": 0}
    for step in range(steps):
        if step == steps // 2:
            before = table.stats()
        table.lookup(tf.constant(ids[step * batch : (step + 1) * batch]))
    after = table.stats()
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    return hits / (hits + misses)


def main() -> None:
    """Prints the hit rates as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ratings", type=Path, help="the file")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.25])
    parser.add_argument("--batch", type=int, default=100, help="ratings per lookup")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of epoch_lfu")
    options = parser.parse_args()
    ids = read_ids(options.ratings)
    print("| ids | rows | " + " | ".join(STRATEGIES) + " | unbounded |")
    print("|---|---|" + "---|" * (len(STRATEGIES) + 1))
    for column, name in enumerate(("users", "movies")):
        every = len(np.unique(ids[:, column]))
        best = hit_rate(ids[:, column], options.batch, None, "lru", options.epochs)
        for share in options.shares:
            capacity = max(1, round(share * every))
            rates = [
                hit_rate(ids[:, column], options.batch, capacity, strategy, options.epochs)
                for strategy in STRATEGIES
            ]
            cells = " | ".join(f"{100 * rate:.1f}%" for rate in [*rates, best])
            print(f"| {name} | {capacity} ({share:.0%}) | {cells} |")


if __name__ == "__main__":
    main()
