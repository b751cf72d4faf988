"""Growth: the time of every batch while a table grows, and its metadata at the end.

All keys are new, so each lookup inserts a row with an initial vector. DenseHashTable has no initial
vectors, so they are passed to it. The longest batch is given as a multiple of the median.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from benchmarks.harness import (
    DENSE,
    OURS,
    Result,
    finish,
    parser_for,
    resident_bytes,
    seconds_of,
    use_threads,
    warm_memory,
)
from benchmarks.peers import empty_table


def grow(
    name: str, dim: int, rows: int, batch: int
) -> tuple[npt.NDArray[np.float64], int, dict[str, int]]:
    """Fills a table.

    Returns:
        The seconds of each batch, the bytes by which the process grew, and the statistics of the
        table if it has any.
    """
    gc.collect()
    warm_memory()
    before = resident_bytes()
    table: Any = empty_table(name, dim, rows, sized=False)
    values = tf.ones([batch, dim])
    times = []
    for start in range(0, rows, batch):
        ids = table.ids(np.arange(start, min(start + batch, rows)))
        if name == OURS:
            times.append(seconds_of(partial(table.lookup, ids)))
        else:
            times.append(seconds_of(partial(table.upsert, ids, values[: len(ids)])))
    statistics = table.variable.stats() if name == OURS else {}
    return np.asarray(times), resident_bytes() - before, statistics


def print_batches(name: str, times: npt.NDArray[np.float64], grown: int, rows: int) -> None:
    """Formats the distribution of batch times and the positions of the longest."""
    milliseconds = times * 1e3
    middle, high, longest = np.quantile(milliseconds, [0.5, 0.99, 1.0])
    worst = ", ".join(str(n) for n in np.argsort(-times)[:5])
    print(
        f"{name}: {rows:,} rows in {times.sum():.1f} s, {rows / times.sum() / 1e6:.2f} M rows/s; "
        f"batch median {middle:.2f} ms, 99% {high:.2f} ms, longest {longest:.2f} ms; "
        f"longest batches: {worst} of {len(times)}; process grew by {grown / 2**30:.2f} GiB, "
        f"{grown / rows:.1f} bytes/row"
    )


def main() -> None:
    """Fills one table after the other, and prints the results."""
    parser = parser_for(__doc__)
    parser.add_argument("--dim", type=int, default=16, help="floats per vector")
    parser.add_argument("--rows", type=int, default=50_000_000, help="rows at the end")
    parser.add_argument("--batch", type=int, default=65_536, help="keys per call")
    parser.add_argument("--no-peer", action="store_true", help="leave DenseHashTable out")
    options = parser.parse_args()
    use_threads(options.threads)

    longest: dict[str, list[float]] = {}
    speed: dict[str, list[float]] = {}
    metadata = 0.0
    for name in (OURS,) if options.no_peer else (OURS, DENSE):
        times, grown, statistics = grow(name, options.dim, options.rows, options.batch)
        print_batches(name, times, grown, options.rows)
        longest[name] = [float(times.max() / np.median(times))]
        speed[name] = [options.rows / float(times.sum()) / 1e6]
        if statistics:
            print(f"statistics: {statistics}")
            metadata = statistics["metadata_bytes"] / statistics["size"]

    what = f"growth to {options.rows / 1e6:g} M rows, dim {options.dim}"
    results = [
        Result(f"{what}: speed", "M rows/s", speed),
        Result(f"{what}: longest / median batch", "x", longest, less_is_better=True),
        Result(f"{what}: metadata, stats()", "bytes/row", {OURS: [metadata]}, less_is_better=True),
    ]
    finish(results, options.json)


if __name__ == "__main__":
    main()
