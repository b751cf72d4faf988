"""The cost of an exchange between ranks, compared with bare `hvd.alltoall`s of the same bytes.

    horovodrun -np 2 python -m benchmarks.exchange [--dim 16] [--hotness 1] [--ids zipf]

There are 26 tables. A step routes the ids of a batch, and sends keys, vectors and gradients. It
looks up no rows, and neither pools nor sums. (A real step pools vectors in the received words, and
sums gradients in the words to be sent.) The bare figure is the time of three alltoalls of the same
words. Routing, which makes the ids distinct, is timed separately. Rank 0 prints medians of
interleaved repeats, and the bytes sent beside the formula of docs/scaling.md. With an
--exchange-dtype the time includes only the packing of vectors: other operators unpack them, and
pack and unpack the gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import _ops, communicator
from tf_dynemb.parallel import exchange

TABLES = 26
ROWS = 1_000_000


def batch_ids(kind: str, samples: int, hotness: int, random: np.random.Generator) -> Any:
    """Draws the ids of one table: int64 [samples * hotness]."""
    count = samples * hotness
    if kind == "uniform":
        return random.integers(0, ROWS, count)
    # zipf(1.05) over ROWS ids, by the inverse of its distribution.
    weights = np.arange(1, ROWS + 1, dtype=np.float64) ** -1.05
    cumulative = np.cumsum(weights)
    return np.searchsorted(cumulative, random.random(count) * cumulative[-1])


class Exchange:
    """Sends keys, vectors and gradients of one batch, by the exchange and by bare alltoalls."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.comm = communicator.get()
        self.options = options
        self.tables = [
            de.DynamicVariable(
                dimension=options.dim, name=f"t{i}", exchange_dtype=options.exchange_dtype
            ).spread
            for i in range(TABLES)
        ]
        random = np.random.default_rng(self.comm.rank)
        samples = options.batch // self.comm.size
        self.ids = [
            tf.constant(batch_ids(options.ids, samples, options.hotness, random))
            for _ in range(TABLES)
        ]
        # Replaces vectors read from tables; any numbers will do.
        self.held = [tf.random.normal([n, options.dim]) for n in self._num_served()]
        self.words = self._words()

    def _num_served(self) -> list[int]:
        return [int(tf.size(keys)) for keys in exchange.request(self.tables, self.ids).keys]

    def _words(self) -> list[tuple[Any, Any]]:
        """Returns the words and splits of the three messages."""
        comm, names = self.comm, [table.name for table in self.tables]
        asked = exchange.request(self.tables, self.ids)
        routed = self._routed()
        packed = [
            _ops.library().dynemb_pack_rows(
                rows=rows,
                counts=counts,
                wire=[table.wire for table in self.tables],
                what="other",
                rank=comm.rank,
                names=names,
            )
            for rows, counts in (
                (self.held, asked.served),
                (asked.to_askers(self.held, "other"), asked.asked),
            )
        ]
        return [(routed.words, routed.splits), *((words, splits) for words, splits in packed)]

    def _routed(self) -> Any:
        return _ops.library().dynemb_route(
            keys=self.ids,
            N=TABLES,
            tables=list(range(TABLES)),
            owners=[table.owner for table in self.tables],
            names=[table.name for table in self.tables],
            num_ranks=self.comm.size,
            rank=self.comm.rank,
        )

    @tf.function
    def whole(self) -> Any:
        """Runs the exchange."""
        asked = exchange.request(self.tables, self.ids)
        vectors = asked.words_to_askers(self.held)
        with tf.control_dependencies([vectors]):
            words, splits = self.words[2]
            gradients, _ = self.comm.alltoall(tf.identity(words), splits, "dynemb_gradients")
        return vectors[0] + gradients[0]

    @tf.function
    def route(self) -> Any:
        """Runs the routing, before anything is sent."""
        return self._routed().splits

    @tf.function
    def bare(self) -> Any:
        """Sends the same words, one message after the other."""
        total = tf.constant(0)
        for number, (words, splits) in enumerate(self.words):
            with tf.control_dependencies([total]):
                received, _ = self.comm.alltoall(tf.identity(words), splits, f"bare_{number}")
            total = total + received[0]
        return total

    def milliseconds(self, function: Any) -> float:
        """Returns the time of the slowest rank."""
        self.comm.barrier()
        began = time.perf_counter()
        function().numpy()
        took = time.perf_counter() - began
        return 1e3 * max(self.comm.gather_objects(took, "took"))

    def bytes_to_others(self) -> list[int]:
        """Returns the bytes of keys, vectors and gradients, over all ranks."""
        counted = [4 * int(tf.size(words)) for words, _ in self.words]
        return [sum(one) for one in zip(*self.comm.gather_objects(counted, "bytes"), strict=True)]

    def formula(self) -> list[int]:
        """Returns the same by the formula of docs/scaling.md, over all ranks."""
        size = self.comm.size
        unique = sum(len(np.unique(ids.numpy())) for ids in self.ids)
        unique = sum(self.comm.gather_objects(unique, "unique"))
        dim = self.options.dim
        row = {None: 4 * dim, "float16": 2 * dim, "bfloat16": 2 * dim, "int8": dim + 4}
        width = row[self.options.exchange_dtype]
        sent_rows = unique * (size - 1) // size
        return [
            sent_rows * 8 + 4 * TABLES * (size - 1) * size,
            sent_rows * width,
            sent_rows * width,
        ]


def run(options: argparse.Namespace) -> None:
    """Measures, and prints the figures on rank 0."""
    de.init("horovod")
    exchange = Exchange(options)
    functions = {"whole": exchange.whole, "route": exchange.route, "bare": exchange.bare}
    for function in [*functions.values()] * 3:
        exchange.milliseconds(function)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(options.repeats):
        for name, function in functions.items():
            times[name].append(exchange.milliseconds(function))
    counted, expected = exchange.bytes_to_others(), exchange.formula()
    if exchange.comm.rank != 0:
        return
    print(
        f"{exchange.comm.size} ranks, {TABLES} tables of dim {options.dim}, batch {options.batch}, "
        f"hotness {options.hotness}, {options.ids} ids, exchange_dtype {options.exchange_dtype}"
    )
    for name, is_, by_formula in zip(
        ("keys", "vectors", "gradients"), counted, expected, strict=True
    ):
        print(f"  {name:10} sent {is_:>12,} bytes; by the formula {by_formula:>12,}")
    rounds = list(zip(times["whole"], times["route"], times["bare"], strict=True))
    exchange_ms = statistics.median(whole - route for whole, route, _ in rounds)
    route_ms, bare_ms = (statistics.median(times[name]) for name in ("route", "bare"))
    ratio = statistics.median((whole - route) / bare for whole, route, bare in rounds)
    with_route = statistics.median(whole / bare for whole, _, bare in rounds)
    print(f"  exchange {exchange_ms:8.2f} ms, bare alltoall {bare_ms:8.2f} ms: {ratio:.2f} times")
    print(f"  and making ids distinct {route_ms:.2f} ms: {with_route:.2f} times")


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dim", type=int, default=16)
    add("--hotness", type=int, default=1, help="ids per sample and table")
    add("--batch", type=int, default=8192, help="samples per batch, over all ranks")
    add("--ids", choices=("zipf", "uniform"), default="zipf")
    add("--exchange-dtype", choices=("float16", "bfloat16", "int8"), default=None)
    add("--repeats", type=int, default=21)
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_options())
