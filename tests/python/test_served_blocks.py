"""Bases that are verified block by block: what is not read is not verified, and costs nothing."""

import numpy as np
import pytest
import tensorflow as tf
from op_helpers import ops
from served_helpers import describe, lookup, same_bits, served_table
from storage_helpers import flip

import tf_dynemb as de

KEYS = np.arange(200)


@pytest.mark.parametrize("key_type", [tf.int64, tf.int32])
def test_a_delta_reads_no_vectors_of_the_base(tmp_path, key_type):
    """Otherwise the first delta would read a large base as a whole, at once."""
    table = de.DynamicVariable(4, "ones", "host", name="user", key_type=key_type)
    keys = KEYS.astype(key_type.as_numpy_dtype)
    table.upsert(keys, np.random.default_rng(1).normal(size=[200, 4]))
    path = tmp_path / "tables"
    de.dump(path, table)
    (vectors,) = path.glob("*-base-*/*.vectors.npy")
    handle = served_table(table)
    ops.dynemb_open_served_table(handle, describe(tmp_path, path, verify_bytes=0))
    flip(vectors, 1000)
    assert ops.dynemb_contains(handle, keys).numpy().all()
    table.upsert(keys[5:], np.random.default_rng(2).normal(size=[195, 4]))
    table.erase(keys[:3])
    table.upsert([1000], np.zeros([1, 4]))
    de.incremental_dump(path, table)
    assert int(ops.dynemb_apply_snapshots(handle, str(path))) == 1
    assert int(ops.dynemb_size(handle)) == len(table) == 198
    there = np.r_[keys[:3], keys[5:]]
    assert same_bits(lookup(handle, there), lookup(table.handle, there))
    with pytest.raises(tf.errors.DataLossError, match=r"vectors\.npy is damaged"):
        lookup(handle, keys[3:5])
