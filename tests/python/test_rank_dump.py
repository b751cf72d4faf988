"""Dumps of several ranks, read by the same or another number of ranks; the ranks are threads."""

import datetime
import json
import threading
import time

import numpy as np
import pytest
import rank_model
import table_reader
from chain_reader import fold, read_snapshot
from delta_model import check_reader
from rank_dump_helpers import KEYS, dump, load
from rank_model import Rank, contents, run_on, unpublished, whole_matrices
from rank_threads import ranks_are_threads

import tf_dynemb as de
from tf_dynemb import cli, serving, storage
from tf_dynemb.persistence import columns, continuation, joint_publication


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    with ranks_are_threads(monkeypatch):
        yield


def check_chain(path, ranks, capsys):
    """Checks that the chain has the content of the ranks' tables, and is valid."""
    folded = fold(storage.Chain.open(path))
    expected = contents(ranks)
    tables = {name: folded[name] for name in expected}
    assert table_reader.same(tables, expected, table_reader.ALL)
    assert cli.main(["verify", str(path)]) == 0, capsys.readouterr().out
    assert unpublished(path) == []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_dump_loads_on_any_number_of_ranks(tmp_path, capsys, size):
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
        loaded, marks_there = load(tmp_path, other)
        assert set(marks_there) == {marks[0]}
        assert table_reader.same(contents(loaded), expected, table_reader.ALL)
        for matrix, value in zip(
            whole_matrices(loaded), [rank_model.GRID, rank_model.HOME], strict=True
        ):
            np.testing.assert_array_equal(matrix, value)
        assert {int(rank.optimizer.core.iterations) for rank in loaded} == {2}


def test_chain_continues_with_other_numbers_of_ranks(tmp_path, capsys):
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
        for loaded, found_marks in ((followers, run_on(followers, Rank.apply)), load(path, 3)):
            assert set(found_marks) == {marks[0]}
            assert table_reader.same(contents(loaded), contents(ranks))
    for name, rows in contents(ranks).items():
        assert (np.sort(np.concatenate([k for k, _ in reader.items(name)])) == rows.keys).all()
    dynamic_reader = serving.Reader(path, tables=["user", "item", "page"])
    check_reader(dynamic_reader, contents(ranks))


def test_commands_read_dumps_of_ranks(tmp_path, capsys):
    path = tmp_path / "chain"
    dump(path, 4)
    ranks, _ = load(path, 2)
    run_on(ranks, lambda rank: (rank.write([1, 400], 5), rank.erase([20]), rank.dump_delta()))
    check_chain(path, ranks, capsys)
    capsys.readouterr()
    assert cli.main(["inspect", "--json", str(path)]) == 0
    inspected = json.loads(capsys.readouterr().out)["snapshots"]
    assert [snapshot["world_size"] for snapshot in inspected] == [4, 2]
    assert [table["ranks"] for table in inspected[0]["tables"]] == [4, 4, 1, 4, 1]
    assert [table["ranks"] for table in inspected[1]["tables"]] == [2, 2, 1]
    before = fold(storage.Chain.open(path))
    assert cli.main(["merge", str(path), str(tmp_path / "merged")]) == 0
    merged = storage.Chain.open(tmp_path / "merged")
    assert merged.deltas == []
    assert table_reader.same(fold(merged), before, (*table_reader.ALL, "accesses"))
    assert cli.main(["verify", str(tmp_path / "merged")]) == 0, capsys.readouterr().out
    loaded, _ = load(tmp_path / "merged", 3)
    assert table_reader.same(contents(loaded), contents(ranks), table_reader.ALL)
    # The ranks' tables can continue the merged base.
    run_on(ranks, lambda rank: (rank.write([2], 6), rank.dump_delta(path=tmp_path / "merged")))
    check_chain(tmp_path / "merged", ranks, capsys)


def test_deltas_since_watermarks_and_times(tmp_path):
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


def test_delta_since_a_time_begins_at_the_latest_tick_of_the_ranks(tmp_path, monkeypatch):
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


def test_training_between_the_cuts_of_ranks(tmp_path, monkeypatch):
    """Rank 0 is trained between its cut and rank 2's cut: the changes are in the next delta."""
    ranks, _ = dump(tmp_path, 3)
    ranks_cut = threading.Barrier(2)
    write_rows = columns.write_rows
    enter = joint_publication.JointPublication.writing

    def slow(part, *args):
        if part.rank == 0:  # rank 0 has its cut, rank 2 does not
            ranks[0].write([700 + i for i in range(60)], 3)
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
    rank_keys = set(
        run_on(ranks, lambda rank: rank.owned_keys(rank.tables[0], np.arange(700, 760)))[0].tolist()
    )
    assert rank_keys
    assert not rank_keys & before
    run_on(ranks, Rank.dump_delta)
    rows, _ = read_snapshot(storage.Chain.open(tmp_path).last, "user")
    assert set(rows.keys.tolist()) == rank_keys


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
