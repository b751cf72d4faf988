"""Serving: opening tables, speed of lookups, deltas while requests run, memory of versions.

    python -m benchmarks.serving --gigabytes 10

Writes tables of that size into a temporary folder (`--folder`: where), and removes them at the end.
One table is trained and dumped; the others on disk are copies of its files.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import tf_dynemb as de
from benchmarks.harness import interleave, process_bytes
from tf_dynemb import storage
from tf_dynemb.storage.snapshot import MANIFEST

TABLES, DIM = 4, 64
BATCH = 8192  # keys of a lookup whose speed is measured
REQUEST = 64  # keys of a request whose latency is measured
DELTAS = 12
POLL = 0.05  # seconds between the polls of a model that follows
CHUNK = 500_000

# A process that only serves. Prints one line of figures.
OPEN = """
import sys, time
import numpy as np, tensorflow as tf, tf_dynemb
from benchmarks.serving import resident
tf.saved_model.load(sys.argv[2])  # a small model: TensorFlow's own memory and time
before = resident()
began = time.perf_counter()
loaded = tf.saved_model.load(sys.argv[1])
opened = time.perf_counter() - began
after = resident()
keys = np.random.default_rng(1).integers(0, int(sys.argv[3]), 1000)
began = time.perf_counter()
loaded.serve(keys)
first = time.perf_counter() - began
touched = resident()
second = tf.saved_model.load(sys.argv[1] + "_2")
second.serve(keys)
print(opened, first, *after.since(before), *touched.since(after), *resident().since(touched))
"""


class Line(NamedTuple):
    """A line of the table: what was measured, the figure, and the target, as texts."""

    what: str
    figure: str
    target: str = ""


class Resident(NamedTuple):
    """Resident memory in bytes: of this process alone, and all of it.

    The rest is mapped files: pages of the disk cache, which processes share, and which the kernel
    frees when it needs them. It maps up to 16 pages around a page that is touched.
    """

    private: int
    all: int

    def since(self, before: Resident) -> Resident:
        """Returns the growth."""
        return Resident(self.private - before.private, self.all - before.all)

    def __str__(self) -> str:
        return f"{self.private / 1e6:.0f} MB, and {(self.all - self.private) / 1e6:.0f} MB of files"


def resident() -> Resident:
    """Returns the resident memory of this process."""
    gc.collect()
    return Resident(process_bytes("RssAnon"), process_bytes("VmRSS"))


def peak_of(action: Callable[[], object]) -> Resident:
    """Returns by how much an action raises the resident memory at most."""
    before, stop, private = resident(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.005):
            private.append(process_bytes("RssAnon"))

    watching = threading.Thread(target=watch)
    watching.start()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    action()
    stop.set()
    watching.join()
    return Resident(max(private), process_bytes("VmHWM")).since(before)


class Model(tf.Module):
    """Tables of one width; `serve` looks up the same ids in all of them."""

    def __init__(self, tables: list[de.DynamicVariable]) -> None:
        super().__init__()
        self.tables = tables

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def serve(self, ids: Any) -> Any:
        """Returns the sum of the vectors of each id."""
        return tf.add_n([table.lookup(ids, insert=False) for table in self.tables])


def empty_table(number: int) -> de.DynamicVariable:
    return de.DynamicVariable(DIM, "zeros", "host", name=f"table_{number}")


def fill(table: de.DynamicVariable, rows: int) -> None:
    """Gives the keys below `rows` rows."""
    rng = np.random.default_rng(0)
    for begin in range(0, rows, CHUNK):
        keys = np.arange(begin, min(begin + CHUNK, rows))
        table.upsert(keys, rng.random([len(keys), DIM], np.float32))


def multiply(base: Path) -> int:
    """Gives a base of one table copies of it, up to TABLES; returns the bytes of all files."""
    manifest = storage.Manifest.from_json((base / MANIFEST).read_text(), str(base))
    (entry,) = manifest.tables
    tables = [entry]
    for number in range(1, TABLES):
        shards = []
        for shard in entry.shards:
            files = {
                kind: dataclasses.replace(file, file=f"{number:03d}{file.file[3:]}")
                for kind, file in shard.files.items()
            }
            for kind, file in files.items():
                shutil.copyfile(base / shard.files[kind].file, base / file.file)
            shards.append(dataclasses.replace(shard, files=files))
        tables.append(dataclasses.replace(entry, name=f"table_{number}", shards=tuple(shards)))
    manifest = dataclasses.replace(manifest, tables=tuple(tables))
    (base / MANIFEST).write_text(manifest.to_json())
    return sum(file.stat().st_size for file in base.iterdir())


def open_large(folder: Path, rows: int) -> list[Line]:
    """Opens all tables in a new process, whose files may be in the disk cache."""
    de.dump(folder / "large", empty := empty_table(0))
    shutil.rmtree(folder / "large")
    shutil.copytree(folder / "dump", folder / "large", copy_function=shutil.copyfile)
    (base,) = (folder / "large").glob("*-base-*")
    size = multiply(base)
    model = Model([empty, *(empty_table(number) for number in range(1, TABLES))])
    for name in ("model", "model_2"):
        de.export_saved_model(model, folder / name, "external", folder / "large")
    small = Model([empty_table(0)])
    de.export_saved_model(small, folder / "small")
    command = [sys.executable, "-c", OPEN, str(folder / "model"), str(folder / "small"), str(rows)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    opened, first, *sizes = map(float, done.stdout.split())
    opening, touched, second = (Resident(*map(int, sizes[i : i + 2])) for i in (0, 2, 4))
    shutil.rmtree(folder / "large")
    return [
        Line(f"opening {size / 1e9:.1f} GB in {TABLES} tables", f"{opened:.2f} s", "< 1 s"),
        Line("resident memory after opening", str(opening), "what was touched"),
        Line(
            f"first request, of 1000 keys in {TABLES} tables, verified block by block",
            f"{first:.2f} s, {touched}",
            "what was touched",
        ),
        Line(
            "resident memory of a second version, opened and asked the same",
            f"{second}: {100 * second.all / size:.2f}%",
            "<= 1%",
        ),
    ]


def lookups(table: de.DynamicVariable, served: Any, rows: int, repeats: int) -> list[Line]:
    """Compares lookups in a served table with those in the table that it was exported from.

    The served table is warm: each of its keys has been asked for once, and its files are verified.
    """
    for chunk in np.array_split(np.random.default_rng(1).permutation(rows), 1 + rows // CHUNK):
        served.lookup(tf.constant(chunk))
    batches = [
        tf.constant(keys) for keys in np.random.default_rng(2).integers(0, rows, [32, BATCH])
    ]
    lines = []
    for what in ("lookup", "lookup_sparse of bags of 8"):

        def trained(ids: Any, what: str = what) -> Any:
            if what == "lookup":
                return table.lookup(ids, insert=False)
            return de.lookup_sparse(table, tf.reshape(ids, [-1, 8]), combiners="sum", insert=False)

        spec = [tf.TensorSpec([None], tf.int64)]
        asked = {
            "trained": tf.function(trained, input_signature=spec),
            "served": served.lookup if what == "lookup" else served.pool,
        }

        def run(function: Any) -> float:
            began = time.perf_counter()
            for keys in batches:
                function(keys)
            return len(batches) * BATCH / (time.perf_counter() - began)

        speeds = interleave({n: lambda f=f: run(f) for n, f in asked.items()}, repeats)
        trained_speed, served_speed = (statistics.median(speeds[n]) for n in asked)
        lines.append(
            Line(
                f"{what}: keys/s of the served table beside the trained one",
                f"{served_speed / 1e6:.1f} M beside {trained_speed / 1e6:.1f} M: "
                f"{served_speed / trained_speed:.2f} x",
                ">= 1 x",
            )
        )
    return lines


class Lookups(Model):
    """`serve`, and the calls whose speed is measured."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def lookup(self, ids: Any) -> Any:
        return self.tables[0].lookup(ids, insert=False)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def pool(self, ids: Any) -> Any:
        bags = tf.reshape(ids, [-1, 8])
        return de.lookup_sparse(self.tables[0], bags, combiners="sum", insert=False)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """Returns the median and the 99th percentile in milliseconds."""
    p50, p99 = np.percentile(np.array(seconds) * 1000, [50, 99])
    return float(p50), float(p99)


def deltas(folder: Path, table: de.DynamicVariable, rows: int, seconds: float) -> list[Line]:
    """Publishes deltas of 1% of the rows to a model; then the same ones to another that is asked.

    Requests without and with a delta that is being applied take turns, so that a disturbance of
    the machine affects both.
    """
    model, rng = Lookups([table]), np.random.default_rng(3)
    changed = max(1, rows // 100)

    def loaded(name: str, follow: Path) -> Any:
        """Returns the model at the base; it polls `follow`."""
        options: dict[str, Any] = {"follow": follow, "follow_seconds": POLL}
        path = folder / name
        de.export_saved_model(model, path, "external", folder / "dump", **options)
        return tf.saved_model.load(str(path))

    def is_at(model: Any, snapshot: storage.Snapshot) -> bool:
        now = model.signatures["watermark"]()["id"].numpy().decode()
        return bool(now == snapshot.manifest.id)

    (folder / "feed").mkdir()
    following, asked = loaded("following", folder / "dump"), loaded("asked", folder / "feed")
    visible, snapshots = [], []
    for _ in range(DELTAS):
        keys = rng.choice(rows, changed, replace=False)
        table.upsert(keys, rng.random([changed, DIM], np.float32))
        de.incremental_dump(folder / "dump", table)
        began = time.perf_counter()
        snapshots.append(storage.Chain.open(folder / "dump").last)
        while not is_at(following, snapshots[-1]):
            time.sleep(0.001)
        visible.append(time.perf_counter() - began)
    del following
    gc.collect()

    times: dict[bool, list[float]] = {False: [], True: []}  # by whether a delta is applied

    def requests(applied: bool, until: Callable[[], bool]) -> None:
        while not until():
            for _ in range(20):
                ids = tf.constant(rng.integers(0, rows, REQUEST))
                began = time.perf_counter()
                asked.serve(ids)
                times[applied].append(time.perf_counter() - began)

    requests(False, _after(seconds / 4))
    times[False].clear()  # the warm-up
    for snapshot in snapshots:
        requests(False, _after(seconds / DELTAS))
        shutil.copytree(snapshot.directory, folder / "copied", copy_function=os.link)
        (folder / "copied").rename(folder / "feed" / snapshot.directory.name)
        requests(True, lambda snapshot=snapshot: is_at(asked, snapshot))
    size = changed * (8 + 4 * DIM)
    (p50, p99), (p50_during, p99_during) = percentiles(times[False]), percentiles(times[True])
    return [
        Line(
            f"a delta of 1% ({size / 1e6:.0f} MB), from its publication until it is served, "
            f"polled every {POLL} s",
            f"median {statistics.median(visible):.2f} s, longest {max(visible):.2f} s",
            "< 1 s",
        ),
        Line(
            f"requests of {REQUEST} keys: median, 99th percentile",
            f"{p50:.2f} ms, {p99:.2f} ms",
        ),
        Line(
            f"the same while a delta is applied ({len(times[True])} requests)",
            f"{p50_during:.2f} ms, {p99_during:.2f} ms: {p99_during / p99:.2f} x",
            "<= 1.5 x",
        ),
    ]


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def exporting(folder: Path, table: de.DynamicVariable) -> list[Line]:
    """Exports the table as it is now."""
    model = Lookups([table])
    de.export_saved_model(Lookups([empty_table(9)]), folder / "warm")
    began = time.perf_counter()
    peak = peak_of(lambda: de.export_saved_model(model, folder / "copy"))
    seconds = time.perf_counter() - began
    held = table.stats()["row_bytes"]
    shutil.rmtree(folder / "copy")
    return [
        Line(
            f"memory of an export beside its table of {held / 1e9:.1f} GB, {seconds:.0f} s",
            str(peak),
            "<= 100 MB",
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=10, help="of all tables")
    parser.add_argument("--folder", type=Path, help="for the tables; default: a temporary one")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=8, help="of requests")
    options = parser.parse_args()
    rows = int(options.gigabytes * 1e9 / TABLES / (8 + 4 * DIM + 8))
    with tempfile.TemporaryDirectory(prefix="serving_", dir=options.folder) as name:
        folder = Path(name)
        table = empty_table(0)
        fill(table, rows)
        de.dump(folder / "dump", table, quiet=True)
        model = Lookups([table])
        lines = open_large(folder, rows)
        de.export_saved_model(model, folder / "lookups", "link", folder / "dump")
        served = tf.saved_model.load(str(folder / "lookups"))
        lines += lookups(table, served, rows, options.repeats)
        del served
        lines += exporting(folder, table)
        lines += deltas(folder, table, rows, options.seconds)
    print("| | measured | target |\n|---|---|---|")
    for line in lines:
        print(f"| {line.what} | {line.figure} | {line.target} |")


if __name__ == "__main__":
    main()
