"""Earlier states of a chain: load(until=), rollback, prune; chains that compact themselves."""

from __future__ import annotations

import datetime
import os

import keras
import pytest
import tensorflow as tf
from dump_helpers import UTC, make, step, vectors_of

import tf_dynemb as de
from tf_dynemb import cli, storage
from tf_dynemb.persistence import dump as dump_module
from tf_dynemb.serving import Reader


def write(table, value):
    table.upsert([1], [[float(value)] * 2])


def value(table):
    return vectors_of(table)[1][0]


def kinds(path):
    return [name.split("-")[1] for name in sorted(os.listdir(path)) if "-" in name]


@pytest.fixture
def chain(tmp_path):
    """A table, and the watermarks of two bases with two deltas each, with the values 1 to 6."""
    table, marks = make(), []
    for number in range(1, 7):
        write(table, number)
        if number in (1, 4):
            marks.append(de.dump(tmp_path, table, keep=1))
        else:
            marks.append(de.incremental_dump(tmp_path, table))
    return table, marks


@pytest.mark.parametrize("number", range(1, 7))
def test_load_until_a_watermark(tmp_path, chain, number):
    _, marks = chain
    table = make()
    assert de.load(tmp_path, table, until=marks[number - 1]) == marks[number - 1]
    assert value(table) == number


@pytest.mark.parametrize("number", range(1, 7))
def test_load_until_a_time(tmp_path, chain, number):
    _, marks = chain
    table = make()
    # A watermark's time is rounded down to the microsecond.
    time = marks[number - 1].utc + datetime.timedelta(microseconds=1)
    assert de.load(tmp_path, table, until=time) == marks[number - 1]
    assert value(table) == number


def test_times_of_a_clock_that_was_ahead(tmp_path):
    table = make()
    write(table, 1)
    first = de.dump(tmp_path, table)
    last = storage.Chain.open(tmp_path).last.manifest
    with storage.Publication(tmp_path, "delta") as ahead:
        utc = last.watermark_utc_ns + 10**12
        ahead.publish(
            [], since=first.tick, watermark=first.tick, watermark_utc_ns=utc, parent=last.id
        )
    names = storage.Chain.names_until(tmp_path, last.watermark_utc_ns)
    assert names[-1].endswith(first.id)
    assert len(storage.Chain.names_until(tmp_path, utc)) == 2


@pytest.mark.parametrize(
    ("until", "error", "says"),
    [
        ("x", TypeError, "until must be a Watermark, a datetime or None"),
        (datetime.datetime(2020, 1, 1), ValueError, "until=.* has no time zone"),
        (datetime.datetime(2020, 1, 1, tzinfo=UTC), FileNotFoundError, "no snapshot that was"),
    ],
)
def test_until_is_checked(tmp_path, chain, until, error, says):
    table = make()
    write(table, 9)
    with pytest.raises(error, match=says):
        de.load(tmp_path, table, until=until)
    assert value(table) == 9


def test_a_snapshot_that_is_not_there(tmp_path, chain):
    table, marks = chain
    de.dump(tmp_path, table)
    with pytest.raises(FileNotFoundError, match=f"no snapshot {marks[5].id}; those there:"):
        de.load(tmp_path, make(), until=marks[5])
    with pytest.raises(FileNotFoundError, match="holds no snapshot: it does not exist"):
        de.load(tmp_path / "nothing", make(), until=marks[5])


def test_training_goes_on_from_an_earlier_state(tmp_path, chain):
    reader = Reader(tmp_path)
    _, marks = chain
    table = make()
    de.load(tmp_path, table, until=marks[4])
    write(table, 7)
    with pytest.raises(ValueError, match="would leave a gap"):
        de.incremental_dump(tmp_path, table)
    de.dump(tmp_path, table)
    assert reader.follow() == 1
    assert reader.lookup([1])[0, 0] == 7


@pytest.mark.parametrize("number", range(1, 6))
def test_a_rollback_is_followed(tmp_path, chain, number, capsys):
    _, marks = chain
    reader = Reader(tmp_path)
    before = set(os.listdir(tmp_path))
    assert cli.main(["rollback", str(tmp_path), "--to", marks[number - 1].id[:12]]) == 0
    assert set(os.listdir(tmp_path)) > before
    assert cli.main(["verify", str(tmp_path)]) == 0
    newest = storage.Chain.open(tmp_path).last.manifest
    assert {mark.id for mark in marks} <= set(newest.after)
    assert reader.follow() == 1
    assert reader.lookup([1])[0, 0] == number
    assert reader.follow() == 0
    # A trainer goes on with it, and the reader follows.
    table = make()
    de.load(tmp_path, table)
    write(table, 8)
    de.incremental_dump(tmp_path, table)
    assert reader.follow() == 1
    assert reader.lookup([1])[0, 0] == 8
    # A rollback can be rolled back, too.
    assert cli.main(["rollback", str(tmp_path), "--to", marks[5].id]) == 0
    assert reader.follow() == 1
    assert reader.lookup([1])[0, 0] == 6


def test_a_trainer_with_the_bad_rows_must_load_first(tmp_path, chain):
    table, marks = chain
    assert cli.main(["rollback", str(tmp_path), "--to", marks[0].id]) == 0
    write(table, 9)
    with pytest.raises(ValueError, match="would leave a gap"):
        de.incremental_dump(tmp_path, table)


def test_the_errors_of_rollback(tmp_path, chain, capsys):
    _, marks = chain
    names = set(os.listdir(tmp_path))
    assert cli.main(["rollback", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert all(mark.id in listed for mark in marks)
    assert cli.main(["rollback", str(tmp_path), "--to", marks[5].id]) == 2
    assert "is the last snapshot" in capsys.readouterr().err
    assert cli.main(["rollback", str(tmp_path), "--to", "zz"]) == 2
    assert "holds no snapshot zz" in capsys.readouterr().err
    assert cli.main(["rollback", str(tmp_path), "--to", ""]) == 2
    assert "pass more digits" in capsys.readouterr().err
    assert cli.main(["rollback", str(tmp_path / "none")]) == 2
    assert set(os.listdir(tmp_path)) == names
    keys = next(tmp_path.glob(f"*{marks[0].id}/*keys.npy"))
    keys.write_bytes(keys.read_bytes()[:-1] + b"\x55")
    assert cli.main(["rollback", str(tmp_path), "--to", marks[0].id]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert set(os.listdir(tmp_path)) == names


def test_prune(tmp_path, chain, capsys):
    assert cli.main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert kinds(tmp_path) == ["base", "delta", "delta"] * 2
    with storage.Publication(tmp_path, "base"):
        assert cli.main(["prune", str(tmp_path)]) == 2
        assert "another process writes" in capsys.readouterr().err
    assert cli.main(["prune", str(tmp_path)]) == 0
    assert kinds(tmp_path) == ["base", "delta", "delta"]
    de.load(tmp_path, other := make())
    assert value(other) == 6
    assert cli.main(["prune", str(tmp_path), "--keep", "-1"]) == 2
    assert cli.main(["prune", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()


# Chains that compact themselves


def test_deltas_are_merged(tmp_path):
    table = make()
    write(table, 0)
    de.dump(tmp_path, table)
    reader = Reader(tmp_path)
    marks = []
    for number in range(1, 8):
        write(table, number)
        marks.append(de.incremental_dump(tmp_path, table, compact_every=3))
        assert kinds(tmp_path) == ["base"] + ["delta"] * (number % 3)
        assert reader.follow() == 1
        assert reader.lookup([1])[0, 0] == number
    de.load(tmp_path, other := make())
    assert value(other) == 7
    # The state of a delta that was merged last is still there, as the state of the base.
    de.load(tmp_path, other, until=marks[5])
    assert value(other) == 6
    with pytest.raises(FileNotFoundError):
        de.load(tmp_path, other, until=marks[4])


def test_bases_that_are_merged_can_be_kept(tmp_path):
    table, marks = make(), []
    write(table, 0)
    de.dump(tmp_path, table)
    for number in range(1, 5):
        write(table, number)
        marks.append(de.incremental_dump(tmp_path, table, compact_every=2, keep=1))
    assert kinds(tmp_path) == ["base", "delta", "delta", "base"]
    de.load(tmp_path, other := make(), until=marks[2])
    assert value(other) == 3


def test_a_merge_that_fails_leaves_the_deltas(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    table = make()
    de.dump(tmp_path, table)
    write(table, 1)
    with monkeypatch.context() as patched:
        patched.setattr(dump_module, "merge", fail)
        with pytest.warns(UserWarning, match="were not merged.*No space left"):
            de.incremental_dump(tmp_path, table, compact_every=1)
    assert kinds(tmp_path) == ["base", "delta"]
    write(table, 2)
    de.incremental_dump(tmp_path, table, compact_every=1)
    assert kinds(tmp_path) == ["base"]


def test_deltas_without_a_base_are_not_merged(tmp_path):
    table = make()
    mark = de.dump(tmp_path / "base", table)
    write(table, 1)
    de.incremental_dump(tmp_path / "deltas", table, since=mark, compact_every=1)
    assert kinds(tmp_path / "deltas") == ["delta"]


@pytest.mark.parametrize("options", [{"compact_every": 0}, {"compact_every": True}, {"keep": -1}])
def test_numbers_are_checked(tmp_path, options):
    table = make()
    de.dump(tmp_path, table)
    with pytest.raises(ValueError, match="must be"):
        de.incremental_dump(tmp_path, table, **options)


# Deltas without changes


def test_no_delta_without_a_change(tmp_path):
    table = make()
    write(table, 1)
    mark = de.dump(tmp_path, table)
    for since in (None, mark) * 3:
        assert de.incremental_dump(tmp_path, table, since) == mark
    table.lookup([1])  # only read
    assert de.incremental_dump(tmp_path, table) == mark
    assert kinds(tmp_path) == ["base"]
    write(table, 2)
    second = de.incremental_dump(tmp_path, table, mark)
    assert second != mark
    assert de.incremental_dump(tmp_path, table) == second
    table.erase([1])
    assert de.incremental_dump(tmp_path, table) not in (mark, second)
    assert kinds(tmp_path) == ["base", "delta", "delta"]
    # A path without a snapshot, and a time, get what was asked for.
    de.incremental_dump(tmp_path / "other", table, since=second)
    de.incremental_dump(tmp_path, table, since=second.utc)
    assert kinds(tmp_path / "other") == ["delta"]
    assert kinds(tmp_path) == ["base", "delta", "delta", "delta"]


def test_counters_of_keys_are_a_change(tmp_path):
    table = make("t", admission=de.Frequency(3))
    de.dump(tmp_path, table)
    for _ in range(2):
        table.lookup([77])  # the key is counted, and gets no row
        mark = de.incremental_dump(tmp_path, table)
        assert de.incremental_dump(tmp_path, table) == mark
    assert kinds(tmp_path) == ["base", "delta", "delta"]
    de.load(tmp_path, other := make("t", admission=de.Frequency(3)))
    assert list(vectors_of(other)) == []
    other.lookup([77])
    assert list(vectors_of(other)) == [77]


def test_steps_that_rows_make_up_for_are_a_change(tmp_path):
    table = make()
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(0.1, weight_decay=0.1), catch_up=True)
    step(optimizer, [table], tf.constant([1], tf.int64))
    de.dump(tmp_path, table)
    for _ in range(2):
        step(optimizer, [table], tf.constant([], tf.int64))
        mark = de.incremental_dump(tmp_path, table)
        assert de.incremental_dump(tmp_path, table) == mark
    assert kinds(tmp_path) == ["base", "delta", "delta"]


def test_what_else_is_a_change(tmp_path):
    table = make("t", ttl=100)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.1))
    step(optimizer, [table], tf.constant([1, 2], tf.int64))

    def deltas():
        before = len(kinds(tmp_path))
        de.incremental_dump(tmp_path, table, optimizer=optimizer)
        return len(kinds(tmp_path)) - before

    de.dump(tmp_path, table, optimizer)
    assert deltas() == 0
    table.lookup([1])  # a step of the clock of the ttl
    assert deltas() == 1
    assert deltas() == 0
    optimizer.core.iterations.assign_add(1)
    assert deltas() == 1
    assert deltas() == 0
