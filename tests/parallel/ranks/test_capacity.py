"""Numbers of rows in options count the rows of all ranks together."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

ROWS = 1000


def held(comm, table):
    return sum(comm.gather_objects(len(table), "rows"))


def full(**options):
    table = de.DynamicVariable(2, name="full", max_capacity=ROWS, **options)
    table.upsert(tf.range(ROWS, dtype=tf.int64), tf.ones([ROWS, 2]))
    return table


@pytest.mark.any_number_of_ranks
def test_max_capacity_different_keys_find_a_place_on_any_number_of_ranks(comm, shared_path):
    table = full(evict_strategy="none")
    assert held(comm, table) == ROWS
    if comm.size > 1:
        assert ROWS / comm.size <= table.attributes["max_capacity"] < 1.7 * ROWS / comm.size
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        de.dump(shared_path, table)
        de.load(shared_path, again := de.DynamicVariable(2, name="full", max_capacity=ROWS))
    assert held(comm, again) == ROWS
    assert held(comm, table) == ROWS
    # On one rank: all of it.
    alone = de.DynamicVariable(2, name="full", max_capacity=ROWS, mode="localized:0")
    de.load(shared_path, alone)
    assert comm.gather_objects(len(alone), "alone")[0] == ROWS


def test_more_keys_do_not(comm):
    table = full()
    keys = np.arange(4 * ROWS)
    for batch in np.split(keys, 40):
        table.lookup(tf.constant(batch))
    assert held(comm, table) < 2 * ROWS
    assert sum(comm.gather_objects(table.stats()["evictions"], "evictions")) > 2 * ROWS


def test_evict_leaves_so_many_rows_on_all_ranks(comm):
    table = full()
    table.evict(to_rows=101)
    assert 101 <= held(comm, table) <= 101 + comm.size
    table.evict(to_rows=0)
    assert held(comm, table) == 0
