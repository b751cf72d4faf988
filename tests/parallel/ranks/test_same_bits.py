"""In deterministic mode N ranks get the same bits as one rank: vectors and state of every row.

The upstream gradient of a sample must have the same bits on one rank and on several. The model
therefore has no dense layers, and the batch sizes are powers of two.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tf_config

import tf_dynemb as de
from parallel.ranks.gathered import draw, gather, one_rank, same_on_all, whole_table
from tf_dynemb import communicator

K = keras.optimizers
ROWS, BATCH, STEPS = 40, 16, 8

pytestmark = pytest.mark.any_number_of_ranks


@pytest.fixture(autouse=True)
def _deterministic():
    tf.config.experimental.enable_op_determinism()
    yield
    tf_config.disable_op_determinism()


# The table, the combiner, and whether there are weights.
FEATURES = [
    (0, "sum", False),
    (1, "sqrtn", True),
    (0, "mean", True),
    (2, "max", False),
    (1, "max", True),
    (0, "mean", False),
]


class Model:
    def __init__(self, comm, make, calls, **options):
        modes = [None, None, f"localized:{comm.size - 1}"]
        types = [tf.int64, tf.uint64, tf.int32]
        self.tables = [
            de.DynamicVariable(dim, "normal", seed=i, key_type=key_type, mode=mode, **options)
            for i, (dim, key_type, mode) in enumerate(zip((5, 8, 3), types, modes, strict=True))
        ]
        self.optimizer = de.OptimizerWrapper(make())
        self.calls = calls

    def step_on(self, features, targets):
        ids, weights = [], []
        for bags, (table, _, weighted) in zip(features, FEATURES, strict=True):
            ids.append(bags.ragged(dtype=self.tables[table].key_type))
            weights.append(bags.ragged(bags.weights) if weighted else None)
        self.step(ids, weights, targets)

    def step(self, ids, weights, targets):
        with tf.GradientTape() as tape:
            pooled = []
            for call in self.calls:
                pooled += de.lookup_sparse(
                    [self.tables[FEATURES[i][0]] for i in call],
                    [ids[i] for i in call],
                    [weights[i] for i in call],
                    [FEATURES[i][1] for i in call],
                )
            order = [i for call in self.calls for i in call]
            loss = tf.add_n(
                [
                    tf.reduce_mean(
                        tf.reduce_sum(tf.square(tf.cast(p, tf.float32) - targets[i]), axis=1)
                    )
                    for p, i in zip(pooled, order, strict=True)
                ]
            )
        grads = tape.gradient(loss, self.tables)
        self.optimizer.apply_gradients(zip(grads, self.tables, strict=True))


def batches(dims=(5, 8, 3)):
    rng = np.random.default_rng(8)
    for _ in range(STEPS):
        bags = [draw(rng, ROWS, BATCH, 6, least=0) for _ in FEATURES]
        targets = [
            rng.normal(size=(BATCH, dims[table])).astype(np.float32) for table, _, _ in FEATURES
        ]
        yield bags, targets


ALL_AT_ONCE = (range(len(FEATURES)),)


def check(comm, make, calls=ALL_AT_ONCE, functional=False, **options):
    model = Model(comm, make, calls, **options)
    if functional:
        model.step = tf.function(model.step, reduce_retracing=True)
    share = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
    alone = None
    if comm.rank == 0:
        with one_rank():
            alone = Model(communicator.LOCAL, make, calls, **options)
    for bags, targets in batches():
        parts = [b.part(comm.rank, comm.size) for b in bags]
        rank_targets = [t[share] for t in targets]
        model.step_on(parts, rank_targets)
        if alone is not None:
            with one_rank():
                alone.step_on(bags, targets)
    got = [whole_table(comm, table) for table in model.tables]
    for rows in got:
        same_on_all(comm, np.frombuffer(rows.vectors.tobytes(), np.uint8))
        assert len(rows.keys) > ROWS // 2
    if alone is not None:
        with one_rank():
            want = [whole_table(communicator.LOCAL, table) for table in alone.tables]
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g.keys, w.keys)
            np.testing.assert_array_equal(g.vectors, w.vectors)
            np.testing.assert_array_equal(g.state, w.state)
            assert g.bits() == w.bits()


MAKERS = {
    "sgd": lambda: K.SGD(0.1),
    "adagrad": lambda: K.Adagrad(0.1),
    "adam": lambda: K.Adam(0.01),
}


@pytest.mark.engines
@pytest.mark.ranks(2, 4)
def test_rows_have_the_same_bits(comm):
    check(comm, MAKERS["adam"])


@pytest.mark.engines
@pytest.mark.ranks(2, 4)
def test_16_bit_rows_have_the_same_bits(comm):
    check(comm, MAKERS["adagrad"], dtype=tf.bfloat16)


# Not float16: a gradient may be so small that doubling it does not double its precision, and the
# mean over half a batch is twice that over the whole batch.
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("name", MAKERS)
def test_all_optimizers_and_types(comm, name, dtype):
    check(comm, MAKERS[name], dtype=dtype)


@pytest.mark.ranks(2)
def test_in_a_function(comm):
    check(comm, MAKERS["adam"], functional=True)


@pytest.mark.ranks(2)
def test_several_lookups_in_a_step(comm):
    check(comm, MAKERS["adagrad"], calls=([0, 1], [2, 3, 4], [5]))


def test_additions_from_several_ranks(comm):
    """Only close: each rank first adds up the values that it passes for a key."""
    rng = np.random.default_rng(9)
    table = de.DynamicVariable(3, "normal", seed=1)
    with one_rank():
        alone = de.DynamicVariable(3, "normal", seed=1)
    for _ in range(5):
        keys = rng.integers(0, 10, 8 * comm.size)
        values = rng.normal(size=(8 * comm.size, 3)).astype(np.float32)
        rank_slice = slice(8 * comm.rank, 8 * comm.rank + 8)
        table.scatter_add(tf.IndexedSlices(tf.constant(values[rank_slice]), keys[rank_slice]))
        with one_rank():
            alone.scatter_add(tf.IndexedSlices(tf.constant(values), keys))
    got = whole_table(comm, table)
    with one_rank():
        want = whole_table(communicator.LOCAL, alone)
    np.testing.assert_allclose(got.vectors, want.vectors, rtol=1e-5, atol=1e-6)
    assert len(gather(comm, got.keys)) == comm.size * len(want.keys)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_additions_to_16_bit_rows_have_the_same_bits(comm, dtype):
    """With distinct keys, because the sum for a repeated key is rounded before it is added."""
    rng = np.random.default_rng(9)
    table = de.DynamicVariable(3, "normal", seed=1, dtype=dtype)
    with one_rank():
        alone = de.DynamicVariable(3, "normal", seed=1, dtype=dtype)
    for number in range(6):
        keys = rng.permutation(40)[: 4 * comm.size]
        values = rng.normal(size=(4 * comm.size, 3)).astype(np.float32) / 8
        rank_slice = slice(4 * comm.rank, 4 * comm.rank + (0 if number == 2 else 4))
        table.scatter_add(tf.IndexedSlices(tf.constant(values[rank_slice]), keys[rank_slice]))
        table.lookup(np.arange(number))
        with one_rank():
            every = slice(0 if number == 2 else None)
            alone.scatter_add(tf.IndexedSlices(tf.constant(values[every]), keys[every]))
            alone.lookup(np.arange(number))
    got = whole_table(comm, table)
    with one_rank():
        want = whole_table(communicator.LOCAL, alone)
    np.testing.assert_array_equal(got.keys, want.keys)
    np.testing.assert_array_equal(got.vectors, want.vectors)


@pytest.mark.ranks(2, 4)
def test_a_matrix_that_two_features_read_has_the_same_bits(comm):
    initial = np.random.default_rng(4).normal(size=(ROWS, 5)).astype(np.float32)

    class Matrix:
        def __init__(self):
            self.table = de.Variable(initial)
            self.optimizer = de.OptimizerWrapper(K.SGD(0.1))

        def step(self, features, targets):
            with tf.GradientTape() as tape:
                pooled = de.lookup_sparse(
                    [self.table] * 2,
                    [bags.ragged(dtype=tf.int64) for bags in features],
                    combiners=["sum", "sum"],
                )
                loss = tf.add_n(
                    [
                        tf.reduce_mean(tf.reduce_sum(tf.square(p - target), axis=1))
                        for p, target in zip(pooled, targets, strict=True)
                    ]
                )
            (gradient,) = tape.gradient(loss, [self.table])
            self.optimizer.apply_gradients([(gradient, self.table)])

        def rows(self):
            return self.table.sparse_read(np.arange(ROWS)).numpy()

    matrix = Matrix()
    with one_rank():
        alone = Matrix()
    share = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
    for bags, targets in batches():
        targets = [targets[0], targets[2]]  # both have dim 5
        matrix.step([b.part(comm.rank, comm.size) for b in bags[:2]], [t[share] for t in targets])
        with one_rank():
            alone.step(bags[:2], targets)
    got = matrix.rows()
    with one_rank():
        want = alone.rows()
    assert not np.array_equal(want, initial)
    np.testing.assert_array_equal(got, want)
