"""Admission counters in dumps, deltas and checkpoints, and on other numbers of ranks."""

import json
import pathlib

import gpu
import numpy as np
import pytest
import rank_threads
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import cli, serving, storage
from tf_dynemb.format import manifest as manifests

KEYS = np.arange(400)


def make(name="items", n=9, counters=2000, **options):
    options = {"initializer": "1", "admission": de.Frequency(n, counters=counters), **options}
    return de.DynamicVariable(2, name=name, **options)


def count(table, times):
    """Asks for each key as often as `times` says."""
    table.lookup(np.repeat(np.arange(len(times)), times))


def counts(table, keys=KEYS):
    return [each.admission_count for each in table.explain(keys)]


def times_of(seed, most=8):
    return np.random.default_rng(seed).integers(0, most, len(KEYS))


def expected(times, n=9):
    """The counts of keys without rows."""
    return [None if t >= n else int(t) for t in times]


def test_a_dump_has_the_counters(tmp_path):
    table, times = make(), times_of(1, 12)
    count(table, times)
    assert counts(table) == expected(times)
    de.dump(tmp_path, table)
    count(table, np.full(len(KEYS), 3))
    loaded = make()
    loaded.lookup(KEYS)
    de.load(tmp_path, [loaded])
    assert counts(loaded) == expected(times)
    assert set(de.export(loaded)[0].numpy()) == set(KEYS[times >= 9])
    # The same count as if the table had never been saved.
    count(loaded, np.full(len(KEYS), 3))
    assert counts(loaded) == counts(table)
    entry = storage.Chain.open(tmp_path).last.manifest.tables[0]
    assert (entry.admission_lines, entry.shards[0].admission_lines) == (87, 87)
    assert cli.main(["verify", str(tmp_path)]) == 0


def test_a_delta_has_the_counters(tmp_path):
    table, times = make(), times_of(2)
    count(table, times)
    mark = de.dump(tmp_path, table)
    follower = make()
    de.load(tmp_path, [follower])
    more = times_of(3, 4)
    count(table, more)
    de.incremental_dump(tmp_path, table, mark)
    count(table, np.ones(len(KEYS), np.int64))
    # The counters of keys that have no row; admitted keys are forgotten.
    total = expected(times + more)
    de.apply_delta(tmp_path, [follower])
    assert counts(follower) == total
    loaded = make()
    de.load(tmp_path, [loaded])
    assert counts(loaded) == total
    merged = tmp_path / "merged"
    assert cli.main(["merge", str(tmp_path), str(merged)]) == 0
    assert cli.main(["verify", str(merged)]) == 0
    again = make()
    de.load(merged, [again])
    assert counts(again) == total
    assert set(de.export(again)[0].numpy()) == set(de.export(follower)[0].numpy())


@pytest.mark.parametrize(
    ("other", "warns"),
    [
        ({"counters": 100}, "has 2001 admission counters, but 'items:0' has 115"),
        ({"admission": None}, None),
        ({"admission": de.Probability(0.5)}, None),
        # Another threshold or result uses the same counts.
        ({"admission": de.Frequency(20, counters=2000, unadmitted="skip")}, "same"),
    ],
)
def test_counters_of_another_table(tmp_path, other, warns, recwarn):
    table, times = make(), times_of(4)
    count(table, times)
    de.dump(tmp_path, table)
    loaded = make(**other)
    de.load(tmp_path, [loaded])
    messages = [str(w.message) for w in recwarn.list if "counters" in str(w.message)]
    if warns == "same":
        assert counts(loaded) == times.tolist()
        assert messages == []
        return
    assert len(messages) == (warns is not None)
    assert not warns or warns in messages[0]
    start = 0 if warns else None
    assert counts(loaded) == [start] * len(KEYS)


def test_a_dump_without_counters(tmp_path):
    de.dump(tmp_path, make(admission=None))
    text = pathlib.Path(next(tmp_path.glob("*/MANIFEST.json"))).read_text()
    members = json.loads(text)
    # As an older version has written it.
    del members["tables"][0]["admission_lines"]
    for name in ("first_admission_line", "admission_lines"):
        del members["tables"][0]["shards"][0][name]
    del members["crc32c"]
    members["crc32c"] = f"{manifests.checksum_of(members):08x}"
    assert manifests.Manifest.from_json(json.dumps(members), "m").tables[0].admission_lines is None
    table = make()
    count(table, times_of(5))
    de.load(tmp_path, [table])
    assert counts(table) == [0] * len(KEYS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"admission_lines": 88}, "must end at line 87"),
        ({"first_admission_line": 1}, "must end at line 87"),
        ({"admission_lines": 86}, "admission.*bytes"),
        ({"admission_lines": -1}, "admission_lines"),
    ],
)
def test_a_manifest_that_contradicts_itself(tmp_path, change, message):
    de.dump(tmp_path, make())
    text = pathlib.Path(next(tmp_path.glob("*/MANIFEST.json"))).read_text()
    members = json.loads(text)
    members["tables"][0]["shards"][0].update(change)
    del members["crc32c"]
    members["crc32c"] = f"{manifests.checksum_of(members):08x}"
    with pytest.raises(storage.DataLossError, match=message):
        manifests.Manifest.from_json(json.dumps(members), "m")


def test_checkpoints_have_the_counters(tmp_path):
    table, times = make(), times_of(6, 12)
    count(table, times)
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "checkpoint"))
    loaded = make()
    count(loaded, times_of(7))
    tf.train.Checkpoint(table=loaded).read(path).assert_consumed()
    assert counts(loaded) == expected(times)
    # A model that gets admission later reads its older checkpoints.
    plain = tf.train.Checkpoint(table=make(admission=None)).write(str(tmp_path / "plain"))
    tf.train.Checkpoint(table=loaded).read(plain).assert_consumed()
    assert counts(loaded) == [0] * len(KEYS)


@pytest.mark.parametrize(("unadmitted", "value"), [("zeros", 0.0), ("skip", 0.0), ("initial", 1.0)])
def test_readers_return_what_lookups_do(tmp_path, unadmitted, value):
    table = make(admission=de.Frequency(2, unadmitted=unadmitted))
    table.lookup([1, 1, 2])
    de.dump(tmp_path, table)
    reader = serving.Reader(tmp_path)
    expected_vectors = [[1.0, 1], [value, value]]
    np.testing.assert_array_equal(table.lookup([1, 2], insert=False), expected_vectors)
    np.testing.assert_array_equal(reader.lookup([1, 2], "items"), expected_vectors)
    # Loading does not make this the table's own default_vector.
    de.load(tmp_path, [table])
    assert table.default_vector is None


@pytest.mark.skipif(gpu.ON, reason="ranks that are threads get each other's tensors")
@pytest.mark.parametrize("counters", [50, 2000])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_counters_survive_resharding(tmp_path, monkeypatch, before, counters):
    def counts_by_key(comm, table):
        return dict(zip(KEYS.tolist(), counts(table), strict=True))

    def write(comm):
        table = make(counters=counters)
        for step in range(3):
            count(table, times_of(10 * step + comm.rank, 2))
        de.dump(tmp_path, table)
        return counts_by_key(comm, table)

    def read(comm):
        table = make(counters=counters)
        de.load(tmp_path, [table])
        return counts_by_key(comm, table)

    with rank_threads.ranks_are_threads(monkeypatch):
        written = rank_threads.run(before, write)[0]
        remembered = sum(count > 0 for count in written.values())
        for after in (1, 2, 3, 5):
            found = rank_threads.run(after, read)[0]
            if counters == 2000 or after == before:
                assert found == written
                continue
            # Full lines: where two ranks have counted in one line, a load keeps half of each.
            kept = sum(found[key] == written[key] != 0 for key in written)
            assert 60 <= kept <= remembered
    assert remembered > (60 if counters == 50 else 300)
