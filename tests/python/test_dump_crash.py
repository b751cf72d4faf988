"""Dumps that are killed, or run out of space: the chain is unchanged, or the dump is complete."""

import contextlib
import errno
import os
import pathlib
import subprocess
import threading

import keras
import numpy as np
import pytest
import table_reader
import tensorflow as tf
from chain_reader import fold
from dump_helpers import run_script

import tf_dynemb as de
from tf_dynemb import storage

ROWS = 600


def run_zygote(what, path):
    """Returns the output of dump_zygote.py, which imports TensorFlow once for all its processes."""
    return run_script("dump_zygote.py", what, path)


@pytest.mark.slow
def test_a_process_killed_at_any_moment(tmp_path):
    counts = run_zygote("kill", tmp_path / "chain")
    assert counts["old"] + counts["new"] == 100
    assert counts["loads"] == 5
    # Processes were killed both before and after publication, in dumps and in deltas.
    assert min(counts["old"], counts["new"]) >= 10
    outcomes = [counts[f"{kind} {state}"] for kind in ("base", "delta") for state in ("old", "new")]
    assert min(outcomes) >= 4
    assert counts["killed after publication"] >= 1
    # A later process, which was killed in turn, removed the leftovers of an earlier one.
    assert counts["left"] >= 1


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path):
    counts = run_zygote("limit", tmp_path / "chain")
    assert counts["failed"] >= 10
    assert counts["problems"] == []


class Trainer:
    def __init__(self, rows=ROWS):
        self.tables = [
            de.DynamicVariable(4, name="user", seed=1),
            de.DynamicVariable(2, name="item", seed=2, key_type=tf.int32, dtype=tf.float16),
        ]
        self.optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.5))
        self.optimizer.attach(self.tables)
        self.write(np.arange(rows), 1)

    def write(self, keys, value):
        for table in self.tables:
            keys = keys.astype(table.key_type.as_numpy_dtype)
            table.upsert(keys, tf.fill([len(keys), table.dimension], float(value)))

    def change(self):
        self.write(np.arange(ROWS // 2, ROWS + 50), 2)
        for table in self.tables:
            table.erase(np.arange(40, dtype=table.key_type.as_numpy_dtype))

    def contents(self):
        return table_reader.contents(self.tables)

    def dump(self, path, kind):
        dump = de.dump if kind == "base" else de.incremental_dump
        return dump(path, self.tables, optimizer=self.optimizer, quiet=True)


def unpublished(path):
    return [name for name in os.listdir(path) if name.startswith(".tmp-")]


def check_chain(path, expected):
    """Checks that the chain has exactly this content, and can be loaded."""
    assert unpublished(path) == []
    assert table_reader.same(fold(storage.Chain.open(path)), expected)
    fresh = Trainer(rows=3)
    de.load(path, fresh.tables, fresh.optimizer, quiet=True)
    columns = ("keys", "vectors", "state", "updates")
    assert table_reader.same(fresh.contents(), expected, columns)


def check_error(error, numbers=(errno.ENOSPC,)):
    assert error.errno in numbers
    assert ".tmp-" in str(error.filename), f"the error names no file: {error!r}"


@contextlib.contextmanager
def small_disk(path, options):
    """Mounts a file system in memory; skips the test if that is not permitted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_a_disk_with_every_number_of_free_pages(tmp_path, kind):
    trainer = Trainer()
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        path = disk / "chain"
        trainer.dump(path, "base")
        before = trainer.contents()
        trainer.change()
        failures = []
        for pages in range(1000):
            with (disk / "filler").open("wb", buffering=0) as filler:
                free = os.statvfs(disk)
                os.posix_fallocate(filler.fileno(), 0, (free.f_bfree - pages) * free.f_frsize)
            assert os.statvfs(disk).f_bfree == pages
            try:
                trainer.dump(path, kind)
            except OSError as error:
                failures.append(error)
                assert unpublished(path) == []
                assert table_reader.same(fold(storage.Chain.open(path)), before)
            else:
                break
            finally:
                (disk / "filler").unlink()
        check_chain(path, trainer.contents())
    for error in failures:
        check_error(error)
    files = {pathlib.Path(error.filename).name for error in failures}
    expected = {"000.r0.keys.npy", "000.r0.vectors.npy", "001.r0.state.npy", "MANIFEST.json"}
    assert files >= expected | ({"000.r0.index.npy"} if kind == "base" else set())


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_a_disk_with_few_inodes(tmp_path, kind):
    trainer = Trainer(rows=20)
    with small_disk(tmp_path / "disk", "size=1m,nr_inodes=64") as disk:
        path = disk / "chain"
        trainer.dump(path, "base")
        before = trainer.contents()
        trainer.change()
        failures = 0
        for inodes in range(40):
            fillers = []
            while os.statvfs(disk).f_ffree > inodes:
                fillers.append(disk / f"filler{len(fillers)}")
                fillers[-1].touch()
            try:
                trainer.dump(path, kind)
            except OSError as error:
                check_error(error)
                failures += 1
                assert unpublished(path) == []
                assert table_reader.same(fold(storage.Chain.open(path)), before)
            else:
                break
            finally:
                for filler in fillers:
                    filler.unlink()
        assert failures > 10
        check_chain(path, trainer.contents())


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_writes_that_fail_after_some_bytes(tmp_path, monkeypatch, kind):
    trainer = Trainer()
    trainer.dump(tmp_path, "base")
    before = trainer.contents()
    trainer.change()
    rng = np.random.default_rng(0)
    write = os.write
    total, threads = 0, threading.Lock()

    def counting(descriptor, data):
        nonlocal total
        with threads:
            total += len(data)
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", counting)
        other = tmp_path / "other"
        tables = Trainer()
        tables.dump(other, "base")
        if kind == "delta":
            tables.change()
            total = 0
            tables.dump(other, "delta")
    for most in [0, 1, total - 1, *rng.integers(0, total, 20)]:
        left = int(most)

        def full(descriptor, data):
            nonlocal left
            with threads:
                if left == 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                written = write(descriptor, data[:left])
                left -= written
                return written

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space left") as caught:
                trainer.dump(tmp_path, kind)
        check_error(caught.value)
        assert unpublished(tmp_path) == []
        assert table_reader.same(fold(storage.Chain.open(tmp_path)), before)
    check_chain(tmp_path, before)
    trainer.dump(tmp_path, kind)
    check_chain(tmp_path, trainer.contents())


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_writes_of_nothing(tmp_path, monkeypatch, kind):
    """A file system that writes nothing and gives no reason is an error, not an endless loop."""
    trainer = Trainer()
    trainer.dump(tmp_path, "base")
    before = trainer.contents()
    trainer.change()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: 0)
        with pytest.raises(OSError, match="Input/output error") as caught:
            trainer.dump(tmp_path, kind)
    check_error(caught.value, (errno.EIO,))
    check_chain(tmp_path, before)


@pytest.mark.parametrize("function", ["pwrite", "posix_fallocate", "fsync", "rename"])
@pytest.mark.parametrize("kind", ["base", "delta"])
def test_other_system_calls_that_fail(tmp_path, monkeypatch, kind, function):
    trainer = Trainer(rows=20)
    trainer.dump(tmp_path, "base")
    before = trainer.contents()
    trainer.change()
    real = getattr(os, function)
    errors = []
    for call in range(100):
        calls = iter(range(1000))

        def failing(*args, calls=calls, call=call):
            if next(calls) == call:
                names = (str(args[0]), None, str(args[1])) if function == "rename" else ()
                raise OSError(errno.EIO, os.strerror(errno.EIO), *names)
            return real(*args)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, function, failing)
                trainer.dump(tmp_path, kind)
        except OSError as error:
            assert unpublished(tmp_path) == []
            errors.append(error)
            found = fold(storage.Chain.open(tmp_path))
            if table_reader.same(found, trainer.contents()):
                assert function == "fsync"  # of the directory, after the rename
                break
            assert table_reader.same(found, before)
        else:
            break
    else:
        raise AssertionError("every dump fails")
    check_chain(tmp_path, trainer.contents())
    least = {"pwrite": 10, "fsync": 14, "rename": 1, "posix_fallocate": 2 * (kind == "base")}
    assert len(errors) >= least[function]
    for error in errors:
        assert error.errno == errno.EIO
        assert str(tmp_path) in str(error), f"the error names no file: {error!r}"
