"""Rows that expire, in tables that are spread over ranks."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import gather
from tf_dynemb import serving


def held(table, n):
    return np.flatnonzero(table.contains(tf.range(n, dtype=tf.int64)).numpy()).tolist()


def step(table, keys=()):
    table.lookup(tf.constant(list(keys), tf.int64))


@pytest.mark.parametrize("mode", [None, "localized:0"])
@pytest.mark.parametrize("since", ["update", "access"])
def test_rows_expire_at_the_same_step_on_every_rank(comm, mode, since):
    table = de.DynamicVariable(2, name="items", ttl=3, ttl_since=since, mode=mode)
    for number in range(6):
        # Each rank asks for another key, and all ask for key 0.
        step(table, [0, 1 + number * comm.size + comm.rank])
    expected = {1 + number * comm.size + rank for number in (3, 4, 5) for rank in range(comm.size)}
    # Key 0 was inserted again every third step, and used in every step.
    assert set(held(table, 40)) == expected | {0}
    removed = gather(comm, np.array([int(table.expire())]))
    assert removed.sum() == 3 * comm.size
    for _ in range(3):
        step(table)
    assert held(table, 40) == []


def test_every_rank_sets_the_time_of_the_data(comm):
    day = datetime.timedelta(days=1)
    table = de.DynamicVariable(2, name="items", ttl=day, ttl_clock="data")
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    table.set_data_time(start)
    step(table, range(10))
    table.set_data_time(start + day / 2)
    step(table, range(10, 20))
    table.set_data_time(start + day)
    assert held(table, 20) == list(range(10, 20))


def test_ranks_share_the_rows_that_stay(comm):
    table = de.DynamicVariable(2, name="items", ttl=1, ttl_min_rows=4 * comm.size)
    assert table.attributes["ttl_min_rows"] == 4
    local = de.DynamicVariable(2, name="local", ttl=1, ttl_min_rows=5, mode="localized:0")
    assert local.attributes["ttl_min_rows"] == 5
    step(table, range(100))
    step(table)
    table.expire()
    assert gather(comm, np.array([len(table)])).tolist() == [4] * comm.size


def test_dumps_of_ranks_continue_the_ages(comm, shared_path):
    path = shared_path / "chain"
    table = de.DynamicVariable(2, name="items", ttl=4, seed=3)
    step(table, range(10))
    step(table, range(10, 20))
    de.dump(path, [table], quiet=True)
    step(table, range(20, 30))
    step(table)
    step(table)  # the first ten expire
    de.incremental_dump(path, [table], quiet=True)
    again = de.DynamicVariable(2, name="items", ttl=4, seed=3)
    de.load(path, [again], quiet=True)
    seen = []
    for _ in range(4):
        assert held(again, 30) == held(table, 30)
        seen.append(len(held(table, 30)))
        step(table)
        step(again)
    assert seen == [20, 10, 0, 0]
    if comm.rank == 0:
        reader = serving.Reader(path)
        keys = sorted(key for block_keys, _ in reader.items("items") for key in block_keys)
        assert keys == list(range(10, 30))
