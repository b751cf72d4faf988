"""Training on a table that does not fit memory: with files, in memory alone, and with RocksDB.

Rows have vectors of 16 floats and the state of Adagrad. A step reads the distinct ids of a batch
of 65,536, which follow Zipf's law with exponent 1.05, and writes their rows back. RocksDB's block
cache has the memory that our table has for rows; it reads past the page cache, as ours does, with
MultiGet, and writes back with one WriteBatch, without a write-ahead log. NumPy computes its steps.

    python -m benchmarks.files --contender ours --folder FOLDER
    python -m benchmarks.files --contender memory
    python -m benchmarks.files --contender rocksdb --folder FOLDER   # needs rocksdict

Each prints one line of JSON. `tools/bench_files.sh` runs ours and RocksDB in turns. With
`--digest`, ours and the table in memory print a digest of all keys, vectors and states, which must
be the same.
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

from benchmarks.harness import process_bytes

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
    """A table; steps are a lookup and Adagrad in its rows, in one graph function."""

    def __init__(self, folder: Path | None, memory: float, strategy: str) -> None:
        import keras
        import tensorflow as tf

        import tf_dynemb as de

        files = {"file_path": str(folder), "max_dram_for_vectors": memory}
        self.table = de.DynamicVariable(
            DIM,
            initializer="zeros",
            var_type="host" if folder is None else "file",
            evict_strategy=strategy,
            name="rows",
            **({} if folder is None else files),
        )
        optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(RATE, START, EPSILON))
        optimizer.build([self.table])

        def step(ids: Any) -> None:
            with tf.GradientTape() as tape:
                vectors = tf.nn.embedding_lookup(self.table, ids)
                loss = tf.reduce_sum(vectors)
            optimizer.apply_gradients([(tape.gradient(loss, self.table), self.table)])

        self._step = tf.function(step, input_signature=[tf.TensorSpec([None], tf.int64)])
        self._step(tf.zeros([0], tf.int64))  # compiles
        self._constant, self._everything = tf.constant, tf.constant(-1, tf.int64)
        self._before = process_bytes("VmRSS")

    def insert(self, keys: npt.NDArray[np.int64]) -> None:
        """Creates rows."""
        self.table.lookup(self._constant(keys))

    def step(self, ids: npt.NDArray[np.int64]) -> None:
        """Trains on a batch."""
        self._step(self._constant(ids))

    def figures(self) -> dict[str, float]:
        """Returns hits, space and writes."""
        stats = self.table.stats()
        row_bytes = stats["file_row_bytes"] / max(1, stats["file_rows"])
        return {
            "memory_hits": 1 - stats["file_hits"] / max(1, stats["hits"]),
            "space": stats["file_bytes"] / max(1, stats["file_row_bytes"]),
            "write_amplification": stats["file_bytes_written"]
            / max(1, row_bytes * stats["file_rows_written"]),
            "index_mb": stats["index_bytes"] / 2**20,
            "peak_mb": (process_bytes("VmHWM") - self._before) / 2**20,
            **{name: stats[name] for name in ("size", "file_rows", "file_reads", "file_writes")},
            **{name: stats[name] for name in ("file_bytes_read", "file_bytes_written")},
        }

    def digest(self) -> str:
        """Returns a sum over all rows of a hash of the key, the vector and the state of each."""
        from tf_dynemb import _ops

        total = cursor = 0
        weights = np.random.default_rng(9).integers(1, 2**63, 2 * DIM, np.uint64) * 2 + 1
        while cursor >= 0:
            keys, vectors, state, _, following = _ops.library().dynemb_export(
                self.table.handle,
                cursor=cursor,
                limit=1 << 20,
                since=self._everything,
                key_type="int64",
                dtype="float32",
            )
            bits = np.concatenate([vectors.numpy(), state.numpy()], 1).view(np.uint32)
            mixed = bits.astype(np.uint64) @ weights
            mixed ^= keys.numpy().view(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
            mixed ^= mixed >> np.uint64(29)
            total += int((mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(dtype=np.uint64))
            cursor = int(following)
        return f"{total % 2**64:016x}"


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
    parser.add_argument("--contender", choices=("ours", "memory", "rocksdb"), required=True)
    parser.add_argument("--folder", type=Path, help="for the files; not needed for `memory`")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--share", type=float, default=0.1, help="of the rows that fit memory")
    parser.add_argument("--warm", type=int, default=40, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--strategy", default="lru", help="evict_strategy: the rows in memory")
    parser.add_argument("--digest", action="store_true")
    args = parser.parse_args()
    memory = args.share * args.rows * (16 + 2 * DIM * 4) / 2**30
    if args.contender != "memory" and args.folder is None:
        parser.error("--folder is missing")
    if args.contender == "rocksdb" and args.digest:
        parser.error("there is no digest of RocksDB")
    folder = args.folder / f"bench_{args.contender}" if args.folder is not None else Path()
    table: Ours | RocksDb
    if args.contender == "rocksdb":
        table = RocksDb(folder, memory)
    else:
        table = Ours(folder if args.contender == "ours" else None, memory, args.strategy)
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
    result |= table.figures()
    if args.digest and isinstance(table, Ours):
        result["digest"] = table.digest()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
