"""Ranks with different requests: none, more, other forms of ids, or the keys of one rank."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import (
    Bags,
    close,
    draw,
    one_rank,
    sum_of_all,
    whole_matrix,
    whole_table,
)
from tf_dynemb import _ops

ROWS = 40
COMBINERS = ("sum", "mean", "sqrtn", "max")


def owned_by(rank, ranks, count):
    """Returns keys that one rank owns."""
    keys = np.arange(100 * count, dtype=np.int64)
    owners = np.asarray(_ops.library().dynemb_owners(tf.constant(keys), num_ranks=ranks))
    return keys[owners == rank][:count]


def make(form, bags, values=None):
    """Returns ids or weights in one of the forms. Dense ones require two ids per sample."""
    if form == "dense":
        return tf.reshape(bags.ids if values is None else values, [len(bags), 2])
    return getattr(bags, form)(values)


def pooled_by_tensorflow(matrix, bags, combiner, weights):
    rows = tf.gather(matrix, bags.ids)
    segments = np.repeat(np.arange(len(bags)), bags.lengths)
    count = len(bags)
    if weights is None:
        weights = tf.ones([len(bags.ids)])
    rows = rows * weights[:, None]
    if combiner == "max":
        most = tf.math.unsorted_segment_max(rows, segments, count)
        return tf.where(bags.lengths[:, None] > 0, most, tf.zeros_like(most))
    total = tf.math.unsorted_segment_sum(rows, segments, count)
    by = {"sum": tf.ones_like, "mean": tf.identity, "sqrtn": tf.square}[combiner](weights)
    norm = tf.math.unsorted_segment_sum(by, segments, count)
    if combiner == "sum":
        return total
    norm = tf.sqrt(norm) if combiner == "sqrtn" else norm
    return tf.math.divide_no_nan(total, norm[:, None])


class Tables:
    """A table of each kind with the same vectors, and the matrix of these vectors."""

    def __init__(self, comm, key_of=None):
        key_of = np.arange(ROWS) if key_of is None else key_of
        rng = np.random.default_rng(1)
        self.comm, self.key_of = comm, key_of
        last = f"localized:{comm.size - 1}"
        self.matrix = rng.normal(size=(ROWS, 3)).astype(np.float32)
        self.all = [
            de.DynamicVariable(3, "zeros"),
            de.DynamicVariable(3, "zeros", mode=last),
            de.Variable(self.matrix),
            de.Variable(self.matrix, mode="localized:0"),
        ]
        for table in self.all[:2]:
            de.assign(table, key_of, self.matrix)

    def ids(self, table, ids):
        return self.key_of[ids] if isinstance(table, de.DynamicVariable) else ids

    def whole_gradient(self, table, grad):
        if isinstance(grad, tf.Tensor):  # TensorFlow's own, of a static table
            assert self.comm.size == 1
            return grad.numpy()
        total = np.zeros((ROWS, 3), np.float32)
        keys, values = grad.indices.numpy(), grad.values.numpy()
        if isinstance(table, de.DynamicVariable):
            number = {int(key): i for i, key in enumerate(self.key_of)}
            keys = np.array([number[int(key)] for key in keys], int)
        elif table.mode is None and self.comm.size > 1:
            keys = keys * self.comm.size + self.comm.rank
        np.add.at(total, keys, values)
        return sum_of_all(self.comm, total)

    def whole(self, table):
        if isinstance(table, de.DynamicVariable):
            return whole_table(self.comm, table).at(self.key_of)
        return whole_matrix(self.comm, table)


def look_up_and_check(comm, tables, bags_of, combiners, forms, functional=False):
    """One call, and a step; `bags_of[i][rank]` are the bags that a rank looks up in table i."""
    weights = [tf.constant(bags[comm.rank].weights) for bags in bags_of]
    weighted = [i % 2 == 0 for i in range(len(bags_of))]
    rng = np.random.default_rng(2)
    ups = [[rng.normal(size=(len(b), 3)).astype(np.float32) for b in bags] for bags in bags_of]
    rank_bags = [bags[comm.rank] for bags in bags_of]
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(1.0), gradient_reduction="sum")

    def run():
        with tf.GradientTape() as tape:
            tape.watch(weights)
            pooled = de.lookup_sparse(
                tables.all,
                [
                    make(form, b, tables.ids(table, b.ids))
                    for form, b, table in zip(forms, rank_bags, tables.all, strict=True)
                ],
                [
                    make(form, b, w) if has else None
                    for form, b, w, has in zip(forms, rank_bags, weights, weighted, strict=True)
                ],
                combiners,
            )
            loss = tf.add_n(
                [tf.reduce_sum(p * u[comm.rank]) for p, u in zip(pooled, ups, strict=True)]
            )
        grads, weight_grads = tape.gradient(loss, (tables.all, weights))
        optimizer.apply_gradients(zip(grads, tables.all, strict=True))
        return pooled, grads, weight_grads

    pooled, grads, weight_grads = tf.function(run)() if functional else run()
    whole_grads = [tables.whole_gradient(t, g) for t, g in zip(tables.all, grads, strict=True)]
    after = [tables.whole(t) for t in tables.all]
    for i, combiner in enumerate(combiners):
        matrix = tf.constant(tables.matrix)
        expected = np.zeros((ROWS, 3), np.float32)
        for rank, bags in enumerate(bags_of[i]):
            w = tf.constant(bags.weights)
            with tf.GradientTape() as tape:
                tape.watch([matrix, w])
                want = pooled_by_tensorflow(matrix, bags, combiner, w if weighted[i] else None)
                loss = tf.reduce_sum(want * ups[i][rank])
            grad, want_weights = tape.gradient(loss, (matrix, w))
            expected += tf.convert_to_tensor(grad).numpy() if len(bags.ids) else 0
            if rank == comm.rank:
                assert pooled[i].shape == (len(bags), 3)
                np.testing.assert_allclose(pooled[i], want, rtol=1e-4, atol=1e-5)
                if weighted[i] and len(bags.ids):
                    np.testing.assert_allclose(weight_grads[i], want_weights, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(whole_grads[i], expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(after[i], (tables.matrix - expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_samples", ["all except the last", "none", "some"])
def test_ranks_without_samples(comm, with_samples):
    check_without_samples(comm, with_samples, False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("with_samples", ["all except the last", "only the last", "none"])
def test_ranks_without_samples_in_a_function(comm, with_samples):
    check_without_samples(comm, with_samples, True)


def check_without_samples(comm, with_samples, functional):
    rng = np.random.default_rng(3)
    batch = {
        "all except the last": lambda rank: 0 if rank == comm.size - 1 else 4,
        "only the last": lambda rank: 4 if rank == comm.size - 1 else 0,
        "none": lambda rank: 0,
        "some": lambda rank: [3, 0, 1, 7][rank % 4],
    }[with_samples]
    tables = Tables(comm)
    bags_of = [[draw(rng, ROWS, batch(r), 2, least=2) for r in range(comm.size)] for _ in range(4)]
    forms = ["ragged", "sparse", "dense", "ragged"]
    look_up_and_check(comm, tables, bags_of, COMBINERS, forms, functional)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_of_different_sizes_and_forms(comm, seed):
    rng = np.random.default_rng(seed)
    tables = Tables(comm, rng.permutation(10**6)[:ROWS] - 500_000)
    bags_of, forms = [], []
    for _ in range(4):
        rows = int(rng.choice([1, 3, ROWS]))  # few ids: all ranks request the same
        form = [str(rng.choice(["ragged", "sparse", "dense"])) for _ in range(comm.size)]
        bags_of.append(
            [
                draw(rng, rows, int(rng.choice([0, 1, 6])), 2, least=2 if f == "dense" else 0)
                for f in form
            ]
        )
        forms.append(form[comm.rank])
    combiners = [str(c) for c in rng.permutation(COMBINERS)]
    look_up_and_check(comm, tables, bags_of, combiners, forms)


def test_samples_without_ids(comm):
    empty = Bags(np.zeros(0, np.int64), np.zeros(5, np.int64), np.zeros(0, np.float32))
    one_id = Bags(np.array([3]), np.array([0, 0, 1, 0, 0]), np.ones(1, np.float32))
    for bags in ([empty] * comm.size, [empty] * (comm.size - 1) + [one_id]):
        for form in ("ragged", "sparse"):
            look_up_and_check(comm, Tables(comm), [bags] * 4, COMBINERS, [form] * 4)


def test_a_table_without_requests(comm):
    tables = [
        de.DynamicVariable(2, "1"),
        de.DynamicVariable(3, "1"),
        de.Variable(np.ones((4, 2), np.float32)),
    ]
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.1))
    nothing = tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), [0, 0])
    with tf.GradientTape() as tape:
        pooled = de.lookup_sparse(tables, [tf.constant([[1], [2]]), nothing, nothing])
        loss = tf.add_n([tf.reduce_sum(tf.cast(p, tf.float32)) for p in pooled])
    grads = tape.gradient(loss, tables)
    optimizer.apply_gradients(zip(grads, tables, strict=True))
    assert not np.asarray(pooled[1]).any()
    assert not np.asarray(pooled[2]).any()
    assert [g.values.shape[0] for g in grads[1:]] == [0, 0]
    assert len(tables[1]) == 0
    np.testing.assert_array_equal(whole_matrix(comm, tables[2]), 1)
    np.testing.assert_allclose(whole_table(comm, tables[0]).vectors, 0.9, rtol=1e-5)


@pytest.mark.parametrize("owner", ["first", "last"])
def test_all_keys_are_owned_by_one_rank(comm, owner):
    owner = 0 if owner == "first" else comm.size - 1
    keys = owned_by(owner, comm.size, ROWS)
    rng = np.random.default_rng(4)
    tables = Tables(comm, keys)
    assert len(tables.all[0]) == (ROWS if comm.rank == owner else 0)
    bags_of = [[draw(rng, ROWS, 5, 2, least=2) for _ in range(comm.size)] for _ in range(4)]
    look_up_and_check(comm, tables, bags_of, COMBINERS, ["ragged", "sparse", "dense", "dense"])


@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint64])
@pytest.mark.parametrize("mode", ["distributed", "localized:0"])
def test_keys_without_a_row_return_their_initial_vectors(comm, key_type, mode):
    """With insert=False, every rank reads the vectors of one process, and creates no row."""
    options = {"key_type": key_type, "seed": 5, "initializer": "normal"}
    table = de.DynamicVariable(4, mode=mode, **options)
    low, high = key_type.min, key_type.max
    keys = np.array([5, 1, low, high, 17 + comm.rank, low + 3], key_type.as_numpy_dtype)
    known = tf.constant(keys[:2])
    de.assign(table, known, tf.fill([2, 4], 8.0))
    with one_rank():
        alone = de.DynamicVariable(4, **options)
        de.assign(alone, known, tf.fill([2, 4], 8.0))
        expected = alone.lookup(keys).numpy()
        pooled = de.lookup_sparse(alone, keys.reshape(2, 3), combiners="mean").numpy()
    ids = tf.constant(keys)
    for _ in range(2):
        np.testing.assert_array_equal(table.lookup(ids, insert=False), expected)
        found = de.lookup_sparse(table, tf.reshape(ids, [2, 3]), combiners="mean", insert=False)
        np.testing.assert_array_equal(found, pooled)
        function = tf.function(lambda i: de.lookup_sparse(table, i, combiners="sum", insert=False))
        np.testing.assert_array_equal(function(ids[:, None]), expected)
    found = table.lookup(ids, insert=False, default_value=[1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(found[2:], [[1, 2, 3, 4]] * 4)
    np.testing.assert_array_equal(found[:2], expected[:2])
    assert sum_of_all(comm, len(table)) == 2
    assert table.contains(ids).numpy().tolist() == [True, True] + [False] * 4
    np.testing.assert_array_equal(table.lookup(ids), expected)
    assert sum_of_all(comm, len(table)) == 5 + comm.size
    assert table.contains(ids).numpy().all()


def test_initial_vectors_do_not_depend_on_the_number_of_ranks(comm):
    kinds = ["uniform", "normal", "truncated_normal", "glorot_uniform", "13"]
    keys = np.arange(200) * 7919 - 10**5
    for kind in kinds:
        table = de.DynamicVariable(5, kind, name=f"starts_{kind}", dtype=tf.float16)
        rank_keys = keys[comm.rank :: comm.size]
        table.lookup(rank_keys[: len(rank_keys) // 2])
        de.lookup_sparse(table, rank_keys[len(rank_keys) // 2 :, None])
        with one_rank():
            alone = de.DynamicVariable(5, kind, name=f"starts_{kind}", dtype=tf.float16)
            expected = alone.lookup(keys).numpy().astype(np.float32)
        np.testing.assert_array_equal(whole_table(comm, table).at(keys), expected)


def test_tensorflows_own_lookups(comm):
    check_tensorflows_own_lookups(comm, False)


@pytest.mark.ranks(2)
def test_tensorflows_own_lookups_in_a_function(comm):
    check_tensorflows_own_lookups(comm, True)


def check_tensorflows_own_lookups(comm, functional):
    """Shapes differ between ranks; the last rank requests no vectors by `ids`."""
    tables = Tables(comm)
    rng = np.random.default_rng(6)
    shape = [(2, 3), (5,), (1, 1, 4), (0,)][comm.rank if comm.size > 1 else 0]
    if comm.rank == comm.size - 1 > 0:
        shape = (0,)
    ids = rng.integers(0, ROWS, shape)
    bags = draw(rng, ROWS, 3, 4)
    sparse = bags.sparse()
    for table in tables.all:

        def run(table=table):
            with tf.GradientTape() as tape:
                found = [
                    tf.nn.embedding_lookup(table, ids),
                    tf.gather(table, ids),
                    table.sparse_read(ids),
                    tf.gather_nd(table, ids[..., None]),
                    tf.nn.embedding_lookup_sparse(
                        table, sparse, bags.sparse(bags.weights), combiner="sum"
                    ),
                    tf.nn.safe_embedding_lookup_sparse(table, sparse, combiner="mean"),
                ]
                loss = tf.add_n([tf.reduce_sum(f) * (i + 1.0) for i, f in enumerate(found)])
            return found, tape.gradient(loss, table)

        found, grad = tf.function(run)() if functional else run()
        got = tables.whole_gradient(table, grad)
        for f in found[:4]:
            np.testing.assert_array_equal(f, tables.matrix[ids])
        expected = np.zeros((ROWS, 3), np.float32)
        np.add.at(expected, ids.ravel(), 10.0)
        segments = np.repeat(np.arange(3), bags.lengths)
        np.add.at(expected, bags.ids, 5 * bags.weights[:, None])
        np.add.at(expected, bags.ids, 6 / bags.lengths[segments][:, None])
        expected = sum_of_all(comm, expected)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        sums = np.zeros((3, 3), np.float32)
        np.add.at(sums, segments, tables.matrix[bags.ids] * bags.weights[:, None])
        close(found[4], sums)
        means = np.zeros((3, 3), np.float32)
        np.add.at(means, segments, tables.matrix[bags.ids] / bags.lengths[segments][:, None])
        close(found[5], means)
