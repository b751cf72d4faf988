"""Training on a table that does not fit memory: ours with files, and RocksDB with the same memory.

Rows have vectors of 16 floats and the state of Adagrad. A step reads the distinct ids of a batch
of 65,536, which follow Zipf's law with exponent 1.05, and writes their rows back. RocksDB's block
cache has the memory that our table has for rows; it reads past the page cache, as ours does, with
MultiGet, and writes back with one WriteBatch, without a write-ahead log. NumPy computes its steps.

    python -m benchmarks.files --contender ours --folder FOLDER
    python -m benchmarks.files --contender rocksdb --folder FOLDER   # needs rocksdict

Each prints one line of JSON. `tools/bench_files.sh` runs them in turns, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DIM = 16
BATCH = 65536
RATE, EPSILON, START = 0.01, 1e-7, 0.1


def ids_of(step: int, rows: int) -> npt.NDArray[np.int64]:
    """Returns a batch of ids by Zipf's law with exponent 1.05, by inversion of its integral."""
    uniform = np.random.default_rng(step).random(BATCH)
    power = 1 - 1.05
    most = (rows + 1.0) ** power
    ranks = np.floor((1 + uniform * (most - 1)) ** (1 / power)).astype(np.int64)
    return scattered(np.clip(ranks, 1, rows) - 1)


def scattered(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the key of each row number; keys are in no order."""
    return (rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


class Ours:
    """A table with files; steps are a lookup and Adagrad in its rows, in one graph function."""

    def __init__(self, folder: Path, memory: float) -> None:
        import keras
        import tensorflow as tf

        import tf_dynemb as de

        self.table = de.DynamicVariable(
            DIM,
            initializer="zeros",
            var_type="file",
            file_path=str(folder),
            max_dram_for_vectors=memory,
            name="rows",
        )
        optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(RATE, START, EPSILON))
        optimizer.build([self.table])

        def step(ids: Any) -> None:
            with tf.GradientTape() as tape:
                vectors = tf.nn.embedding_lookup(self.table, ids)
                loss = tf.reduce_sum(vectors)
            optimizer.apply_gradients([(tape.gradient(loss, self.table), self.table)])

        self._step = tf.function(step)
        self._constant = tf.constant

    def insert(self, keys: npt.NDArray[np.int64]) -> None:
        """Creates rows."""
        self.table.lookup(self._constant(keys))

    def step(self, ids: npt.NDArray[np.int64]) -> None:
        """Trains on a batch."""
        self._step(self._constant(ids))

    def figures(self) -> dict[str, float]:
        """Returns hits, space and writes."""
        stats = self.table.stats()
        return {
            "memory_hits": 1 - stats["file_hits"] / max(1, stats["hits"]),
            "space": stats["file_bytes"] / max(1, stats["file_row_bytes"]),
            "bytes_written": stats["file_bytes_written"],
        }


class RocksDb:
    """The same rows in RocksDB, read and written by batches."""

    def __init__(self, folder: Path, memory: float) -> None:
        from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteOptions

        table = BlockBasedOptions()
        table.set_block_cache(Cache(int(memory * 2**30)))
        table.set_bloom_filter(10, False)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.increase_parallelism(2)
        options.set_block_based_table_factory(table)
        shutil.rmtree(folder, ignore_errors=True)
        self._db = Rdict(str(folder), options)
        writes = WriteOptions()
        writes.disable_wal = True
        self._db.set_write_options(writes)

    def _write(self, keys: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        content = rows.tobytes()
        width = rows.shape[1] * 4
        for i, key in enumerate(keys.tolist()):
            batch.put(key.to_bytes(8, "little", signed=True), content[i * width : (i + 1) * width])
        self._db.write(batch)

    def insert(self, keys: npt.NDArray[np.int64]) -> None:
        """Creates rows."""
        rows = np.zeros((len(keys), 2 * DIM), np.float32)
        rows[:, DIM:] = START
        self._write(keys, rows)

    def step(self, ids: npt.NDArray[np.int64]) -> None:
        """Trains on a batch."""
        distinct, counts = np.unique(ids, return_counts=True)
        found = self._db.get([key.to_bytes(8, "little", signed=True) for key in distinct.tolist()])
        rows = np.frombuffer(b"".join(found), np.float32).reshape(-1, 2 * DIM).copy()
        gradient = counts.astype(np.float32)[:, None]
        rows[:, DIM:] += gradient * gradient
        rows[:, :DIM] -= RATE * gradient / np.sqrt(rows[:, DIM:] + EPSILON)
        self._write(distinct, rows)

    def figures(self) -> dict[str, float]:
        """Returns nothing."""
        return {}


def main() -> None:
    """Prints the speed of one contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contender", choices=("ours", "rocksdb"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--share", type=float, default=0.1, help="of the rows that fit memory")
    parser.add_argument("--warm", type=int, default=40, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    memory = args.share * args.rows * (12 + 2 * DIM * 4) / 2**30
    folder = args.folder / f"bench_{args.contender}"
    table = (Ours if args.contender == "ours" else RocksDb)(folder, memory)
    for first in range(0, args.rows, BATCH // 4):
        table.insert(scattered(np.arange(first, min(args.rows, first + BATCH // 4))))
    for step in range(args.warm):
        table.step(ids_of(step, args.rows))
    seconds = []
    for step in range(args.steps):
        ids = ids_of(args.warm + step, args.rows)
        begin = time.perf_counter()
        table.step(ids)
        seconds.append(time.perf_counter() - begin)
    median = float(np.median(seconds))
    result = {
        "contender": args.contender,
        "ids/s": BATCH / median,
        "step_ms": 1000 * median,
        "rows": args.rows,
        "memory_mb": memory * 1024,
    }
    print(json.dumps({**result, **table.figures()}))


if __name__ == "__main__":
    main()
