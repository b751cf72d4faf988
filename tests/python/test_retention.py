"""Rows by conditions, eviction on request, and explanations of keys."""

import datetime
import time

import numpy as np
import pytest
import tensorflow as tf
from score_helpers import held, make, scores

import tf_dynemb as de


def test_conditions_select_rows():
    table = make("score", 100)
    table.upsert([-5, 0, 3, 8], [[0.0, 0], [3, 4], [6, 8], [0, 1]], scores=[10, 20, 30, 40])
    time.sleep(0.002)
    middle = datetime.datetime.now(datetime.timezone.utc)
    time.sleep(0.002)
    table.upsert([3, 9], [[6.0, 8], [1, 0]], scores=[30, 2**32 - 1])

    def keys(**conditions):
        rows = table.export_if(**conditions)
        assert table.size_if(**conditions) == len(rows.keys)
        np.testing.assert_array_equal(rows.vectors, table.lookup(rows.keys, insert=False))
        assert rows.scores.numpy().tolist() == scores(table, rows.keys)
        return sorted(rows.keys.numpy().tolist())

    assert keys() == [-5, 0, 3, 8, 9]
    assert keys(key_from=0, key_below=8) == [0, 3]
    assert keys(key_from=5, key_below=5) == keys(key_from=2**64) == keys(key_below=-100) == []
    assert keys(key_below=None, score_from=20, score_below=40) == [0, 3]
    assert keys(score_from=41) == [9]
    assert keys(l2_below=1) == [-5]
    assert keys(l2_from=1, l2_below=10) == [0, 8, 9]
    assert keys(l2_from=5, score_below=25) == [0]
    assert keys(updated_since=middle) == [3, 9]
    assert keys(updated_before=middle) == [-5, 0, 8]
    assert keys(updated_before=middle, updated_since=middle) == []

    since = table.stats()
    assert table.erase_if(l2_below=2, score_below=100) == 2
    assert keys() == [0, 3, 9]
    assert table.stats()["erased"] - since["erased"] == 2
    assert table.erase_if(key_from=1000) == 0
    assert table.evict(2) == 1
    assert keys() == [3, 9]
    assert table.stats()["evictions"] - since["evictions"] == 1
    assert table.evict(to_rows=0) == 2
    assert keys() == []


@pytest.mark.parametrize("key_type", [tf.int32, tf.uint64])
def test_conditions_on_keys_of_other_types(key_type):
    table = de.DynamicVariable(2, key_type=key_type, name="items")
    if key_type == tf.int32:
        table.lookup(tf.constant([-(2**31), -1, 0, 2**31 - 1]))
        assert table.size_if(key_below=0) == 2
        assert table.size_if(key_from=2**31 - 1) == 1
        assert table.size_if(key_from=-(2**40), key_below=2**40) == 4
    else:
        table.lookup(tf.constant([0, 5, 2**63, 2**64 - 1], tf.uint64))
        assert table.size_if(key_from=6) == 2
        assert table.size_if(key_from=2**63 + 1) == 1
        assert table.size_if(key_below=2**64) == 4


def test_conditions_on_times_of_accesses():
    table = make("lru", 100)
    table.lookup([1, 2, 3])
    time.sleep(0.002)
    middle = datetime.datetime.now(datetime.timezone.utc)
    time.sleep(0.002)
    table.lookup([2], insert=False)
    assert table.export_if(accessed_since=middle).keys.numpy().tolist() == [2]
    assert table.size_if(accessed_before=middle) == 2
    assert table.size_if(updated_before=middle) == 3
    assert table.evict(1) == 2
    assert held(table, [1, 2, 3]) == [2]


def test_evicted_and_erased_keys_are_deletions(tmp_path):
    table = make("lfu", 100)
    table.lookup(np.repeat(np.arange(10), np.arange(1, 11)))
    de.dump(tmp_path, table)
    follower = make("lfu", 100)
    de.load(tmp_path, follower)
    table.evict(6)
    table.erase_if(key_from=8)
    table.lookup([50])
    de.incremental_dump(tmp_path, table)
    de.apply_delta(tmp_path, follower)
    assert sorted(follower.export_if().keys.numpy().tolist()) == [4, 5, 6, 7, 50]
    reader = de.serving.Reader(tmp_path)
    assert np.flatnonzero(reader.contains(np.arange(100))).tolist() == [4, 5, 6, 7, 50]


def test_bad_conditions():
    table, timed = make("score"), make("lru")
    now = datetime.datetime.now(datetime.timezone.utc)
    later = now + datetime.timedelta(hours=1)
    for conditions, error, match in [
        ({"norm": 3}, TypeError, "norm=3.*l2_below"),
        ({"key_from": 1.5}, TypeError, "key_from.*1.5"),
        ({"key_from": 2**70}, ValueError, "key_from"),
        ({"score_from": "a"}, TypeError, "score_from"),
        ({"l2_below": "a"}, TypeError, "l2_below"),
        ({"l2_below": float("nan")}, ValueError, "l2_below"),
        ({"updated_before": datetime.datetime.now()}, ValueError, "updated_before.*time zone"),
        ({"updated_since": 5}, TypeError, "updated_since"),
        ({"updated_before": later}, ValueError, "updated_before.*later than now"),
        ({"accessed_since": now}, ValueError, "accessed_since.*'score'.*score_from"),
    ]:
        with pytest.raises(error, match=match):
            table.size_if(**conditions)
    with pytest.raises(ValueError, match=r"score_below.*'lru'.*accessed_before"):
        timed.size_if(score_below=3)
    with pytest.raises(ValueError, match="erase_if needs a condition"):
        table.erase_if()
    with pytest.raises(tf.errors.InvalidArgumentError, match="to_rows=-1"):
        table.evict(-1)
    with pytest.raises(RuntimeError, match=r"outside tf\.function"):
        tf.function(lambda: table.size_if())()


def test_rows_that_have_exploded_are_found():
    table = de.DynamicVariable(2, name="items")
    values = [[1.0, 1], [1e30, 1e30], [np.inf, 0], [np.nan, 0]]
    table.upsert([1, 2, 3, 4], tf.constant(values))
    assert sorted(table.export_if(l2_from=1e6).keys.numpy().tolist()) == [2, 3]
    assert table.size_if(l2_from=0) == 3
    assert table.size_if(l2_from=-5) == table.size_if() == 4
    assert table.size_if(key_from=-(2**63)) == 4


def test_explain_says_what_happened_to_a_key():
    table = make("lfu", 3)
    assert table.explain([]) == []
    begin = datetime.datetime.now(datetime.timezone.utc)
    table.lookup([1, 2, 3, 3])
    table.erase([2])
    table.forget([1])
    table.lookup([4, 4, 5, 5])
    table.lookup([6, 6, 6])  # evicts 4 or 5
    table.upsert([2], tf.ones([1, 2]))  # evicts the other, or 3
    now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=1)
    found = {
        each.key: each for each in table.explain(tf.constant([[1, 2, 3], [4, 5, 6], [7, 7, 7]]))
    }
    assert list(found) == [1, 2, 3, 4, 5, 6, 7]
    for key, each in found.items():
        assert each.has_row == (key in held(table, range(8)))
        assert each.tier == ("host" if each.has_row else None)
        assert (each.updated is not None) == each.has_row
        assert each.accessed is None
        assert (each.lost is None) == (each.lost_because is None)
        assert all(begin <= time <= now for time in (each.updated, each.lost) if time)
        assert str(each.key) in str(each)
    assert found[1].lost_because == "forgotten"
    assert (found[2].has_row, found[2].score, found[2].lost_because) == (True, 1, "erased")
    assert sorted(str(found[key].lost_because) for key in (3, 4, 5)) == [
        "None",
        "evicted",
        "evicted",
    ]
    assert (found[6].score, found[6].lost) == (3, None)
    assert (found[7].has_row, found[7].lost_because) == (False, None)
    assert "evicted" in " ".join(map(str, found.values()))

    timed = make("lru")
    timed.lookup([1])
    time.sleep(0.01)
    timed.lookup([1], insert=False)
    (each,) = timed.explain(1)
    assert each.updated < each.accessed
    assert each.score is None
    with pytest.raises(RuntimeError, match=r"outside tf\.function"):
        tf.function(lambda: timed.explain([1]))()
