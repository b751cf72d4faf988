"""Every operator against a dict in NumPy (op_helpers.Model), for all key and value types."""

import gc

import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from op_helpers import ops

DIM = 3
INITIAL = [0.25, -1.5, 3.0]
Full = tf.errors.ResourceExhaustedError
Invalid = tf.errors.InvalidArgumentError
ALL_TYPES = [(k, v) for k in h.KEY_TYPES for v in h.VALUE_TYPES]
type_ids = ["-".join(t.name for t in pair) for pair in ALL_TYPES]


def make(key=tf.int64, dtype=tf.float32, **options):
    return h.make_table(DIM, key, dtype, INITIAL, **options)


def some_keys(rng, key):
    """40 keys: the extremes of their type and others over its range."""
    low, high = key.min, key.max
    others = [int(rng.integers(low, high, dtype=key.as_numpy_dtype)) for _ in range(35)]
    return np.array([*h.EXTREMES[key], *others], key.as_numpy_dtype)


def quarters(rng, *shape):
    """Numbers that every value type holds exactly, and small sums of them too."""
    return (rng.integers(-16, 17, shape) / 4).astype(np.float32)


class Walk:
    """One table and its model; each method is an operator with random arguments."""

    def __init__(self, rng, key, dtype):
        self.rng, self.key, self.dtype = rng, key, dtype
        self.pool = some_keys(rng, key)
        self.model = h.Model(dtype, INITIAL)
        self.handle = make(key, dtype, init_capacity=1)
        ops.dynemb_attach_state(self.handle, optimizer="sgd", widths=[DIM], inits=[0.0])

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
        ops.dynemb_write_rows(self.handle, keys, values, state, insert=insert)
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


class TestCreation:
    def test_shared_name_gives_the_same_table(self):
        first = make(shared_name="creation_same")
        second = make(shared_name="creation_same")
        h.lookup(first, [1, 2, 3])
        assert h.size(second) == 3
        assert h.size(make(shared_name="creation_other")) == 0
        assert h.size(make(shared_name="creation_same", container="elsewhere")) == 0

    def test_anonymous_tables_are_distinct(self):
        first, second = make(), make()
        h.lookup(first, [1])
        assert h.size(second) == 0

    @pytest.mark.parametrize(
        "other", [{"dim": 4}, {"dtype": tf.float16}, {"key": tf.int32}], ids=str
    )
    def test_shared_name_with_another_type_is_an_error(self, other):
        first = h.make_table(3, shared_name=f"creation_{other}")
        with pytest.raises(Invalid, match="creation_"):
            h.make_table(**{"dim": 3, "shared_name": f"creation_{other}", **other})
        assert h.size(first) == 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dim": 0}, "dim=0"),
            ({"dim": -1}, "dim=-1"),
            ({"dim": 2**40}, "dim=1099511627776"),
            ({"init_capacity": 0}, "init_capacity=0"),
            ({"init_capacity": 2**62}, "init_capacity"),
            ({"max_capacity": -1}, "max_capacity=-1"),
            ({"init_capacity": 20, "max_capacity": 10}, "init_capacity=20"),
            ({"max_load_factor": 0.0}, "max_load_factor"),
            ({"max_load_factor": float("nan")}, "max_load_factor"),
            ({"initial": float("nan")}, "initializer"),
            ({"dim": 4, "initial": [1.0, 2.0]}, "initializers"),
            ({"evict_strategy": "random"}, "random"),
        ],
        ids=str,
    )
    def test_bad_option_is_named(self, options, message):
        with pytest.raises((ValueError, tf.errors.OpError), match=message):
            h.make_table(**options)

    def test_memory_goes_back_with_the_handle(self):
        def resident():
            with open("/proc/self/statm") as f:
                return int(f.read().split()[1]) * 4096

        def fill():
            handle = h.make_table(256)
            for begin in range(0, 60_000, 20_000):
                h.lookup(handle, np.arange(begin, begin + 20_000))
            assert h.stats(handle)["row_bytes"] > 60e6
            return handle

        fill()  # whatever is kept once is kept by now
        gc.collect()
        before = resident()
        for _ in range(4):
            fill()
        gc.collect()
        assert resident() - before < 100e6  # four tables are 250 MB
        handle = fill()
        assert resident() - before > 40e6
        del handle


class TestState:
    def test_attach_gives_rows_their_state(self):
        handle = make()
        h.lookup(handle, [1, 2])
        ops.dynemb_attach_state(handle, optimizer="x", widths=[2, 1], inits=[0.5, 7.0])
        h.lookup(handle, [3])
        state = ops.dynemb_read_rows(handle, tf.constant([1, 2, 3, 4], tf.int64)).state
        np.testing.assert_array_equal(state, [[0.5, 0.5, 7]] * 3 + [[0, 0, 0]])

    def test_same_again_keeps_state_and_other_resets_it(self):
        handle = make()
        one, vector = tf.constant([1], tf.int64), tf.constant([[1.0, 2, 3]])
        ops.dynemb_attach_state(handle, optimizer="x", widths=[2], inits=[0.0])
        ops.dynemb_write_rows(handle, one, vector, [[4.0, 5.0]], insert=True)
        ops.dynemb_attach_state(handle, optimizer="x", widths=[2], inits=[0.0])
        np.testing.assert_array_equal(ops.dynemb_read_rows(handle, one).state, [[4, 5]])
        ops.dynemb_attach_state(handle, optimizer="y", widths=[1, 2], inits=[8.0, 9.0])
        values, state, _ = ops.dynemb_read_rows(handle, one)
        np.testing.assert_array_equal(state, [[8, 9, 9]])
        np.testing.assert_array_equal(values, vector)

    @pytest.mark.parametrize(
        ("widths", "inits"), [([0], [0.0]), ([-1], [0.0]), ([2**40], [0.0]), ([1, 2], [0.0])]
    )
    def test_bad_widths_change_nothing(self, widths, inits):
        handle = make()
        ops.dynemb_attach_state(handle, optimizer="x", widths=[2], inits=[1.5])
        h.lookup(handle, [1])
        with pytest.raises(Invalid):
            ops.dynemb_attach_state(handle, optimizer="y", widths=widths, inits=inits)
        state = ops.dynemb_read_rows(handle, tf.constant([1], tf.int64)).state
        np.testing.assert_array_equal(state, [[1.5, 1.5]])

    def test_apply_without_the_state_is_an_error(self):
        handle = make()
        h.lookup(handle, [1])
        one = tf.constant([1], tf.int64)
        with pytest.raises(tf.errors.FailedPreconditionError, match="state"):
            h.apply_sgd([handle], [one], [np.ones([1, DIM], np.float32)], momentum=True)
        np.testing.assert_array_equal(ops.dynemb_read_rows(handle, one).values, [INITIAL])


class TestEmpty:
    """Nothing in, nothing out, and no table changes."""

    none = np.zeros(0, np.int64)
    vectors = np.zeros([0, DIM], np.float32)

    def test_one_table_operators(self):
        handle = make()
        for insert in (True, False):
            values, rows = h.lookup(handle, self.none, insert)
            assert values.shape == (0, DIM)
            assert rows.shape == (0,)
            assert h.lookup(handle, np.zeros([2, 0], np.int64), insert).values.shape == (2, 0, DIM)
        ops.dynemb_upsert(handle, self.none, self.vectors)
        ops.dynemb_accumulate(handle, self.none, self.vectors)
        ops.dynemb_write_rows(handle, self.none, self.vectors, np.zeros([0, 0]), insert=True)
        assert int(ops.dynemb_erase(handle, self.none)) == 0
        assert ops.dynemb_contains(handle, self.none).shape == (0,)
        assert ops.dynemb_read_rows(handle, self.none).values.shape == (0, DIM)
        h.apply_sgd([handle], [self.none], [self.vectors])
        assert [part.shape[0] for part in h.export(handle)] == [0, 0, 0, 0]
        ops.dynemb_clear(handle)
        assert h.size(handle) == 0

    @pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
    @pytest.mark.parametrize("num_bags", [0, 3])
    @pytest.mark.parametrize("form", ["uniform", "splits", "indices"])
    def test_bags(self, form, num_bags, combiner):
        handle = make()
        bags = {
            "uniform": np.int64(0),
            "splits": np.zeros(num_bags + 1, np.int64),
            "indices": np.zeros([0, 2], np.int64),
        }[form]
        outputs, rows, argmax = h.lookup_sparse(
            [handle], [self.none], [bags], [num_bags], [DIM], combiners=[combiner]
        )
        np.testing.assert_array_equal(outputs[0], np.zeros([num_bags, DIM]))
        if combiner == "max":
            np.testing.assert_array_equal(argmax[0], np.full([num_bags, DIM], -1))
        keys, sums, unique_rows = ops.dynemb_lookup_sparse_grad(
            [self.none], rows, [bags], [h.NO_WEIGHTS], argmax, outputs, combiners=[combiner]
        )
        assert [keys[0].shape, sums[0].shape, unique_rows[0].shape] == [(0,), (0, DIM), (0,)]
        (grads,) = ops.dynemb_lookup_sparse_weight_grad(
            [handle], [self.none], rows, [bags], [h.NO_WEIGHTS], argmax, outputs, outputs,
            combiners=[combiner],
        )  # fmt: skip
        assert grads.shape == (0,)

    def test_dedup_sum(self):
        keys, sums = ops.dynemb_dedup_sum(self.none, self.vectors)
        assert keys.shape == (0,)
        assert sums.shape == (0, DIM)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("form", h.FORMS)
def test_gradients_equal_tensorflows(form, combiner, weighted):
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


def test_max_keeps_the_first_of_equal_products_and_negative_ones():
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
    made = [h.random_bags(rng, f, b, 4 * b) for f, b in zip(forms, num_bags, strict=True)]
    keys = [
        rng.choice(some_keys(rng, k), len(m[1])) for (k, _), m in zip(ALL_TYPES, made, strict=True)
    ]
    outputs, rows, argmax = h.lookup_sparse(
        handles, keys, [m[0] for m in made], num_bags, dims,
        combiners=combiners, dtypes=[v for _, v in ALL_TYPES],
    )  # fmt: skip
    for i in range(n):
        vectors = np.tile(np.arange(dims[i], dtype=np.float32) / 4, [len(keys[i]), 1])
        pooled, expected = h.pool(vectors, made[i][1], num_bags[i], None, combiners[i])
        np.testing.assert_allclose(tf.cast(outputs[i], tf.float32), pooled, rtol=1e-2)
        assert outputs[i].dtype == ALL_TYPES[i][1]
        assert h.size(handles[i]) == len(np.unique(keys[i]))
        if combiners[i] == "max":
            np.testing.assert_array_equal(argmax[i], expected)
    got = ops.dynemb_lookup_sparse_grad(
        keys, rows, [m[0] for m in made], [h.NO_WEIGHTS] * n, argmax, outputs, combiners=combiners
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


class TestApply:
    def test_stale_rows_are_dropped_and_counted(self):
        handle = make()
        keys = np.array([1, 2, 3])
        rows = h.lookup(handle, keys).rows
        ops.dynemb_erase(handle, tf.constant([2], tf.int64))
        grads = np.ones([3, DIM], np.float32)
        h.apply_sgd([handle], [keys], [grads], [rows])
        assert h.stats(handle)["dropped_gradients"] == 1
        values, _, found = ops.dynemb_read_rows(handle, keys)
        assert found.numpy().tolist() == [True, False, True]
        np.testing.assert_array_equal(values[0], np.array(INITIAL) - 0.5)
        # Another key in the row of the erased one must not get its gradient either.
        taken = h.lookup(handle, [9]).rows
        assert taken.numpy()[0] == rows.numpy()[1]
        h.apply_sgd([handle], [keys[1:2]], [grads[1:2]], [rows[1:2]])
        assert h.stats(handle)["dropped_gradients"] == 2
        np.testing.assert_array_equal(h.lookup(handle, [9], False).values, [INITIAL])

    def test_probing_adds_up_repeated_keys_before_the_step(self):
        handle = make()
        ops.dynemb_attach_state(handle, optimizer="adagrad", widths=[DIM], inits=[0.0])
        h.lookup(handle, [4])
        keys = np.array([4, 8, 4])
        grads = np.array([[1.0] * DIM, [1.0] * DIM, [2.0] * DIM], np.float32)
        hyper = h.HYPER.copy()
        hyper[3] = 0.0  # epsilon
        ops.dynemb_apply_gradients(
            [handle], [keys], [np.zeros(0, np.uint32)], [grads], hyper, optimizer="adagrad"
        )
        values, state, _ = ops.dynemb_read_rows(handle, keys)
        np.testing.assert_array_equal(state[0], [9.0] * DIM)  # (1 + 2)², not 1 + 4
        np.testing.assert_allclose(values[0], np.array(INITIAL) - 0.5)
        assert h.stats(handle)["dropped_gradients"] == 1  # 8 has no row
        assert h.size(handle) == 1

    def test_nonfinite_gradients_are_counted(self):
        handle = make()
        keys = np.array([1, 2, 3])
        rows = h.lookup(handle, keys).rows
        grads = np.array([[np.nan, 0, 0], [0, np.inf, 0], [1, 1, 1]], np.float32)
        h.apply_sgd([handle], [keys], [grads], [rows])
        assert h.stats(handle)["nonfinite_gradients"] == 2

    def test_one_table_twice(self):
        handle = make()
        keys = np.array([1, 2])
        rows = h.lookup(handle, keys).rows
        grads = np.ones([2, DIM], np.float32)
        h.apply_sgd([handle, handle], [keys, keys], [grads, grads], [rows, np.zeros(0, np.uint32)])
        np.testing.assert_array_equal(
            ops.dynemb_read_rows(handle, keys).values, [np.array(INITIAL) - 1] * 2
        )


class TestExport:
    def test_since_gives_rows_updated_later(self):
        handle = make()
        h.lookup(handle, [1, 2, 3, 4])
        seen = int(h.export(handle)[3].max())
        assert len(h.export(handle, since=seen)[0]) == 0
        h.lookup(handle, [1, 2], insert=False)  # reading is no update
        h.lookup(handle, [2, 5])
        ops.dynemb_upsert(handle, tf.constant([3], tf.int64), [[9.0, 9.0, 9.0]])
        keys, _, _, updates = h.export(handle, since=seen)
        assert sorted(keys.tolist()) == [3, 5]
        assert (updates > seen).all()
        assert updates[keys.tolist().index(3)] > updates[keys.tolist().index(5)]

    def test_chunks_cover_all_rows_once_with_holes(self):
        handle = make()
        h.lookup(handle, np.arange(1000))
        ops.dynemb_erase(handle, np.arange(0, 1000, 3))
        for limit in (1, 7, 1000):
            keys = h.export(handle, limit)[0]
            assert sorted(keys.tolist()) == [k for k in range(1000) if k % 3]

    def test_bad_scalars(self):
        handle = make()
        for cursor, limit in ((-1, 5), (0, 0), (0, -1)):
            with pytest.raises(Invalid, match=r"cursor|limit"):
                ops.dynemb_export(handle, cursor, limit, 0, key_type=tf.int64, dtype=tf.float32)
        with pytest.raises(Invalid, match="key_type"):
            ops.dynemb_export(handle, 0, 5, 0, key_type=tf.int32, dtype=tf.float32)
        with pytest.raises(Invalid, match="dtype"):
            ops.dynemb_export(handle, 0, 5, 0, key_type=tf.int64, dtype=tf.float16)
        assert int(ops.dynemb_export(
            handle, 2**62, 2**62, -1, key_type=tf.int64, dtype=tf.float32
        ).next_cursor) == -1  # fmt: skip


def test_stats_names_and_counts():
    handle = make()
    h.lookup(handle, [1, 2, 2])
    h.lookup(handle, [2, 7], insert=False)
    ops.dynemb_erase(handle, tf.constant([1], tf.int64))
    got = h.stats(handle)
    assert set(got) == {
        "size", "slots", "index_bytes", "row_bytes", "metadata_bytes", "hits", "misses",
        "inserts", "evictions", "erased", "refused", "dropped_gradients", "nonfinite_gradients",
    }  # fmt: skip
    assert {k: got[k] for k in ("size", "hits", "misses", "inserts", "erased", "evictions")} == {
        "size": 1, "hits": 1, "misses": 4, "inserts": 2, "erased": 1, "evictions": 0,
    }  # fmt: skip
    assert 0 < got["metadata_bytes"] < got["index_bytes"] + got["row_bytes"]


@pytest.mark.parametrize(
    "insert",
    [
        lambda t, k: h.lookup(t, k),
        lambda t, k: h.lookup_sparse([t], [k], [np.int64(1)], [len(k)], [DIM]),
        lambda t, k: ops.dynemb_upsert(t, k, np.ones([len(k), DIM], np.float32)),
        lambda t, k: ops.dynemb_accumulate(t, k, np.ones([len(k), DIM], np.float32)),
        lambda t, k: ops.dynemb_write_rows(
            t, k, np.ones([len(k), DIM], np.float32), np.zeros([len(k), 0]), insert=True
        ),
    ],
    ids=["lookup", "lookup_sparse", "upsert", "accumulate", "write_rows"],
)
def test_full_table_refuses_and_stays_as_it_was(insert):
    handle = make(
        init_capacity=10, max_capacity=10, evict_strategy="none", shared_name="full_table"
    )
    ops.dynemb_clear(handle)
    h.lookup(handle, np.arange(8))
    before = h.export(handle)
    with pytest.raises(Full, match=r"full_table.* 8 .*10"):
        insert(handle, np.array([3, 20, 21, 22]))
    for had, has in zip(before, h.export(handle), strict=True):
        np.testing.assert_array_equal(has, had)
    assert h.stats(handle)["refused"] > 0
    insert(handle, np.array([3, 20, 20, 21])[:2])  # what fits goes in
    assert h.size(handle) == 9


class TestWrongInput:
    """Eager calls skip shape inference: the kernels check by themselves, and say what was wrong."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda t: h.lookup(t, tf.constant([1], tf.int32)), "keys has dtype int32"),
            (lambda t: h.lookup(t, [1], dtype=tf.float16), "half"),
            (lambda t: h.lookup(t, [1], False, np.ones(DIM + 1)), "default_value"),
            (lambda t: ops.dynemb_upsert(t, tf.constant([1], tf.int64), [[1.0]]), "values"),
            (lambda t: ops.dynemb_upsert(t, tf.constant([1], tf.int64), [1.0, 1, 1]), "values"),
            (lambda t: ops.dynemb_accumulate(t, tf.constant([1], tf.int64), [[1.0]]), "deltas"),
            (lambda t: ops.dynemb_read_rows(t, tf.constant([[1]], tf.int64)), "keys"),
            (lambda t: ops.dynemb_write_rows(
                t, tf.constant([1], tf.int64), [[1.0, 1, 1]], [[1.0]], insert=True), "state"),
            (lambda t: h.lookup_sparse([t], [np.array([1])], [np.int64(1)], [1], [4]), "dim"),
            (lambda t: h.lookup_sparse([t], [np.array([1])], [np.int64(1)], [2], [3]), "bags"),
            (lambda t: h.lookup_sparse([t], [np.array([1])], [np.int64(1)], [-1], [3]), "num_bags"),
            (lambda t: h.lookup_sparse([t], [np.array([1])], [np.array([[1]])], [1], [3]), "bag"),
            (lambda t: h.lookup_sparse([t], [np.array([1])], [np.array([0, 2])], [1], [3]), "bag"),
            (lambda t: h.lookup_sparse(
                [t], [np.array([1])], [np.int64(1)], [1], [3], [np.ones(2, np.float32)]),
             "weights"),
            (lambda t: h.apply_sgd([t], [np.array([1])], [np.ones([1, 2])]), "grads"),
            (lambda t: h.apply_sgd(
                [t], [np.array([1])], [np.ones([1, 3])], [np.zeros(2, np.uint32)]), "rows"),
            (lambda t: h.apply_sgd(
                [t], [np.array([1])], [np.ones([1, 3])], hyper=np.ones(11)), "hyper"),
        ],
    )  # fmt: skip
    def test_is_named_and_changes_nothing(self, call, message):
        handle = make()
        h.lookup(handle, [5])
        with pytest.raises(Invalid, match=message):
            call(handle)
        assert h.size(handle) == 1
        np.testing.assert_array_equal(h.lookup(handle, [5], False).values, [INITIAL])

    def test_handle_of_another_resource(self):
        variable = tf.Variable([1.0])
        for call in (ops.dynemb_size, ops.dynemb_clear, ops.dynemb_stats):
            with pytest.raises((Invalid, tf.errors.NotFoundError)):
                call(variable.handle)
