"""Every operator against a dict in NumPy (op_helpers.Model), for all key and value types."""

import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from op_helpers import ALL_TYPES, DIM, INITIAL, make, ops, quarters, some_keys, type_ids


class Walk:
    """One table and its model; each method calls an operator with random arguments."""

    def __init__(self, rng, key, dtype):
        self.rng, self.key, self.dtype = rng, key, dtype
        self.pool = some_keys(rng, key)
        self.model = h.Model(dtype, INITIAL)
        self.handle = make(key, dtype, init_capacity=1)
        ops.dynemb_attach_state(self.handle, optimizer="sgd momentum", widths=[DIM], inits=[0.0])

    def keys(self, n=None, distinct=False):
        n = self.rng.integers(0, 12) if n is None else n
        return self.rng.choice(self.pool, n, replace=not distinct)

    def cast(self, values):
        return tf.cast(values, self.dtype)

    def lookup(self):
        keys = self.keys(6).reshape(2, 3)
        insert = bool(self.rng.integers(2))
        default = None if insert or self.rng.integers(2) else quarters(self.rng, DIM)
        values, rows = h.lookup(self.handle, keys, insert, default, self.dtype)
        present = np.array([[k in self.model.vectors for k in row] for row in keys])
        if insert:
            expected = [[self.model.row(k).copy() for k in row] for row in keys]
            present[:] = True
        else:
            expected = [[self.model.read(k, default) for k in row] for row in keys]
        np.testing.assert_array_equal(tf.cast(values, tf.float32), expected)
        np.testing.assert_array_equal(rows.numpy() != h.NO_ROW, present)
        assert values.shape == (2, 3, DIM)
        assert rows.shape == (2, 3)

    def lookup_sparse(self):
        form = self.rng.choice(h.FORMS)
        num_bags = int(self.rng.integers(1, 5))
        bags, bag_of = h.random_bags(self.rng, form, num_bags, int(self.rng.integers(0, 12)))
        combiner = str(self.rng.choice(["sum", "mean", "sqrtn", "max"]))
        weighted = self.rng.integers(2) and len(bag_of)
        weights = self.rng.uniform(0.5, 2, len(bag_of)).astype(np.float32) if weighted else None
        keys = self.keys(len(bag_of))
        insert = bool(self.rng.integers(2))
        outputs, rows, argmax = h.lookup_sparse(
            [self.handle],
            [keys],
            [bags],
            [num_bags],
            [DIM],
            None if weights is None else [weights],
            combiners=[combiner],
            dtypes=[self.dtype],
            insert=insert,
        )
        read = self.model.row if insert else self.model.read
        vectors = np.array([read(k) for k in keys], np.float32).reshape(-1, DIM)
        pooled, expected_argmax = h.pool(vectors, bag_of, num_bags, weights, combiner)
        tolerance = {tf.float32: 1e-6, tf.float16: 1e-3, tf.bfloat16: 8e-3}[self.dtype]
        np.testing.assert_allclose(
            tf.cast(outputs[0], tf.float32), pooled, rtol=tolerance, atol=tolerance
        )
        held = np.array([k in self.model.vectors for k in keys], bool)
        np.testing.assert_array_equal(rows[0].numpy() != h.NO_ROW, held)
        if combiner == "max":
            np.testing.assert_array_equal(argmax[0], expected_argmax)
        else:
            assert argmax[0].shape == (0, DIM)

    def upsert(self):
        keys = self.keys()
        values = quarters(self.rng, len(keys), DIM)
        ops.dynemb_upsert(self.handle, keys, self.cast(values))
        for key, value in zip(keys, values, strict=True):  # the last of repeated keys wins
            self.model.set(key, value)

    def accumulate(self):
        keys = self.keys()
        deltas = quarters(self.rng, len(keys), DIM)
        ops.dynemb_accumulate(self.handle, keys, self.cast(deltas))
        self.model.accumulate(keys, deltas)

    def apply_probe(self):
        keys = self.keys()
        grads = quarters(self.rng, len(keys), DIM)
        h.apply_sgd([self.handle], [keys], [grads], momentum=True)
        self.model.apply(keys, grads)

    def apply_rows(self):
        keys = self.keys(8, distinct=True)
        grads = quarters(self.rng, 8, DIM)
        rows = h.lookup(self.handle, keys, False, dtype=self.dtype).rows
        before = h.stats(self.handle)["dropped_gradients"]
        h.apply_sgd([self.handle], [keys], [grads], [rows], momentum=True)
        dropped = h.stats(self.handle)["dropped_gradients"] - before
        assert dropped == sum(k not in self.model.vectors for k in keys)
        self.model.apply(keys, grads)

    def write_rows(self):
        keys = self.keys(7, distinct=True)
        insert = bool(self.rng.integers(2))
        values, state = quarters(self.rng, 7, DIM), quarters(self.rng, 7, DIM)
        ops.dynemb_write_rows(self.handle, keys, values, state, 1, insert=insert)
        for key, value, momentum in zip(keys, values, state, strict=True):
            if insert or key in self.model.vectors:
                self.model.set(key, value)
                self.model.momentum[key] = momentum

    def erase(self):
        keys = self.keys()
        assert int(ops.dynemb_erase(self.handle, keys)) == self.model.erase(keys)

    def clear(self):
        ops.dynemb_clear(self.handle)
        self.model.erase(list(self.model.vectors))

    def check(self):
        vectors, momentum = self.model.vectors, self.model.momentum
        assert h.size(self.handle) == len(vectors)
        limit = int(self.rng.integers(1, 50))
        keys, values, state, updates = h.export(self.handle, limit, key=self.key, dtype=self.dtype)
        assert sorted(keys.tolist()) == sorted(int(k) for k in vectors)
        for key, value, row in zip(keys, values.astype(np.float32), state, strict=True):
            np.testing.assert_array_equal(value, vectors[key], err_msg=str(key))
            np.testing.assert_array_equal(row, momentum[key], err_msg=str(key))
        assert (updates > 0).all()
        values, state, found = ops.dynemb_read_rows(self.handle, self.pool)
        present = np.array([k in vectors for k in self.pool])
        np.testing.assert_array_equal(found, present)
        nothing = np.zeros(DIM, np.float32)
        np.testing.assert_array_equal(values, [vectors.get(k, nothing) for k in self.pool])
        np.testing.assert_array_equal(state, [momentum.get(k, nothing) for k in self.pool])
        square = self.pool.reshape(5, 8)
        np.testing.assert_array_equal(
            ops.dynemb_contains(self.handle, square), present.reshape(5, 8)
        )


@pytest.mark.parametrize(("key", "dtype"), ALL_TYPES, ids=type_ids)
def test_random_walk_equals_the_model(key, dtype):
    seed = ALL_TYPES.index((key, dtype))
    walk = Walk(np.random.default_rng(seed), key, dtype)
    steps = [
        walk.lookup,
        walk.lookup_sparse,
        walk.upsert,
        walk.accumulate,
        walk.apply_probe,
        walk.apply_rows,
        walk.write_rows,
        walk.erase,
    ]
    for step in range(160):
        walk.rng.choice(steps)()
        if step % 4 == 0:
            walk.check()
    walk.clear()
    walk.check()
    walk.lookup()
    walk.check()


@pytest.mark.parametrize("key", h.KEY_TYPES, ids=lambda k: k.name)
def test_random_initial_vectors_depend_on_seed_and_key_only(key):
    keys = some_keys(np.random.default_rng(0), key)
    first = h.lookup(h.make_table(8, key, random=True, seed=-5), keys).values.numpy()
    other = h.make_table(8, key, random=True, seed=-5)
    for i in reversed(range(len(keys))):
        np.testing.assert_array_equal(h.lookup(other, keys[i : i + 1]).values[0], first[i])
    unknown = h.lookup(h.make_table(8, key, random=True, seed=-5), keys, insert=False)
    np.testing.assert_array_equal(unknown.values, first)
    reseeded = h.lookup(h.make_table(8, key, random=True, seed=6), keys).values.numpy()
    assert (reseeded != first).mean() > 0.99
    assert len(np.unique(first, axis=0)) == len(keys)
