"""Ranks that read a chain verify each file once, and all read the same snapshots."""

import contextlib
import datetime
import os
import shutil
import threading
import time

import numpy as np
import pytest
import table_reader
import tensorflow as tf
from rank_dump_helpers import KEYS, dump, load
from rank_model import Rank, contents, run_on, whole
from rank_threads import ranks_are_threads, run

import tf_dynemb as de
from tf_dynemb import storage
from tf_dynemb.persistence import columns, joint_reading
from tf_dynemb.tables import batches


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    with ranks_are_threads(monkeypatch):
        yield


@pytest.mark.parametrize("size", [2, 4])
def test_each_file_is_verified_by_one_rank(tmp_path, monkeypatch, size):
    ranks, _ = dump(tmp_path, 4)
    run_on(ranks, lambda rank: (rank.write([1], 5), rank.dump_delta()))
    seen = [[] for _ in range(size)]
    read = storage.Snapshot.read
    here = threading.local()

    def reading(self, file, checksum):
        seen[here.rank].append((file.file, file.bytes, self.manifest.kind))
        return read(self, file, checksum)

    monkeypatch.setattr(storage.Snapshot, "read", reading)

    def follow(comm):
        here.rank = comm.rank
        Rank(comm, tmp_path).load()

    run(size, follow)
    snapshots = storage.Chain.open(tmp_path).snapshots
    expected = [(f.file, f.bytes, s.manifest.kind) for s in snapshots for f in s.files]
    assert sorted(file for files in seen for file in files) == sorted(expected)
    loads = [sum(size for _, size, _ in files) for files in seen]
    assert max(loads) < 1.2 * min(loads)


def test_shares_of_unequal_files():
    def file(number, size):
        return storage.ColumnFile(f"{number}", size, "")

    class Snapshot:
        def __init__(self, sizes, writers):
            files = [file(i, size) for i, size in enumerate(sizes)]
            of_ranks = [(files[i], rank) for rank, numbers in writers.items() for i in numbers]
            self.manifest = type("Manifest", (), {"files_of_ranks": of_ranks})
            self.files = files

    def shares(sizes, writers, size):
        found = joint_reading._shares(Snapshot(sizes, writers), size)
        return [sorted(int(file.file) for file in share) for share in found]

    # A rank gets the files that it wrote if that is fair; the rank with the least gets the others.
    assert shares([10, 10], {0: [1], 1: [0]}, 2) == [[1], [0]]
    assert shares([10, 9, 5], {0: [0, 2], 1: [1]}, 2) == [[0, 2], [1]]
    assert shares([10, 10, 10, 1], {0: [0, 1, 2, 3]}, 3) == [[0, 3], [1], [2]]
    assert shares([8, 8, 8, 8], {0: [0], 1: [1], 2: [2], 3: [3]}, 2) == [[0, 2], [1, 3]]
    assert shares([1], {0: [0]}, 4) == [[0], [], [], []]


class Watched:
    """A column that reports the number of rows of each read."""

    def __init__(self, array, note):
        self.array, self.note = array, note

    def __getitem__(self, selected):
        part = self.array[selected]
        self.note(len(part))
        return part


@pytest.mark.parametrize("capacity", [None, 40])
def test_ranks_read_only_the_keys_of_other_shards(tmp_path, monkeypatch, capacity):
    """With the dump's number of ranks, a rank reads no column of other shards except the keys."""
    ranks, _ = dump(tmp_path, 3)
    monkeypatch.setattr(batches, "_LOAD_BYTES", 1400)
    read = []
    column = storage.Snapshot.column
    here = threading.local()

    def watched(self, table, name, rank=0):
        array = column(self, table, name, rank)
        if table in ("user", "item", "page"):
            return Watched(array, lambda n: read.append((here.rank, rank, name, n)))
        return array

    monkeypatch.setattr(storage.Snapshot, "column", watched)

    def follow(comm):
        here.rank = comm.rank
        rank = Rank(comm, tmp_path)
        if capacity:
            small = de.DynamicVariable(3, name="user", init_capacity=8, max_capacity=capacity)
            de.load(tmp_path, small, quiet=True)
            assert len(small) == small.attributes["max_capacity"] < 2 * capacity
        else:
            rank.load()
        return rank

    warned = pytest.warns(UserWarning, match=r"rows of table 'user' did not fit")
    with warned if capacity else contextlib.nullcontext():
        loaded = run(3, follow)
    assert {name for reader, writer, name, _ in read if reader != writer} == {"keys"}
    assert max(n for *_, name, n in read if name == "vectors") <= 50
    if not capacity:
        assert table_reader.same(contents(loaded), contents(ranks), table_reader.ALL)
        for reader in range(3):
            rows = sum(n for r, _, name, n in read if (r, name) == (reader, "vectors"))
            assert rows == sum(len(table) for table in loaded[reader].tables)


def test_base_published_during_a_load(tmp_path, monkeypatch):
    """A snapshot that rank 0 has listed is gone when rank 1 opens it: all ranks restart."""
    ranks, _ = dump(tmp_path, 2)
    old = storage.Chain.open(tmp_path).last.directory
    kept = tmp_path / "kept"
    shutil.copytree(old, kept)
    run_on(ranks, lambda rank: (rank.write([1], 7), rank.dump()))
    new = storage.Chain.open(tmp_path).last.directory
    hidden = tmp_path / ".hidden"
    os.rename(new, hidden)
    shutil.copytree(kept, old)
    opened = []
    verified = threading.Semaphore(0)

    def opening(ranks, path, names):
        opened.append((ranks.rank, names))
        if ranks.rank == 1 and hidden.exists():
            for _ in range(2):  # ranks 0 and 2 find all files
                assert verified.acquire(timeout=60)
            os.rename(hidden, new)
            shutil.rmtree(old)
        return joint_reading.open_chain(ranks, path, names)

    def verifying(ranks, *args):
        joint_reading.verify(ranks, *args)
        verified.release()

    monkeypatch.setattr("tf_dynemb.persistence.load.open_chain", opening)
    monkeypatch.setattr("tf_dynemb.persistence.load.verify", verifying)
    loaded, _ = load(tmp_path, 3)
    assert sorted(opened) == sorted(
        (rank, [name]) for name in (old.name, new.name) for rank in range(3)
    )
    assert table_reader.same(contents(loaded), contents(ranks), table_reader.ALL)


def test_all_ranks_read_the_snapshots_that_rank_0_lists(tmp_path, monkeypatch):
    """No rank loads a delta that is published later."""
    ranks, marks = dump(tmp_path, 2)
    before = contents(ranks)
    listed = []
    names = storage.Chain.names

    def listing(path):
        listed.append(threading.current_thread().name)
        found = names(path)
        if len(listed) == 1:
            snapshot = storage.Chain.open(path).last
            with storage.Publication(path, "delta") as later:
                later.publish([], parent=snapshot.manifest.id, watermark=99, watermark_utc_ns=1)
        return found

    monkeypatch.setattr(storage.Chain, "names", listing)
    loaded, found = load(tmp_path, 3)
    assert set(listed) == {"rank 0"}
    assert set(found) == set(marks)
    assert table_reader.same(contents(loaded), before, table_reader.ALL)


def test_load_without_a_snapshot(tmp_path):
    def follow(comm):
        for call in (Rank.load, Rank.apply):
            with pytest.raises(FileNotFoundError, match=r"holds no snapshot"):
                call(Rank(comm, tmp_path))

    run(3, follow)


def test_number_of_stages(tmp_path):
    def stages(rank, work):
        before = len(rank.comm.calls)
        work(rank)
        return (len(rank.comm.calls) - before) / 2  # a stage gathers lengths, then texts

    ranks, _ = dump(tmp_path, 2)
    assert run_on(ranks, lambda rank: stages(rank, Rank.dump)) == [3, 3]
    assert run_on(ranks, lambda rank: stages(rank, Rank.dump_delta)) == [3, 3]
    assert run_on(ranks, lambda rank: stages(rank, Rank.load)) == [4, 4]
    assert run_on(ranks, lambda rank: stages(rank, Rank.apply)) == [5, 5]


def test_only_rank_0_has_a_progress_bar(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(columns, "_PATIENCE", 0)

    def work(comm):
        rank = Rank(comm, tmp_path)
        rank.write(KEYS, 1)
        de.dump(tmp_path, rank.variables, quiet=False)
        de.load(tmp_path, rank.variables, quiet=False)

    run(3, work)
    printed = capfd.readouterr().err
    for bar in ("dump: 100%", "verify: 100%"):
        assert printed.count(bar) == 1, printed
    for name in ("user", "item", "page"):
        assert f"load {name}: " in printed
    # One line for each bar.
    assert printed.count("\n") == 5, printed


def test_incremental_model_dump_returns_all_rows_on_all_ranks():
    def work(comm):
        rank = Rank(comm)
        rank.write(KEYS[:100], 1)
        time.sleep(0.01)
        now = datetime.datetime.now(datetime.timezone.utc)
        comm.barrier()
        time.sleep(0.01)
        rank.write(KEYS[90:120], 2)
        comm.barrier()
        long_ago = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
        return (
            de.incremental_model_dump(rank.tables, now),
            de.incremental_model_dump(rank.tables, [now, long_ago, now]),
            de.incremental_model_dump(rank.tables[0], [long_ago]),
            de.incremental_model_dump(rank.tables[0], datetime.datetime.now(datetime.timezone.utc)),
            rank.contents(),
        )

    results = run(3, work)
    expected = whole([result[-1] for result in results])
    for since_now, mixed, single, nothing, _ in results:
        for (keys, vectors), begins in (
            (since_now, [90, 90, 90]),
            (mixed, [90, 0, 90]),
            (single, [0]),
        ):
            assert isinstance(keys, list)
            assert isinstance(vectors, list)
            assert len(keys) == len(vectors) == len(begins)
            for name, begin, k, v in zip(expected, begins, keys, vectors, strict=False):
                rows = expected[name]
                order = np.argsort(k)
                kept = rows.keys >= begin
                np.testing.assert_array_equal(k[order], rows.keys[kept], strict=True)
                assert v[order].tobytes() == rows.vectors[kept].tobytes()
                assert v.dtype == {"item": tf.bfloat16.as_numpy_dtype}.get(name, np.float32)
        (keys,), (vectors,) = nothing
        assert (keys.shape, vectors.shape) == ((0,), (0, 3))
    for other in results[1:]:
        for one, two in zip(results[0][0][0], other[0][0], strict=True):
            np.testing.assert_array_equal(one, two)


def test_invalid_times():
    table = de.DynamicVariable(2)
    now = datetime.datetime.now(datetime.timezone.utc)
    with pytest.raises(ValueError, match=r"one for each of the 1 tables, got 2"):
        de.incremental_model_dump(table, [now, now])
    with pytest.raises(ValueError, match="got 0"):
        de.incremental_model_dump([table], [])
    with pytest.raises(ValueError, match="no time zone"):
        de.incremental_model_dump([table], [datetime.datetime(2026, 1, 1)])
