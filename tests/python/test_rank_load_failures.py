"""Loads that fail on one rank fail on all, and change nothing on any; the ranks are threads."""

import errno
import re
import threading

import numpy as np
import pytest
import table_reader
import tensorflow as tf
from rank_dump_helpers import dump_and_change
from rank_model import Rank, check_failed, contents, outcomes_on, run_on, whole
from rank_threads import ranks_are_threads, run
from test_sok_dump import KEY, STATE, WEIGHT, write

import tf_dynemb as de
from tf_dynemb import storage
from tf_dynemb.parallel.agreement import OtherRankError
from tf_dynemb.persistence import columns, joint_reading
from tf_dynemb.tables import batches

KEYS = np.arange(120)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    with ranks_are_threads(monkeypatch):
        yield


@pytest.fixture
def ranks(tmp_path):
    """Returns ranks that dumped a base and a delta."""

    def dump_delta(rank):
        rank.optimizer.core.iterations.assign(4)
        rank.dump_delta()

    return dump_and_change(tmp_path / "chain", 3, dump_delta)


@pytest.fixture
def followers(ranks):
    """Returns two ranks with other rows, to load the dump of three ranks."""

    def begin(comm):
        rank = Rank(comm, ranks[0].path)
        rank.write(KEYS[:30] + 1000, 9)
        return rank

    return run(2, begin)


def states(ranks):
    return [rank.state() for rank in ranks]


def test_damaged_files(ranks, followers, tmp_path):
    before = states(followers)
    finders = set()
    for file in sorted((tmp_path / "chain").rglob("*.npy")):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 4
        file.write_bytes(flipped)
        found = outcomes_on(followers, Rank.load)
        (finder,) = (r for r in range(2) if type(found[r].error) is not OtherRankError)
        finders.add(finder)
        check_failed(found, [finder], storage.DataLossError, re.escape(str(file)))
        file.write_bytes(content[:-1])
        for outcome in outcomes_on(followers, Rank.load):
            assert re.search(
                f"{re.escape(str(file))} has|{re.escape(str(file))} ends", str(outcome.error)
            )
        file.write_bytes(content)
    assert finders == {0, 1}
    for manifest in (tmp_path / "chain").rglob("MANIFEST.json"):
        content = manifest.read_bytes()
        manifest.write_bytes(content.replace(b'"rows": ', b'"rows": 1', 1))
        check_failed(outcomes_on(followers, Rank.load), [0, 1], storage.DataLossError, "CRC32C")
        manifest.write_bytes(content)
    assert states(followers) == before
    run_on(followers, Rank.load)
    assert table_reader.same(contents(followers), contents(ranks))


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("call", range(6))
def test_failed_load_on_one_rank(ranks, followers, monkeypatch, rank, call):
    before = states(followers)
    load_rows = columns.load_rows
    here = threading.local()
    counted = []

    def fails(*args):
        if here.rank == rank:
            counted.append(args)
            if len(counted) == call + 1:
                raise tf.errors.ResourceExhaustedError(None, None, "no memory")
        return load_rows(*args)

    def load(each):
        here.rank = each.comm.rank
        return each.load()

    with monkeypatch.context() as patch:
        patch.setattr(columns, "load_rows", fails)
        found = outcomes_on(followers, load)
    check_failed(found, [rank], tf.errors.ResourceExhaustedError, "cannot hold the rows.*no memory")
    assert states(followers) == before
    run_on(followers, Rank.load)
    assert table_reader.same(contents(followers), contents(ranks))


def test_different_variables_on_ranks(followers):
    def load(each):
        name = "user" if each.comm.rank == 0 else "absent"
        return de.load(each.path, {name: each.tables[0]}, quiet=True)

    before = states(followers)
    for outcome in outcomes_on(followers, load):
        assert type(outcome.error) is ValueError
        assert "must be the same on all ranks" in str(outcome.error)
    check = outcomes_on(followers, lambda each: de.load(each.path, {"absent": each.tables[0]}))
    for outcome in check:
        assert type(outcome.error) is ValueError
        assert "has no table 'absent'" in str(outcome.error)
    assert states(followers) == before


def test_deltas_are_verified_before_any_rank_applies_one(ranks, followers, tmp_path):
    base = next((tmp_path / "chain").glob("*-base-*"))
    run_on(followers, lambda each: de.load(base, each.variables, each.optimizer, quiet=True))
    run_on(ranks, lambda each: (each.write([7], 5), each.dump_delta()))
    before = states(followers)
    deltas = sorted((tmp_path / "chain").glob("*-delta-*"))
    for file in sorted(deltas[1].glob("*.npy")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = outcomes_on(followers, Rank.apply)
        (finder,) = (r for r in range(2) if type(found[r].error) is not OtherRankError)
        check_failed(found, [finder], storage.DataLossError, re.escape(str(file)))
        file.write_bytes(content)
    assert states(followers) == before
    run_on(followers, Rank.apply)
    assert table_reader.same(contents(followers), contents(ranks))


@pytest.mark.parametrize("rank", range(2))
def test_rank_that_fell_behind_catches_up(ranks, followers, tmp_path, monkeypatch, rank):
    """A delta that one rank could not apply is verified and applied in the next attempt."""
    base = next((tmp_path / "chain").glob("*-base-*"))
    run_on(followers, lambda each: de.load(base, each.variables, each.optimizer, quiet=True))
    here = threading.local()
    load_rows = columns.load_rows

    def fails(*args, **kwargs):
        if here.rank == rank:
            raise OSError(errno.EIO, "gone")
        return load_rows(*args, **kwargs)

    def apply(each):
        here.rank = each.comm.rank
        return each.apply()

    with monkeypatch.context() as patch:
        patch.setattr(columns, "load_rows", fails)
        check_failed(outcomes_on(followers, apply), [rank], OSError, "gone")
    assert [int(each.optimizer.core.iterations) for each in followers] == [0, 0]
    ids = [set(dict(each.tables[-1].snapshots.items())) for each in followers]
    assert ids[rank] < ids[1 - rank]
    verified = []
    verify = joint_reading.verify

    def verifying(ranks, snapshots, quiet):
        verified.append(len(snapshots))
        return verify(ranks, snapshots, quiet)

    monkeypatch.setattr("tf_dynemb.persistence.apply_delta.verify", verifying)
    marks = run_on(followers, apply)
    assert verified == [1, 1]
    assert [int(each.optimizer.core.iterations) for each in followers] == [4, 4]
    assert marks == [de.Watermark.of(storage.Chain.open(ranks[0].path).last.manifest)] * 2
    assert table_reader.same(contents(followers), contents(ranks))


def write_sok_dump(folder, keys, vectors):
    folder.mkdir()
    write(folder / "user-key", KEY, keys)
    write(folder / "user-weight", WEIGHT, vectors)
    for state, factor in (("m", 2), ("v", 3)):
        write(folder / f"user-Adam-{state}", STATE, vectors * factor, state=state)
    write(folder / "grid-key", KEY, np.array([3, 0, 4, 1, 2]))
    write(folder / "grid-weight", WEIGHT, np.arange(10, dtype=np.float32).reshape(5, 2))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sok_dump_is_spread_over_ranks(tmp_path, monkeypatch, size):
    keys = np.arange(-50, 50)
    vectors = (keys[:, None] * [1, 10, 100]).astype(np.float32)
    write_sok_dump(tmp_path / "sok", keys, vectors)
    monkeypatch.setattr(batches, "_LOAD_BYTES", 1000)
    grid = np.zeros((5, 2), np.float32)
    grid[[3, 0, 4, 1, 2]] = np.arange(10).reshape(5, 2)

    def load(comm):
        rank = Rank(comm)
        rank.write([7000], 1)
        matrix = de.Variable(tf.zeros([5, 2]), name="grid")
        de.load_sok_dump(tmp_path / "sok", [rank.tables[0], matrix], rank.optimizer)
        np.testing.assert_array_equal(matrix.numpy(), grid[comm.rank :: size])
        before = rank.contents()["user"]
        bad = de.DynamicVariable(3, name="user", mode=f"localized:{size - 1}")
        de.load_sok_dump(tmp_path / "sok", bad)
        assert len(bad) == (100 if comm.rank == size - 1 else 0)
        if comm.rank == size - 1:
            (tmp_path / "sok" / "user-weight").unlink()
        comm.barrier()
        with pytest.raises(ValueError, match=r"user-weight is missing"):
            de.load_sok_dump(tmp_path / "sok", [rank.tables[0], matrix], rank.optimizer)
        assert before.same(rank.contents()["user"])
        return rank.contents()

    found = whole(run(size, load))["user"]
    np.testing.assert_array_equal(found.keys, keys)
    np.testing.assert_array_equal(found.vectors, vectors)
    np.testing.assert_array_equal(found.state, np.concatenate([vectors * 2, vectors * 3], 1))
