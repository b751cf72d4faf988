"""Trains a table that is several times larger than the memory it may use.

The ids follow Zipf's law: a few of them are frequent, most are rare, and every batch has new ones.
Memory holds the rows that were used last; all others are in files. The script prints where the rows
of the ids were found, what was read and written, and the speed. It then trains the same table in
memory, and compares all rows, bit for bit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tqdm

import tf_dynemb as de

Ids = npt.NDArray[np.int64]


def zipf_batches(options: argparse.Namespace) -> Iterator[Ids]:
    """Yields batches of ids; the id of rank r has a probability in proportion to r^-exponent."""
    rng = np.random.default_rng(options.seed)
    shares = np.arange(1, options.ids + 1, dtype=np.float64) ** -options.exponent
    cumulative = np.cumsum(shares) / shares.sum()
    numbers = rng.permutation(options.ids) * 1_000_003  # any integers are ids
    for _ in range(options.steps):
        ranks = np.searchsorted(cumulative, rng.random(options.batch), side="right")
        yield numbers[np.minimum(ranks, options.ids - 1)]


def make_step(table: Any, optimizer: Any) -> Any:
    """Returns a compiled step of training: vectors learn numbers that depend on their ids."""
    optimizer.attach([table])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids: Any) -> Any:
        targets = tf.cast(ids % 7, tf.float32)[:, tf.newaxis] / 7 - 0.5
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.embedding_lookup(table, ids) - targets) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return loss

    return step


def train(table: Any, options: argparse.Namespace, what: str) -> float:
    """Trains a table; returns the seconds that the steps took."""
    step = make_step(table, de.OptimizerWrapper(keras.optimizers.Adam(0.05)))
    step(tf.zeros([0], tf.int64))  # compiles
    batches: Any = [tf.constant(ids) for ids in zipf_batches(options)]
    if options.prefetch:
        ahead = de.prefetch_lookup(batches, table, lambda ids: ids)
        batches = (ids for ids, _ in ahead)
    began = time.perf_counter()
    for ids in tqdm.tqdm(batches, what, total=options.steps, unit="step", disable=options.quiet):
        loss = step(ids)
    seconds = time.perf_counter() - began
    ids_per_second = options.steps * options.batch / seconds
    print(f"{what}: {ids_per_second / 1e6:.2f} million ids/s, loss {float(loss):.4f}")
    return seconds


def describe(stats: dict[str, int], limit: int) -> None:
    """Prints what the statistics of a table with files say."""
    state_bytes = stats["row_bytes"] + stats["file_row_bytes"]
    looked_up = stats["hits"] + stats["misses"]
    print(f"  {stats['size']} rows, {stats['file_rows']} of them in files")
    print(f"  all rows: {state_bytes / 2**20:.1f} MB, {state_bytes / limit:.1f} times the memory")
    print(f"  ids looked up: {looked_up}; new ids {stats['misses']}")
    print(f"  rows moved from files to memory: {stats['file_hits']}, one for")
    print(f"    {looked_up / max(1, stats['file_hits']):.1f} ids")
    print(f"  of these rows, {stats['file_hits_ahead']} had been read during the step before")
    print(
        f"  read {stats['file_bytes_read'] / 2**20:.1f} MB in {stats['file_reads']} calls, wrote "
        f"{stats['file_bytes_written'] / 2**20:.1f} MB in {stats['file_writes']} calls"
    )
    print(f"  files: {stats['file_bytes'] / 2**20:.1f} MB")
    print(
        f"  memory besides rows: index {stats['file_index_bytes'] / 2**20:.1f} MB, rows that wait "
        f"to be written {stats['file_buffer_bytes'] / 2**20:.1f} MB"
    )


def rows_of(table: Any) -> tuple[Any, Any]:
    """Returns keys and vectors, in the order of the keys."""
    keys, vectors = (part.numpy() for part in de.export(table))
    order = np.argsort(keys)
    return keys[order], vectors[order]


def run(options: argparse.Namespace, folder: Path) -> None:
    """Trains both tables and compares them."""
    files = de.DynamicVariable(
        options.dim,
        "normal",
        "file",
        seed=options.seed,
        file_path=folder,
        max_dram_for_vectors=options.memory / 1024,
    )
    in_files = train(files, options, "rows in files")
    describe(files.stats(), options.memory * 2**20)
    if not options.compare:
        return
    memory = de.DynamicVariable(options.dim, "normal", "host", seed=options.seed)
    in_memory = train(memory, options, "all in memory")
    print(f"  {in_files / in_memory:.1f} times as fast as with files")
    for one, other in zip(rows_of(files), rows_of(memory), strict=True):
        np.testing.assert_array_equal(one, other)
    print("All rows have the same bits.")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--ids", type=int, default=1_000_000, help="number of different ids")
    add("--exponent", type=float, default=1.05, help="exponent of Zipf's law")
    add("--batch", type=int, default=16_384, help="ids in a batch")
    add("--steps", type=int, default=200, help="batches to train")
    add("--dim", type=int, default=16, help="width of the vectors")
    add("--memory", type=float, default=16, help="MB of memory for rows; a batch's rows must fit")
    add("--folder", type=Path, help="folder for the files; default: the system's temporary one")
    add("--seed", type=int, default=0, help="seed of ids and vectors")
    add(
        "--compare", action=argparse.BooleanOptionalAction, default=True, help="train in memory too"
    )
    add(
        "--prefetch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read rows from files during the step before the one that needs them",
    )
    add("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(arguments)


def main() -> None:
    """Runs the script."""
    options = parse_options()
    if options.folder is not None:
        run(options, options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
