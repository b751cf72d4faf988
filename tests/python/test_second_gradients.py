"""Second derivatives with respect to a table, compared with a dense variable."""

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

KEYS = np.array([5, -3, 2**40, 7])
VECTORS = np.random.default_rng(1).normal(size=[4, 3]).astype(np.float32)
PLACES = np.array([[0, 1, 1], [2, 0, 3], [1, 1, 1]])


def penalty(gradient, variable):
    """A gradient penalty: the squared norm of the gradient, plus a part that is linear in it."""
    values = tf.convert_to_tensor(gradient) if variable.shape[0] is not None else gradient.values
    return tf.reduce_sum(tf.cast(values, tf.float32) ** 2)


def second(variable, lookup, others=()):
    @tf.function
    def compute():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(lookup(variable) ** 3)
            value = penalty(inner.gradient(loss, variable), variable)
        return outer.gradient(value, [variable, *others])

    return compute()


def compare(got, dense):
    full = tf.convert_to_tensor(dense).numpy()
    order = [KEYS.tolist().index(key) for key in got.indices.numpy().astype(np.int64)]
    np.testing.assert_allclose(got.values, full[order], rtol=1e-4, atol=1e-4)
    assert set(np.flatnonzero(np.abs(full).sum(1))) <= set(order)


def both(key_type=tf.int64, **options):
    table = de.DynamicVariable(3, key_type=key_type, **options)
    keys = tf.constant(KEYS.astype(key_type.as_numpy_dtype), key_type)
    table.upsert(keys, VECTORS)
    return table, tf.Variable(VECTORS), tf.gather(keys, PLACES)


@pytest.mark.parametrize("key_type", [tf.int64, tf.uint64])
def test_embedding_lookup(key_type):
    table, dense, ids = both(key_type)
    (got,) = second(table, lambda v: tf.nn.embedding_lookup(v, ids))
    (expected,) = second(dense, lambda v: tf.nn.embedding_lookup(v, PLACES))
    compare(got, expected)


@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_lookups_and_their_weights(combiner, form, weighted):
    table, dense, ids = both()
    convert = {
        "dense": tf.identity,
        "ragged": tf.RaggedTensor.from_tensor,
        "sparse": tf.sparse.from_dense,
    }[form]
    w = tf.Variable(np.random.default_rng(2).uniform(0.5, 2.0, PLACES.shape).astype(np.float32))

    def pooled(v):
        weights = convert(tf.identity(w)) if weighted else None
        return de.lookup_sparse(v, convert(ids), weights, combiners=combiner)

    def reference(v):
        vectors = tf.gather(v, PLACES)
        weights = (w if weighted else tf.ones_like(w))[..., tf.newaxis]
        if combiner == "max":
            return tf.reduce_max(vectors * weights, 1)
        total = tf.reduce_sum(vectors * weights, 1)
        if combiner == "mean":
            return total / tf.reduce_sum(weights, 1)
        return total / tf.sqrt(tf.reduce_sum(weights**2, 1)) if combiner == "sqrtn" else total

    weight_variables = [w] if weighted else []
    found = second(table, pooled, weight_variables)
    expected = second(dense, reference, weight_variables)
    compare(found[0], expected[0])
    if weighted:
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("combiner", ["sum", "max"])
def test_a_batch_without_ids_and_eagerly(combiner):
    table, dense, ids = both()
    no_ids = tf.ragged.constant([[], []], dtype=tf.int64)
    for batch, places in ((no_ids, None), (ids, PLACES)):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                pooled = de.lookup_sparse(table, batch, combiners=combiner)
                loss = tf.reduce_sum(pooled**3)
            value = penalty(inner.gradient(loss, table), table)
        got = outer.gradient(value, table)
        if places is None:
            assert got is None or len(got.indices) == 0
            continue
        reduce = tf.reduce_max if combiner == "max" else tf.reduce_sum
        (expected,) = second(dense, lambda v: reduce(tf.gather(v, PLACES), 1))  # noqa: B023
        compare(got, expected)


def test_several_tables_of_which_one_has_a_second_derivative():
    table, dense, ids = both()
    other = de.DynamicVariable(2, "ones", dtype=tf.float16)
    (got,) = second(
        table,
        lambda v: de.lookup_sparse([v, other], [ids, ids], combiners=["sum", "mean"])[0],
    )
    (expected,) = second(dense, lambda v: tf.reduce_sum(tf.gather(v, PLACES), 1))
    compare(got, expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_table_that_a_custom_gradient_captures_is_named(recompute):
    table, _, ids = both(name="captured")

    def read(x):
        return tf.reduce_sum(tf.nn.embedding_lookup(table, ids)) * x

    @tf.custom_gradient
    def custom(x):
        return read(x), lambda upstream, variables=None: (upstream, [None])

    captured = tf.recompute_grad(read) if recompute else custom
    with tf.GradientTape(), pytest.raises(NotImplementedError, match=r"cannot capture .* captured"):
        captured(tf.constant(2.0))

    # The way that the error shows.
    vectors_of = tf.recompute_grad(lambda vectors: tf.reduce_sum(vectors**2))
    with tf.GradientTape() as tape:
        loss = vectors_of(tf.nn.embedding_lookup(table, ids))
    assert len(tape.gradient(loss, table).indices) == 4
