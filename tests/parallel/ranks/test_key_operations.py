"""Operations on keys by several ranks at once, compared with a dict that applies them in order."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import one_rank, sum_of_all, whole_table

DIM, START = 2, 0.25


class Model:
    """A table as a dict; each call gets the arguments of all ranks, in their order."""

    def __init__(self):
        self.rows: dict[int, np.ndarray] = {}

    def upsert(self, keys, values):
        for k, v in zip(np.concatenate(keys), np.concatenate(values), strict=True):
            self.rows[int(k)] = v

    def add(self, keys, values):
        for k, v in zip(np.concatenate(keys), np.concatenate(values), strict=True):
            self.rows[int(k)] = self.rows.get(int(k), np.full(DIM, START, np.float32)) + v

    def erase(self, keys):
        gone = {int(k) for k in np.concatenate(keys)} & set(self.rows)
        for key in gone:
            del self.rows[key]
        return len(gone)

    def read(self, keys, default):
        return np.array([self.rows.get(int(k), default) for k in keys], np.float32).reshape(-1, DIM)


def operations(table):
    """The operations: each takes keys and values, and its result is compared."""
    slices = lambda k, v: tf.IndexedSlices(v, k)  # noqa: E731
    return {
        "upsert": lambda k, v: table.upsert(k, v) and None,
        "assign": lambda k, v: de.assign(table, k, v),
        "scatter_update": lambda k, v: table.scatter_update(slices(k, v)) and None,
        "scatter_add": lambda k, v: table.scatter_add(slices(k, v)) and None,
        "scatter_sub": lambda k, v: table.scatter_sub(slices(k, v)) and None,
        "erase": lambda k, v: table.erase(k),
        "forget": lambda k, v: table.forget(k),
        "contains": lambda k, v: table.contains(k),
        "read": lambda k, v: table.lookup(k, insert=False),
        "read_or_default": lambda k, v: table.lookup(k, insert=False, default_value=[-1.0, -2.0]),
        "insert": lambda k, v: tf.nn.embedding_lookup(table, k),
    }


def expected(model, name, keys, values, rank):
    if name in ("upsert", "assign", "scatter_update"):
        return model.upsert(keys, values)
    if name in ("scatter_add", "scatter_sub"):
        return model.add(keys, values if name == "scatter_add" else [-v for v in values])
    if name in ("erase", "forget"):
        return model.erase(keys)
    if name == "contains":
        return np.array([int(k) in model.rows for k in keys[rank]], bool)
    if name == "insert":
        model.add(keys, [np.zeros((len(k), DIM), np.float32) for k in keys])
    return model.read(keys[rank], [-1, -2] if name == "read_or_default" else [START] * DIM)


KINDS = {
    "int64": (tf.int64, tf.float32, None),
    "int32": (tf.int32, tf.bfloat16, "distributed"),
    "uint64": (tf.uint64, tf.float16, None),
    "localized": (tf.int64, tf.float32, "localized:last"),
}


@pytest.mark.parametrize(("kind", "functional"), [("int64", False), ("uint64", True)])
def test_random_operations(comm, kind, functional):
    check_operations(comm, *KINDS[kind], functional)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "functional"),
    [("int64", True), ("int32", False), ("int32", True), ("localized", False), ("localized", True)],
)
def test_random_operations_of_other_tables(comm, kind, functional):
    check_operations(comm, *KINDS[kind], functional)


def check_operations(comm, key_type, dtype, mode, functional):
    mode = mode and mode.replace("last", str(comm.size - 1))
    table = de.DynamicVariable(
        DIM, str(START), key_type=key_type, dtype=dtype, mode=mode, stochastic_rounding=False
    )
    rng, model = np.random.default_rng(9), Model()
    domain = np.arange(12).astype(key_type.as_numpy_dtype)
    domain[:3] = [key_type.min, key_type.max, key_type.max - 1]
    if key_type != tf.uint64:
        domain[3:6] -= 5
    named = operations(table)
    if functional:
        specs = [tf.TensorSpec([None], key_type), tf.TensorSpec([None, DIM], dtype)]
        named = {
            name: tf.function(operation, input_signature=specs, autograph=False)
            for name, operation in named.items()
        }
    names = list(named)
    for i in range(70):
        name = names[i] if i < len(names) else str(rng.choice(names))
        counts = rng.integers(0, 9, comm.size) * rng.integers(0, 2, comm.size)
        keys = [rng.choice(domain, n) for n in counts]
        # Sums of these numbers are exact in 16 bits.
        values = [rng.integers(-4, 5, (n, DIM)).astype(np.float32) / 4 for n in counts]
        got = named[name](
            tf.constant(keys[comm.rank]), tf.cast(tf.constant(values[comm.rank]), dtype)
        )
        want = expected(model, name, keys, values, comm.rank)
        if want is not None:
            got = tf.cast(got, tf.float32) if got.dtype.is_floating else got
            np.testing.assert_array_equal(got, want, err_msg=f"{name}, step {i}")
        if i % 10 == 9:
            rows = whole_table(comm, table)
            found = dict(zip(rows.keys.tolist(), rows.vectors.tolist(), strict=True))
            assert found == {k: v.tolist() for k, v in model.rows.items()}, f"{name}, step {i}"
            assert sum_of_all(comm, len(table)) == len(model.rows)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_additions_to_16_bit_rows_are_rounded_as_in_one_process(comm, dtype):
    """Values that are added to one key are summed in float32 before its row is written."""
    options = {"initializer": "1", "dtype": dtype, "stochastic_rounding": False}
    table = de.DynamicVariable(1, **options)
    small = 2.0 ** -(12 if dtype == tf.float16 else 9)
    keys, deltas = np.full(32, 3), np.full((32, 1), small)
    deltas[::2] = -0.25
    rank_slice = slice(comm.rank, None, comm.size)
    table.scatter_add(tf.IndexedSlices(tf.constant(deltas[rank_slice]), keys[rank_slice]))
    with one_rank():
        alone = de.DynamicVariable(1, **options)
        alone.scatter_add(tf.IndexedSlices(tf.constant(deltas), keys))
        want = float(alone.lookup([3])[0, 0])
    got = whole_table(comm, table).vectors[0, 0]
    assert want == 1 - 4 + 16 * small
    assert abs(got - want) <= abs(want) * 2.0 ** -(10 if dtype == tf.float16 else 7)


def test_keys_of_any_shape(comm):
    table = de.DynamicVariable(DIM, "zeros")
    keys = np.arange(6).reshape(2, 1, 3) + 3 * comm.rank
    values = np.stack([keys, -keys], -1).astype(np.float32)
    table.upsert(keys, values)
    assert table.contains(keys).numpy().shape == keys.shape
    assert table.contains(keys).numpy().all()
    np.testing.assert_array_equal(table.lookup(keys), values)
    np.testing.assert_array_equal(table.gather_nd(keys[..., None]), values)
    assert table.lookup(np.zeros((0, 4), np.int64)).shape == (0, 4, DIM)
    assert int(table.erase(keys[:, 0, :2])) == len(
        {k for r in range(comm.size) for k in (3 * r, 1 + 3 * r, 3 + 3 * r, 4 + 3 * r)}
    )


def test_clear_affects_only_this_rank(comm):
    table = de.DynamicVariable(DIM, "zeros")
    table.lookup(np.arange(100))
    here = len(table)
    assert sum_of_all(comm, here) == 100
    if comm.rank == 0:
        table.clear()
        assert len(table) == 0
    assert sum_of_all(comm, len(table)) == 100 - sum_of_all(comm, here if comm.rank == 0 else 0)


ERRORS = {
    "float ids": lambda t, s: de.lookup_sparse([t], [tf.constant([[1.5]])]),
    "combiner": lambda t, s: de.lookup_sparse([t, s], [[[1]]] * 2, combiners=["sum", "median"]),
    "number of ids": lambda t, s: de.lookup_sparse([t, s], [[[1]]]),
    "number of weights": lambda t, s: de.lookup_sparse([t, s], [[[1]]] * 2, [None]),
    "form of weights": lambda t, s: de.lookup_sparse(
        t, tf.ragged.constant([[1]], dtype=tf.int64), tf.constant([[1.0]])
    ),
    "type of weights": lambda t, s: de.lookup_sparse(t, [[1]], tf.constant([[1]])),
    "insert": lambda t, s: de.lookup_sparse(t, [[1]], insert="yes"),
    "no table": lambda t, s: de.lookup_sparse([], []),
    "no variable": lambda t, s: de.lookup_sparse([tf.zeros([2, 2])], [[[1]]]),
    "uint64 ids": lambda t, s: de.lookup_sparse([s, t], [tf.constant([[1]], tf.uint64)] * 2),
    "rank of ids": lambda t, s: de.lookup_sparse(t, [[[1]]]),
    "default_value": lambda t, s: t.lookup([1], insert=False, default_value=[1.0]),
    "float keys": lambda t, s: t.upsert([1.0], [[1.0, 2.0]]),
    "shape of values": lambda t, s: t.upsert([1], [[1.0]]),
    "integer values": lambda t, s: t.upsert([1], [[1, 2]]),
    "no slices": lambda t, s: t.scatter_add(tf.zeros([1, 2])),
    "keys to erase": lambda t, s: t.erase([0.5]),
    "static float ids": lambda t, s: tf.nn.embedding_lookup(s, [0.5]),
    "gather_nd": lambda t, s: s.gather_nd([[0, 1, 2]]),
    "mode": lambda t, s: de.DynamicVariable(2, mode="localized:99"),
    "static mode": lambda t, s: de.Variable([[1.0]], mode="localized:99"),
    "exchange_dtype": lambda t, s: de.DynamicVariable(2, exchange_dtype="float8"),
}


@pytest.mark.parametrize("functional", [False, True], ids=["eager", "function"])
def test_wrong_arguments_fail_before_any_collective_operation(comm, functional):
    """An error on one rank only: that rank raises it, and later calls work on all ranks."""
    table = de.DynamicVariable(DIM, "1")
    static = de.Variable(np.ones((4, DIM), np.float32))
    for name, call in ERRORS.items():
        if comm.rank == comm.size - 1:
            call = tf.function(call, autograph=False) if functional else call
            try:
                call(table, static)
            except (ValueError, TypeError, tf.errors.InvalidArgumentError):
                pass  # TensorFlow raises InvalidArgumentError for a static table on one rank.
            else:
                pytest.fail(f"{name}: no error")
        pooled = de.lookup_sparse([table, static], [[[1, comm.rank]]] * 2, combiners="sum")
        np.testing.assert_array_equal(pooled, [[[2.0, 2.0]]] * 2)
