"""lookup_sparse against tf.nn.embedding_lookup_sparse on a dense variable of the same vectors."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

VOCABULARY = 30
SETTINGS = hypothesis.settings(
    max_examples=40,
    suppress_health_check=list(hypothesis.HealthCheck),
)


class Feature:
    """Random bags in one form, a table, and a dense variable with the same vectors."""

    def __init__(self, rng, batch, max_hotness, dim, combiner, weighted, form, dtype=tf.float32):
        self.combiner, self.form, self.weighted = combiner, form, weighted
        if form == "dense":
            lengths = np.full(batch, max_hotness)
        else:
            lengths = rng.integers(0, max_hotness + 1, batch)
        self.lengths = lengths
        self.splits = np.concatenate([[0], np.cumsum(lengths)])
        self.ids = rng.integers(0, VOCABULARY, self.splits[-1])
        self.weights = rng.normal(size=self.splits[-1]).astype(np.float32) + 2.0
        self.vectors = rng.normal(size=(VOCABULARY, dim)).astype(np.float32)
        self.upstream = rng.normal(size=(batch, dim)).astype(np.float32)
        self.batch, self.max_hotness = batch, max_hotness
        self.order = (
            rng.permutation(len(self.ids)) if form == "unsorted" else np.arange(len(self.ids))
        )
        self.table = de.DynamicVariable(dim, "zeros", dtype=dtype)
        de.assign(self.table, np.arange(VOCABULARY), self.vectors)
        self.dense = tf.Variable(tf.cast(tf.cast(self.vectors, dtype), tf.float32))

    def _sparse(self, values, order):
        rows = np.repeat(np.arange(self.batch), self.lengths)
        columns = np.concatenate([np.arange(n) for n in self.lengths] or [[]]).astype(np.int64)
        indices = np.stack([rows, columns], 1)
        return tf.SparseTensor(indices[order], values, [self.batch, max(self.max_hotness, 1)])

    def make(self, values, order=None):
        """Returns `values`, a tensor in the order of `ids`, in the feature's form."""
        if self.form == "dense":
            return tf.reshape(values, [self.batch, self.max_hotness])
        if self.form == "ragged":
            return tf.RaggedTensor.from_row_splits(values, self.splits)
        return self._sparse(tf.gather(values, self.order), self.order)

    def expected(self, tape_weights):
        """Returns the vectors as TensorFlow's lookup pools them, with zeros for empty bags."""
        order = np.arange(len(self.ids))
        weights = self._sparse(tape_weights, order) if self.weighted else None
        out = tf.nn.embedding_lookup_sparse(
            self.dense, self._sparse(self.ids, order), weights, combiner=self.combiner
        )
        return tf.pad(out, [[0, self.batch - tf.shape(out)[0]], [0, 0]])


def dense_gradient(grad, dim):
    total = np.zeros((VOCABULARY, dim))
    if grad is None:
        return total
    np.add.at(total, np.asarray(grad.indices), np.asarray(grad.values))
    return total


def check(features, traced=False):
    weights = [tf.constant(f.weights) for f in features]
    dense_weights = [tf.constant(f.weights) for f in features]
    tables = [f.table for f in features]

    def run():
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = de.lookup_sparse(
                tables,
                [f.make(tf.constant(f.ids)) for f in features],
                [f.make(w) if f.weighted else None for f, w in zip(features, weights, strict=True)],
                [f.combiner for f in features],
            )
            loss = tf.add_n(
                [
                    tf.reduce_sum(tf.cast(o, tf.float32) * f.upstream)
                    for o, f in zip(outputs, features, strict=True)
                ]
            )
        return outputs, *tape.gradient(loss, (tables, weights))

    outputs, grads, weight_grads = tf.function(run)() if traced else run()
    with tf.GradientTape() as tape:
        tape.watch(dense_weights)
        expected = [f.expected(w) for f, w in zip(features, dense_weights, strict=True)]
        loss = tf.add_n(
            [tf.reduce_sum(e * f.upstream) for e, f in zip(expected, features, strict=True)]
        )
    dense_grads, dense_weight_grads = tape.gradient(
        loss, ([f.dense for f in features], dense_weights)
    )
    for i, f in enumerate(features):
        dim = f.vectors.shape[1]
        # The error of a sum is relative to its terms, not to the sum.
        largest = np.abs(f.vectors).max() * max(f.max_hotness, 1)
        np.testing.assert_allclose(outputs[i], expected[i], rtol=1e-5, atol=1e-6 * largest)
        keys = grads[i].indices.numpy()
        assert len(set(keys.tolist())) == len(keys)
        assert set(keys.tolist()) == set(f.ids.tolist())
        np.testing.assert_allclose(
            dense_gradient(grads[i], dim), dense_gradient(dense_grads[i], dim), rtol=1e-4, atol=1e-5
        )
        if f.weighted and len(f.ids):
            got, want = (tf.convert_to_tensor(g[i]) for g in (weight_grads, dense_weight_grads))
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


@st.composite
def feature_lists(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch = draw(st.integers(0, 5))
    return [
        Feature(
            rng,
            batch,
            draw(st.integers(0, 7)),
            draw(st.integers(1, 9)),
            draw(st.sampled_from(["sum", "mean", "sqrtn"])),
            draw(st.booleans()),
            draw(st.sampled_from(["sparse", "unsorted", "ragged", "dense"])),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


@SETTINGS
@hypothesis.given(feature_lists())
def test_agrees_with_tensorflow(features):
    check(features)


@pytest.mark.parametrize("tables", [1, 64])
@pytest.mark.parametrize("hotness", [1, 500])
def test_many_tables_and_large_bags(tables, hotness):
    rng = np.random.default_rng(tables + hotness)
    forms = ["sparse", "unsorted", "ragged", "dense"]
    combiners = ["sum", "mean", "sqrtn"]
    check(
        [
            Feature(rng, 6, hotness, 1 + i % 5, combiners[i % 3], bool(i % 2), forms[i % 4])
            for i in range(tables)
        ]
    )


@pytest.mark.parametrize("form", ["sparse", "unsorted", "ragged", "dense"])
@pytest.mark.parametrize("weighted", [False, True])
def test_inside_a_function(form, weighted):
    rng = np.random.default_rng(5)
    check([Feature(rng, 4, 3, 2, c, weighted, form) for c in ("sum", "mean", "sqrtn")], traced=True)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_16_bit_tables_pool_in_float32(dtype):
    feature = Feature(np.random.default_rng(2), 8, 20, 4, "mean", True, "ragged", dtype)
    out = de.lookup_sparse(
        feature.table, feature.make(tf.constant(feature.ids)), feature.make(feature.weights), "mean"
    )
    assert out.dtype == dtype
    expected = feature.expected(tf.constant(feature.weights))
    np.testing.assert_allclose(
        tf.cast(out, tf.float32),
        expected,
        rtol=2.0 ** -(10 if dtype == tf.float16 else 7),
        atol=1e-6,
    )


def brute_force_max(vectors, ids, weights, lengths):
    out, start = [], 0
    for n in lengths:
        rows = vectors[ids[start : start + n]] * weights[start : start + n, None]
        out.append(rows.max(0) if n else np.zeros(vectors.shape[1]))
        start += n
    return np.array(out)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_max(static, weighted):
    rng = np.random.default_rng(3)
    ids, lengths = np.array([1, 2, 3, 5, 6, 1]), [3, 0, 2, 1]
    vectors = rng.normal(size=(8, 3)).astype(np.float32)
    weights = rng.uniform(0.5, 2, 6).astype(np.float32) if weighted else np.ones(6, np.float32)
    table = tf.Variable(vectors)
    if not static:
        table = de.DynamicVariable(3, "zeros")
        de.assign(table, np.arange(8), vectors)
    watched = tf.constant(weights)
    with tf.GradientTape() as tape:
        tape.watch(watched)
        out = de.lookup_sparse(
            table,
            tf.RaggedTensor.from_row_lengths(ids, lengths),
            tf.RaggedTensor.from_row_lengths(watched, lengths) if weighted else None,
            "max",
        )
        loss = tf.reduce_sum(out * tf.constant([1.0, 10.0, 100.0]))
    expected = brute_force_max(vectors, ids, weights, lengths)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    grad, weight_grad = tape.gradient(loss, (table, watched))
    expected_grad, expected_weight_grad, start = np.zeros((8, 3)), np.zeros(6), 0
    for n in lengths:
        for c in range(3) if n else ():
            at = start + int(
                np.argmax(vectors[ids[start : start + n], c] * weights[start : start + n])
            )
            expected_grad[ids[at], c] += 10**c * weights[at]
            expected_weight_grad[at] += 10**c * vectors[ids[at], c]
        start += n
    total = np.zeros((8, 3))
    np.add.at(total, np.asarray(grad.indices), np.asarray(grad.values))
    np.testing.assert_allclose(total, expected_grad, rtol=1e-5)
    if weighted:
        np.testing.assert_allclose(weight_grad, expected_weight_grad, rtol=1e-4, atol=1e-4)


def test_dynamic_and_static_tables_in_one_call():
    vectors = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    dynamic = de.DynamicVariable(2, "zeros", key_type=tf.int32)
    de.assign(dynamic, np.arange(5, dtype=np.int32), vectors)
    tables = [tf.Variable(vectors), dynamic, de.Variable(vectors, mode="localized:0"), dynamic]
    ids = tf.ragged.constant([[1, 2], [], [4, 4, 0]], dtype=tf.int32)
    combiners = ["mean", "mean", "sum", "sum"]
    with tf.GradientTape() as tape:
        outputs = de.lookup_sparse(tables, [ids] * 4, combiners=combiners)
        loss = tf.add_n([tf.reduce_sum(o) * (i + 1) for i, o in enumerate(outputs)])
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-6)
    np.testing.assert_allclose(outputs[2], outputs[3], rtol=1e-6)
    assert outputs[0].numpy()[1].tolist() == [0, 0]
    # The dynamic table is in the list twice; its gradient is the sum over both features.
    grad = tape.gradient(loss, dynamic)
    total = np.zeros((5, 2))
    np.add.at(total, grad.indices.numpy(), grad.values.numpy())
    np.testing.assert_allclose(total[4], [2 * 2 / 3 + 4 * 2] * 2, rtol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("form", ["sparse", "unsorted", "ragged", "dense"])
@pytest.mark.parametrize("weighted", [False, True])
def test_static_and_dynamic_tables_agree(combiner, form, weighted):
    f = Feature(np.random.default_rng(8), 5, 4, 3, combiner, weighted, form)
    results = []
    for table in (f.table, f.dense):
        weights = tf.constant(f.weights)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            out = de.lookup_sparse(
                table, f.make(tf.constant(f.ids)), f.make(weights) if weighted else None, combiner
            )
            loss = tf.reduce_sum(out * f.upstream)
        grad, weight_grad = tape.gradient(loss, (table, weights))
        results.append([out, dense_gradient(grad, 3)])
        if weighted:
            results[-1].append(tf.convert_to_tensor(weight_grad))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
def test_ids_are_cast_without_loss(static):
    table = tf.Variable(tf.ones([9, 1])) if static else de.DynamicVariable(1, "ones")
    for dtype in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.int64):
        out = de.lookup_sparse(table, np.array([[1, 2]], dtype), combiners="sum")
        assert out.numpy().tolist() == [[2.0]]


def test_lookup_without_insert_reads_initial_vectors():
    table = de.DynamicVariable(2, "uniform", seed=1)
    ids = tf.constant([[1, 2], [3, 4]])
    read = de.lookup_sparse(table, ids, combiners="sum", insert=False)
    assert len(table) == 0
    inserted = de.lookup_sparse(table, ids, combiners="sum")
    assert len(table) == 4
    np.testing.assert_array_equal(read, inserted)


def test_default_combiner_and_return_types():
    table = de.DynamicVariable(1, "zeros")
    de.assign(table, [1, 2], [[1.0], [3.0]])
    ids = tf.constant([[1, 2]])
    assert de.lookup_sparse(table, ids).numpy().tolist() == [[2.0]]
    (out,) = de.lookup_sparse([table], [ids], combiners=["sum"])
    assert out.numpy().tolist() == [[4.0]]
    assert de.lookup_sparse(table, tf.constant([2, 1])).numpy().tolist() == [[3.0], [1.0]]


def test_static_shapes_are_known_when_tracing():
    table = de.DynamicVariable(3)
    shapes = []

    @tf.function
    def look(sparse, ragged, dense):
        for ids in (sparse, ragged, dense):
            shapes.append(de.lookup_sparse(table, ids).shape.as_list())

    look.get_concrete_function(
        tf.SparseTensorSpec([4, None], tf.int64),
        tf.RaggedTensorSpec([4, None], tf.int64),
        tf.TensorSpec([None, 2], tf.int64),
    )
    assert shapes == [[4, 3], [4, 3], [None, 3]]


def test_empty_batch():
    table = de.DynamicVariable(2)
    for ids in (
        tf.zeros([0, 3], tf.int64),
        tf.zeros([3, 0], tf.int64),
        tf.ragged.constant([], dtype=tf.int64, ragged_rank=1),
        tf.SparseTensor(tf.zeros([0, 2], tf.int64), tf.zeros([0], tf.int64), [0, 4]),
    ):
        with tf.GradientTape() as tape:
            out = de.lookup_sparse(table, ids)
        assert out.shape[1] == 2
        assert not out.numpy().any()
        assert tape.gradient(out, table).values.shape == (0, 2)
    assert len(table) == 0


def test_other_names_of_arguments():
    table = de.DynamicVariable(dim=2, initializer="ones")
    assert table.dimension == 2
    ids = tf.constant([[3, 4]], tf.int64)
    np.testing.assert_array_equal(de.lookup_sparse(table, ids, combiner="sum"), [[2, 2]])
    with pytest.raises(TypeError, match="combiners='sum' and combiner='mean' set the same"):
        de.lookup_sparse(table, ids, combiners="sum", combiner="mean")
    with pytest.raises(TypeError, match="dimension=2 and dim=3 set the same"):
        de.DynamicVariable(2, dim=3)
    with pytest.raises(TypeError, match="needs dimension, the width of its vectors"):
        de.DynamicVariable(initializer="ones")


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_max_norm_is_as_in_tensorflow(combiner):
    rng = np.random.default_rng(8)
    vectors = rng.normal(size=[6, 3]).astype(np.float32)
    table = de.DynamicVariable(3)
    table.upsert(np.arange(6), vectors)
    static, dense = de.Variable(vectors), tf.Variable(vectors)
    ids = tf.sparse.from_dense(tf.constant([[1, 2, 1], [5, 0, 3], [4, 4, 0]], tf.int64))
    weights = ids.with_values(tf.constant(rng.uniform(0.5, 2, 7).astype(np.float32)))
    with tf.GradientTape(persistent=True) as tape:
        expected = tf.nn.embedding_lookup_sparse(
            dense, ids, weights, combiner=combiner, max_norm=1.2
        )
        *clipped, free = de.lookup_sparse(
            [table, static, table],
            [ids] * 3,
            [weights] * 3,
            combiners=combiner,
            max_norm=[1.2, 1.2, None],
        )
        losses = [tf.reduce_sum(output**2) for output in (expected, clipped[0])]
    for output in clipped:
        np.testing.assert_allclose(output, expected, rtol=1e-5)
    assert np.abs(free - expected).max() > 0.1
    full = tf.convert_to_tensor(tape.gradient(losses[0], dense)).numpy()
    gradient = tape.gradient(losses[1], table)
    np.testing.assert_allclose(gradient.values, full[gradient.indices.numpy()], 1e-4, 1e-5)
    np.testing.assert_array_equal(table.lookup(np.arange(6)), vectors)


@pytest.mark.parametrize("max_norm", [0, -1.0, True, "1", [1.0, 2.0]])
def test_bad_max_norm(max_norm):
    table = de.DynamicVariable(3)
    with pytest.raises(ValueError, match="max_norm"):
        de.lookup_sparse(table, tf.constant([[1]], tf.int64), max_norm=max_norm)
    assert len(table) == 0
