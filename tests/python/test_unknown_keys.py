"""A key without a row has the same vector in the model, in a dump's reader, and after a delta."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import serving

UNKNOWN = np.array([0, 1, -1, 5, 2**40 + 3, -(2**62), 2**63 - 1, -(2**63)], np.int64)
INITIALIZERS = {
    "default": None,
    "uniform": keras.initializers.RandomUniform(-3.0, 5.0),
    "normal": keras.initializers.RandomNormal(0.25, 2.0),
    "truncated": keras.initializers.TruncatedNormal(-1.0, 0.5),
    "glorot": "glorot_uniform",
    "ones": "ones",
    "columns": ["1.5", "uniform", "normal", "normal", keras.initializers.RandomNormal(9.0, 0.0)],
}


def reader_of(tmp_path, table, **kwargs):
    de.dump(tmp_path, [table], **kwargs)
    return serving.Reader(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_initial_vectors_have_the_same_bits(initializer, dtype, tmp_path):
    dimension = 5 if initializer == "columns" else 67
    table = de.DynamicVariable(
        dimension, INITIALIZERS[initializer], dtype=dtype, name="t", seed=-(2**62) - 11
    )
    de.assign(table, [7], np.ones((1, dimension)))
    reader = reader_of(tmp_path, table)
    rng = np.random.default_rng(0)
    keys = np.concatenate([UNKNOWN, rng.integers(-(2**63), 2**63 - 1, 3000)])
    expected = tf.cast(table.lookup(keys, insert=False), tf.float32).numpy()
    got = reader.lookup(keys)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    assert len(table) == 1
    np.testing.assert_array_equal(reader.lookup([7]), np.ones((1, dimension)))
    # The row that training creates starts with the same vector.
    np.testing.assert_array_equal(tf.cast(table.lookup(keys), tf.float32), expected)


@pytest.mark.parametrize("key_type", ["int32", "uint64"])
def test_other_key_types(key_type, tmp_path):
    limits = np.iinfo(key_type)
    table = de.DynamicVariable(8, key_type=key_type, name="t")
    keys = np.array([0, 3, limits.max, limits.min], key_type)
    reader = reader_of(tmp_path, table)
    np.testing.assert_array_equal(reader.lookup(keys), table.lookup(keys, insert=False))


@pytest.mark.parametrize("default", [0.0, 0.5, [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("combiner", [None, "sum", "mean", "sqrtn"])
def test_default_vector_of_a_layer(default, combiner, tmp_path):
    layer = de.layers.Embedding(3, default_vector=default, combiner=combiner, padding_id=-9)
    ids = np.array([[1, 2, 40], [50, 1, -9]])
    layer(ids[:, :2], training=True)
    got = layer(ids, training=False).numpy()
    reader = reader_of(tmp_path, layer.table)
    rows = reader.lookup(ids)
    np.testing.assert_array_equal(rows[0, 2], np.broadcast_to(default, 3))
    np.testing.assert_array_equal(rows[1, 2], np.zeros(3))
    if combiner is None:
        np.testing.assert_array_equal(rows, got)
        return
    count = np.array([[3], [2]])
    scale = {"sum": 1, "mean": count, "sqrtn": np.sqrt(count)}[combiner]
    np.testing.assert_allclose(rows.sum(1) / scale, got, rtol=1e-6)


def test_default_vector_of_a_table_in_all_lookups(tmp_path):
    table = de.DynamicVariable(2, "ones", name="t")
    other = de.DynamicVariable(2, "ones", name="u")
    table.default_vector = [4.0, 5.0]
    assert table.default_vector == (4.0, 5.0)
    table.lookup([1])
    ids = tf.ragged.constant([[1, 2], [3], []], dtype=tf.int64)
    np.testing.assert_array_equal(table.lookup([1, 2], insert=False), [[1, 1], [4, 5]])
    both = de.lookup_sparse([other, table], [ids, ids], combiners="sum", insert=False)
    np.testing.assert_array_equal(both[0], [[2, 2], [1, 1], [0, 0]])
    np.testing.assert_array_equal(both[1], [[5, 6], [4, 5], [0, 0]])
    np.testing.assert_array_equal(
        table.lookup([2], insert=False, default_value=[0.0, 1.0]), [[0, 1]]
    )
    reader = reader_of(tmp_path, table)
    np.testing.assert_array_equal(reader.lookup([1, 2]), [[1, 1], [4, 5]])
    np.testing.assert_array_equal(reader.lookup([1, 2], default=9.0), [[1, 1], [9, 9]])
    np.testing.assert_array_equal(reader.lookup_many({"t": [1, 2]})["t"], [[1, 1], [4, 5]])
    # Training does not use it.
    np.testing.assert_array_equal(table.lookup([2]), [[1, 1]])
    table.default_vector = None
    np.testing.assert_array_equal(table.lookup([99], insert=False), [[1, 1]])
    for wrong in ([1.0], np.nan, [[1.0, 2.0]]):
        with pytest.raises(ValueError, match="default_vector must be"):
            table.default_vector = wrong


def test_delta_brings_a_new_default(tmp_path):
    table = de.DynamicVariable(2, "zeros", name="t")
    table.default_vector = 1.0
    table.lookup([1])
    first = de.dump(tmp_path, [table])
    reader = serving.Reader(tmp_path)
    np.testing.assert_array_equal(reader.lookup([8]), [[1, 1]])
    table.default_vector = 2.0
    table.erase([1])
    de.incremental_dump(tmp_path, [table], since=first)
    assert reader.follow() == 1
    np.testing.assert_array_equal(reader.lookup([8, 1]), [[2, 2], [2, 2]])


def test_static_tables_read_zeros(tmp_path):
    matrix = de.Variable(np.ones((3, 2), np.float32), name="m")
    reader = reader_of(tmp_path, matrix)
    np.testing.assert_array_equal(reader.lookup([2, 3]), [[1, 1], [0, 0]])
