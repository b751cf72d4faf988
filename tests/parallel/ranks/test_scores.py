"""Scores in tables that are spread over ranks: the owner of a key counts the ids of all ranks."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import gather


def ids_of(rank, step, n=60):
    """The ids of a rank: some are on every rank, some on one, and many repeat."""
    rng = np.random.default_rng([rank, step])
    return rng.choice([*range(10), *range(100 * (rank + 1), 100 * (rank + 1) + 20)], n)


def expected(comm, steps, epochs=None):
    """The counts of all ids of all ranks, and the epoch of the last step with each id."""
    counts, last = collections.Counter(), {}
    for step in range(steps):
        for rank in range(comm.size):
            for key in ids_of(rank, step).tolist():
                counts[key] += 1
                last[key] = step
    if epochs is None:
        return dict(counts)
    return {key: last[key] // epochs << 20 | count for key, count in counts.items()}


def check(table, wanted):
    keys = sorted(wanted)
    found = table.scores(tf.constant([*keys, 10**6], tf.int64)).numpy().tolist()
    assert found == [*(wanted[key] for key in keys), -1]


@pytest.mark.parametrize("mode", [None, "localized:0"])
def test_every_id_counts_once(comm, mode):
    table = de.DynamicVariable(2, name="items", evict_strategy="lfu", mode=mode)
    timed = de.DynamicVariable(2, name="timed", mode=mode)
    for step in range(4):
        ids = tf.constant(ids_of(comm.rank, step), tf.int64)
        if step % 2 == 0:
            table.lookup(ids)
        else:  # in a graph, in two features, beside a table that does not count
            halves = tf.reshape(ids, [2, -1, 1])
            features = [halves[0], halves[1], halves[0]]
            look_up = tf.function(
                lambda f: de.lookup_sparse([table, table, timed], f, combiners=["sum"] * 3)
            )
            look_up(features)
        table.lookup(ids, insert=False)
    check(table, expected(comm, 4))


def test_prefetched_ids_count_when_they_are_used(comm):
    table = de.DynamicVariable(2, name="items", evict_strategy="lfu")
    batches = [tf.constant(ids_of(comm.rank, step)[:, None], tf.int64) for step in range(3)]
    for _, ahead in de.prefetch_lookup(batches, table, ids=lambda batch: batch):
        de.lookup_sparse(table, ahead, combiners="sum")
    check(table, expected(comm, 3))


def test_epochs_advance_on_all_ranks(comm):
    table = de.DynamicVariable(2, name="items", evict_strategy="epoch_lfu", epoch_steps=2)
    for step in range(5):
        table.lookup(tf.constant(ids_of(comm.rank, step), tf.int64))
    check(table, expected(comm, 5, epochs=2))


def test_scores_of_the_highest_rank_win(comm):
    table = de.DynamicVariable(2, name="items", evict_strategy="score")
    keys = tf.range(20, dtype=tf.int64)
    table.lookup(keys, scores=keys * 1000 + comm.rank)
    check(table, {key: key * 1000 + comm.size - 1 for key in range(20)})
    rank_keys = tf.constant([comm.rank, comm.rank], tf.int64)
    table.upsert(rank_keys, tf.ones([2, 2]), scores=[5, 2**32 - 1 - comm.rank])
    table.set_scores(tf.constant([50], tf.int64), 7)  # no rank has a row for it
    wanted = {key: key * 1000 + comm.size - 1 for key in range(20)}
    wanted.update({rank: 2**32 - 1 - rank for rank in range(comm.size)})
    check(table, wanted)


def test_owners_evict_what_is_asked_for_least(comm):
    capacity = 9
    table = de.DynamicVariable(2, name="items", evict_strategy="lfu", max_capacity=capacity)
    table.lookup(tf.constant(np.repeat(np.arange(6), 5), tf.int64))
    gone = []
    for step in range(6):
        new = np.arange(3) + 1000 * (step + 1)
        rows = table.insert_and_evict(tf.constant(new, tf.int64))
        assert all(score == comm.size for score in rows.scores.numpy())
        gone += gather(comm, rows.keys).tolist()
    assert len(set(gone)) == len(gone)
    assert min(gone, default=1000) >= 1000
    assert table.contains(tf.range(6, dtype=tf.int64)).numpy().all()


def test_every_rank_can_explain_every_key(comm):
    table = de.DynamicVariable(2, name="items", evict_strategy="lfu")
    table.explain([])
    table.lookup(tf.range(10, dtype=tf.int64))
    table.erase(tf.constant([3], tf.int64))
    asked = [comm.rank, 3, 50, 9, 9]
    found = table.explain(asked)
    assert [each.key for each in found] == asked
    has_row = [comm.rank != 3, False, False, True, True]
    assert [each.has_row for each in found] == has_row
    assert found[1].lost_because == "erased"
    assert found[3].score == comm.size
    ranks = gather(comm, np.array([found[3].rank]))
    assert len(set(ranks.tolist())) == 1
