"""Dumps of several ranks, read by the same or another number of ranks; the ranks are threads."""

import contextlib
import datetime
import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
import rank_model
import table_reader
import tensorflow as tf
from chain_reader import fold, read_snapshot
from delta_model import check_reader
from rank_model import Rank, contents, run_on, unpublished, whole, whole_matrices
from rank_threads import ranks_are_threads, run

import tf_dynemb as de
from tf_dynemb import cli, serving, storage
from tf_dynemb.persistence import continuation
from tf_dynemb.snapshots import columns, joint_publication, joint_reading
from tf_dynemb.tables import batches

KEYS = np.arange(300)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    with ranks_are_threads(monkeypatch):
        yield


def dump(path, size, steps=2):
    """Ranks that were trained and dumped, with their watermarks."""

    def train(comm):
        rank = Rank(comm, path)
        for step in range(steps):
            rank.write(KEYS[50 * step :], step)
        rank.erase(KEYS[:10])
        rank.optimizer.core.iterations.assign(steps)
        return rank, rank.dump()

    return zip(*run(size, train), strict=True)


def load(path, size):
    """Ranks that had other rows before they loaded."""

    def follow(comm):
        rank = Rank(comm, path)
        rank.write(KEYS[:5] + 1000, 9)
        rank.erase([1000])
        for matrix in rank.matrices:
            matrix.assign(tf.zeros_like(matrix))
        return rank, rank.load()

    return zip(*run(size, follow), strict=True)


def check_chain(path, ranks, capsys):
    """Checks that the chain has the content of the ranks' tables, and is valid."""
    folded = fold(storage.Chain.open(path))
    expected = contents(ranks)
    tables = {name: folded[name] for name in expected}
    assert table_reader.same(tables, expected, table_reader.ALL)
    assert cli.main(["verify", str(path)]) == 0, capsys.readouterr().out
    assert unpublished(path) == []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_many_ranks_dump_any_number_loads(tmp_path, capsys, size):
    ranks, marks = dump(tmp_path, size)
    expected = contents(ranks)
    assert set(marks) == {marks[0]}
    check_chain(tmp_path, ranks, capsys)
    manifest = storage.Chain.open(tmp_path).last.manifest
    assert manifest.world_size == size
    assert de.Watermark.of(manifest) == marks[0]
    assert manifest.optimizer["iterations"] == 2
    everywhere, last = list(range(size)), [size - 1]
    shards = {table.name: [shard.rank for shard in table.shards] for table in manifest.tables}
    assert shards == {
        "user": everywhere,
        "item": everywhere,
        "page": last,
        "grid": everywhere,
        "home": last,
    }
    for other in (1, 2, 3, 8):
        heirs, marks_there = load(tmp_path, other)
        assert set(marks_there) == {marks[0]}
        assert table_reader.same(contents(heirs), expected, table_reader.ALL)
        for matrix, value in zip(
            whole_matrices(heirs), [rank_model.GRID, rank_model.HOME], strict=True
        ):
            np.testing.assert_array_equal(matrix, value)
        assert {int(heir.optimizer.core.iterations) for heir in heirs} == {2}


def test_a_chain_goes_on_with_other_numbers_of_ranks(tmp_path, capsys):
    path = tmp_path / "chain"
    ranks, _ = dump(path, 4)
    reader, follower = serving.Reader(path), load(path, 3)
    followers, _ = follower
    for size, version in ((2, 5), (3, 6), (1, 7), (4, 8)):
        ranks, _ = load(path, size)
        before = contents(ranks)

        def train(rank, version=version):
            rank.write(KEYS[100 + version : 120], version)
            rank.write([1000 + version, 2**31 - version], version)
            rank.erase([2 * version, 1000 + version - 1, 120 + version, 5000])
            rank.write([120 + version], version + 0.5)  # inserted again
            return rank.dump_delta()

        marks = run_on(ranks, train)
        assert set(marks) == {marks[0]}
        check_chain(path, ranks, capsys)
        last = storage.Chain.open(path).last
        assert last.manifest.world_size == size
        changed = {*range(100 + version, 121), 1000 + version, 2**31 - version, 120 + version}
        gone = {2 * version, 1000 + version - 1}
        for name in before:
            rows, deleted = read_snapshot(last, name)
            assert set(rows.keys.tolist()) == changed - {120}
            assert set(deleted.tolist()) == gone & set(before[name].keys.tolist())
            assert len(deleted) >= 1
        assert reader.follow() == 1
        for heirs, of_all in ((followers, run_on(followers, Rank.apply)), load(path, 3)):
            assert set(of_all) == {marks[0]}
            assert table_reader.same(contents(heirs), contents(ranks))
    for name, rows in contents(ranks).items():
        assert (np.sort(np.concatenate([k for k, _ in reader.items(name)])) == rows.keys).all()
    of_dynamic = serving.Reader(path, tables=["user", "item", "page"])
    check_reader(of_dynamic, contents(ranks))


def test_the_commands_read_what_ranks_wrote(tmp_path, capsys):
    path = tmp_path / "chain"
    dump(path, 4)
    ranks, _ = load(path, 2)
    run_on(ranks, lambda rank: (rank.write([1, 400], 5), rank.erase([20]), rank.dump_delta()))
    check_chain(path, ranks, capsys)
    capsys.readouterr()
    assert cli.main(["inspect", "--json", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)["snapshots"]
    assert [snapshot["world_size"] for snapshot in told] == [4, 2]
    assert [table["ranks"] for table in told[0]["tables"]] == [4, 4, 1, 4, 1]
    assert [table["ranks"] for table in told[1]["tables"]] == [2, 2, 1]
    before = fold(storage.Chain.open(path))
    assert cli.main(["merge", str(path), str(tmp_path / "merged")]) == 0
    merged = storage.Chain.open(tmp_path / "merged")
    assert merged.deltas == []
    assert table_reader.same(fold(merged), before, (*table_reader.ALL, "accesses"))
    assert cli.main(["verify", str(tmp_path / "merged")]) == 0, capsys.readouterr().out
    heirs, _ = load(tmp_path / "merged", 3)
    assert table_reader.same(contents(heirs), contents(ranks), table_reader.ALL)
    # The ranks' own tables continue the merged base.
    run_on(ranks, lambda rank: (rank.write([2], 6), rank.dump_delta(path=tmp_path / "merged")))
    check_chain(tmp_path / "merged", ranks, capsys)


def test_watermarks_and_times_are_where_deltas_begin(tmp_path):
    ranks, marks = dump(tmp_path / "chain", 3)
    run_on(ranks, lambda rank: rank.write([500], 5))
    second = run_on(ranks, Rank.dump_delta)
    time.sleep(0.01)
    now = datetime.datetime.now(datetime.timezone.utc)
    time.sleep(0.01)
    run_on(ranks, lambda rank: (rank.write([501], 6), rank.erase([100])))

    def keys_of(since, name):
        run_on(ranks, lambda rank: rank.dump_delta(since, tmp_path / name))
        snapshot = storage.Chain.open(tmp_path / name).last
        found = [read_snapshot(snapshot, table) for table in ("user", "item", "page")]
        keys, gone = (
            {tuple(sorted(part.tolist())) for part in parts}
            for parts in zip(*((rows.keys, deleted) for rows, deleted in found), strict=True)
        )
        return keys, gone, snapshot.manifest

    *found, manifest = keys_of(marks[0], "a")
    assert found == [{(500, 501)}, {(100,)}]
    assert (manifest.parent, manifest.since) == (marks[0].id, marks[0].tick)
    *found, manifest = keys_of(second[0], "b")
    assert found == [{(501,)}, {(100,)}]
    *found, manifest = keys_of(now, "c")
    assert found == [{(501,)}, {(100,)}]
    assert manifest.parent is None
    reader = serving.Reader(tmp_path / "chain", ["user"])
    assert reader.follow(tmp_path / "c") == 1
    assert reader.size() == len(contents(ranks)["user"].keys)


def test_a_time_is_another_tick_for_each_rank(tmp_path, monkeypatch):
    ranks, marks = dump(tmp_path / "chain", 3)
    here = threading.local()
    ticks = [marks[0].tick + after for after in (1, 4, 2)]
    monkeypatch.setattr(continuation, "tick_before", lambda *_: ticks[here.rank])

    def work(rank):
        here.rank = rank.comm.rank
        return rank.dump_delta(marks[0].utc, tmp_path / "deltas")

    run_on(ranks, work)
    manifest = storage.Chain.open(tmp_path / "deltas").last.manifest
    assert (manifest.parent, manifest.since) == (None, max(ticks))


def test_each_rank_knows_the_snapshot_by_its_own_clock(tmp_path, monkeypatch):
    """Between the cuts of two ranks a third is trained: its changes are in the next delta."""
    ranks, _ = dump(tmp_path, 3)
    ranks_cut = threading.Barrier(2)
    write_rows = columns.write_rows
    enter = joint_publication.JointPublication.writing

    def slow(part, *args):
        if part.rank == 0:  # its cut exists; that of rank 2 does not
            with_path = ranks[0]
            with_path.write([700 + i for i in range(60)], 3)
            ranks_cut.wait(60)
        return write_rows(part, *args)

    def late(self):
        if self._ranks.rank == 2:
            ranks_cut.wait(60)
        return enter(self)

    with monkeypatch.context() as patch:
        patch.setattr(columns, "write_rows", slow)
        patch.setattr(joint_publication.JointPublication, "writing", late)
        (mark, *_) = run_on(ranks, Rank.dump)
    assert [dict(r.tables[0].snapshots.items())[mark.id][0] for r in ranks] != [mark.tick] * 3
    before = set(fold(storage.Chain.open(tmp_path))["user"].keys.tolist())
    mine = set(
        run_on(ranks, lambda rank: rank.own(rank.tables[0], np.arange(700, 760)))[0].tolist()
    )
    assert mine
    assert not mine & before
    run_on(ranks, Rank.dump_delta)
    rows, _ = read_snapshot(storage.Chain.open(tmp_path).last, "user")
    assert set(rows.keys.tolist()) == mine


def test_clocks_are_set_to_the_latest_before_the_cut(tmp_path, monkeypatch):
    ranks, _ = dump(tmp_path, 3)
    advanced = []
    here = threading.local()
    monkeypatch.setattr(joint_publication, "last_tick", lambda: here.rank * 1000)
    monkeypatch.setattr(joint_publication, "advance_clock", advanced.append)

    def work(rank):
        here.rank = rank.comm.rank
        rank.dump()

    run_on(ranks, work)
    assert advanced == [2000] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_files_are_verified_once_by_some_rank(tmp_path, monkeypatch, size):
    ranks, _ = dump(tmp_path, 4)
    run_on(ranks, lambda rank: (rank.write([1], 5), rank.dump_delta()))
    seen = [[] for _ in range(size)]
    verify = storage.Snapshot._verify_file
    here = threading.local()

    def verifying(self, file, checksum):
        seen[here.rank].append((file.file, file.bytes, self.manifest.kind))
        return verify(self, file, checksum)

    monkeypatch.setattr(storage.Snapshot, "_verify_file", verifying)

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
            shards = [
                storage.Shard(rank, 0, 0, 0, {str(i): files[i] for i in numbers})
                for rank, numbers in writers.items()
            ]
            table = type("Table", (), {"shards": shards})
            self.manifest = type("Manifest", (), {"tables": [table]})
            self.files = files

    def shares(sizes, writers, size):
        found = joint_reading._shares(Snapshot(sizes, writers), size)
        return [sorted(int(file.file) for file in share) for share in found]

    # Each rank has its own files if that is fair; otherwise the rank with the least gets a file.
    assert shares([10, 10], {0: [1], 1: [0]}, 2) == [[1], [0]]
    assert shares([10, 9, 5], {0: [0, 2], 1: [1]}, 2) == [[0, 2], [1]]
    assert shares([10, 10, 10, 1], {0: [0, 1, 2, 3]}, 3) == [[0, 3], [1], [2]]
    assert shares([8, 8, 8, 8], {0: [0], 1: [1], 2: [2], 3: [3]}, 2) == [[0, 2], [1, 3]]
    assert shares([1], {0: [0]}, 4) == [[0], [], [], []]


class Watched:
    """A column that records which of its rows are read."""

    def __init__(self, array, note):
        self.array, self.note = array, note

    def __getitem__(self, some):
        part = self.array[some]
        self.note(len(part))
        return part


@pytest.mark.parametrize("capacity", [None, 40])
def test_what_is_not_its_own_a_rank_does_not_read(tmp_path, monkeypatch, capacity):
    """With the same number of ranks as wrote: only the keys of other shards are read, by slices."""
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
        heir = Rank(comm, tmp_path)
        if capacity:
            small = de.DynamicVariable(3, name="user", init_capacity=8, max_capacity=capacity)
            de.load(tmp_path, small, quiet=True)
            assert len(small) == capacity
        else:
            heir.load()
        return heir

    warned = pytest.warns(UserWarning, match=r"rows of table 'user' did not fit")
    with warned if capacity else contextlib.nullcontext():
        heirs = run(3, follow)
    assert {name for reader, writer, name, _ in read if reader != writer} == {"keys"}
    assert max(n for *_, name, n in read if name == "vectors") <= 50
    if not capacity:
        assert table_reader.same(contents(heirs), contents(ranks), table_reader.ALL)
        for reader in range(3):
            rows = sum(n for r, _, name, n in read if (r, name) == (reader, "vectors"))
            assert rows == sum(len(table) for table in heirs[reader].tables)


def test_a_base_that_comes_while_ranks_load(tmp_path, monkeypatch):
    """A snapshot that rank 0 has listed is gone when rank 1 opens it: all ranks start again."""
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
            for _ in range(2):  # the others miss no file
                assert verified.acquire(timeout=60)
            os.rename(hidden, new)
            shutil.rmtree(old)
        return joint_reading.open_chain(ranks, path, names)

    def verifying(ranks, *args):
        joint_reading.verify(ranks, *args)
        verified.release()

    monkeypatch.setattr("tf_dynemb.persistence.load.open_chain", opening)
    monkeypatch.setattr("tf_dynemb.persistence.load.verify", verifying)
    heirs, _ = load(tmp_path, 3)
    assert sorted(opened) == sorted(
        (rank, [name]) for name in (old.name, new.name) for rank in range(3)
    )
    assert table_reader.same(contents(heirs), contents(ranks), table_reader.ALL)


def test_all_ranks_read_what_rank_0_has_listed(tmp_path, monkeypatch):
    """A delta that is published later is loaded by none of them."""
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
    heirs, found = load(tmp_path, 3)
    assert set(listed) == {"rank 0"}
    assert set(found) == set(marks)
    assert table_reader.same(contents(heirs), before, table_reader.ALL)


def test_nothing_to_load(tmp_path):
    def follow(comm):
        for call in (Rank.load, Rank.apply):
            with pytest.raises(FileNotFoundError, match=r"holds no snapshot"):
                call(Rank(comm, tmp_path))

    run(3, follow)


def test_how_often_ranks_meet(tmp_path):
    def meetings(rank, work):
        before = len(rank.comm.calls)
        work(rank)
        return (len(rank.comm.calls) - before) / 2  # lengths and texts

    ranks, _ = dump(tmp_path, 2)
    assert run_on(ranks, lambda rank: meetings(rank, Rank.dump)) == [3, 3]
    assert run_on(ranks, lambda rank: meetings(rank, Rank.dump_delta)) == [3, 3]
    assert run_on(ranks, lambda rank: meetings(rank, Rank.load)) == [4, 4]
    assert run_on(ranks, lambda rank: meetings(rank, Rank.apply)) == [5, 5]


def test_only_rank_0_has_a_progress_bar(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(columns, "_PATIENCE", 0)

    def work(comm):
        rank = Rank(comm, tmp_path)
        rank.write(KEYS, 1)
        de.dump(tmp_path, rank.variables, quiet=False)
        de.load(tmp_path, rank.variables, quiet=False)

    run(3, work)
    told = capfd.readouterr().err
    for bar in ("dump: 100%", "verify: 100%"):
        assert told.count(bar) == 1, told
    for name in ("user", "item", "page"):
        assert f"load {name}: " in told
    # One line for each bar.
    assert told.count("\n") == 5, told


def test_incremental_model_dump_gives_all_ranks_everything():
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


def test_times_that_do_not_fit_the_tables():
    table = de.DynamicVariable(2)
    now = datetime.datetime.now(datetime.timezone.utc)
    with pytest.raises(ValueError, match=r"one for each of the 1 tables, got 2"):
        de.incremental_model_dump(table, [now, now])
    with pytest.raises(ValueError, match="got 0"):
        de.incremental_model_dump([table], [])
    with pytest.raises(ValueError, match="no time zone"):
        de.incremental_model_dump([table], [datetime.datetime(2026, 1, 1)])
