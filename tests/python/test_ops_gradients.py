"""The operators of pooled lookups and of their gradients, against TensorFlow and NumPy."""

import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from op_helpers import ALL_TYPES, DIM, INITIAL, make, ops, quarters, some_keys, type_ids


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("form", h.FORMS)
def test_gradients_equal_tensorflow(form, combiner, weighted):
    """Both gradient operators against tf.GradientTape over a gather and segment reductions."""
    rng = np.random.default_rng(17)
    num_bags, nnz, dim = 7, 42, 5
    bags, bag_of = h.random_bags(rng, form, num_bags, nnz)
    keys = rng.integers(-6, 7, nnz)
    weights = rng.uniform(0.5, 2, nnz).astype(np.float32) if weighted else None
    upstream = rng.normal(size=[num_bags, dim]).astype(np.float32)
    handle = h.make_table(dim, random=True, seed=3)
    outputs, rows, argmax = h.lookup_sparse(
        [handle], [keys], [bags], [num_bags], [dim],
        None if weights is None else [weights], combiners=[combiner],
    )  # fmt: skip
    unique, inverse = np.unique(keys, return_inverse=True)
    vectors = tf.Variable(ops.dynemb_read_rows(handle, unique).values)
    w = tf.Variable(np.ones(nnz, np.float32) if weights is None else weights)
    with tf.GradientTape() as tape:
        products = w[:, None] * tf.gather(vectors, inverse)
        if combiner == "max":
            pooled = tf.math.unsorted_segment_max(products, bag_of, num_bags)
        else:
            pooled = tf.math.unsorted_segment_sum(products, bag_of, num_bags)
            square = tf.math.unsorted_segment_sum(w * w, bag_of, num_bags)[:, None]
            if combiner == "mean":
                total = tf.math.unsorted_segment_sum(w, bag_of, num_bags)[:, None]
                pooled = tf.math.divide_no_nan(pooled, total)
            elif combiner == "sqrtn":
                pooled = tf.math.divide_no_nan(pooled, tf.sqrt(tf.maximum(square, 1e-30)))
        full = tf.gather(pooled, np.unique(bag_of))
        loss = tf.reduce_sum(full * upstream[np.unique(bag_of)])
    np.testing.assert_allclose(outputs[0].numpy()[np.unique(bag_of)], full, rtol=1e-5, atol=1e-6)
    vector_grad, weight_grad = tape.gradient(loss, [vectors, w])

    got_keys, sums, got_rows = ops.dynemb_lookup_sparse_grad(
        [keys], rows, [bags], [h.NO_WEIGHTS if weights is None else weights], argmax, [upstream],
        combiners=[combiner],
    )  # fmt: skip
    order = np.argsort(got_keys[0])
    np.testing.assert_array_equal(got_keys[0].numpy()[order], unique)
    np.testing.assert_allclose(
        sums[0].numpy()[order], tf.convert_to_tensor(vector_grad), rtol=1e-4, atol=1e-5
    )
    row_of = dict(zip(keys, rows[0].numpy(), strict=True))
    assert got_rows[0].numpy().tolist() == [row_of[k] for k in got_keys[0].numpy()]
    if weighted:
        (got,) = ops.dynemb_lookup_sparse_weight_grad(
            [handle], [keys], rows, [bags], [weights], argmax, outputs, [upstream],
            combiners=[combiner],
        )  # fmt: skip
        np.testing.assert_allclose(got, weight_grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_bag_whose_weights_sum_to_zero_is_zero(combiner):
    handle = make()
    weights = np.array([0.0, 0.0, 1.0], np.float32)
    splits = np.array([0, 2, 3])
    ids = np.array([1, 2, 3])
    outputs, rows, argmax = h.lookup_sparse(
        [handle], [ids], [splits], [2], [DIM], [weights], combiners=[combiner]
    )
    np.testing.assert_array_equal(outputs[0], [[0, 0, 0], INITIAL])
    _, sums, _ = ops.dynemb_lookup_sparse_grad(
        [ids], rows, [splits], [weights], argmax, outputs, combiners=[combiner]
    )
    np.testing.assert_array_equal(sums[0], [[0, 0, 0], [0, 0, 0], INITIAL])


def test_max_keeps_the_first_of_equal_negative_products():
    handle = h.make_table(1)
    ops.dynemb_upsert(handle, tf.constant([1, 2, 3], tf.int64), [[-1.0], [-1.0], [-2.0]])
    outputs, _, argmax = h.lookup_sparse(
        [handle], [np.array([3, 2, 1, 1])], [np.array([0, 3, 4])], [2], [1], combiners=["max"]
    )
    assert outputs[0].numpy().tolist() == [[-1.0], [-1.0]]
    assert argmax[0].numpy().tolist() == [[1], [3]]


def test_many_tables_of_mixed_types_in_one_call():
    rng = np.random.default_rng(5)
    n = len(ALL_TYPES)
    dims = [1 + i for i in range(n)]
    forms = [h.FORMS[i % len(h.FORMS)] for i in range(n)]
    combiners = [("sum", "mean", "sqrtn", "max")[i % 4] for i in range(n)]
    num_bags = [3 + i for i in range(n)]
    handles = [
        h.make_table(d, k, v, np.arange(d) / 4) for d, (k, v) in zip(dims, ALL_TYPES, strict=True)
    ]
    drawn = [h.random_bags(rng, f, b, 4 * b) for f, b in zip(forms, num_bags, strict=True)]
    keys = [
        rng.choice(some_keys(rng, k), len(m[1])) for (k, _), m in zip(ALL_TYPES, drawn, strict=True)
    ]
    outputs, rows, argmax = h.lookup_sparse(
        handles, keys, [m[0] for m in drawn], num_bags, dims,
        combiners=combiners, dtypes=[v for _, v in ALL_TYPES],
    )  # fmt: skip
    for i in range(n):
        vectors = np.tile(np.arange(dims[i], dtype=np.float32) / 4, [len(keys[i]), 1])
        pooled, expected = h.pool(vectors, drawn[i][1], num_bags[i], None, combiners[i])
        np.testing.assert_allclose(tf.cast(outputs[i], tf.float32), pooled, rtol=1e-2)
        assert outputs[i].dtype == ALL_TYPES[i][1]
        assert h.size(handles[i]) == len(np.unique(keys[i]))
        if combiners[i] == "max":
            np.testing.assert_array_equal(argmax[i], expected)
    got = ops.dynemb_lookup_sparse_grad(
        keys, rows, [m[0] for m in drawn], [h.NO_WEIGHTS] * n, argmax, outputs, combiners=combiners
    )
    for i in range(n):
        assert set(got.unique_keys[i].numpy().tolist()) == set(keys[i].tolist())
        assert got.sums[i].shape == (len(np.unique(keys[i])), dims[i])


def test_one_table_twice_in_one_lookup_inserts_each_key_once():
    handle = make()
    outputs, rows, _ = h.lookup_sparse(
        [handle, handle],
        [np.array([5, 6]), np.array([6, 7, 5])],
        [np.int64(1), np.int64(1)],
        [2, 3],
        [DIM, DIM],
    )
    assert h.size(handle) == 3
    first, second = rows[0].numpy(), rows[1].numpy()
    assert (first[0], first[1]) == (second[2], second[0])
    np.testing.assert_array_equal(outputs[1], [INITIAL] * 3)
    assert int(ops.dynemb_erase(handle, tf.constant([5, 6, 7], tf.int64))) == 3
    assert h.size(handle) == 0


@pytest.mark.parametrize(("key", "dtype"), ALL_TYPES, ids=type_ids)
def test_dedup_sum(key, dtype):
    rng = np.random.default_rng(3)
    keys = rng.choice(some_keys(rng, key), [6, 10])
    values = quarters(rng, 6, 10, 2)
    unique, sums = ops.dynemb_dedup_sum(keys, tf.cast(values, dtype))
    assert sums.dtype == tf.float32
    expected = h.Model(dtype, [0]).sum_by_key(keys.ravel(), values.reshape(-1, 2))
    assert len(unique) == len(expected)
    for k, s in zip(unique.numpy(), sums.numpy(), strict=True):
        np.testing.assert_array_equal(s, expected[k])
