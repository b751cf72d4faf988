"""The work of tables that is recorded: python workloads.py FOLDER NAME...

Run by test_crash_model.py with the recorder preloaded. FOLDER/NAME then has, for each workload,
`files`, the folder that was recorded, `trace`, and the rows that are expected. A workload is a
sequence of stages; each is a process, so that stages can be killed.

To add a workload, write its stages here, and name it in test_crash_model.py. Every `log.publish`
must leave other rows than the publication before it, so that the rows say which one a state has.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import table_reader
import tensorflow as tf
from recording import Recorder
from replay import Kind
from row_memory import host_memory

import tf_dynemb as de
from tf_dynemb import cli

NAME = "t"


@dataclasses.dataclass(frozen=True)
class Spec:
    """A persistent table: `hot` rows are in memory."""

    dim: int = 8
    hot: int = 64
    folder: str = "."

    def open(self, files: pathlib.Path, name: str = NAME) -> de.DynamicVariable:
        return de.DynamicVariable(
            self.dim,
            name=name,
            var_type="file",
            file_path=str(files / self.folder),
            max_dram_for_vectors=host_memory(self.hot, self.dim, states=1),  # Adagrad's
            persistent=True,
        )


NARROW = Spec()
# A row takes several blocks, and the table writes its own files, which need a MB of rows.
WIDE = Spec(dim=1500)
# The folder of the rows does not exist before.
FRESH = Spec(folder="new/rows")


def dumped() -> list[de.DynamicVariable]:
    """The tables of the workloads that dump."""
    return [
        de.DynamicVariable(8, name="user", var_type="host"),
        de.DynamicVariable(4, name="item", var_type="host", key_type=tf.int32, dtype=tf.bfloat16),
    ]


class Log:
    """Tells the trace what a stage does, and the test which rows to expect."""

    def __init__(self, folder: pathlib.Path, recorder: Recorder) -> None:
        self.folder = folder
        self.files = folder / "files"
        self.recorder = recorder

    def publish(
        self, tables: Sequence[Any], call: Callable[[], object], fails: bool = False
    ) -> None:
        """Makes a call that makes the rows of tables durable; or that fails, as it was told to."""
        number = 1 + len(list(self.folder.glob("expected-*.npz")))
        columns = {
            f"{name}/{column}": value
            for name, rows in table_reader.contents(tables).items()
            for column, value in rows._asdict().items()
        }
        np.savez(self.folder / f"expected-{number}.npz", **columns)
        self.recorder.mark(event="begins", number=number)
        try:
            call()
        except (tf.errors.OpError, OSError):
            if not fails:
                raise
            assert not self.recorder.waits
            self.recorder.mark(event="failed", number=number)
        else:
            assert not fails
            self.recorder.mark(event="returned", number=number)

    def forget(self, table: de.DynamicVariable, keys: Any) -> None:
        keys = np.asarray(keys).tolist()
        self.recorder.mark(event="forgets", keys=keys)
        assert int(table.forget(keys)) == len(keys)
        self.recorder.mark(event="forgot", keys=keys)


def fill(table: Any, keys: Any, value: float) -> None:
    """Writes rows that depend on their keys and a value, in batches that fit memory."""
    keys = np.asarray(keys, table.key_type.as_numpy_dtype)
    for at in range(0, len(keys), 60):
        part = keys[at : at + 60]
        vectors = part[:, None] + np.linspace(value, value + 0.5, table.dimension)
        table.upsert(part, vectors.astype(np.float32))


def train(table: Any, optimizer: Any, keys: Sequence[int]) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup(keys) ** 2)
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def adagrad(tables: Sequence[Any]) -> de.OptimizerWrapper:
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
    optimizer.attach(list(tables))
    return optimizer


# --- Persistent tables


def life(log: Log, spec: Spec = NARROW, forgotten: int = 20) -> None:
    """Flushes, erased and forgotten rows, and a table that is opened again."""
    table = spec.open(log.files)
    optimizer = adagrad([table])
    fill(table, range(150), 1)
    log.publish([table], table.flush)
    fill(table, range(100, 200), 2)
    table.erase(range(10, 30))
    train(table, optimizer, range(90, 120))
    log.publish([table], table.flush)
    log.forget(table, range(50, 60))  # not where the flush has them
    log.publish([table], table.flush)
    fill(table, [500, 501], 3)  # never flushed
    del table, optimizer
    gc.collect()
    table = spec.open(log.files)
    optimizer = adagrad([table])
    log.forget(table, range(100, 100 + forgotten))  # where the flush has them
    log.forget(table, [0, 199])
    log.publish([table], table.flush)
    fill(table, range(140, 210), 4)
    train(table, optimizer, range(60, 90))
    log.publish([table], table.flush)
    log.forget(table, range(140, 150))  # in memory; the flush has them, too
    log.forget(table, [1, 200])
    fill(table, [141, 200], 5)  # as new
    log.publish([table], table.flush)
    log.forget(table, [141, 2, 3])


def wide(log: Log) -> None:
    life(log, WIDE, forgotten=3)


def fresh(log: Log) -> None:
    life(log, FRESH)


FAILURES = [
    (Kind.MKDIR, "*/flush-*", errno.ENOSPC, 1),
    (Kind.CREATE, "*/index", errno.ENOSPC, 1),
    (Kind.WRITE, "*/index", errno.ENOSPC, 1),
    (Kind.WRITE, "*/flush-*/*.rows", errno.ENOSPC, 1),
    (Kind.SYNC, "*.rows", errno.EIO, 1),
    (Kind.SYNC, "*/index", errno.EIO, 1),
    (Kind.CREATE, "*/manifest.new", errno.EDQUOT, 1),
    (Kind.WRITE, "*/manifest.new", errno.ENOSPC, 1),
    (Kind.SYNC, "*/manifest.new", errno.EIO, 1),
    (Kind.SYNC, "*/flush-*[0-9]", errno.EIO, 1),  # before the rename
    (Kind.RENAME, "*/manifest", errno.ENOSPC, 1),
]
AFTER_RENAME = [(Kind.SYNC, "*/flush-*[0-9]", errno.EIO, 2)]


def failing(log: Log, failures: Any = FAILURES) -> None:
    """Flushes that fail, each in another call, and are repeated at once or after changes."""
    table = NARROW.open(log.files)
    fill(table, range(120), 1)
    log.publish([table], table.flush)
    del table
    gc.collect()
    table = NARROW.open(log.files)
    for i, (kind, pattern, error, number) in enumerate(failures):
        fill(table, range(10 * i, 10 * i + 15), 2 + i)
        log.recorder.fail(kind, pattern, error, number)
        log.publish([table], table.flush, fails=True)
        if i % 2:
            fill(table, [i], 50 + i)
            log.forget(table, [100 + i])
        log.publish([table], table.flush)


def failing_after_rename(log: Log) -> None:
    failing(log, AFTER_RENAME)


def failing_segment(log: Log) -> None:
    """The sync of a file fails that the table goes on to use."""
    table = WIDE.open(log.files)
    fill(table, range(180), 1)
    log.publish([table], table.flush)
    fill(table, range(180, 300), 2)
    log.recorder.fail(Kind.SYNC, "*/rows-*/*.rows", errno.EIO)
    log.publish([table], table.flush, fails=True)
    fill(table, [5], 3)
    log.publish([table], table.flush)


def killed(after: int) -> Callable[[Log], None]:
    """A stage that opens the table and flushes until it is killed after `after` changes."""

    def stage(log: Log) -> None:
        table = NARROW.open(log.files)
        log.recorder.kill(after)
        for i in range(20):
            fill(table, range(after + i, after + i + 40), after + i / 8)
            if i % 3 == 2:
                log.forget(table, [after + i, after + i + 1])
            log.publish([table], table.flush)
        raise AssertionError("it was not killed")

    return stage


# --- Dumps


DUMP_FAILURES = [
    (Kind.MKDIR, "*/.tmp-*", errno.ENOSPC, 1),
    (Kind.WRITE, "*.vectors.npy", errno.ENOSPC, 1),
    (Kind.SYNC, "*.keys.npy", errno.EIO, 1),
    (Kind.SYNC, "*/MANIFEST.json", errno.EIO, 1),
    (Kind.RENAME, "*/.tmp-*", errno.ENOSPC, 1),
]


def dumps(log: Log, parent: str = ".") -> None:
    """Dumps and deltas, some of which fail."""
    path = log.files / parent / "chain"
    tables = dumped()
    optimizer = adagrad(tables)

    def change(step: int) -> None:
        for table in tables:
            fill(table, range(20 * step, 20 * step + 50), step)
            table.erase(range(20 * step + 5, 20 * step + 9))
        train(tables[0], optimizer, range(20 * step + 10, 20 * step + 20))

    def publish(kind: str, fails: bool = False) -> None:
        call = de.dump if kind == "base" else de.incremental_dump
        log.publish(tables, lambda: call(path, tables, optimizer=optimizer, quiet=True), fails)

    kinds = ["base", "delta", "delta", "base", "delta", "base"]
    for step, kind in enumerate(kinds):
        change(step)
        if step and step <= len(DUMP_FAILURES):
            log.recorder.fail(*DUMP_FAILURES[step - 1])
            publish(kind, fails=True)
            if step % 2:
                change(step + 1)
        publish(kind)
    # Only the very last sync fails: the snapshot may be there.
    change(len(kinds))
    log.recorder.fail(Kind.SYNC, "*/chain", errno.EIO)
    publish("delta", fails=True)
    publish("base")


def fresh_dumps(log: Log) -> None:
    """At a path of which not even the parent exists."""
    dumps(log, "new/dumps")


def forgotten_dumps(log: Log) -> None:
    """Rows of keys are removed from a chain on disk."""
    path = log.files / "chain"
    tables = dumped()
    optimizer = adagrad(tables)
    for table in tables:
        fill(table, range(40), 1)
    log.publish(tables, lambda: de.dump(path, tables, optimizer, quiet=True))
    for table in tables:
        fill(table, range(30, 60), 2)
        table.erase([0, 1])
    log.publish(tables, lambda: de.incremental_dump(path, tables, None, optimizer, quiet=True))
    keys = [2, 35, 50]  # in the base, in both, in the delta
    arguments = ["forget", str(path), "--keys", *map(str, keys)]
    arguments += [f"--table={table.name.removesuffix(':0')}" for table in tables]

    def forget() -> None:
        assert cli.main(arguments) == 0

    log.recorder.mark(event="forgets", keys=keys)
    for table in tables:
        table.erase(keys)
    log.publish(tables, forget)
    log.recorder.mark(event="forgot", keys=keys)


WORKLOADS: dict[str, list[Callable[[Log], None]]] = {
    "life": [life],
    "wide": [wide],
    "fresh": [fresh],
    "failing": [failing],
    "failing_after_rename": [failing_after_rename],
    "failing_segment": [failing_segment],
    "killed": [killed(n) for n in (9, 31, 40, 24, 60, 45, 70)],
    "dumps": [dumps],
    "fresh_dumps": [fresh_dumps],
    "forgotten_dumps": [forgotten_dumps],
}


def run(folder: pathlib.Path, stage: Callable[[Log], None]) -> None:
    """Runs a stage in a separate process; it may be killed."""
    pid = os.fork()
    if pid == 0:
        try:
            recorder = Recorder()
            recorder.start(folder / "files", folder / "trace")
            stage(Log(folder, recorder))
            gc.collect()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -9), stage


def main(folder: pathlib.Path, names: Sequence[str]) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    for name in names:
        (folder / name / "files").mkdir(parents=True)
        for stage in WORKLOADS[name]:
            run(folder / name, stage)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
