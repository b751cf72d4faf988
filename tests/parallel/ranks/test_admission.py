"""Admission on several ranks: the owner of a key counts what all ranks ask for."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import gather, one_rank

ROWS = 6  # bags of each rank


def batch(rank, step):
    """The bags and weights of a rank: some ids are on every rank, some on one."""
    rng = np.random.default_rng([rank, step])
    ids = [
        rng.choice([*range(12), *range(100 * rank + 100, 100 * rank + 130)], rng.integers(0, 5))
        for _ in range(ROWS)
    ]
    weights = [rng.normal(size=len(row)) for row in ids]
    scale = rng.normal(size=[ROWS, 2])
    return ids, weights, scale


def joined(ranks, step):
    ids, weights, scales = zip(*(batch(rank, step) for rank in range(ranks)), strict=True)
    return [
        [row for part in ids for row in part],
        [row for part in weights for row in part],
        np.concatenate(scales),
    ]


def make(unadmitted, mode=None, admission=None):
    admission = admission or de.Frequency(3, unadmitted=unadmitted)
    return de.DynamicVariable(2, "uniform", name="items", seed=5, mode=mode, admission=admission)


def step(table, ids, weights, scale, combiner, insert):
    """Returns the pooled vectors, {key: gradient}, and the gradient of the weights."""
    lengths = [len(row) for row in ids]
    keys = tf.constant(np.concatenate(ids), tf.int64)
    flat = tf.Variable(np.concatenate(weights).astype(np.float32))
    with tf.GradientTape() as tape:
        features = [tf.RaggedTensor.from_row_lengths(values, lengths) for values in (keys, flat)]
        pooled = de.lookup_sparse(
            [table, table], [features[0]] * 2, [features[1], None], [combiner] * 2, insert
        )
        loss = tf.reduce_sum((pooled[0] + 2 * pooled[1]) * tf.constant(scale, tf.float32))
    grad, weight_grad = tape.gradient(loss, [table, flat])
    grads = {}  # in one process, the gradients of two features are not added up
    for key, value in zip(grad.indices.numpy().tolist(), grad.values.numpy(), strict=True):
        grads[key] = grads.get(key, 0) + value
    return [p.numpy() for p in pooled], grads, tf.convert_to_tensor(weight_grad).numpy()


def held(table):
    return de.export(table)[0].numpy()


@pytest.mark.parametrize("mode", [None, "localized:0"])
@pytest.mark.parametrize("unadmitted", ["zeros", "initial", "skip"])
def test_the_same_as_on_one_rank(comm, unadmitted, mode):
    table = make(unadmitted, mode)
    with one_rank():
        alone = make(unadmitted)
    for number in range(4):
        combiner = ("sum", "mean", "sqrtn", "max")[number]
        insert = number != 2
        pooled, grads, weight_grad = step(
            table, *batch(comm.rank, number), combiner=combiner, insert=insert
        )
        with one_rank():
            there = step(alone, *joined(comm.size, number), combiner=combiner, insert=insert)
        rank_slice = slice(ROWS * comm.rank, ROWS * (comm.rank + 1))
        for here, expected in zip(pooled, there[0], strict=True):
            np.testing.assert_allclose(here, expected[rank_slice], rtol=1e-5, atol=1e-6)
        ids = [sum(map(len, batch(rank, number)[0])) for rank in range(comm.size)]
        begin = sum(ids[: comm.rank])
        np.testing.assert_allclose(
            weight_grad, there[2][begin : begin + ids[comm.rank]], rtol=1e-4, atol=1e-5
        )
        for key, grad in grads.items():
            np.testing.assert_allclose(grad, there[1][key], rtol=1e-4, atol=1e-5)
        total = gather(comm, np.array(sorted(grads), np.int64))
        assert sorted(total.tolist()) == sorted(there[1])
        with one_rank():
            rows_there = held(alone)
        assert sorted(gather(comm, held(table)).tolist()) == sorted(rows_there.tolist())
    refused = gather(comm, np.array([table.stats()["unadmitted"]]))
    assert refused.sum() == alone.stats()["unadmitted"]
    assert table.stats()["dropped_gradients"] == 0


def test_a_key_that_each_rank_asks_for_once(comm):
    table = make("zeros", admission=de.Frequency(comm.size + 1))
    table.lookup([7])
    assert [each.admission_count for each in table.explain([7, 8])] == [comm.size, 0]
    assert not table.contains([7]).numpy().any()
    table.lookup([7])
    assert table.contains([7]).numpy().all()
    assert gather(comm, np.array([table.stats()["unadmitted"]])).sum() == comm.size


def test_all_occurrences_count_for_the_probability(comm):
    admission = de.Probability(0.2)
    table = make("zeros", admission=admission)
    keys = np.arange(4000)
    table.lookup(keys)
    p = 1 - 0.8**comm.size
    size = gather(comm, np.array([len(table)])).sum()
    assert abs(size - 4000 * p) < 5 * np.sqrt(4000 * p * (1 - p))
    with one_rank():
        alone = make("zeros", admission=admission)
        alone.lookup(np.tile(keys, comm.size))
        expected = sorted(held(alone).tolist())
    assert sorted(gather(comm, held(table)).tolist()) == expected


@pytest.mark.parametrize("unadmitted", ["zeros", "skip"])
def test_in_graphs_with_prefetched_ids_and_scores(comm, unadmitted):
    admission = de.Frequency(2 * comm.size, unadmitted=unadmitted)
    table = de.DynamicVariable(2, "1", name="counted", evict_strategy="lfu", admission=admission)
    look_up = tf.function(
        lambda ahead: de.lookup_sparse(table, ahead, combiners="mean"), reduce_retracing=True
    )
    batches = [tf.constant([[3, 4]], tf.int64), tf.constant([[3, 3]], tf.int64)]
    results = [
        look_up(ahead).numpy().tolist()
        for _, ahead in de.prefetch_lookup(batches, table, ids=lambda ids: ids)
    ]
    assert results == [[[0.0, 0.0]], [[1.0, 1.0]]]
    # The score of a new row counts the batch in which it was admitted.
    assert table.scores([3, 4]).numpy().tolist() == [2 * comm.size, -1]
    mixed = look_up.python_function(tf.constant([[3, 6]], tf.int64))
    divisor = 1 if unadmitted == "skip" else 2
    np.testing.assert_allclose(mixed, [[1 / divisor] * 2])
    clipped = de.lookup_sparse(
        table, tf.constant([[3, 5]], tf.int64), combiners="mean", max_norm=100.0
    )
    np.testing.assert_allclose(clipped, [[1 / divisor] * 2])


def test_each_rank_has_its_share_of_the_counters(comm):
    def counters_bytes(counters):
        options = {"name": f"t{counters}", "admission": de.Frequency(2, counters=counters)}
        stats = de.DynamicVariable(2, **options).stats()
        return stats["metadata_bytes"] - stats["index_bytes"]

    more = counters_bytes(10**6) - counters_bytes(10**5)
    assert abs(more - 900_000 * 64 / 23 / comm.size) < 1000
