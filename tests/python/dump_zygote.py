"""Forks processes that dump tables, and are killed or exceed a limit on the size of files.

Run by test_dump_crash.py: python dump_zygote.py kill|limit PATH. Prints a JSON object.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import random
import resource
import select
import shutil
import signal
import sys
import threading
import time
import traceback

import keras
import numpy as np
import table_reader
import tensorflow as tf
import tqdm
from chain_reader import fold

import tf_dynemb as de
from tf_dynemb import _ops, storage

TRIALS = 100
ROWS = 3000
# The rows of tables before a load.
OTHER = 3


def make_tables():
    return [
        de.DynamicVariable(8, "zeros", name="user", seed=1),
        de.DynamicVariable(4, "uniform", name="item", seed=2, key_type=tf.int32, dtype=tf.bfloat16),
    ]


def make_optimizer(tables):
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.5))
    optimizer.attach(tables[:1])
    return optimizer


class Trainer:
    """Tables that change from version to version."""

    def __init__(self):
        self.tables = make_tables()
        self.optimizer = make_optimizer(self.tables)
        self.rng = np.random.default_rng(0)
        for table in self.tables:
            keys = np.arange(ROWS, dtype=table.key_type.as_numpy_dtype)
            table.upsert(keys, np.zeros((ROWS, table.dimension), np.float32))

    def change(self, version, everywhere):
        """Writes the version into vectors, steps some rows, erases some and creates some."""
        for table in self.tables:
            key_type = table.key_type.as_numpy_dtype
            held = table_reader.rows_of(table).keys
            erased, written = np.split(self.rng.permutation(held), [40])
            if not everywhere:
                written = written[:400]
            fresh = np.arange(50, dtype=key_type) + (ROWS + 50 * version)
            table.erase(erased)
            written = np.concatenate([written, fresh])
            table.upsert(written, np.full((len(written), table.dimension), version, np.float32))
        user = self.tables[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(user.lookup(self.rng.integers(0, ROWS, 100)))
        self.optimizer.apply_gradients([(tape.gradient(loss, user), user)])

    def contents(self):
        return table_reader.contents(self.tables)

    def dump(self, path, kind):
        if kind == "base":
            return de.dump(path, self.tables, self.optimizer, quiet=True)
        return de.incremental_dump(path, self.tables, optimizer=self.optimizer, quiet=True)

    def was_published(self, manifest):
        """Records the snapshot that a forked process published."""
        _ops.library().dynemb_advance_clock(manifest.watermark, manifest.watermark_utc_ns)
        for table in self.tables:
            table.snapshots.note(manifest.id, manifest.watermark)


def fork(child) -> int:
    """Runs a function in a forked process, which exits with 0, or with 1 if the function raised."""
    pid = os.fork()
    if pid:
        return pid
    try:
        child()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def killed(child, delay, at_rename) -> bool:
    """Kills a forked process `delay` seconds after its start, or after its rename begins.

    Returns False if the process had finished.
    """
    read, write = os.pipe()

    def run():
        rename = os.rename

        def renaming(source, target):
            os.write(write, b"r")
            rename(source, target)

        os.rename = renaming
        os.write(write, b"b")
        child()

    pid = fork(run)
    os.close(write)
    try:
        for awaited in (b"b", b"r")[: 1 + at_rename]:
            assert select.select([read], [], [], 30)[0], f"no {awaited!r}"
            assert os.read(read, 1) == awaited
        deadline = time.perf_counter() + delay
        while time.perf_counter() < deadline and (remaining := deadline - time.perf_counter()) > 0:
            time.sleep(remaining)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(read)
        _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def unpublished(path):
    return [name for name in os.listdir(path) if name.startswith(".tmp-")]


def check_load(path, expected):
    """Loads into tables that have other rows."""
    tables = make_tables()
    for table in tables:
        table.upsert(tf.range(-OTHER, 0, dtype=table.key_type), tf.ones([OTHER, table.dimension]))
    de.load(path, tables, make_optimizer(tables), quiet=True)
    found = table_reader.contents(tables)
    assert table_reader.same(found, expected, ("keys", "vectors", "updates"))
    assert found["user"].same(expected["user"])  # "item" now has space for state


def kill(path):
    random.seed(0)
    trainer = Trainer()
    trainer.change(0, everywhere=False)
    started = time.perf_counter()
    trainer.dump(path, "base")
    spans = {"base": [time.perf_counter() - started], "delta": []}
    before = trainer.contents()
    counts = dict.fromkeys(("old", "new", "killed after publication", "left", "loads"), 0)
    counts |= {f"{kind} {state}": 0 for kind in spans for state in ("old", "new")}
    for trial in range(1, TRIALS + 1):
        trainer.change(trial, everywhere=trial % 3 == 0)
        after = trainer.contents()
        kind = "base" if trial % 2 else "delta"
        last = storage.Chain.open(path).last.manifest
        stale = unpublished(path)
        span = max(spans[kind], default=0.1)
        at_rename = trial % 5 == 0
        delay = random.random() * (0.01 if at_rename else span)
        if not spans[kind]:
            delay = 30.0
        started = time.perf_counter()

        def child(kind=kind):
            trainer.dump(path, kind)

        if delay == 30.0:  # the first of its kind is measured
            os.waitpid(fork(child), 0)
            was_killed = False
        else:
            was_killed = killed(child, delay, at_rename)
        if not was_killed:
            spans[kind] = [*spans[kind], time.perf_counter() - started][-3:]
        chain = storage.Chain.open(path)
        found = fold(chain)
        is_old = table_reader.same(found, before)
        is_new = table_reader.same(found, after)
        assert is_old != is_new, f"trial {trial}: neither the state before the dump nor after it"
        assert is_old == (chain.last.manifest.id == last.id)
        assert is_new or was_killed
        state = "new" if is_new else "old"
        counts[state] += 1
        counts[f"{kind} {state}"] += 1
        if is_new:
            counts["killed after publication"] += was_killed
            assert chain.last.manifest.kind == kind
            trainer.was_published(chain.last.manifest)
            before = after
            # The dump first removed the files that killed processes had left.
            assert unpublished(path) == []
        elif len(stale) and not set(stale) & set(unpublished(path)):
            counts["left"] += 1
        if trial % 20 == 0:
            check_load(path, before)
            counts["loads"] += 1
    trainer.dump(path, "delta")
    assert unpublished(path) == []
    found = fold(storage.Chain.open(path))
    assert table_reader.same(found, trainer.contents())
    trainer.dump(path, "base")
    assert sorted(p.name.split("-")[-1] == "LOCK" for p in path.iterdir()) == [False, True]
    return counts


def limit(path):
    """Dumps under RLIMIT_FSIZE; each limit is too small for some file, often by one byte."""
    trainer = Trainer()
    trainer.dump(path, "base")
    trainer.change(1, everywhere=False)
    trainer.dump(path, "delta")
    before = trainer.contents()
    trainer.change(2, everywhere=False)
    sizes = {}
    for kind in ("base", "delta"):
        copy = path.with_name(f"copy-{kind}")
        shutil.copytree(path, copy)
        assert os.waitpid(fork(lambda copy=copy, kind=kind: trainer.dump(copy, kind)), 0)[1] == 0
        directory = storage.Chain.open(copy).last.directory
        sizes[kind] = {file.stat().st_size for file in directory.iterdir()}
    problems = []
    counts = {"failed": 0}
    for kind, kind_sizes in sizes.items():
        limits = {0, 64, 127, 128, 129, *(size - 1 for size in kind_sizes)}
        for most in sorted(n for n in limits if n < max(kind_sizes)):

            def child(kind=kind, most=most):
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
                code = 2
                try:
                    trainer.dump(path, kind)
                except OSError as error:
                    is_named = error.errno == errno.EFBIG and ".tmp-" in str(error.filename)
                    code = 0 if is_named else 3
                os._exit(code)

            _, status = os.waitpid(fork(child), 0)
            code = os.waitstatus_to_exitcode(status)
            if code:
                problems.append([kind, most, code])
            counts["failed"] += 1
            assert unpublished(path) == []
            assert table_reader.same(fold(storage.Chain.open(path)), before)
    check_load(path, before)
    trainer.dump(path, "delta")
    check_load(path, trainer.contents())
    return {**counts, "problems": problems}


def main():
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    # Forked processes share tqdm's lock. A process that is killed while it holds the lock never
    # releases it.
    tqdm.tqdm.set_lock(threading.RLock())
    path = pathlib.Path(sys.argv[2])
    print(json.dumps({"kill": kill, "limit": limit}[sys.argv[1]](path)))


if __name__ == "__main__":
    main()
