"""Eviction through the operators: max_capacity, victims, and the effects of a refused batch."""

import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from op_helpers import ops

DIM = 4
Full = tf.errors.ResourceExhaustedError


def make(capacity, **options):
    return h.make_table(DIM, random=True, init_capacity=1, max_capacity=capacity, seed=4, **options)


def contains(handle, keys):
    return ops.dynemb_contains(handle, np.asarray(keys)).numpy()


@pytest.mark.parametrize("capacity", [1, 10, 500, 5000])
def test_never_holds_more_than_max_capacity(capacity):
    rng = np.random.default_rng(capacity)
    handle = make(capacity)
    new = capacity // 2 + 1
    for step in range(8):
        keys = rng.permutation(np.arange(step * new, (step + 1) * new))[:capacity]
        values, rows = h.lookup(handle, keys)
        assert h.size(handle) == min(capacity, (step + 1) * len(keys))
        assert contains(handle, keys).all()
        assert len(np.unique(rows)) == len(keys)
        assert rows.numpy().max() < capacity
        again = h.lookup(handle, keys, insert=False)
        np.testing.assert_array_equal(again.values, values)
        np.testing.assert_array_equal(again.rows, rows)
    got = h.stats(handle)
    assert got["inserts"] - got["evictions"] == got["size"] == min(capacity, 8 * len(keys))


def test_a_small_table_evicts_the_least_recently_used():
    handle = make(20)
    h.lookup(handle, np.arange(20))
    h.lookup(handle, np.arange(0, 20, 2))
    h.lookup(handle, np.arange(10, 20), insert=False)  # a read is an access too
    h.lookup(handle, np.arange(100, 105))
    # Only these have not been accessed since the first batch.
    assert np.flatnonzero(~contains(handle, np.arange(20))).tolist() == [1, 3, 5, 7, 9]
    h.lookup(handle, np.arange(110, 115))
    np.testing.assert_array_equal(contains(handle, np.arange(0, 10, 2)), [False] * 5)
    assert contains(handle, np.arange(10, 20)).all()


def test_a_large_table_evicts_old_rows():
    handle = make(10_000)
    for begin in range(0, 10_000, 1000):
        h.lookup(handle, np.arange(begin, begin + 1000))
    h.lookup(handle, np.arange(20_000, 21_000))
    evicted = np.flatnonzero(~contains(handle, np.arange(10_000)))
    assert len(evicted) == 1000
    assert np.median(evicted) < 1500
    assert evicted.max() < 8000


@pytest.mark.parametrize("capacity", [4096, 65_536])
def test_eviction_is_as_exact_as_the_design_says(capacity):
    # Half of the rows are used again, and then one new key comes for each of the other rows.
    handle, half = make(capacity), capacity // 2
    keys = np.random.default_rng(0).permutation(3 * capacity) + 10**9
    h.lookup(handle, keys[:capacity])
    h.lookup(handle, keys[half:capacity])
    for new in np.split(keys[capacity : capacity + half], 16):
        h.lookup(handle, new)
    assert 0.08 < contains(handle, keys[:half]).mean() < 0.13

    # Blocks of new keys again and again: the place of each victim in the order of age.
    block = capacity // 32
    order = list(keys[capacity + half :]) + list(range(2 * capacity))
    held, places = np.array([], np.int64), []
    for start in range(0, len(order) - block + 1, block):
        h.lookup(handle, order[start : start + block])
        before = held
        held = before[contains(handle, before)] if len(before) else before
        gone = np.flatnonzero(~np.isin(before, held))
        if start >= 2 * capacity:
            places.append(gone / len(before))
        held = np.concatenate([held, order[start : start + block]])
    places = np.concatenate(places)
    assert len(places) > capacity // 2
    assert 0.07 < places.mean() < 0.11
    assert np.median(places) < 0.09
    assert np.quantile(places, 0.99) < 0.36


def test_contains_export_and_read_rows_are_not_accesses():
    handle = make(10)
    h.lookup(handle, np.arange(10))
    for key in range(10):
        h.lookup(handle, [key])
    contains(handle, [0])
    ops.dynemb_read_rows(handle, tf.constant([0], tf.int64))
    h.export(handle)
    h.lookup(handle, [50])
    np.testing.assert_array_equal(contains(handle, np.arange(10)), np.arange(10) > 0)


def test_an_evicted_key_has_its_initial_vector_and_state_again():
    handle = make(10)
    ops.dynemb_attach_state(handle, optimizer="sgd", widths=[DIM], inits=[0.5])
    keys = np.arange(10)
    initial = h.lookup(handle, keys).values.numpy()
    trained, state = np.full([10, DIM], 7, np.float32), np.full([10, DIM], 9, np.float32)
    ops.dynemb_write_rows(handle, keys, trained, state, 1, insert=False)
    np.testing.assert_array_equal(h.lookup(handle, keys).values, trained)
    h.lookup(handle, keys + 100)
    assert not contains(handle, keys).any()
    np.testing.assert_array_equal(h.lookup(handle, keys, insert=False).values, initial)
    np.testing.assert_array_equal(h.lookup(handle, keys).values, initial)
    np.testing.assert_array_equal(ops.dynemb_read_rows(handle, keys).state, [[0.5] * DIM] * 10)


def test_the_gradient_of_an_evicted_row_is_dropped():
    handle = make(4)
    keys = np.arange(4)
    rows = h.lookup(handle, keys).rows
    others = h.lookup(handle, keys + 100).values.numpy()
    h.apply_sgd([handle], [keys], [np.ones([4, DIM], np.float32)], [rows])
    assert h.stats(handle)["dropped_gradients"] == 4
    np.testing.assert_array_equal(h.lookup(handle, keys + 100, insert=False).values, others)


INSERTS = {
    "lookup": lambda t, k: h.lookup(t, k),
    "lookup_sparse": lambda t, k: h.lookup_sparse([t], [k], [np.int64(1)], [len(k)], [DIM]),
    "upsert": lambda t, k: ops.dynemb_upsert(t, k, np.ones([len(k), DIM], np.float32)),
    "accumulate": lambda t, k: ops.dynemb_accumulate(t, k, np.ones([len(k), DIM], np.float32)),
    "write_rows": lambda t, k: ops.dynemb_write_rows(
        t, k, np.ones([len(k), DIM], np.float32), np.zeros([len(k), 0]), 1, insert=True
    ),
}


@pytest.mark.parametrize("name", INSERTS)
@pytest.mark.parametrize("strategy", ["lru", "none"])
def test_a_batch_larger_than_the_table_changes_nothing(name, strategy):
    handle = make(50, evict_strategy=strategy, shared_name=f"batch_{name}_{strategy}")
    h.lookup(handle, np.arange(30))
    before = h.export(handle)
    with pytest.raises(Full, match=rf"batch_{name}_{strategy}.*30 rows of at most 50"):
        INSERTS[name](handle, np.arange(25, 76))
    for had, has in zip(before, h.export(handle), strict=True):
        np.testing.assert_array_equal(has, had)
    assert h.stats(handle)["evictions"] == 0


@pytest.mark.parametrize("name", INSERTS)
def test_a_batch_as_large_as_the_table_fills_it(name):
    handle = make(50)
    h.lookup(handle, np.arange(30))
    INSERTS[name](handle, np.arange(25, 75))
    assert h.size(handle) == 50
    assert contains(handle, np.arange(25, 75)).all()


def test_repeats_count_once_against_the_capacity():
    handle = make(5)
    values = h.lookup(handle, np.tile(np.arange(5), 1000)).values.numpy()
    assert h.size(handle) == 5
    np.testing.assert_array_equal(values.reshape(1000, 5, DIM), [values[:5]] * 1000)


def test_lookup_without_insert_evicts_nothing():
    handle = make(5)
    h.lookup(handle, np.arange(5))
    h.lookup(handle, np.arange(100), insert=False)
    assert contains(handle, np.arange(5)).all()


def test_random_batches_under_eviction():
    """Each row has its last vector or, after an eviction, its initial vector."""
    rng = np.random.default_rng(8)
    handle = make(200)
    initial = {}
    trained = {}
    for _ in range(60):
        keys = np.unique(rng.zipf(1.2, 120) % 2000)
        values = h.lookup(handle, keys).values.numpy()
        assert h.size(handle) <= 200
        for key, value in zip(keys.tolist(), values, strict=True):
            first = initial.setdefault(key, value)
            # The row either was not evicted, or started again from its initial vector.
            expected = trained.get(key, first)
            assert np.array_equal(value, expected) or np.array_equal(value, first), key
        values = rng.normal(size=[len(keys), DIM]).astype(np.float32)
        ops.dynemb_upsert(handle, keys, values)
        trained.update(zip(keys.tolist(), values, strict=True))
        held, vectors = h.export(handle)[:2]
        for key, vector in zip(held.tolist(), vectors, strict=True):
            np.testing.assert_array_equal(vector, trained[key])
    got = h.stats(handle)
    assert got["evictions"] > 500
    assert got["size"] == got["inserts"] - got["evictions"]
