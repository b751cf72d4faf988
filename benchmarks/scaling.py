"""How the cost per key scales; it should have no jumps.

For one table, lookups are timed while rows, dim or keys per call vary. For the tables of a model,
trained with Adagrad, the ids per sample and table vary, and the number of tables at a constant
total of ids. Each point is compared with a static variable.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import tensorflow as tf

from benchmarks.harness import (
    OURS,
    STATIC,
    Result,
    finish,
    interleave,
    parser_for,
    seconds_of,
    use_threads,
    warm_memory,
)
from benchmarks.peers import Peer, empty_table, fill
from benchmarks.sparse import (
    DISTINCT_STEPS,
    draw_steps,
    filled,
    optimizer_for,
    run_steps,
    training_step,
)
from benchmarks.workload import Draws

FILL = 1 << 17
NAMES = (OURS, STATIC)
MODEL_ROWS, MODEL_IDS = 2_600_000, 26 * 8192  # over all tables


def lookup_case(
    case: str, peers: dict[str, Peer], rows: int, batch: int, repeats: int, keys: int
) -> Result:
    """Times lookups of `keys` keys, in calls of `batch`."""
    draws = Draws(rows, None, seed=2)
    numbers = [draws.take(batch) for _ in range(max(1, keys // batch))]

    def figure(peer: Peer, batches: list[tf.Tensor]) -> float:
        def run() -> None:
            for ids in batches:
                peer.lookup(ids)

        return seconds_of(run) / (len(batches) * batch) * 1e9

    actions = {
        name: partial(figure, peer, [peer.ids(part) for part in numbers])
        for name, peer in peers.items()
    }
    return Result(case, "ns/key", interleave(actions, repeats), less_is_better=True)


def row_cases(options: argparse.Namespace) -> Iterator[Result]:
    """Varies the rows: one table grows from the fewest to the most."""
    dim = 16
    warm_memory()
    peers = {name: empty_table(name, dim, max(options.rows), sized=False) for name in NAMES}
    held = 0
    for rows in sorted(options.rows):
        fill(peers.values(), dim, range(held, rows), FILL)
        held = rows
        yield lookup_case(
            f"scaling: {rows / 1e6:g} M rows", peers, rows, 65_536, options.repeats, options.keys
        )


def dim_cases(options: argparse.Namespace) -> Iterator[Result]:
    """Varies the length of vectors."""
    rows = 1_000_000
    for dim in options.dims:
        peers = {name: empty_table(name, dim, rows, sized=True) for name in NAMES}
        fill(peers.values(), dim, range(rows), FILL)
        case = f"scaling: dim {dim}"
        yield lookup_case(case, peers, rows, 65_536, options.repeats, options.keys)
        del peers
        gc.collect()


def batch_cases(options: argparse.Namespace) -> Iterator[Result]:
    """Varies the keys per call."""
    rows = 2_000_000
    peers = {name: empty_table(name, 16, rows, sized=True) for name in NAMES}
    fill(peers.values(), 16, range(rows), FILL)
    for batch in options.batches:
        case = f"scaling: calls of {batch} keys"
        keys = min(options.keys, batch * 2000)
        yield lookup_case(case, peers, rows, batch, options.repeats, keys)


def train_case(
    case: str, tables: int, samples: int, hotness: int, options: argparse.Namespace
) -> Result:
    """Times training steps with Adagrad."""
    rows = MODEL_ROWS // tables
    numbers = draw_steps(Draws(rows, None, seed=4), tables, samples * hotness)
    ids = tables * samples * hotness
    steps = max(DISTINCT_STEPS, options.keys // ids)
    actions = {}
    for name in NAMES:
        peers: list[Any] = filled(name, tables, 16, rows, FILL)
        batches = [[peers[0].ids(part) for part in batch] for batch in numbers]
        step = training_step(peers, samples, hotness, optimizer_for("adagrad", peers, False))

        def figure(step: Any = step, batches: Any = batches) -> float:
            return seconds_of(partial(run_steps, step, batches, steps)) / (steps * ids) * 1e9

        actions[name] = figure
    return Result(case, "ns/id", interleave(actions, options.repeats), less_is_better=True)


def hotness_cases(options: argparse.Namespace) -> Iterator[Result]:
    """Varies the ids per bag; batches get smaller."""
    for hotness in options.hotness:
        samples = MODEL_IDS // 26 * 10 // hotness
        yield train_case(f"scaling: train, hotness {hotness}", 26, samples, hotness, options)
        gc.collect()


def table_cases(options: argparse.Namespace) -> Iterator[Result]:
    """Varies the number of tables, from one large to many small ones."""
    for tables in options.tables:
        samples = MODEL_IDS // tables
        yield train_case(f"scaling: train, {tables} tables", tables, samples, 1, options)
        gc.collect()


CASES = {
    "rows": row_cases,
    "dims": dim_cases,
    "batches": batch_cases,
    "hotness": hotness_cases,
    "tables": table_cases,
}


def main() -> None:
    """Runs the cases and prints them."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="quantities to vary")
    rows = [1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000]
    add("--rows", type=int, nargs="+", default=rows, help="rows per table")
    add("--dims", type=int, nargs="+", default=[4, 8, 16, 32, 64, 100, 128, 256])
    batches = [64, 256, 1024, 4096, 16_384, 65_536, 262_144]
    add("--batches", type=int, nargs="+", default=batches, help="keys per call")
    add("--hotness", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50, 100])
    add("--tables", type=int, nargs="+", default=[1, 5, 26, 100, 200])
    add("--keys", type=int, default=2_000_000, help="keys per repeat")
    options = parser.parse_args()
    use_threads(options.threads)
    results: list[Result] = []
    for name in options.cases:
        for result in CASES[name](options):
            results.append(result)
            gc.collect()
    finish(results, options.json)


if __name__ == "__main__":
    main()
