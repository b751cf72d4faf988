"""Saving variables of tf_dynemb.tfra: checkpoints, and TFRA's files of rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_tfra import content, train, variable

from tf_dynemb import tfra


def test_a_checkpoint_restores_rows_and_counts(tmp_path):
    def make():
        v = variable(restrict_policy=tfra.FrequencyRestrictPolicy)
        optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
        return v, optimizer, tf.train.Checkpoint(v=v, optimizer=optimizer)

    v, optimizer, checkpoint = make()
    train(v, [1, 2], optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    restored, restored_optimizer, restored_checkpoint = make()
    restored_checkpoint.restore(path)
    assert content(restored) == content(v)
    assert len(restored.restrict_policy.status) == 2
    train(v, [1, 2], optimizer)
    train(restored, [1, 2], restored_optimizer)
    assert content(restored) == content(v)


def test_a_variable_may_stay_out_of_checkpoints(tmp_path):
    v = variable(checkpoint=False)
    v.upsert([1], [[1.0, 1.0]])
    path = tf.train.Checkpoint(v=v).write(str(tmp_path / "checkpoint"))
    other = variable(checkpoint=False)
    other.upsert([2], [[2.0, 2.0]])
    tf.train.Checkpoint(v=other).restore(path)
    assert content(other) == {2: [2.0, 2.0]}


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("key_dtype", [tf.int64, tf.int32])
def test_files_of_rows(tmp_path, dtype, key_dtype):
    v = variable("a/b", 3, key_dtype=key_dtype, value_dtype=dtype)
    keys = [5, -6, 2**31 - 1]
    values = tf.cast(tf.reshape(tf.range(9), [3, 3]), dtype)
    v.upsert(tf.constant(keys, key_dtype), values)
    v.save_to_file_system(str(tmp_path / "new"), proc_size=2, proc_rank=1)
    empty = variable("a/b", 3, key_dtype=key_dtype, value_dtype=dtype)
    empty.save_to_file_system(str(tmp_path / "new"), proc_size=2, proc_rank=0)
    beginning = tmp_path / "new" / "a_b_mht_1of1_rank1_size2"
    order = np.fromfile(f"{beginning}-keys", key_dtype.as_numpy_dtype)
    assert sorted(order) == sorted(keys)
    written = np.fromfile(f"{beginning}-values", dtype.as_numpy_dtype).reshape(3, 3)
    np.testing.assert_array_equal(written, v.lookup(order).numpy())

    other = variable("a/b", 3, key_dtype=key_dtype, value_dtype=dtype)
    other.upsert(tf.constant([5, 1], key_dtype), tf.cast([[9.0] * 3, [8.0] * 3], dtype))
    other.load_from_file_system(str(tmp_path / "new"), proc_size=2)
    assert content(other) == {**content(v), 1: [8.0] * 3}
    with pytest.raises(FileNotFoundError, match=r"no files of .*'a/b' from 4 ranks.*: a_b"):
        other.load_from_file_system(str(tmp_path / "new"), proc_size=4)
    with pytest.raises(FileNotFoundError, match=r"'c'; its variables: a_b"):
        variable("c", 3).load_from_file_system(str(tmp_path / "new"))


def test_files_are_appended_to_and_found_by_name_and_environment(tmp_path, monkeypatch):
    v = variable()
    v.upsert([1], [[1.0, 1.0]])
    monkeypatch.setenv("TFRA_SAVED_KV", str(tmp_path))
    with pytest.raises(ValueError, match="must be one name"):
        v.save_to_file_system("/nonexistent", file_name_list=["a", "b"])
    v.save_to_file_system("/nonexistent", file_name_list=["mine"])
    v.clear()
    v.upsert([2], [[2.0, 2.0]])
    v.save_to_file_system("/nonexistent", file_name_list=["mine"], append_to_file=True)
    other = variable()
    other.load_from_file_system("/nonexistent", file_name_list=["mine"])
    assert content(other) == {1: [1.0, 1.0], 2: [2.0, 2.0]}
    with pytest.raises(ValueError, match=r"2 keys of int64.* 1 vectors of 4 x float32"):
        variable("v", 4).load_from_file_system("", file_name_list=["mine"])
    with pytest.raises(ValueError, match="not a multiple of the 12 bytes of 3 x float32"):
        variable("v", 3).load_from_file_system("", file_name_list=["mine"])
