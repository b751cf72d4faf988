"""use_low_frequency_filter: the ids of unknown keys that a lookup admits."""

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

KNOWN = np.arange(0, 100, 2)


def make(ratio, **options):
    table = de.DynamicVariable(2, "1", filter_ratio=ratio, **options)
    table.upsert(
        tf.cast(KNOWN, table.key_type),
        np.stack([KNOWN + 10.0, -KNOWN - 10.0], 1).astype(np.float32),
    )
    return table


def look_up(params, ids, weights=None, combiners="sum", **options):
    return de.lookup_sparse(
        params, ids, weights, combiners, use_low_frequency_filter=True, **options
    )


IDS = [[2, 3, 4], [5], [], [6, 6, 7, 8]]
WEIGHTS = [[1.0, 100.0, 2.0], [100.0], [], [1.0, 2.0, 100.0, 3.0]]
FORMS = {
    "ragged": lambda rows, dtype: tf.ragged.constant(rows, dtype=dtype),
    "sparse": lambda rows, dtype: tf.ragged.constant(rows, dtype=dtype).to_sparse(),
}


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
def test_dropped_ids_count_as_absent(combiner, form, weighted, functional):
    table = make(0.0)
    known = [[i for i in row if i % 2 == 0] for row in IDS]
    known_weights = [
        [w for i, w in zip(row, row_weights, strict=True) if i % 2 == 0]
        for row, row_weights in zip(IDS, WEIGHTS, strict=True)
    ]

    def run(ids, weights, filtered):
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(
                table, ids, weights, combiner, use_low_frequency_filter=filtered
            )
            loss = tf.reduce_sum(pooled * tf.constant([[1.0], [2.0], [3.0], [4.0]]))
        return pooled, tape.gradient(loss, table)

    def outputs(rows, weights, filtered):
        ids = FORMS[form](rows, tf.int64)
        weights = FORMS[form](weights, tf.float32) if weighted else None
        call = tf.function(run) if functional else run
        pooled, grad = call(ids, weights, filtered)
        order = np.argsort(grad.indices)
        return pooled.numpy(), grad.indices.numpy()[order], grad.values.numpy()[order]

    filtered = outputs(IDS, WEIGHTS, True)
    for got, expected in zip(filtered, outputs(known, known_weights, False), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert len(table) == len(KNOWN)


def test_dense_ids():
    table = make(0.0)
    np.testing.assert_array_equal(
        look_up(table, [[2, 3], [5, 7], [4, 4]], combiners="mean"), [[12, -12], [0, 0], [14, -14]]
    )
    np.testing.assert_array_equal(look_up(table, [2, 3]), [[12, -12], [0, 0]])


def test_a_ratio_of_one_admits_all_ids():
    table = make(1.0)
    np.testing.assert_array_equal(look_up(table, [[3], [2]]), [[1, 1], [12, -12]])
    assert len(table) == len(KNOWN) + 1


def test_the_ratio_is_ignored_without_the_filter():
    table = make(0.0)
    np.testing.assert_array_equal(de.lookup_sparse(table, [[3]]), [[1, 1]])
    assert len(table) == len(KNOWN) + 1


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_the_share_of_admitted_ids(ratio):
    tf.random.set_seed(5)
    table = make(ratio)
    n = 20_000
    pooled = look_up(table, np.arange(1001, 1001 + 2 * n, 2)[:, None])
    admitted_ids = int(np.sum(pooled[:, 0] == 1))
    assert len(table) == len(KNOWN) + admitted_ids
    np.testing.assert_array_equal(pooled[:, 0] == 0, pooled[:, 0] != 1)
    assert abs(admitted_ids - ratio * n) < 5 * np.sqrt(n * ratio * (1 - ratio))
    # Keys with a row keep it; each id of another key is admitted independently.
    many = look_up(table, np.full([n, 1], 7))
    first = int(np.sum(many[:, 0] == 1))
    assert abs(first - ratio * n) < 5 * np.sqrt(n * ratio * (1 - ratio))
    assert np.all(look_up(table, np.full([100, 1], 7))[:, 0] == 1)


def test_draws_differ_between_calls():
    tf.random.set_seed(6)
    table = make(0.5)
    step = tf.function(lambda ids: look_up(table, ids, insert=False))
    ids = np.arange(1001, 1401, 2)[:, None]
    assert np.any(step(ids) != step(ids))
    assert len(table) == len(KNOWN), "insert=False"


def test_tables_of_one_call_with_different_ratios():
    static = de.Variable(np.full([10, 3], 5.0, np.float32))
    none, every = make(0.0), make(1.0)
    a, b, c, d = look_up([none, static, every, none], [[[3]], [[3]], [[3]], [[4]]])
    assert (a[0, 0], b[0, 0], c[0, 0], d[0, 0]) == (0, 5, 1, 14)


@pytest.mark.parametrize("key_type", [tf.int32, tf.uint64])
def test_other_key_types(key_type):
    table = make(0.0, key_type=key_type)
    np.testing.assert_array_equal(
        look_up(table, tf.constant([[2], [3]], key_type)), [[12, -12], [0, 0]]
    )


@pytest.mark.parametrize("ratio", [-0.1, 1.1, "0.5", None, True, float("nan")])
def test_invalid_ratios(ratio):
    with pytest.raises(ValueError, match="filter_ratio"):
        de.DynamicVariable(2, filter_ratio=ratio)


def test_wrong_arguments():
    table = make(0.0)
    with pytest.raises(TypeError, match="use_low_frequency_filter must be True or False"):
        de.lookup_sparse(table, [[1]], use_low_frequency_filter=None)
    (_, ahead), *_ = de.prefetch_lookup(
        tf.data.Dataset.from_tensors([[1]]), table, ids=lambda batch: batch
    )
    with pytest.raises(ValueError, match="cannot filter"):
        look_up(table, ahead)
