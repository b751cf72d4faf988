"""The API that SOK scripts use, compared with TensorFlow on whole matrices or with numpy."""

from __future__ import annotations

import datetime
import time

import keras
import numpy as np
import pytest
import pytz
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import (
    close,
    draw,
    gather,
    rows_here,
    same_on_all,
    sum_of_all,
    whole_matrix,
    whole_table,
)

UNIT = {tf.float32: 2.0**-20, tf.float16: 2.0**-9, tf.bfloat16: 2.0**-6}
VOCABULARY = 60


class Feature:
    """A feature of a call: its table, and the table's twin, a whole matrix."""

    def __init__(self, rng, table, twin, key_of, combiner, weighted, batch):
        self.table, self.twin, self.key_of = table, twin, key_of
        self.combiner, self.weighted = combiner, weighted
        self.bags = draw(rng, VOCABULARY, batch, 5, least=0)
        self.upstream = rng.integers(-8, 9, (batch, twin.shape[1])).astype(np.float32) / 4
        self.form = rng.choice(["ragged", "sparse"])

    def make(self, bags, values):
        return getattr(bags, self.form)(values)

    def pooled(self, twin, weights):
        """Returns the result of TensorFlow for the batches of all ranks."""
        w = self.bags.sparse(weights) if self.weighted else None
        if self.combiner == "max":
            rows = tf.gather(twin, self.bags.ids)
            rows = rows * weights[:, None] if self.weighted else rows
            segments = np.repeat(np.arange(len(self.bags)), self.bags.lengths)
            pooled = tf.math.unsorted_segment_max(rows, segments, len(self.bags))
            return tf.where(self.bags.lengths[:, None] > 0, pooled, tf.zeros_like(pooled))
        out = tf.nn.embedding_lookup_sparse(twin, self.bags.sparse(), w, combiner=self.combiner)
        return tf.pad(out, [[0, len(self.bags) - out.shape[0]], [0, 0]])


def mixed_features(comm, batch):
    """All kinds of tables, with several features for some of them."""
    rng = np.random.default_rng(11)
    last = f"localized:{comm.size - 1}"
    far = np.arange(VOCABULARY) * 104729
    key_maps = {
        tf.int64: far * 10**9 - 3 * 10**15,
        tf.int32: (far - 3 * 10**6).astype(np.int32),
        tf.uint64: (far * 10**6).astype(np.uint64) + np.uint64(2**63 - 5 * 10**9),
    }
    features = []

    def add(table, key_of, *uses):
        twin = rng.normal(size=(VOCABULARY, table.shape[1])).astype(np.float32)
        twin = tf.Variable(tf.cast(tf.cast(twin, table.dtype), tf.float32))
        if isinstance(table, de.DynamicVariable):
            de.assign(table, key_of, twin.value())
        else:
            rows = np.arange(VOCABULARY)
            if isinstance(table, de.Variable) and comm.size > 1:
                on_one = table.mode is not None
                rows = rows if on_one else rows[comm.rank :: comm.size]
                rows = rows[:0] if on_one and comm.rank != comm.size - 1 else rows
            table.assign(tf.cast(tf.gather(twin, rows), table.dtype))
        for combiner, weighted in uses:
            features.append(Feature(rng, table, twin, key_of, combiner, weighted, batch))

    def zeros(dim):
        return np.zeros((VOCABULARY, dim), np.float32)

    same = np.arange(VOCABULARY)
    add(de.Variable(zeros(6)), same, ("sum", False), ("max", True))
    add(de.Variable(zeros(3), mode=last, dtype=tf.float16), same, ("mean", False))
    kinds = [
        (5, tf.int64, tf.float32, None, [("sum", False), ("max", True), ("sqrtn", True)]),
        (4, tf.int32, tf.bfloat16, "localized:0", [("mean", False)]),
        (7, tf.uint64, tf.float16, "distributed", [("sqrtn", True), ("sum", False)]),
        (2, tf.int32, tf.float32, last, [("max", False), ("mean", True)]),
        (9, tf.int64, tf.bfloat16, None, [("max", False)]),
    ]
    for dim, key_type, dtype, mode, uses in kinds:
        table = de.DynamicVariable(dim, "zeros", key_type=key_type, dtype=dtype, mode=mode)
        add(table, key_maps[key_type], *uses)
    add(tf.Variable(zeros(3)), same, ("sum", False), ("sqrtn", True))
    features.append(features.pop(0))  # the features of a table are not adjacent
    return features


def whole_gradient(comm, feature, grad):
    """Returns the sum of the ranks' gradients of a table, as a matrix like the twin."""
    table, shape = feature.table, feature.twin.shape
    total = np.zeros(shape, np.float32)
    if not isinstance(table, (de.DynamicVariable, de.Variable)):
        np.add.at(total, grad.indices.numpy(), grad.values.numpy())
        return sum_of_all(comm, total)
    keys, values = grad.indices.numpy(), tf.cast(grad.values, tf.float32).numpy()
    if isinstance(table, de.Variable) and comm.size > 1 and table.mode is None:
        keys = keys * comm.size + comm.rank
    keys, values = gather(comm, keys), gather(comm, values)
    if isinstance(table, de.DynamicVariable):
        # On one rank, a table that two features read has one gradient for each.
        if comm.size > 1:
            assert len(np.unique(keys)) == len(keys), "two ranks have the gradient of one key"
        numbers = {int(key): i for i, key in enumerate(feature.key_of)}
        keys = [numbers[int(key)] for key in keys]
    np.add.at(total, keys, values)
    return total


def test_one_call_reads_tables_of_every_kind(comm):
    check_one_call(comm, functional=False)


@pytest.mark.ranks(2)
def test_one_call_in_a_function_reads_tables_of_every_kind(comm):
    check_one_call(comm, functional=True)


def check_one_call(comm, functional):
    features = mixed_features(comm, 8)
    tables = list({id(f.table): f.table for f in features}.values())
    parts = [f.bags.part(comm.rank, comm.size) for f in features]
    weights = [tf.constant(bags.weights) for bags in parts]
    share = slice(comm.rank * 8 // comm.size, (comm.rank + 1) * 8 // comm.size)

    def run():
        with tf.GradientTape() as tape:
            tape.watch(weights)
            pooled = de.lookup_sparse(
                [f.table for f in features],
                [f.make(b, f.key_of[b.ids]) for f, b in zip(features, parts, strict=True)],
                [
                    f.make(b, w) if f.weighted else None
                    for f, b, w in zip(features, parts, weights, strict=True)
                ],
                [f.combiner for f in features],
            )
            loss = tf.add_n(
                [
                    tf.reduce_sum(tf.cast(p, tf.float32) * f.upstream[share])
                    for f, p in zip(features, pooled, strict=True)
                ]
            )
        return pooled, *tape.gradient(loss, (tables, weights))

    pooled, grads, weight_grads = tf.function(run)() if functional else run()
    whole_grads = {}
    for table, grad in zip(tables, grads, strict=True):
        feature = next(f for f in features if f.table is table)
        whole_grads[id(table)] = whole_gradient(comm, feature, grad)
    all_pooled = [gather(comm, tf.cast(p, tf.float32)) for p in pooled]

    twins = list({id(f.twin): f.twin for f in features}.values())
    all_weights = [tf.constant(f.bags.weights) for f in features]
    with tf.GradientTape() as tape:
        tape.watch(all_weights)
        expected = [f.pooled(f.twin, w) for f, w in zip(features, all_weights, strict=True)]
        loss = tf.add_n(
            [tf.reduce_sum(e * f.upstream) for f, e in zip(features, expected, strict=True)]
        )
    twin_grads, expected_weight_grads = tape.gradient(loss, (twins, all_weights))
    for f, got, output, want in zip(features, all_pooled, pooled, expected, strict=True):
        assert output.dtype == f.table.dtype
        close(got, want, 4 * UNIT[f.table.dtype])
    for table, want in zip(tables, twin_grads, strict=True):
        close(whole_grads[id(table)], tf.convert_to_tensor(want), 8 * UNIT[table.dtype])
    for f, got, want in zip(features, weight_grads, expected_weight_grads, strict=True):
        if f.weighted:
            got = tf.zeros([0]) if got is None else got  # this rank has no ids
            close(gather(comm, got), want, 8 * UNIT[f.table.dtype])


def test_assign_and_export(comm):
    """SOK's test has two million rows of 128 elements, too many for four ranks on two cores."""
    rows, dim = 100_000, 16
    keys = np.random.default_rng(2).permutation(rows).astype(np.int64) * 31 - 10**6
    values = np.random.default_rng(3).random((rows, dim), np.float32)
    table = de.DynamicVariable(dim, var_type="hybrid", init_capacity=rows, max_capacity=2 * rows)
    rank_slice = slice(comm.rank, None, comm.size)
    de.assign(table, keys[rank_slice], values[rank_slice])
    assert sum_of_all(comm, table.size)[0] == rows
    found = whole_table(comm, table)
    np.testing.assert_array_equal(found.vectors, values[np.argsort(keys)])
    exported_keys, exported = de.export(table)
    assert (exported_keys.dtype, exported.dtype) == (tf.int64, tf.float32)
    place = {key: i for i, key in enumerate(keys.tolist())}
    np.testing.assert_array_equal(
        exported, values[[place[key] for key in exported_keys.numpy().tolist()]]
    )


def test_assign_keeps_the_last_vector_of_the_highest_rank(comm):
    table = de.DynamicVariable(2, "zeros")
    keys = np.array([5, -7, 5, 100 + comm.rank])
    values = 10.0 * comm.rank + np.arange(8, dtype=np.float32).reshape(4, 2)
    de.assign(table, keys, values)
    found = whole_table(comm, table)
    highest = 10.0 * (comm.size - 1)
    expected = {5: [4 + highest, 5 + highest], -7: [2 + highest, 3 + highest]}
    expected.update({100 + r: [6 + 10 * r, 7 + 10 * r] for r in range(comm.size)})
    assert dict(zip(found.keys.tolist(), found.vectors.tolist(), strict=True)) == expected


def trained_tables(comm, optimizer, key_types=(tf.int64, tf.uint64)):
    """Two dynamic tables after two steps, and a function that steps on given ids of all ranks."""
    tables = [
        de.DynamicVariable(6, "13", name="wide", key_type=key_types[0]),
        de.DynamicVariable(
            4, "17", name="narrow", key_type=key_types[1], dtype=tf.bfloat16, mode="localized:0"
        ),
    ]

    def step(bags):
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(
                tables, [tf.cast(b.ragged(), t.key_type) for b, t in zip(bags, tables, strict=True)]
            )
            loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(p, tf.float32))) for p in pooled])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    return tables, step


def test_incremental_model_dump_returns_the_keys_of_the_last_batches(comm):
    rng = np.random.default_rng(4)
    tables, step = trained_tables(comm, de.OptimizerWrapper(keras.optimizers.SGD(1.0)))
    for _ in range(3):
        moment = datetime.datetime.now(pytz.utc)
        # The latest of the ranks' times, which are of one machine's clock.
        times = comm.gather_objects(moment.timestamp(), "test/moment")
        moment = datetime.datetime.fromtimestamp(max(times), pytz.utc)
        time.sleep(0.05)
        bags = [[draw(rng, 500, 32, 4, least=0) for _ in tables] for _ in range(2)]
        for batch in bags:
            step([b.part(comm.rank, comm.size) for b in batch])
        # Reading does not update rows.
        de.lookup_sparse(tables, [tf.constant([[1]], t.key_type) for t in tables], insert=False)
        keys, values = de.incremental_model_dump(tables, moment)
        for i, table in enumerate(tables):
            expected = np.unique(np.concatenate([batch[i].ids for batch in bags]))
            np.testing.assert_array_equal(np.sort(keys[i]), expected)
            assert keys[i].dtype == table.key_type.as_numpy_dtype
            now = whole_table(comm, table).at(np.sort(keys[i]))
            np.testing.assert_array_equal(
                np.asarray(values[i], np.float32)[np.argsort(keys[i])], now
            )
            same_on_all(comm, np.sort(keys[i]))
        time.sleep(0.05)


def test_load_after_zeroing_restores_the_same_bits(comm, shared_path):
    rng = np.random.default_rng(6)
    optimizer = de.OptimizerWrapper(keras.optimizers.Nadam(0.1))
    tables, step = trained_tables(comm, optimizer)
    matrix = rng.normal(size=(37, 3)).astype(np.float32)
    statics = [
        de.Variable(matrix, name="spread"),
        de.Variable(matrix, name="on_one", mode=f"localized:{comm.size - 1}"),
    ]
    for _ in range(3):
        step([draw(rng, 300, 32, 4).part(comm.rank, comm.size) for _ in tables])
    before = [rows_here(table) for table in tables]
    assert all(rows.state.any() or not len(rows.keys) for rows in before)
    de.dump(shared_path / "weights", [*tables, *statics], optimizer)
    for table, rows in zip(tables, before, strict=True):
        keys = tf.constant(rows.keys)
        de.assign(table, keys, tf.zeros([len(rows.keys), table.dimension]))
        assert not rows_here(table).vectors.any()
    for variable in statics:
        variable.assign(tf.zeros_like(variable))
    step([draw(rng, 300, 32, 4).part(comm.rank, comm.size) for _ in tables])
    de.load(shared_path / "weights", [*tables, *statics], optimizer)
    for table, rows in zip(tables, before, strict=True):
        assert rows_here(table).bits() == rows.bits()
    for variable in statics:
        np.testing.assert_array_equal(whole_matrix(comm, variable), matrix)
    assert int(optimizer.iterations) == 3


def test_filter_variables(comm):
    dense = tf.Variable([1.0])
    kernel = keras.Variable([1.0])
    embedding_variables = [de.Variable(np.eye(3, dtype=np.float32)), de.DynamicVariable(2)]
    found, others = de.filter_variables(
        [dense, embedding_variables[0], kernel, embedding_variables[1]]
    )
    assert [id(v) for v in found] == [id(v) for v in embedding_variables]
    assert [id(v) for v in others] == [id(dense), id(kernel)]


def test_rows_of_a_matrix_are_spread_over_ranks_in_turn(comm):
    """As in SOK's documentation: each rank has a shard of v1, and one rank has all rows of v2."""
    value = np.arange(15 * 16).reshape(15, 16)
    v1 = de.Variable(value, dtype=tf.float32)
    v2 = de.Variable(value, dtype=tf.float32, mode=f"localized:{comm.size - 1}")
    np.testing.assert_array_equal(v1.numpy(), value[comm.rank :: comm.size])
    assert v2.shape.as_list() == [15 if comm.rank == comm.size - 1 else 0, 16]
    assert v1.global_shape == v2.global_shape == (15, 16)
    np.testing.assert_array_equal(tf.nn.embedding_lookup(v1, [14, 0, 7]), value[[14, 0, 7]])
    np.testing.assert_array_equal(tf.nn.embedding_lookup(v2, [[14, 14]]), value[[[14, 14]]])


def test_all_to_all_dense_embedding(comm):
    if not hasattr(de, "all2all_dense_embedding"):
        pytest.skip("all2all_dense_embedding is not implemented yet")
    rng = np.random.default_rng(8)
    rows, dim = 640, 12
    value = rng.random((rows, dim), np.float32)
    static, twin = de.Variable(value), tf.Variable(value)
    table = de.DynamicVariable(dim, "zeros")
    de.assign(table, np.arange(rows), value)
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(1.0), gradient_reduction="sum")
    plain = keras.optimizers.SGD(1.0)
    for _ in range(10):
        ids = rng.integers(0, rows, (16, 3))
        upstream = rng.normal(size=(16, 3, dim)).astype(np.float32)
        rank_slice = slice(comm.rank * 16 // comm.size, (comm.rank + 1) * 16 // comm.size)
        with tf.GradientTape(persistent=True) as tape:
            found = [
                de.all2all_dense_embedding(v, tf.constant(ids[rank_slice])) for v in (static, table)
            ]
            losses = [tf.reduce_sum(f * upstream[rank_slice]) for f in found]
        optimizer.apply_gradients([(tape.gradient(losses[1], table), table)])
        plain.apply_gradients([(tape.gradient(losses[0], static), static)])
        for f in found:
            assert f.shape == (*ids[rank_slice].shape, dim)
            np.testing.assert_allclose(f, tf.gather(twin, ids[rank_slice]), rtol=1e-4, atol=1e-4)
        total = np.zeros((rows, dim), np.float32)
        np.add.at(total, ids, upstream)
        twin.assign_sub(total)
    close(whole_matrix(comm, static), twin.numpy())
    close(whole_table(comm, table).vectors, twin.numpy())


@pytest.mark.parametrize("functional", [False, True], ids=["eager", "function"])
def test_low_frequency_filter(comm, functional):
    """Known keys are read on their owners; unknown keys are read if they are admitted."""
    known = np.arange(0, 200, 2)
    vectors = np.stack([known + 10.0, -known - 10.0], 1).astype(np.float32)
    modes = [None, "localized:0", None, None]
    ratios = [0.0, 0.0, 1.0, 0.5]
    tables = [
        de.DynamicVariable(2, "1", mode=mode, filter_ratio=ratio)
        for mode, ratio in zip(modes, ratios, strict=True)
    ]
    for table in tables:
        de.assign(table, known, vectors)
    # With several ranks, the last one requests no keys.
    n = 0 if comm.rank == comm.size - 1 > 0 else 100 + comm.rank
    ids = np.random.default_rng(comm.rank).integers(0, 200, [n, 3])

    def run(ids):
        return de.lookup_sparse(
            tables, [ids] * 4, combiners="sum", insert=False, use_low_frequency_filter=True
        )

    call = tf.function(run, autograph=False) if functional else run
    pooled = [table_pooled.numpy() for table_pooled in call(tf.constant(ids))]
    even = ids % 2 == 0
    without = np.where(even, ids + 10.0, 0).sum(1)
    with_all = np.where(even, ids + 10.0, 1).sum(1)
    for found, expected in zip(pooled[:3], [without, without, with_all], strict=True):
        np.testing.assert_array_equal(found[:, 0], expected)
    extra = pooled[3][:, 0] - without
    assert np.all((extra >= 0) & (extra <= (~even).sum(1)))
    np.testing.assert_array_equal(extra, np.round(extra))
    if n > 0:
        assert 0.2 < extra.sum() / (~even).sum() < 0.8
    # The ranks have the same seed, but draw different numbers.
    alike = [tf.constant(np.arange(1, 401, 2)[:, None])]
    (drawn,) = de.lookup_sparse(
        tables[3:], alike, combiners="sum", insert=False, use_low_frequency_filter=True
    )
    drawn_by_ranks = comm.gather_objects(drawn[:, 0].numpy().tolist(), "drawn")
    assert len({tuple(rank_drawn) for rank_drawn in drawn_by_ranks}) == comm.size


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_sok_sgd(comm, dtype):
    if not hasattr(de, "SGD"):
        pytest.skip("SGD is not implemented yet")
    value = np.ones((8, 2), np.float32)
    tables = [
        de.DynamicVariable(2, "3", dtype=dtype),
        de.Variable(value, dtype=dtype),
        de.DynamicVariable(2, "3", dtype=dtype, mode=f"localized:{comm.size - 1}"),
        de.Variable(value, dtype=dtype, mode="localized:0"),
    ]
    optimizer = de.SGD(1.0)
    optimizer.lr.assign(0.5)
    for _ in range(2):
        with tf.GradientTape() as tape:
            found = de.lookup_sparse(tables, [[[1, 2, 1]]] * 4, combiners="sum")
            loss = tf.add_n([tf.reduce_sum(tf.cast(f, tf.float32)) for f in found])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
    # The sum over ranks.
    down = np.array([2.0, 1.0])[:, None] * comm.size * [[1.0, 1.0]]
    for table in tables[::2]:
        rows = whole_table(comm, table)
        assert rows.keys.tolist() == [1, 2]
        np.testing.assert_array_equal(rows.vectors, 3 - down)
    value[1:3] -= down
    for table in tables[1::2]:
        np.testing.assert_array_equal(whole_matrix(comm, table), value)
    assert float(optimizer.lr) == 0.5


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_each_evicted_row_is_returned_once_with_its_trained_vector(comm, dtype):
    if not hasattr(de, "sparse_read_and_evict"):
        pytest.skip("sparse_read_and_evict is not implemented yet")
    batch, dim = 512, 4
    # Space for about four batches, but not in every bucket.
    table = de.DynamicVariable(
        dim, "11", dtype=dtype, init_capacity=batch, max_capacity=4 * batch // comm.size
    )
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(1.0), gradient_reduction="sum")
    evicted: dict[int, list[float]] = {}
    for i in range(10):
        keys = np.arange(i * batch, (i + 1) * batch)
        # All ranks have the last eight keys (twice) and eight older ones; each other key is on one.
        shared = np.concatenate([keys[-8:], keys[-8:], keys[:8] - batch if i else []])
        rank_keys = np.concatenate([keys[:-8][comm.rank :: comm.size], shared]).astype(np.int64)
        counts = (rank_keys % 7) * np.where(
            rank_keys < keys[-8], np.where(rank_keys < keys[0], 0, 1), 0
        )
        with tf.GradientTape() as tape:
            found, gone, vectors = de.sparse_read_and_evict(table, tf.constant(rank_keys))
            loss = tf.reduce_sum(tf.cast(found, tf.float32) * counts[:, None].astype(np.float32))
        old = (rank_keys < keys[0])[:, None] * (rank_keys % 7 * (rank_keys % batch < batch - 8))[
            :, None
        ]
        np.testing.assert_array_equal(tf.cast(found, tf.float32), 11.0 - old * np.ones(dim))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        assert gone.shape[0] == vectors.shape[0]
        assert vectors.dtype == dtype
        gone, vectors = gather(comm, gone), gather(comm, tf.cast(vectors, tf.float32))
        for key, vector in zip(gone.tolist(), vectors.tolist(), strict=True):
            assert key not in evicted, f"{key} was evicted twice"
            assert key < keys[0], f"{key} belongs to the batch that evicts"
            evicted[key] = vector
    assert evicted == {key: [11.0 - key % 7 * (key % batch < batch - 8)] * dim for key in evicted}
    rows = whole_table(comm, table)
    assert len(evicted) + len(rows.keys) == 10 * batch
    assert set(evicted) | set(rows.keys.tolist()) == set(range(10 * batch))
