"""One table: lookup, upsert, insert and export, and the cost of a small call."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.harness import (
    OURS,
    STATIC,
    Result,
    add_contenders,
    finish,
    interleave,
    parser_for,
    rates,
    seconds_of,
    use_threads,
    warm_memory,
)
from benchmarks.peers import Peer, empty_table, fill
from benchmarks.workload import Draws, Rows

ZIPF = 1.05
SMALL = 128
SMALL_CALLS = 500


def insert_all(peer: Peer, batches: list[Rows], values: tf.Tensor) -> float:
    """Inserts the batches and returns the seconds of the calls."""
    return sum(seconds_of(partial(peer.upsert, peer.ids(rows), values)) for rows in batches)


def new_key_batches(rows: int, batch: int) -> list[Rows]:
    """Returns every row number once, in random order."""
    shuffled = np.random.default_rng(1).permutation(rows)
    return list(shuffled[: rows - rows % batch].reshape(-1, batch))


def insert_case(
    names: list[str], dim: int, rows: int, batch: int, sized: bool, repeats: int
) -> Result:
    """Measures inserts of new keys into an empty table, growing or presized."""
    batches = new_key_batches(rows, batch)
    values = tf.ones([batch, dim])

    fills = itertools.count()

    def fill_new(name: str) -> float:
        gc.collect()
        if next(fills) % len(names) == 0:  # once for all contenders: it takes about a minute
            warm_memory()
        peer = empty_table(name, dim, rows, sized)
        seconds = insert_all(peer, batches, values)
        return len(batches) * batch / seconds / 1e6

    how = "table sized before" if sized else "table growing"
    speed = interleave({name: partial(fill_new, name) for name in names}, repeats, warm_up=0)
    return Result(f"insert of new keys, {how}, dim {dim}", "M keys/s", speed)


def full_tables(names: list[str], dim: int, rows: int, batch: int) -> dict[str, Peer]:
    """Returns one filled table of each kind; they grew, as in practice."""
    peers = {name: empty_table(name, dim, rows, sized=False) for name in names}
    fill(peers.values(), dim, range(rows), batch)
    return peers


def batch_cases(
    peers: dict[str, Peer], dim: int, rows: int, batch: int, repeats: int, calls: int
) -> Iterator[Result]:
    """Measures lookups and upserts of present rows."""
    values = tf.ones([batch, dim])

    def run(call: Callable[[tf.Tensor], object], batches: list[tf.Tensor]) -> None:
        for ids in batches:
            call(ids)

    for label, exponent in (("uniform", None), (f"zipf {ZIPF}", ZIPF)):
        draws = Draws(rows, exponent, seed=2)
        numbers = [draws.take(batch) for _ in range(calls)]
        batches = {name: [peer.ids(part) for part in numbers] for name, peer in peers.items()}
        actions = {name: partial(run, peer.lookup, batches[name]) for name, peer in peers.items()}
        millions = calls * batch / 1e6
        yield Result(f"lookup, {label}, dim {dim}", "M keys/s", rates(actions, millions, repeats))
        if exponent is None:
            actions = {
                name: partial(run, lambda ids, peer=peer: peer.upsert(ids, values), batches[name])
                for name, peer in peers.items()
            }
            yield Result(
                f"upsert of present keys, dim {dim}", "M keys/s", rates(actions, millions, repeats)
            )


def small_call_cases(peers: dict[str, Peer], dim: int, rows: int, repeats: int) -> Iterator[Result]:
    """Measures the fixed cost of a call: one eager call with few keys."""
    numbers = Draws(rows, None, seed=3).take(SMALL)

    def median_call(lookup: Callable[[tf.Tensor], tf.Tensor], ids: tf.Tensor) -> float:
        times = [seconds_of(partial(lookup, ids)) for _ in range(SMALL_CALLS)]
        return float(np.median(times)) * 1e6

    def case(how: str, lookups: dict[str, Callable[[tf.Tensor], tf.Tensor]]) -> Result:
        actions = {
            name: partial(median_call, lookup, peers[name].ids(numbers))
            for name, lookup in lookups.items()
        }
        return Result(
            f"lookup of {SMALL} keys, eager, {how}, dim {dim}",
            "us",
            interleave(actions, repeats),
            less_is_better=True,
        )

    yield case("its own method", {name: peer.eager_lookup for name, peer in peers.items()})
    # tf.nn accepts variables only.
    variables: dict[str, Any] = {name: peers[name] for name in (OURS, STATIC) if name in peers}
    if not variables:
        return
    yield case(
        "tf.nn",
        {name: partial(tf.nn.embedding_lookup, peer.variable) for name, peer in variables.items()},
    )


def export_case(peers: dict[str, Peer], dim: int, rows: int, repeats: int) -> Result:
    """Measures the export of all rows. DenseHashTable returns its arrays, with empty slots."""
    import tf_dynemb as de

    dynemb: Any = peers[OURS]
    static: Any = peers[STATIC]
    actions: dict[str, Callable[[], float]] = {
        OURS: partial(seconds_of, partial(de.export, dynemb.variable)),
        STATIC: partial(seconds_of, static.variable.numpy),
    }
    warm_memory()
    return Result(
        f"export of all rows, dim {dim}", "s", interleave(actions, repeats), less_is_better=True
    )


def main() -> None:
    """Runs the cases for one dim and prints them."""
    parser = parser_for(__doc__)
    add_contenders(parser)
    parser.add_argument("--dim", type=int, default=16, help="floats per vector")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows per table")
    parser.add_argument("--batch", type=int, default=65_536, help="keys per call")
    parser.add_argument("--calls", type=int, default=32, help="calls per repeat")
    parser.add_argument("--insert-repeats", type=int, default=3, help="fills of an empty table")
    options = parser.parse_args()
    use_threads(options.threads)
    dim, rows, batch = options.dim, options.rows, options.batch

    results: list[Result] = []
    for sized in (False, True):
        results.append(
            insert_case(options.contenders, dim, rows, batch, sized, options.insert_repeats)
        )
    gc.collect()
    peers = full_tables(options.contenders, dim, rows, batch)
    results += batch_cases(peers, dim, rows, batch, options.repeats, options.calls)
    results += small_call_cases(peers, dim, rows, options.repeats)
    if {OURS, STATIC} <= peers.keys():
        results.append(export_case(peers, dim, rows, options.repeats))
    finish(results, options.json)
    dynemb: Any = peers.get(OURS)
    if dynemb is not None:
        print(f"statistics of our table: {dynemb.variable.stats()}")


if __name__ == "__main__":
    main()
