"""Operators on the tables of exported models, compared with the trained tables, bit by bit."""

import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from op_helpers import ops
from served_helpers import describe, lookup, open_served, same_bits, served_table

import tf_dynemb as de

COMBINERS = ("sum", "mean", "sqrtn", "max")


def trained(key_type=tf.int64, dtype=tf.float32, dim=5, rows=700, seed=3, **options):
    """A table with random rows; arrays of its keys, and of known, unknown and extreme keys."""
    rng = np.random.default_rng(seed)
    table = de.DynamicVariable(
        dim, "normal", "host", key_type=key_type, dtype=dtype, name="user", **options
    )
    kind = key_type.as_numpy_dtype
    drawn = rng.integers(key_type.min, key_type.max, 2 * rows, dtype=kind)
    extremes = np.array(h.EXTREMES[key_type], kind)
    known = np.unique(np.concatenate([drawn[:rows], extremes[:3]]))
    table.upsert(known, rng.normal(size=[len(known), dim]).astype(np.float32))
    table.erase(known[5:50])
    return table, known, rng.permutation(np.concatenate([drawn, extremes]))


@pytest.mark.parametrize(("key_type", "dtype"), h.ALL_TYPES, ids=h.type_ids)
def test_lookups_have_the_bits_of_the_trained_table(tmp_path, key_type, dtype):
    table, known, asked = trained(key_type, dtype)
    (handle,) = open_served(tmp_path, table)
    for keys in (known, asked, asked[:0], asked[:1], asked[:60].reshape(3, 4, 5)):
        expected = ops.dynemb_lookup(table.handle, keys, tf.zeros([0], dtype), insert=False)
        found = lookup(handle, keys, dtype)
        assert found.shape == expected[0].shape
        assert same_bits(found, expected[0])
    default = tf.cast(tf.range(5), dtype)
    expected = ops.dynemb_lookup(table.handle, asked, default, insert=False)
    found = ops.dynemb_lookup(handle, asked, default, insert=False)
    assert same_bits(found[0], expected[0])
    assert same_bits(found[1] == h.NO_ROW, expected[1] == h.NO_ROW)
    assert same_bits(ops.dynemb_contains(handle, asked), table.contains(asked))
    assert h.size(handle) == len(table) == len(known) - 45


@pytest.mark.parametrize(("key_type", "dtype"), h.ALL_TYPES, ids=h.type_ids)
def test_pooled_lookups_have_the_bits_of_the_trained_table(tmp_path, key_type, dtype):
    table, _, asked = trained(key_type, dtype, dim=16)
    (handle,) = open_served(tmp_path, table)
    rng = np.random.default_rng(7)
    for form in h.FORMS:
        bags, bag_of = h.random_bags(rng, form, 90, len(asked))
        keys = asked[: len(bag_of)]
        weights = rng.normal(size=len(keys)).astype(np.float32)
        for w in (h.NO_WEIGHTS, weights):
            four = [keys] * 4, [bags] * 4, [90] * 4, [16] * 4, [w] * 4
            options = {"dtypes": [dtype] * 4, "combiners": COMBINERS, "insert": False}
            expected = h.lookup_sparse([table.handle] * 4, *four, **options)
            found = h.lookup_sparse([handle] * 4, *four, **options)
            for i in range(4):
                assert same_bits(found[0][i], expected[0][i])
                assert same_bits(found[2][i], expected[2][i])


def test_nothing_is_inserted(tmp_path):
    table, _, asked = trained()
    (handle,) = open_served(tmp_path, table)
    size = h.size(handle)
    none = tf.zeros([0])
    expected = ops.dynemb_lookup(table.handle, asked, none, insert=False)[0]
    assert same_bits(ops.dynemb_lookup(handle, asked, none, insert=True)[0], expected)
    pooled = h.lookup_sparse([handle], [asked], [np.int64(1)], [len(asked)], [5], insert=True)
    assert same_bits(pooled[0][0], expected)
    counts = np.ones(len(asked), np.int32)
    assert same_bits(
        ops.dynemb_lookup_counted(handle, asked, counts, dtype=tf.float32)[0], expected
    )
    assert h.size(handle) == size
    assert h.stats(handle)["size"] == size
    assert h.stats(handle)["misses"] > 0


@pytest.mark.parametrize("unadmitted", ["zeros", "initial", "skip"])
def test_keys_that_admission_refused(tmp_path, unadmitted):
    table, _, asked = trained(admission=de.Frequency(3, unadmitted=unadmitted))
    (handle,) = open_served(tmp_path, table, absent=unadmitted)
    none = tf.zeros([0])
    expected = ops.dynemb_lookup(table.handle, asked, none, insert=False)[0]
    assert same_bits(lookup(handle, asked), expected)
    bags = [np.int64(3)] * 2
    keys = asked[: len(asked) // 3 * 3]
    args = [keys] * 2, bags, [len(keys) // 3] * 2, [5] * 2
    options = {"combiners": ["mean", "max"], "insert": False}
    expected = h.lookup_sparse([table.handle] * 2, *args, **options)
    found = h.lookup_sparse([handle] * 2, *args, **options)
    assert all(same_bits(a, b) for a, b in zip(found[0], expected[0], strict=True))


def test_a_default_vector_is_read_by_lookups_that_would_insert(tmp_path):
    table, known, _ = trained()
    (handle,) = open_served(tmp_path, table, default_vector=[1.0, 2.0, 3.0, 4.0, 5.0])
    found = ops.dynemb_lookup(handle, [12345, known[0]], tf.zeros([0]), insert=True)[0]
    assert found[0].numpy().tolist() == [1, 2, 3, 4, 5]
    assert same_bits(found[1], table.lookup(known[:1])[0])


def test_weight_gradients(tmp_path):
    table, _, asked = trained()
    (handle,) = open_served(tmp_path, table)
    keys, weights = asked[:30], tf.constant(np.linspace(0.5, 2, 30), tf.float32)

    def gradient(which):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            out = h.lookup_sparse(
                [which], [keys], [np.int64(3)], [10], [5], [weights], insert=False
            )[0][0]
        return tape.gradient(out, weights)

    assert same_bits(gradient(handle), gradient(table.handle))


def test_an_empty_table(tmp_path):
    table = de.DynamicVariable(3, "uniform", "host", name="user")
    (handle,) = open_served(tmp_path, table)
    assert h.size(handle) == 0
    assert same_bits(lookup(handle, [1, -1]), table.lookup([1, -1], insert=False))


def test_several_tables_and_the_last_delta(tmp_path):
    path = tmp_path / "tables"
    tables = [
        de.DynamicVariable(dim, "uniform", "host", name=f"t{dim}", dtype=dtype)
        for dim, dtype in [(2, tf.float32), (7, tf.bfloat16)]
    ]
    rng = np.random.default_rng(11)
    for table in tables:
        table.upsert(np.arange(500), rng.normal(size=[500, table.dimension]))
    de.dump(path, tables)
    for _ in range(9):
        for table in tables:
            table.upsert(rng.integers(0, 900, 40), rng.normal(size=[40, table.dimension]))
            table.erase(rng.integers(0, 900, 40))
        de.incremental_dump(path, tables)
    descriptor = describe(tmp_path, path)
    keys = np.arange(-10, 1000)
    for table in tables:
        handle = served_table(table)
        ops.dynemb_open_served_table(handle, descriptor)
        expected = table.lookup(keys, insert=False)
        assert same_bits(lookup(handle, keys, table.dtype), expected)
        assert h.size(handle) == len(table)
        assert same_bits(ops.dynemb_contains(handle, keys), table.contains(keys))


def test_operators_that_change_tables_are_refused(tmp_path):
    table, known, _ = trained()
    (handle,) = open_served(tmp_path, table)
    before = lookup(handle, known)
    calls = {
        "DynembUpsert": lambda: ops.dynemb_upsert(handle, known[:1], tf.ones([1, 5])),
        "DynembErase": lambda: ops.dynemb_erase(handle, known),
        "DynembClear": lambda: ops.dynemb_clear(handle),
        "DynembApplyGradients": lambda: h.apply_sgd([handle], [known[:1]], [tf.ones([1, 5])]),
        "DynembApplyPooledGradients": lambda: ops.dynemb_apply_pooled_gradients(
            [handle],
            [known[:1]],
            [tf.zeros([1], tf.uint32)],
            [1],
            [h.NO_WEIGHTS],
            [tf.zeros([0, 5], tf.int32)],
            [tf.ones([1, 5])],
            h.HYPER,
            1,
            combiners=["sum"],
            optimizer="sgd",
        ),
        "DynembScores": lambda: ops.dynemb_scores(handle, known),
        "DynembSnapshot": lambda: ops.dynemb_snapshot([handle], np.array([-1])),
        "DynembExport": lambda: h.export(handle),
    }
    for name, call in calls.items():
        with pytest.raises(tf.errors.FailedPreconditionError, match=f"user.*read-only.*{name}"):
            call()
    assert same_bits(lookup(handle, known), before)


def test_a_table_that_is_not_open(tmp_path):
    table, known, _ = trained()
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"user.*has not been opened"):
        lookup(served_table(table), known)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"not a table of an exported"):
        ops.dynemb_open_served_table(table.handle, "descriptor")


def test_a_table_of_other_types(tmp_path):
    table, _, _ = trained()
    de.dump(tmp_path / "tables", table)
    descriptor = describe(tmp_path, tmp_path / "tables")
    other = de.DynamicVariable(6, "normal", "host", name="user")
    with pytest.raises(tf.errors.DataLossError, match=r"'user' on disk.*\[5\].*exported.*\[6\]"):
        ops.dynemb_open_served_table(served_table(other), descriptor)
    with pytest.raises(tf.errors.DataLossError, match="has no table 'item'"):
        ops.dynemb_open_served_table(served_table(table, "item"), descriptor)


SERVED = {
    "table": "user",
    "key_dtype": tf.int64,
    "dtype": tf.bfloat16,
    "dim": 5,
    "initializers": ["constant"],
    "initializer_args": [0.0, 0.0],
}


def test_the_handle_carries_the_width():
    @tf.function
    def traced(keys):
        values, _ = ops.dynemb_lookup(
            ops.dynemb_served_table(**SERVED), keys, tf.zeros([0], tf.bfloat16), insert=False
        )
        assert values.shape.as_list() == [7, None, 5]

    traced.get_concrete_function(tf.TensorSpec([7, None], tf.int64))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 0}, "dim=0"),
        ({"dim": 2**21}, "dim=2097152: must be in"),
        ({"default_vector": [1.0]}, "default_vector has 1 numbers, expected none or 5"),
        ({"initializer_args": [1.0] * 4}, "initializer_args has 4 numbers"),
        ({"initializers": ["normal"], "initializer_args": [0.0, -1.0]}, "-1"),
    ],
)
def test_wrong_options(wrong, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.dynemb_served_table(**{**SERVED, **wrong})


def test_a_step_reads_one_state(tmp_path):
    path = tmp_path / "tables"
    table = de.DynamicVariable(2, "zeros", "host", name="user")
    table.upsert([1], [[1.0, 1.0]])
    de.dump(path, table)
    handle = served_table(table)
    ops.dynemb_open_served_table(handle, describe(tmp_path, path))
    table.upsert([1], [[2.0, 2.0]])
    de.incremental_dump(path, table)

    @tf.function
    def request():
        before = lookup(handle, [1])
        with tf.control_dependencies([before]):
            applied = ops.dynemb_apply_snapshots(handle, str(path))
        with tf.control_dependencies([applied]):
            return before, applied, lookup(handle, [1])

    before, applied, after = request()
    assert int(applied) == 1
    assert before.numpy().tolist() == after.numpy().tolist() == [[1, 1]]
    assert lookup(handle, [1]).numpy().tolist() == [[2, 2]]
    assert request()[2].numpy().tolist() == [[2, 2]]
