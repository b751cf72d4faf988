"""The bytes of the exchange: each key and row is sent once. The rounding of narrow wire types."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import Bags, close, one_rank, sum_of_all, whole_table
from tf_dynemb import _ops, communicator

VOCABULARY, BATCH, HOTNESS = 20_000, 512, 10
# The largest rounding error of an element: relative to the element (half a unit in the last place),
# and relative to the largest element of its vector (half of 1/127).
ROUNDING = {
    None: (0.0, 0.0),
    "float16": (2.0**-11, 0.0),
    "bfloat16": (2.0**-8, 0.0),
    "int8": (0.0, 1 / 254),
}
several_ranks = pytest.mark.ranks(2, 4)
pytestmark = pytest.mark.any_number_of_ranks


def zipf_bags(rng, batch=BATCH):
    """Ids with a Zipf distribution of exponent 1.05: the first are the most frequent."""
    share = np.arange(1, VOCABULARY + 1) ** -1.05
    ids = rng.choice(VOCABULARY, batch * HOTNESS, p=share / share.sum())
    scattered = ids * 7919 - 10**6
    return Bags(scattered, np.full(batch, HOTNESS), rng.random(len(ids)).astype(np.float32))


def width_of(dim, dtype, exchange_dtype):
    """The bytes of a row in a message."""
    if exchange_dtype == "int8":
        return dim + 4
    return dim * (2 if exchange_dtype in ("float16", "bfloat16") else dtype.size)


def asked_of_others(keys_of_rank, owner_of):
    """Returns the number of distinct keys that the ranks request from others, each per rank."""
    return sum(
        int((owner_of(np.unique(keys)) != rank).sum()) for rank, keys in enumerate(keys_of_rank)
    )


def by_hash(comm):
    library = _ops.library()
    return lambda keys: np.asarray(library.dynemb_owners(tf.constant(keys), num_ranks=comm.size))


COUNTERS = (
    "keys_asked_of_other_ranks",
    "key_bytes_sent",
    "vector_bytes_sent",
    "gradient_bytes_sent",
)


def counters(comm, table):
    stats = table.stats()
    return sum_of_all(comm, np.array([stats[name] for name in COUNTERS]))


KINDS = {
    "float32": (tf.int64, tf.float32, 64, None),
    "float16 rows": (tf.int64, tf.float16, 64, None),
    "bfloat16 rows": (tf.uint64, tf.bfloat16, 32, None),
    "as float16": (tf.int64, tf.float32, 64, "float16"),
    "as bfloat16": (tf.int32, tf.float32, 64, "bfloat16"),
    "as int8": (tf.int64, tf.float32, 64, "int8"),
    "float16 rows as bfloat16": (tf.int64, tf.float16, 32, "bfloat16"),
    "float16 rows as int8": (tf.int64, tf.float16, 128, "int8"),
}


@several_ranks
def test_bytes_of_a_step(comm):
    """All tables in one call, with two features each, including a static and a localized one."""
    rng = np.random.default_rng(1)
    last = comm.size - 1
    tables, owners, widths, gradient_widths, key_widths = [], [], [], [], []
    for key_type, dtype, dim, exchange_dtype in KINDS.values():
        options = {"key_type": key_type, "dtype": dtype, "exchange_dtype": exchange_dtype}
        tables.append(de.DynamicVariable(dim, **options))
        owners.append(by_hash(comm))
        widths.append(width_of(dim, dtype, exchange_dtype))
        gradient_widths.append(width_of(dim, tf.float32, exchange_dtype))
        key_widths.append(key_type.size)
    tables.append(de.DynamicVariable(48, mode=f"localized:{last}"))
    owners.append(lambda keys: np.full(len(keys), last))
    tables.append(de.Variable(np.zeros((VOCABULARY, 24), np.float32), exchange_dtype="float16"))
    owners.append(lambda keys: keys % comm.size)
    tables.append(de.Variable(np.zeros((VOCABULARY, 24), np.float32), mode="localized:0"))
    owners.append(lambda keys: np.zeros(len(keys)))
    widths += [48 * 4, 24 * 2, 24 * 4]
    gradient_widths += widths[-3:]
    key_widths += [8, 8, 8]
    for step in range(2):
        features = [zipf_bags(rng) for _ in range(2 * len(tables))]
        before = [counters(comm, table) for table in tables]
        ids = []
        for bags, table in zip(features, tables * 2, strict=True):
            key_type = table.key_type if isinstance(table, de.DynamicVariable) else tf.int64
            if isinstance(table, de.Variable) or key_type == tf.uint64:
                bags.ids[:] = (bags.ids + 10**6) // 7919
            ids.append(tf.cast(bags.part(comm.rank, comm.size).ragged(), key_type))
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(tables * 2, ids, combiners="sum")
            loss = tf.add_n([tf.reduce_sum(tf.cast(p, tf.float32)) for p in pooled])
        if step:
            tape.gradient(loss, tables)
        for i, (table, owner, was) in enumerate(zip(tables, owners, before, strict=True)):
            keys = [
                np.concatenate([features[j].part(r, comm.size).ids for j in (i, i + len(tables))])
                for r in range(comm.size)
            ]
            keys = [k.astype(ids[i].dtype.as_numpy_dtype) for k in keys]
            expected = asked_of_others(keys, owner)
            asked, key_bytes, vector_bytes, gradient_bytes = counters(comm, table) - was
            assert asked == expected > 0
            assert expected * key_widths[i] <= key_bytes <= 1.05 * expected * 8
            assert expected * widths[i] <= vector_bytes <= 1.05 * expected * widths[i], table.name
            # Gradients are float32, and are sent as float32 unless the table has a wire type.
            if step:
                least = expected * gradient_widths[i]
                assert least <= gradient_bytes <= 1.05 * least, table.name
            else:
                assert gradient_bytes == 0


@several_ranks
def test_keys_that_a_rank_owns_are_not_sent(comm):
    """A lookup without inserts requests the keys of other ranks like any other lookup."""
    keys = np.arange(500)
    owner = by_hash(comm)(keys)
    table = de.DynamicVariable(8)
    de.lookup_sparse(table, keys[owner == comm.rank][:, None])
    asked, key_bytes, vector_bytes, _ = counters(comm, table)
    assert (asked, vector_bytes) == (0, 0)
    assert key_bytes <= 16 * comm.size**2  # the number of keys for each rank, which is zero
    de.lookup_sparse(table, keys[owner != comm.rank][:, None], insert=False)
    asked, _, vector_bytes, _ = counters(comm, table)
    assert asked == 500 * (comm.size - 1)
    assert 0 < vector_bytes <= 1.05 * asked * 32
    with one_rank():
        alone = de.DynamicVariable(8)
        de.lookup_sparse(alone, keys[:, None])
        assert [alone.stats()[name] for name in COUNTERS] == [0] * 4


def vectors_of_all_sizes(rng, count, dim):
    vectors = rng.normal(size=(count, dim)) * 10.0 ** rng.integers(-3, 3, (count, 1))
    vectors[0] = 0
    vectors[1, 1:] = 0
    vectors[2] = -vectors[2].max()
    return vectors.astype(np.float32)


@pytest.mark.parametrize("exchange_dtype", ROUNDING)
@pytest.mark.parametrize("dim", [1, 5, 64])
def test_vectors_and_gradients_are_rounded_to_nearest(comm, exchange_dtype, dim):
    relative, of_largest = ROUNDING[exchange_dtype]
    rng = np.random.default_rng(2)
    keys = np.arange(300)
    vectors = vectors_of_all_sizes(rng, 300, max(dim, 2))[:, :dim]
    table = de.DynamicVariable(dim, "zeros", exchange_dtype=exchange_dtype)
    static = de.Variable(vectors, exchange_dtype=exchange_dtype)
    de.assign(table, keys, vectors)
    np.testing.assert_array_equal(whole_table(comm, table).vectors, vectors)  # assign is exact
    upstream = np.stack([rng.permutation(vectors) for _ in range(comm.size)])
    with tf.GradientTape(persistent=True) as tape:
        found = [de.lookup_sparse(t, keys[:, None], combiners="sum") for t in (table, static)]
        losses = [tf.reduce_sum(f * upstream[comm.rank]) for f in found]
    largest = np.abs(vectors).max(1, keepdims=True)
    allowed = 1.001 * (relative * np.abs(vectors) + of_largest * largest)
    if exchange_dtype == "float16":
        allowed += 2.0**-25  # half the smallest number of the type
    for f in found:
        assert (np.abs(f - vectors) <= allowed).all()
    if exchange_dtype is None:
        np.testing.assert_array_equal(found[0], vectors)
    allowed = relative * np.abs(upstream) + of_largest * np.abs(upstream).max(2, keepdims=True)
    allowed = 1.001 * allowed.sum(0) + 1e-6 * np.abs(upstream).sum(0) + 2.0**-25 * comm.size
    for t, loss in zip((table, static), losses, strict=True):
        grad = tape.gradient(loss, t)
        got = np.zeros((300, dim), np.float32)
        places = grad.indices.numpy()
        got[places if t is table else places * comm.size + comm.rank] = grad.values.numpy()
        assert (np.abs(sum_of_all(comm, got) - upstream.sum(0)) <= allowed).all()


@pytest.mark.parametrize("exchange_dtype", ROUNDING)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e30])
def test_non_finite_gradients_stay_non_finite(comm, exchange_dtype, value):
    """An overflow on any rank reaches the owner of the row."""
    table = de.DynamicVariable(4, "1", exchange_dtype=exchange_dtype)
    keys = np.arange(20)
    factors = np.ones((20, 4), np.float32)
    if comm.rank == comm.size - 1:
        factors[::2, 1] = value
    with tf.GradientTape() as tape:
        pooled = de.lookup_sparse(table, keys[:, None], combiners="sum")
        loss = tf.reduce_sum(pooled * factors)
    grad = tape.gradient(loss, table)
    finite = np.isfinite(grad.values.numpy()).all(1)
    if np.isfinite(value):
        assert exchange_dtype == "float16" or finite.all()  # float16 cannot represent it
    else:
        np.testing.assert_array_equal(finite, grad.indices.numpy() % 2 == 1)


@several_ranks
def test_training_with_int8_is_close_to_one_rank(comm):
    check_training(comm, "int8")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("exchange_dtype", [None, "float16", "bfloat16"])
def test_training_is_close_to_one_rank(comm, exchange_dtype):
    check_training(comm, exchange_dtype)


def check_training(comm, exchange_dtype):
    """Compares with one rank, which sends no vectors and gradients."""
    tolerance = {None: 1e-5, "float16": 1e-3, "bfloat16": 1e-2, "int8": 2e-2}[exchange_dtype]
    rng = np.random.default_rng(3)
    table = de.DynamicVariable(8, "normal", seed=1, exchange_dtype=exchange_dtype)
    with one_rank():
        alone = de.DynamicVariable(8, "normal", seed=1, exchange_dtype=exchange_dtype)
    optimizers = [de.OptimizerWrapper(keras.optimizers.Adagrad(0.1)) for _ in range(2)]
    keys = rng.integers(0, 200, (30, 64, 4))
    targets = rng.normal(size=(30, 64, 8)).astype(np.float32)

    def step(table, optimizer, ids, target):
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(table, ids, combiners="mean")
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(pooled - target), 1))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    share = slice(comm.rank * 64 // comm.size, (comm.rank + 1) * 64 // comm.size)
    for ids, target in zip(keys, targets, strict=True):
        step(table, optimizers[0], tf.constant(ids[share]), target[share])
        with one_rank():
            step(alone, optimizers[1], tf.constant(ids), target)
    got = whole_table(comm, table)
    with one_rank():
        want = whole_table(communicator.LOCAL, alone)
    np.testing.assert_array_equal(got.keys, want.keys)
    close(got.vectors, want.vectors, tolerance)
    if exchange_dtype is not None and comm.size > 1:
        assert not np.array_equal(got.vectors, want.vectors)
