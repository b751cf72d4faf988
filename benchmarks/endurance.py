"""Training for minutes with large tables: whether steps stay as fast as at the beginning.

Ten tables of ten million rows are filled, and then trained with Adagrad. The ids of the steps are
drawn from all rows, and a share of them is new, so that the tables grow while they are trained. A
line is printed for each window: steps per second, the median and the longest step, the rows of all
tables and the memory of the process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.harness import (
    OURS,
    Result,
    describe_machine,
    finish,
    parser_for,
    resident_bytes,
    use_threads,
)
from benchmarks.sparse import ZIPF, Ids, filled, optimizer_for, training_step
from benchmarks.workload import Draws


def endless(batches: list[Ids], peer: Any, rows: int, new_ids: int) -> Iterator[Ids]:
    """Yields the batches again and again; the first `new_ids` ids of each table are new."""
    next_row = rows
    while True:
        for batch in batches:
            fresh = peer.ids(np.arange(next_row, next_row + new_ids))
            next_row += new_ids
            yield [tf.concat([fresh, ids[new_ids:]], axis=0) for ids in batch]


def main() -> None:
    """Fills the tables, trains them, and prints a line for each window."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--tables", type=int, default=10, help="tables per step")
    add("--rows", type=int, default=10_000_000, help="rows per table at the beginning")
    add("--dim", type=int, default=16, help="floats per vector")
    add("--samples", type=int, default=8_192, help="samples per step")
    add("--hotness", type=int, default=10, help="ids per sample and table")
    add("--new-ids", type=int, default=100, help="new ids per step and table")
    add("--batches", type=int, default=48, help="batches that the steps cycle through")
    add("--zipf", action="store_true", help="draw ids by Zipf's law instead of uniformly")
    add("--seconds", type=float, default=600, help="how long to train")
    add("--window", type=float, default=30, help="seconds per line")
    options = parser.parse_args()
    use_threads(options.threads)

    print(describe_machine(), flush=True)
    began = time.perf_counter()
    peers: list[Any] = filled(OURS, options.tables, options.dim, options.rows, 1 << 17)
    print(f"filled in {time.perf_counter() - began:.0f} s", flush=True)
    draws = Draws(options.rows, ZIPF if options.zipf else None, seed=4)
    count = options.samples * options.hotness
    batches = [
        [peers[0].ids(draws.take(count)) for _ in range(options.tables)]
        for _ in range(options.batches)
    ]
    step = training_step(
        peers, options.samples, options.hotness, optimizer_for("adagrad", peers, False)
    )
    ids = endless(batches, peers[0], options.rows, options.new_ids)
    step(next(ids))
    gc.collect()

    print("seconds  steps/s  median ms  longest ms  million rows  GiB", flush=True)
    rates: list[float] = []
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < options.seconds:
        times: list[float] = []
        while sum(times) < options.window:
            batch = next(ids)
            before = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - before)
        milliseconds = np.asarray(times) * 1e3
        rows = sum(peer.variable.stats()["size"] for peer in peers)
        rates.append(len(times) / sum(times))
        print(
            f"{elapsed:7.0f}  {rates[-1]:7.2f}  {np.median(milliseconds):9.1f}  "
            f"{milliseconds.max():10.1f}  {rows / 1e6:12.1f}  {resident_bytes() / 2**30:.2f}",
            flush=True,
        )
    half = len(rates) // 2
    size = f"{options.tables} x {options.rows / 1e6:g} M rows"
    what = f"train adagrad for {options.seconds:g} s, {size}"
    results = [
        Result(f"{what}: first half", "steps/s", {OURS: rates[:half] or rates}),
        Result(f"{what}: second half", "steps/s", {OURS: rates[half:]}),
    ]
    finish(results, options.json)


if __name__ == "__main__":
    main()
