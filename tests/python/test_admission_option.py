"""The option `admission`: which keys get a row, and what the others read as."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb.ids.bags import Bags
from tf_dynemb.lookup.pool import pool
from tf_dynemb.tables import admission_options

UNADMITTED = ("zeros", "initial", "skip")
COMBINERS = ("sum", "mean", "sqrtn", "max")


def make(n=2, unadmitted="zeros", **options):
    admission = de.Frequency(n, unadmitted=unadmitted)
    options = {"initializer": "uniform", "seed": 3, "admission": admission, **options}
    return de.DynamicVariable(3, **options)


def initial_vectors(keys):
    """The vectors that keys of `make` start with."""
    return de.DynamicVariable(3, "uniform", seed=3).lookup(keys, insert=False).numpy()


def held(table):
    return set(de.export(table)[0].numpy().tolist())


class Model:
    """The keys that have a row, if counters never forget."""

    def __init__(self, n):
        self.n, self.counts, self.rows, self.refused = n, {}, set(), 0

    def look_up(self, ids):
        for key, times in zip(*np.unique(ids, return_counts=True), strict=True):
            if key in self.rows:
                continue
            self.counts[key] = self.counts.get(key, 0) + times
            if self.counts[key] >= self.n:
                self.rows.add(key)
            else:
                self.refused += times


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_key_gets_its_row_when_it_has_been_asked_for_n_times(n, functional):
    table, model = make(n), Model(n)
    look_up = tf.function(table.lookup, reduce_retracing=True) if functional else table.lookup
    random = np.random.default_rng(n)
    for _ in range(10):
        ids = random.integers(0, random.integers(1, 300), random.integers(0, 200))
        vectors = look_up(tf.constant(ids)).numpy()
        model.look_up(ids)
        assert held(table) == model.rows
        has_row = np.isin(ids, list(model.rows))
        expected = np.where(has_row[:, None], initial_vectors(ids), 0)
        np.testing.assert_array_equal(vectors, expected)
    assert table.stats()["unadmitted"] == model.refused
    assert table.stats()["inserts"] == len(model.rows)
    keys = np.arange(300)
    for key, each in zip(keys, table.explain(keys), strict=True):
        count = None if key in model.rows else model.counts.get(key, 0)
        assert each.admission_count == count
        assert (f"was counted {count} times" in str(each)) == (count is not None)


BAGS = [[1, 8, 2], [], [9], [3, 3, 8], [1]]
WEIGHTS = [[2.0, 10.0, 3.0], [], [5.0], [1.0, -4.0, 7.0], [0.5]]
FORMS = {
    "ragged": lambda rows, dtype: tf.ragged.constant(rows, dtype=dtype, inner_shape=()),
    "sparse": lambda rows, dtype: tf.ragged.constant(rows, dtype=dtype).to_sparse(),
    "unordered": lambda rows, dtype: unordered(tf.ragged.constant(rows, dtype=dtype).to_sparse()),
}


def unordered(sparse):
    order = np.random.default_rng(1).permutation(len(sparse.values))
    return tf.SparseTensor(
        tf.gather(sparse.indices, order), tf.gather(sparse.values, order), sparse.dense_shape
    )


def reference(ids, weights, known, unadmitted, combiner, scale):
    """The pooled vectors and the gradients of a lookup, by operations of TensorFlow alone."""
    keys = np.concatenate([np.asarray(row, np.int64) for row in ids])
    bag = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
    unique, place = np.unique(keys, return_inverse=True)
    rows = tf.Variable(initial_vectors(unique))
    flat = None if weights is None else tf.Variable(np.concatenate(weights).astype(np.float32))
    has_row = np.isin(keys, known)
    present = has_row if unadmitted == "skip" else np.ones_like(has_row)
    with tf.GradientTape() as tape:
        vectors = tf.gather(rows, place)
        absent = tf.stop_gradient(vectors) if unadmitted == "initial" else tf.zeros_like(vectors)
        vectors = tf.where(has_row[:, None], vectors, absent)
        present_bags = Bags(
            keys[present],
            tf.constant(bag[present][:, None]),
            tf.zeros([0]) if flat is None else tf.boolean_mask(flat, present),
            tf.constant(len(ids), tf.int64),
            len(ids),
        )
        pooled = pool(tf.boolean_mask(vectors, present), present_bags, combiner)
        loss = tf.reduce_sum(pooled * scale)
    targets = [rows] if flat is None else [rows, flat]
    grads = [tf.convert_to_tensor(grad).numpy() for grad in tape.gradient(loss, targets)]
    return pooled.numpy(), dict(zip(unique.tolist(), grads[0], strict=True)), grads[1:]


@pytest.mark.parametrize("insert", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("unadmitted", UNADMITTED)
@pytest.mark.parametrize("combiner", COMBINERS)
def test_pooled_vectors_and_gradients(combiner, unadmitted, form, weighted, insert):
    # 8 occurs twice in the batch.
    table = make(3, unadmitted)
    known = [1, 2, 3]
    table.lookup(known * 3)
    ids = FORMS[form](BAGS, tf.int64)
    weights = FORMS[form](WEIGHTS, tf.float32) if weighted else None
    scale = np.random.default_rng(2).normal(size=[len(BAGS), 3]).astype(np.float32)
    pooled_there, rows_there, weights_there = reference(
        BAGS, WEIGHTS if weighted else None, known, unadmitted, combiner, scale
    )
    with tf.GradientTape() as tape:
        if weighted:
            tape.watch(weights.values)
        pooled = de.lookup_sparse(table, ids, weights, combiner, insert=insert)
        loss = tf.reduce_sum(pooled * scale)
    grads = tape.gradient(loss, [table, *([weights.values] if weighted else [])])
    np.testing.assert_allclose(pooled, pooled_there, rtol=1e-5, atol=1e-6)
    assert held(table) == set(known)
    for key, grad in zip(grads[0].indices.numpy(), grads[0].values.numpy(), strict=True):
        np.testing.assert_allclose(grad, rows_there.pop(int(key)), rtol=1e-5, atol=1e-6)
    assert not rows_there
    if weighted:
        order = slice(None)
        if form == "unordered":
            order = np.random.default_rng(1).permutation(len(weights.values))
        np.testing.assert_allclose(grads[1], weights_there[0][order], rtol=1e-4, atol=1e-5)


def test_features_of_one_table_count_together():
    for ids in ([[1], [1]], [[1, 1], []]):
        table = make(2)
        features = [tf.ragged.constant([row], dtype=tf.int64) for row in ids]
        outputs = de.lookup_sparse([table, table], features, combiners="sum")
        assert held(table) == {1}
        total = sum(output.numpy() for output in outputs)
        np.testing.assert_allclose(total, 2 * initial_vectors([1]), rtol=1e-6)


def test_a_step_trains_admitted_keys_only():
    table = make(2)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
    ids = tf.constant([[1, 1], [2, 3]], tf.int64)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.lookup_sparse(table, ids, combiners="mean"))
            loss += tf.reduce_sum(table.lookup([7]) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        table.erase([2, 3, 7])
    assert held(table) == {1}
    assert not np.allclose(table.lookup([1]), initial_vectors([1]))
    assert table.stats()["dropped_gradients"] == 0


@pytest.mark.parametrize("unadmitted", UNADMITTED)
def test_second_derivatives(unadmitted):
    table = make(3, unadmitted)
    table.lookup([1, 2] * 3)
    ids = tf.ragged.constant([[1, 8, 2], [9]], dtype=tf.int64)
    scale = tf.Variable(1.5)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(de.lookup_sparse(table, ids, combiners="mean") * scale)
        grad = inner.gradient(loss, table)
        total = tf.reduce_sum(grad.values)
    divisor = 2 if unadmitted == "skip" else 3
    assert float(total) == pytest.approx(1.5 * 3 * 2 / divisor)
    assert float(outer.gradient(total, scale)) == pytest.approx(3 * 2 / divisor)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_max_norm_and_skip(combiner):
    table = make(3, "skip", initializer="2")
    table.lookup([1, 2] * 3)
    ids = tf.ragged.constant([[1, 8, 2], [9]], dtype=tf.int64)
    pooled = de.lookup_sparse(table, ids, combiners=combiner, max_norm=np.sqrt(3))
    count = 2 if combiner == "sum" else 1
    np.testing.assert_allclose(pooled, [[count] * 3, [0] * 3], rtol=1e-6)


def test_only_lookups_that_insert_count():
    table = make(2)
    ids = tf.constant([[1]], tf.int64)
    for _ in range(3):
        table.lookup([1], insert=False)
        de.lookup_sparse(table, ids, insert=False)
        table.contains([1])
    assert table.explain([1])[0].admission_count == 0
    np.testing.assert_array_equal(table.lookup([1], False, default_value=[1.0, 2, 3]), [[1, 2, 3]])
    # Calls that name keys to create them are not lookups.
    table.upsert([2], [[1.0, 1, 1]])
    table.scatter_add(tf.IndexedSlices(tf.ones([1, 3]), tf.constant([3], tf.int64)))
    table.insert_and_evict([4])
    de.assign(table, tf.constant([5], tf.int64), tf.ones([1, 3]))
    assert held(table) == {2, 3, 4, 5}


def test_a_layer_counts_in_training_only():
    layer = de.layers.Embedding(3, initializer="ones", admission=de.Frequency(2))
    for training in (False, False, True, False):
        np.testing.assert_array_equal(layer(np.array([[4]]), training=training), [[[0, 0, 0]]])
    np.testing.assert_array_equal(layer(np.array([[4]]), training=True), [[[1, 1, 1]]])


@pytest.mark.parametrize(
    "admission", [de.Frequency(3, counters=100, unadmitted="skip"), de.Probability(0.5)]
)
def test_layers_save_the_option(admission):
    one = de.layers.Embedding(3, admission=admission)
    config = keras.saving.serialize_keras_object(one)
    again = keras.saving.deserialize_keras_object(config)
    again.build([None])
    assert again.table.options.admission == admission
    many = de.layers.MultiTableEmbedding(
        tables=[{"dim": 2, "admission": admission}], feature_tables=[0], dim=2
    )
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(many))
    assert again.tables[0].options.admission == admission


def test_a_key_that_comes_rarely_is_forgotten():
    table = make(admission=de.Frequency(2, counters=23))
    table.lookup([1])
    table.lookup(np.arange(100, 123))
    table.lookup([1])
    assert 1 not in held(table)
    table.lookup(np.arange(200, 210))
    table.lookup([1])
    assert 1 in held(table)


def test_probability():
    table = make(admission=de.Probability(0.3), init_capacity=9000)
    table.lookup(np.arange(9000))
    once = len(table)
    assert abs(once - 2700) < 5 * np.sqrt(9000 * 0.3 * 0.7)
    assert table.stats()["unadmitted"] == 9000 - once
    # In the same state, the same keys are admitted; they are independent from lookup to lookup.
    again = make(admission=de.Probability(0.3), init_capacity=9000)
    again.lookup([1], insert=False)
    again.lookup(np.arange(9000))
    assert held(again) == held(table)
    again.lookup(np.arange(9000))
    assert abs(len(again) - 9000 * (1 - 0.7**2)) < 5 * np.sqrt(9000 * 0.51 * 0.49)
    repeats = make(admission=de.Probability(0.3))
    repeats.lookup(np.repeat(np.arange(9000), 3))
    assert abs(len(repeats) - 9000 * (1 - 0.7**3)) < 5 * np.sqrt(9000 * 0.66 * 0.34)
    assert make(admission=de.Probability(0.0)).lookup([1, 2]).shape == [2, 3]
    assert table.explain([1])[0].admission_count is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: de.Frequency(0), r"n must be an integer in \[1, 255\], got 0"),
        (lambda: de.Frequency(256), r"n must .* got 256"),
        (lambda: de.Frequency(2.5), r"n must .* got 2.5"),
        (lambda: de.Frequency(True), r"n must .* got True"),
        (lambda: de.Frequency(2, counters=0), r"counters must .* got 0"),
        (lambda: de.Frequency(2, counters=2**33), r"counters must .* got 8589934592"),
        (lambda: de.Frequency(2, unadmitted="ones"), r"unadmitted must be one of zeros.*'ones'"),
        (lambda: de.Probability(1.5), r"p must be in \[0, 1\], got 1.5"),
        (lambda: de.Probability(float("nan")), "p must .* got nan"),
        (lambda: de.Probability("1"), "p must .* got '1'"),
        (lambda: de.Probability(0.5, unadmitted=None), "unadmitted must .* got None"),
        (lambda: make(admission=3), "admission must be a Frequency.* got 3"),
        (lambda: make(filter_ratio=0.5), r"admission=Frequency.* filter_ratio=0.5"),
        (
            lambda: de.lookup_sparse(make(), [[1]], use_low_frequency_filter=True),
            r"use_low_frequency_filter=True.* admission=Frequency",
        ),
        (
            lambda: de.tfra.Variable(dim=2, admission=de.Frequency(2)),
            "admission=Frequency.* needs lookups that insert",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        de.Frequency(2).n = 3
    with pytest.raises(TypeError):
        de.Frequency(2, 100)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("counters", [1, 23, 24, 1000, 1_048_576])
def test_the_lines_of_all_ranks(ranks, counters):
    admission = de.Frequency(2, counters=counters)
    held_lines = []
    for rank in range(ranks):
        attributes = admission_options.attributes(admission, rank, ranks, None)
        assert attributes["admission_lines"] == -(-counters // 23)
        first, count = attributes["admission_first_line"], attributes["admission_num_lines"]
        assert count <= admission.lines / ranks + 2
        held_lines += range(first, first + count)
    # All lines; two ranks may share a line at their boundary.
    assert set(held_lines) == set(range(admission.lines))
    assert held_lines == sorted(held_lines)
    assert len(held_lines) <= admission.lines + ranks - 1
    alone = admission_options.attributes(admission, 0, 1, None)
    assert admission_options.attributes(admission, 1, 3, owner=1) == alone
    assert admission_options.attributes(admission, 2, 3, owner=1)["admission_num_lines"] == 1


@pytest.mark.parametrize("strategy", ["lru", "lfu"])
def test_a_full_table_in_several_features(strategy):
    table = make(2, max_capacity=4, evict_strategy=strategy)
    table.upsert([1, 2, 3, 4], tf.zeros([4, 3]))
    refused = tf.constant([[100], [101], [102]])
    for number in range(5):
        admitted = tf.constant([[10 + number], [10 + number], [1]])
        features = [refused + 10 * number, admitted, admitted]
        de.lookup_sparse([table] * 3, features, combiners=["sum"] * 3)
        assert {1, 10 + number} <= held(table)
        assert len(table) == 4


def test_an_expired_key_is_counted_anew():
    table = make(2, ttl=2)
    table.lookup([7, 7])
    table.lookup([8])
    assert held(table) == {7}
    table.lookup([7])  # has expired
    assert held(table) == set()
    assert table.explain([7])[0].admission_count == 1
    table.lookup([7])
    assert held(table) == {7}
