"""Disk: dump and load beside `dd`, deltas, dense weights, training during a dump, and the reader.

`dd` writes the same number of bytes as the dump to the same disk, and syncs them. The disk's speed
varies, so dump and `dd` take turns.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    OURS,
    Result,
    finish,
    interleave,
    parser_for,
    process_bytes,
    seconds_of,
)

DD = "dd"
DIM = 16
BATCH = 1 << 20
STRIDE = 7919  # between keys, so that keys are not row numbers


def filled(rows: int) -> Any:
    """Creates a table of `rows` rows."""
    import tensorflow as tf

    import tf_dynemb as de

    table = de.DynamicVariable(DIM, name="t", init_capacity=rows)
    for start in range(0, rows, BATCH):
        table.lookup(tf.range(start, min(rows, start + BATCH), dtype=tf.int64) * STRIDE)
    return table


def size_of(folder: Path) -> int:
    """Returns the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def dd(path: Path, size: int) -> None:
    """Writes `size` bytes and syncs them."""
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={-(-size >> 20)}"]
    subprocess.run([*command, "conv=fsync"], check=True, capture_output=True)
    path.unlink()


def anonymous_bytes() -> int:
    """Returns this process's memory, without the page cache."""
    return process_bytes("RssAnon")


def peak_growth(action: Any) -> float:
    """Returns by how many MB the process's memory grows at most while `action` runs."""
    before, peak, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        done.set()
        watcher.join()
    return (peak[0] - before) / 1e6


def dump_and_load(folder: Path, rows: int, repeats: int) -> list[Result]:
    import tf_dynemb as de

    table, loaded_table = filled(rows), de.DynamicVariable(DIM, name="t")
    path = folder / "chain"

    def dump() -> None:
        de.dump(path, table, quiet=True)

    dump()
    size = size_of(path)
    name = f"{rows / 1e6:g} M x {DIM}"

    def timed(action: Any) -> Any:
        return lambda: seconds_of(action)

    def copy_with_dd() -> float:
        return seconds_of(lambda: dd(folder / "dd", size))

    def load() -> None:
        de.load(path, loaded_table, quiet=True)

    dumps = interleave({OURS: timed(dump), DD: copy_with_dd}, repeats)
    memory = [peak_growth(dump) for _ in range(repeats)]
    loads = interleave({OURS: timed(load), DD: copy_with_dd}, repeats)
    return [
        Result(f"dump, {name}, {size / 1e6:.0f} MB", "s", dumps, less_is_better=True),
        Result(f"dump, {name}: memory beside the table", "MB", {OURS: memory}),
        Result(f"load, {name}", "s", loads, less_is_better=True),
    ]


def deltas(folder: Path, rows: int, repeats: int) -> list[Result]:
    """Measures deltas of 1% of the rows, and of 100,000 rows for any table size."""
    import tensorflow as tf

    import tf_dynemb as de

    table = filled(rows)
    path = folder / "deltas"
    de.dump(path, table, quiet=True)
    full = size_of(path)
    rng = np.random.default_rng(0)
    results = []
    for what, changed in (("1%", rows // 100), ("100,000", 100_000)):
        seconds, share = [], []
        for _ in range(repeats):
            keys = rng.choice(rows, changed, replace=False) * STRIDE
            table.upsert(tf.constant(keys, tf.int64), tf.ones([changed, DIM]))
            seconds.append(1e3 * seconds_of(lambda: de.incremental_dump(path, table, quiet=True)))
            share.append(100 * size_of(de.storage.Chain.open(path).last.directory) / full)
        name = f"delta of {what} rows of {rows / 1e6:g} M"
        results.append(Result(name, "ms", {OURS: seconds}))
        results.append(Result(f"{name}, of the full dump", "%", {OURS: share}))
    return results


def dense(folder: Path, weights: int, repeats: int) -> list[Result]:
    """Measures what dense weights add to a delta: time, compared with `dd`, and bytes."""
    import tensorflow as tf

    import tf_dynemb as de

    table = filled(BATCH)
    variables = {"t": table, **{f"w{i}": tf.Variable(tf.ones([weights // 10])) for i in range(10)}}
    path = folder / "dense"
    de.dump(path, variables, quiet=True)
    values = iter(range(1, 1 << 30))
    sizes = []

    def delta(which: str | None) -> float:
        value = float(next(values))
        keys = np.arange(1000) * STRIDE
        table.upsert(tf.constant(keys, tf.int64), tf.fill([len(keys), DIM], value))
        for name, variable in variables.items():
            if name != "t":
                variable.assign(tf.fill(variable.shape, value))
        seconds = seconds_of(lambda: de.incremental_dump(path, variables, dense=which, quiet=True))
        sizes.append(size_of(de.storage.Chain.open(path).last.directory))
        return 1e3 * seconds

    def added() -> float:
        without = delta(None)
        return delta("weights") - without

    times = interleave(
        {OURS: added, DD: lambda: 1e3 * seconds_of(lambda: dd(folder / "dd", 4 * weights))}, repeats
    )
    shutil.rmtree(path)
    name = f"{weights / 1e6:g} M dense weights in a delta"
    share = (sizes[-1] - sizes[-2]) / (4 * weights)
    return [
        Result(f"{name}, added", "ms", times, less_is_better=True),
        Result(f"{name}, bytes added, of the weights", "", {OURS: [share]}),
    ]


def training(folder: Path, rows: int, repeats: int) -> list[Result]:
    """Measures steps per second with and without a running dump (under "static")."""
    import keras
    import tensorflow as tf

    import tf_dynemb as de

    table = filled(rows)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.01))
    rng = np.random.default_rng(0)
    batches = [tf.constant(rng.integers(0, rows, (4096, 10)) * STRIDE, tf.int64) for _ in range(16)]

    @tf.function
    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.lookup_sparse(table, ids, combiners="sum"))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    turns = itertools.cycle(batches)
    step(next(turns))

    def rate(until: Any) -> float:
        steps, began = 0, time.perf_counter()
        while not until(steps):
            step(next(turns))
            steps += 1
        return steps / (time.perf_counter() - began)

    def alone() -> float:
        return rate(lambda steps: steps >= 100)

    def beside_a_dump() -> float:
        dumper = threading.Thread(
            target=lambda: de.dump(folder / "live", table, optimizer, quiet=True)
        )
        dumper.start()
        try:
            return rate(lambda _: not dumper.is_alive())
        finally:
            dumper.join()

    name = f"training steps, {rows / 1e6:g} M x {DIM}, Adagrad"
    values = interleave({"alone": alone, OURS: beside_a_dump}, repeats)
    return [Result(f"{name}, while it is dumped (beside: alone)", "steps/s", values)]


READER = """
import os, sys, time
os.sched_setaffinity(0, {0})
import numpy as np
from tf_dynemb.serving import Reader
path, rows, stride, repeats = sys.argv[1], *map(int, sys.argv[2:])
began = time.perf_counter(); reader = Reader(path); opened = time.perf_counter() - began
rng = np.random.default_rng(0)
print(1e3 * opened)
for i in range(repeats + 1):
    keys = rng.integers(0, rows, 1 << 20) * stride
    began = time.perf_counter(); reader.lookup(keys); seconds = time.perf_counter() - began
    if i: print(len(keys) / seconds / 1e6)
assert "tensorflow" not in sys.modules
"""


def reader(folder: Path, rows: int, repeats: int) -> list[Result]:
    """Measures the reader in a process without TensorFlow, on one core."""
    import tf_dynemb as de

    table = filled(rows)
    de.dump(folder / "served", table, quiet=True)
    arguments = [str(folder / "served"), str(rows), str(STRIDE), str(repeats)]
    printed = subprocess.run(
        [sys.executable, "-c", READER, *arguments], check=True, capture_output=True, text=True
    ).stdout
    opened, *rates = map(float, printed.split())
    name = f"{rows / 1e6:g} M x {DIM}"
    return [
        Result(f"Reader, open, {name}", "ms", {OURS: [opened]}),
        Result(f"Reader, lookup of present keys, {name}, one core", "M keys/s", {OURS: rates}),
    ]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows in the table")
    parser.add_argument(
        "--delta-rows",
        type=int,
        nargs="+",
        default=[1_000_000, 10_000_000, 40_000_000],
        help="rows in the tables of the deltas",
    )
    parser.add_argument("--dense", type=int, default=10_000_000, help="dense weights of the deltas")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: temporary"
    )
    options = parser.parse_args()

    from benchmarks.harness import use_threads

    use_threads(options.threads)
    results: list[Result] = []
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        results += dump_and_load(folder, options.rows, options.repeats)
        results += training(folder, options.rows, options.repeats)
        results += reader(folder, options.rows, options.repeats)
        results += dense(folder, options.dense, options.repeats)
        for rows in options.delta_rows:
            results += deltas(folder, rows, options.repeats)
            shutil.rmtree(folder / "deltas")
    finally:
        shutil.rmtree(folder)
    finish(results, options.json)


if __name__ == "__main__":
    main()
