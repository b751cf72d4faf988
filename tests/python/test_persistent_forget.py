"""Persistent tables that forget rows; flushes that were interrupted, copied or are not seen."""

import errno
import gc
import os
import pathlib
import shutil
import threading
import time

import numpy as np
import pytest
import table_reader
import tensorflow as tf
import warm_python
from file_pairs import DIM, in_files
from test_persistent_tables import fill, make

import tf_dynemb as de
from tf_dynemb.tables import flushes

FORGOTTEN = np.arange(100, 200)


def check(table, expected=None):
    """All rows are as `fill` has left them, and those that were forgotten are not there."""
    rows = table_reader.rows_of(table)
    assert len(rows.keys) == len(np.unique(rows.keys)) == len(table)
    assert (rows.vectors == 3).all()
    assert not table.contains(FORGOTTEN).numpy().any()
    if expected is not None:
        np.testing.assert_array_equal(np.sort(rows.keys), expected)


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in pathlib.Path(folder).rglob("*")
        if path.is_file()
    }


def flushed(path, rows=500):
    table = make(path)
    fill(table, np.arange(rows), 3)
    table.flush()
    return table


def test_forgotten_rows_do_not_come_back_before_the_next_flush(tmp_path):
    table = flushed(tmp_path)
    assert int(table.forget(FORGOTTEN)) == 100
    fill(table, np.arange(1000, 1100), 3)
    del table
    gc.collect()
    for _ in range(2):
        table = make(tmp_path)
        check(table, np.setdiff1d(np.arange(500), FORGOTTEN))
        table.forget([7])
        table.upsert([7], np.full((1, DIM), 3, np.float32))
        table.flush()  # has key 7 again, and forgets what it has forgotten
        del table
        gc.collect()


def test_rows_that_were_in_memory_are_forgotten_too(tmp_path):
    """With memory for all rows, none is in files when they are forgotten."""
    table = make(tmp_path, rows=1000)
    fill(table, np.arange(500), 3)
    table.flush()
    assert table.stats()["file_rows"] == 0
    table.forget(FORGOTTEN)
    del table
    gc.collect()
    check(make(tmp_path, rows=1000), np.setdiff1d(np.arange(500), FORGOTTEN))


def test_a_flush_after_a_load_forgets_too(tmp_path):
    """The rows come from a dump, and a restart still begins with the flush before."""
    table = flushed(tmp_path / "files")
    de.dump(str(tmp_path / "dump"), [table], quiet=True)
    de.load(str(tmp_path / "dump"), [table], quiet=True)
    table.forget(FORGOTTEN)
    del table
    gc.collect()
    check(make(tmp_path / "files"), np.setdiff1d(np.arange(500), FORGOTTEN))


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_flush(tmp_path, monkeypatch, when):
    """Ctrl-C while a flush ends: whichever flush a restart finds, it has no forgotten row."""
    table = flushed(tmp_path)
    keep = flushes._keep_flush

    def interrupted(handle, folder):
        if when == "after":
            keep(handle, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(flushes, "_keep_flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            table.flush()
    table.forget(FORGOTTEN)
    folder = tmp_path / "t.persistent"
    numbers = sorted(name for name in os.listdir(folder) if name.startswith("flush-"))
    del table
    gc.collect()
    # Until a flush is kept, another rank may not have it.
    for name in numbers if when == "before" else numbers[-1:]:
        shutil.copytree(folder / name, tmp_path / name / "t.persistent" / name)
        check(make(tmp_path / name), np.setdiff1d(np.arange(500), FORGOTTEN))
        gc.collect()
    table = make(tmp_path)
    check(table, np.setdiff1d(np.arange(500), FORGOTTEN))
    table.flush()
    assert len([name for name in os.listdir(folder) if name.startswith("flush-")]) == 1


def test_a_flush_fails_after_an_interrupted_one(tmp_path, monkeypatch):
    """The interrupted one is complete: a restart finds it, without what is forgotten later."""
    table = flushed(tmp_path)

    def interrupted(handle, folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(flushes, "_keep_flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            table.flush()
    begin = flushes.Flushes.begin

    def in_the_way(self, number):
        begin(self, number)
        os.mkdir(os.path.join(self.folder(number), "index"))

    with monkeypatch.context() as patch:
        patch.setattr(flushes.Flushes, "begin", in_the_way)
        with pytest.raises(tf.errors.OpError):
            table.flush()
    table.forget(FORGOTTEN)
    del table
    gc.collect()
    check(make(tmp_path), np.setdiff1d(np.arange(500), FORGOTTEN))


@pytest.mark.parametrize("flushes_again", [False, True])
def test_a_table_that_was_replaced_forgets_its_own_rows_only(tmp_path, flushes_again):
    table = flushed(tmp_path)
    later = make(tmp_path)
    table.forget(np.arange(500))
    assert len(table) == 0
    assert len(later) == 500
    assert (table_reader.rows_of(later).vectors == 3).all()
    if flushes_again:
        later.flush()
    del table, later
    gc.collect()
    assert len(make(tmp_path)) == 500


def test_a_folder_by_two_names(tmp_path):
    table = flushed(tmp_path / "rows")
    (tmp_path / "link").symlink_to("rows")
    later = make(tmp_path / "link")
    assert len(later) == 500
    with pytest.raises(ValueError, match="later table"):
        table.flush()


def test_a_table_does_not_flush_while_it_is_replaced(tmp_path, monkeypatch):
    """It would remove the flush that the later table begins with."""
    tables = [flushed(tmp_path)]
    take_over = flushes.Flushes.take_over
    refused = []

    def flush():
        try:
            tables[0].flush()
        except ValueError as error:
            refused.append(error)

    thread = threading.Thread(target=flush)

    def meanwhile(self):
        thread.start()
        thread.join(timeout=0.5)
        take_over(self)

    with monkeypatch.context() as patch:
        patch.setattr(flushes.Flushes, "take_over", meanwhile)
        tables.append(make(tmp_path))
    thread.join()
    assert len(refused) == 1
    tables.clear()
    gc.collect()
    assert len(make(tmp_path)) == 500


def test_copies_by_links_do_not_change(tmp_path):
    """As `cp -al` makes them: nothing that a flush has is written to later."""
    table = flushed(tmp_path / "files")
    for kept in (tmp_path / "files" / "t.persistent").rglob("*"):
        copy = tmp_path / "backup" / kept.relative_to(tmp_path / "files")
        if kept.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            os.link(kept, copy)
    before = contents(tmp_path / "backup")
    table.forget(FORGOTTEN)
    table.forget([1, 2, 3])
    fill(table, np.arange(600, 900), 3)
    table.flush()
    table.forget(np.arange(300, 500))
    del table
    gc.collect()
    assert contents(tmp_path / "backup") == before
    restored = make(tmp_path / "backup")
    assert len(restored) == 500
    assert (table_reader.rows_of(restored).vectors == 3).all()


def test_forgotten_rows_are_in_no_file(tmp_path):
    table = make(tmp_path)
    mark = np.float32(1234567.5)
    fill(table, np.arange(500), 3)
    fill(table, FORGOTTEN, mark)
    fill(table, np.arange(500, 900), 3)
    table.flush()

    def count():
        return sum(data.count(mark.tobytes()) for data in contents(tmp_path).values())

    assert count() >= 100 * DIM
    table.forget(FORGOTTEN)
    table.flush()
    deadline = time.monotonic() + 60
    while count():  # compaction may be reading a file that is removed then
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_flush_that_cannot_be_seen_is_not_removed(tmp_path, monkeypatch, error):
    """Only ENOENT says that there is none."""
    table = flushed(tmp_path)
    del table
    gc.collect()
    stat = os.stat

    def fails(path, *args, **kwargs):
        if str(path).endswith("manifest"):
            raise OSError(error, os.strerror(error), str(path))
        return stat(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fails)
        with pytest.raises(OSError, match="manifest"):
            make(tmp_path)
    gc.collect()
    assert len(make(tmp_path)) == 500


def test_a_constructor_that_fails_takes_nothing_over(tmp_path):
    table = flushed(tmp_path)
    with pytest.raises(tf.errors.FailedPreconditionError, match="dimension"):
        in_files(tmp_path, 5, name="t", persistent=True)
    gc.collect()
    fill(table, np.arange(500, 600), 3)
    table.flush()
    del table
    gc.collect()
    assert len(make(tmp_path)) == 600


@pytest.mark.parametrize("step", ["begin", "discard"])
def test_errors_of_folders(tmp_path, monkeypatch, step):
    """A folder that cannot be made, or removed, costs a flush, or space, and no row."""
    table = flushed(tmp_path)
    what, error = {"begin": ("mkdir", OSError), "discard": ("rmdir", None)}[step]

    def fails(path, *args, **kwargs):
        raise OSError(errno.EIO, "injected", str(path))

    fill(table, np.arange(500, 600), 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, what, fails)
        if error is not None:
            with pytest.raises(OSError, match="injected"):
                table.flush()
        else:
            with pytest.warns(UserWarning, match="injected"):
                table.flush()
    table.flush()
    assert len(os.listdir(tmp_path / "t.persistent")) == 2
    del table
    gc.collect()
    assert len(make(tmp_path)) == 600


FORK = """
import os, signal, sys
import numpy as np, tensorflow as tf, tf_dynemb as de
table = de.DynamicVariable(4, name="t", var_type="file", file_path=sys.argv[1],
                           max_dram_for_vectors=100 * 40 / 2**30, persistent=True)
for first in range(0, 600, 60):
    table.upsert(np.arange(first, first + 60), np.full((60, 4), 3, np.float32))
table.flush()
child = os.fork()
if child == 0:
    signal.alarm(60)
    for wrong in (table.flush, lambda: de.DynamicVariable(4, name="t", var_type="file",
                                                          file_path=sys.argv[1], persistent=True)):
        try:
            wrong()
            os._exit(3)
        except (ValueError, BlockingIOError):
            pass
    sys.exit(0)  # as any process ends: tables are destroyed
_, status = os.waitpid(child, 0)
assert status == 0, status
for first in range(0, 600, 60):
    assert (table.lookup(np.arange(first, first + 60), insert=False).numpy() == 3).all()
table.upsert([1000], np.full((1, 4), 3, np.float32))
table.flush()
del table
again = de.DynamicVariable(4, name="t", var_type="file", file_path=sys.argv[1],
                           max_dram_for_vectors=100 * 40 / 2**30, persistent=True)
print("rows", len(again))
"""


def test_a_forked_child_that_ends_leaves_the_files(tmp_path):
    done = warm_python.run(["-c", FORK, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert "rows 601" in done.stdout
