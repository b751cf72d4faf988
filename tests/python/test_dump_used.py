"""Deltas that also have the rows that were only used."""

import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import storage


def keys_of_last(path):
    return sorted(storage.Chain.open(path).last.column(0, "keys").tolist())


def kept_of_32_hot_rows(tmp_path, hot, used, **options):
    """How many of 32 rows that were used last, or most, survive 32 new keys in a loaded table."""
    options = {"name": "t", "max_capacity": 64} | options
    table = de.DynamicVariable(4, **options)
    table.lookup(tf.range(64))
    de.dump(tmp_path, table)
    hot(table)
    table.upsert([32], tf.ones([1, 4]))  # otherwise no delta is written
    de.incremental_dump(tmp_path, table, used=used)
    loaded = de.DynamicVariable(4, **options)
    de.load(tmp_path, loaded)
    if options.get("evict_strategy") == "score":
        loaded.lookup(tf.range(100, 131), scores=[50] * 31)
    else:
        loaded.lookup(tf.range(100, 131))
    return int(tf.reduce_sum(tf.cast(loaded.contains(tf.range(32)), tf.int32)))


HOT = {
    "lru": lambda table: table.lookup(tf.range(32), insert=False),
    "lfu": lambda table: table.lookup(tf.tile(tf.range(32), [5])),
    "epoch_lfu": lambda table: (table.advance_epoch(), table.lookup(tf.range(32))),
    "score": lambda table: table.set_scores(tf.range(32), [100] * 32),
}


@pytest.mark.parametrize("strategy", HOT)
def test_a_follower_evicts_what_the_trainer_would(tmp_path, strategy):
    kept = {
        used: kept_of_32_hot_rows(
            tmp_path / str(used), HOT[strategy], used, evict_strategy=strategy
        )
        for used in (False, True)
    }
    assert kept[True] > kept[False]
    assert kept[True] >= 30  # eviction compares about 28 rows, not all
    has = keys_of_last(tmp_path / "True")
    assert has == ([*range(33)] if strategy == "lru" else [*range(64)])
    assert keys_of_last(tmp_path / "False") == [32]


def test_since_each_delta_and_deletions(tmp_path):
    table = de.DynamicVariable(2, name="t")
    table.lookup(tf.range(10))
    first = de.dump(tmp_path / "chain", table)
    table.lookup([1, 2], insert=False)
    second = de.incremental_dump(tmp_path / "chain", table, used=True)
    assert second != first
    assert keys_of_last(tmp_path / "chain") == [1, 2]
    assert de.incremental_dump(tmp_path / "chain", table, used=True) == second  # no change
    table.lookup([3], insert=False)
    table.erase([5, 2])
    table.upsert([6], tf.ones([1, 2]))
    de.incremental_dump(tmp_path / "chain", table, used=True)
    assert keys_of_last(tmp_path / "chain") == [3, 6]
    de.incremental_dump(tmp_path / "shipped", table, since=first, used=True)
    assert keys_of_last(tmp_path / "shipped") == [1, 3, 6]
    reader = de.serving.Reader(tmp_path / "chain")
    assert not reader.contains([5, 2]).any()
    assert reader.contains([1, 3, 6]).all()


def test_a_table_expires_by_the_uses_of_the_trainer(tmp_path):
    options = {"ttl": 10, "ttl_since": "access", "name": "t"}
    table = de.DynamicVariable(2, **options)
    table.lookup([1, 2, 3])
    de.dump(tmp_path, table)
    for _ in range(8):
        table.lookup([9])
    table.lookup([1], insert=False)
    de.incremental_dump(tmp_path, table, used=True)
    assert keys_of_last(tmp_path) == [1, 9]
    loaded = de.DynamicVariable(2, **options)
    de.load(tmp_path, loaded)
    for _ in range(4):
        loaded.lookup([10])
    assert loaded.contains([1, 2, 9]).numpy().tolist() == [True, False, True]


def test_rows_in_files_that_moved_there_after_their_use(tmp_path):
    table = de.DynamicVariable(
        4,
        name="t",
        var_type="file",
        file_path=str(tmp_path / "rows"),
        max_dram_for_vectors=3e-4,
    )
    for first in range(0, 20_000, 5000):
        table.lookup(tf.range(first, first + 5000))
    de.dump(tmp_path / "chain", table)
    table.lookup(tf.range(100, 110))  # they come back to memory
    for first in range(30_000, 50_000, 5000):
        table.lookup(tf.range(first, first + 5000))  # and go to files again
    assert table.stats()["file_rows"] > 20_000
    de.incremental_dump(tmp_path / "chain", table, used=True)
    assert set(keys_of_last(tmp_path / "chain")) == {*range(100, 110), *range(30_000, 50_000)}
