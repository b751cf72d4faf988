"""Reading what TFRA 0.8.1 saved; golden/make_tfra.py wrote it with TensorFlow 2.16."""

import json
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dynemb import tfra
from tf_dynemb.variables.transfer import export_rows

GOLDEN = pathlib.Path(__file__).parent / "golden" / "tfra"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
SLOT = "user-parameter/DynamicEmbedding/user-shadow/"
# The name of the training, the path to pass, the optimizer, and its states.
SAVED = {
    "adam": ("adam/checkpoint", keras.optimizers.Adam, ("m", "v")),
    "legacy_adam": ("legacy_adam/checkpoint", keras.optimizers.Adam, ("m", "v")),
    "adagrad_files": ("adagrad_files", keras.optimizers.Adagrad, ("accumulator",)),
    "saver": ("saver/checkpoint", keras.optimizers.Adam, ("m", "v")),
}


def rows_of(table):
    keys, values, state = (part.numpy() for part in export_rows(table))
    order = np.argsort(keys)
    return keys[order].tolist(), values[order], state[order]


@pytest.mark.parametrize("name", SAVED)
def test_vectors_and_states(name):
    path, make, states = SAVED[name]
    table = tfra.Variable(dim=4, name="user-parameter")
    table.upsert([5], tf.ones([1, 4]))
    optimizer = tfra.DynamicEmbeddingOptimizer(make(0.1))
    tfra.load_checkpoint(GOLDEN / path, [table], optimizer)
    keys, vectors, state = rows_of(table)
    assert keys == EXPECTED[name]["user-parameter"][0]
    np.testing.assert_array_equal(vectors, EXPECTED[name]["user-parameter"][1])
    for i, slot in enumerate(states):
        saved = dict(zip(*EXPECTED[name][SLOT + slot], strict=True))
        # 99 was never trained, so it has no state and starts with the initial one.
        initial = [0.1 if slot == "accumulator" else 0.0] * 4
        assert 99 not in saved
        expected = [saved.get(key, initial) for key in keys]
        np.testing.assert_array_equal(state[:, 4 * i : 4 * i + 4], np.float32(expected))


@pytest.mark.parametrize("name", SAVED)
def test_without_an_optimizer_only_vectors(name):
    layer = tfra.keras.layers.Embedding(4, name="any")
    tfra.load_checkpoint(GOLDEN / SAVED[name][0], {"user-parameter": layer})
    keys, vectors, state = rows_of(layer.params)
    assert keys == EXPECTED[name]["user-parameter"][0]
    np.testing.assert_array_equal(vectors, EXPECTED[name]["user-parameter"][1])
    assert state.shape[1] == 0


def test_training_continues_as_keras_would():
    table = tfra.Variable(dim=4, name="user-parameter")
    optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    tfra.load_checkpoint(GOLDEN / "adam/checkpoint", table, optimizer)
    optimizer.core.iterations.assign(3)
    keys, vectors, state = rows_of(table)
    dense, reference = tf.Variable(vectors), keras.optimizers.Adam(0.1)
    reference.build([dense])
    reference.iterations.assign(3)
    moments = [v for v in reference.variables if tuple(v.shape) == vectors.shape]
    for moment, value in zip(moments, (state[:, :4], state[:, 4:]), strict=True):
        moment.assign(value)
    gradient = np.linspace(-1, 1, vectors.size).reshape(vectors.shape).astype(np.float32)
    reference.apply_gradients([(tf.constant(gradient), dense)])
    optimizer.apply_gradients([(tf.IndexedSlices(gradient, tf.constant(keys, tf.int64)), table)])
    np.testing.assert_allclose(rows_of(table)[1], dense.numpy(), rtol=1e-5, atol=1e-7)


def test_state_that_was_not_saved_is_warned_of():
    table = tfra.Variable(dim=4, name="user-parameter")
    optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.Ftrl(0.1))
    with pytest.warns(UserWarning, match="no state of 'ftrl' for the table 'user-parameter'"):
        tfra.load_checkpoint(GOLDEN / "adam/checkpoint", table, optimizer)
    assert len(table) == 6


def test_a_missing_table_or_place_is_named(tmp_path):
    table = tfra.Variable(dim=4, name="other")
    for path in ("adam/checkpoint", "saver"):
        with pytest.raises(FileNotFoundError, match=r"no table 'other'; saved: .*'user-parameter'"):
            tfra.load_checkpoint(GOLDEN / path, table)
    with pytest.raises(FileNotFoundError, match="neither files nor a checkpoint of TFRA"):
        tfra.load_checkpoint(tmp_path, table)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("adam/checkpoint", "has dimension 4, but 'user-parameter:0' has 3"),
        ("adagrad_files", "not a multiple|96 bytes|types or dim differ"),
    ],
)
def test_another_dimension_changes_nothing(path, message):
    table = tfra.Variable(dim=3, name="user-parameter")
    table.upsert([1], tf.ones([1, 3]))
    with pytest.raises(ValueError, match=message):
        tfra.load_checkpoint(GOLDEN / path, table)
    assert rows_of(table)[0] == [1]


def test_damaged_files_change_nothing(tmp_path):
    shutil.copytree(GOLDEN / "saver", tmp_path / "saver")
    (values,) = tmp_path.glob("**/user-parameter_mht_2of2_rank0_size1-values")
    values.write_bytes(values.read_bytes()[:-16])
    table = tfra.Variable(dim=4, name="user-parameter")
    with pytest.raises(ValueError, match=r"mht_2of2.* keys of int64.* vectors of 4 x float32"):
        tfra.load_checkpoint(tmp_path / "saver", table)
    assert len(table) == 0


def save(tmp_path, *places, name="t"):
    table = tfra.Variable(dim=2, name=name)
    table.upsert([1], [[1.0, 2.0]])
    for rank, size in places:
        table.save_to_file_system(str(tmp_path), proc_size=size, proc_rank=rank)
    return table


def test_files_of_several_saves_are_refused(tmp_path):
    table = save(tmp_path, (0, 1), (0, 2), (1, 2))
    save(tmp_path, (0, 1), name="other")
    for load in (tfra.load_checkpoint, lambda path, table: table.load_from_file_system(str(path))):
        with pytest.raises(ValueError, match="from 1 and from 2 ranks"):
            load(tmp_path, table)
    assert len(table) == 1
    tfra.load_checkpoint(tmp_path, tfra.Variable(dim=2, name="other"))
    table.load_from_file_system(str(tmp_path), proc_size=2)


def test_a_missing_file_is_named(tmp_path):
    table = save(tmp_path, (0, 2))
    with pytest.raises(ValueError, match="incomplete: 1of1 of rank 1 of 2 is missing"):
        tfra.load_checkpoint(tmp_path, table)
    (tmp_path / "t_mht_1of1_rank0_size2-values").unlink()
    with pytest.raises(ValueError, match="incomplete"):
        table.load_from_file_system(str(tmp_path))
    assert len(table) == 1


def test_the_state_of_a_table_with_a_longer_name_is_not_loaded(tmp_path):
    for name, value in (
        ("user", 1.0),
        ("user_id", 2.0),
        ("user_id_x_m", 3.0),
        ("user_id_x_v", 4.0),
    ):
        table = tfra.Variable(dim=2, name=name)
        table.upsert([1], [[float(value)] * 2])
        table.save_to_file_system(str(tmp_path))
    short, long = (tfra.Variable(dim=2, name=name) for name in ("user", "user_id"))
    optimizer = tfra.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    with pytest.warns(UserWarning, match="no state of 'adam' for the table 'user'"):
        tfra.load_checkpoint(tmp_path, [short, long], optimizer)
    assert rows_of(short)[2].tolist() == [[0.0] * 4]
    assert rows_of(long)[2].tolist() == [[3.0, 3.0, 4.0, 4.0]]
    other = tfra.DynamicEmbeddingOptimizer(keras.optimizers.RMSprop(0.1))
    with pytest.warns(UserWarning, match="the state of 'rmsprop' is not loaded"):
        tfra.load_checkpoint(tmp_path, long, other)


def test_string_keys_are_hashed_by_a_layer_of_strings(tmp_path):
    prefix = str(tmp_path / "strings")
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=["s_mht_1of1-keys", "s_mht_1of1-values"],
        shape_and_slices=["", ""],
        tensors=[tf.constant(["a", "b"]), tf.constant([[1.0, 2.0], [3.0, 4.0]])],
    )
    layer = tfra.keras.layers.Embedding(2, key_dtype=tf.string)
    tfra.load_checkpoint(prefix, {"s": layer})
    assert layer(tf.constant(["b", "a"])).numpy().tolist() == [[3.0, 4.0], [1.0, 2.0]]
    with pytest.raises(TypeError, match=r"TFRA's table 's' has .* keys: load it into a layer"):
        tfra.load_checkpoint(prefix, {"s": tfra.Variable(dim=2, name="s")})


def test_files_of_another_dtype(tmp_path):
    table = tfra.Variable(dim=2, name="a/b", value_dtype=tf.float16)
    table.upsert([1, 2], [[1.0, 2.0], [3.0, 4.0]])
    table.save_to_file_system(str(tmp_path))
    other = tfra.Variable(dim=2, name="a/b")
    tfra.load_checkpoint(tmp_path, other, value_dtype=tf.float16)
    assert rows_of(other)[1].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_saver_that_numbers_its_steps(tmp_path):
    shutil.copytree(GOLDEN / "saver/TFRADynamicEmbedding", tmp_path / "TFRADynamicEmbedding-700")
    table = tfra.Variable(dim=4, name="user-parameter")
    tfra.load_checkpoint(tmp_path / "model.ckpt-700", table)
    assert rows_of(table)[0] == EXPECTED["saver"]["user-parameter"][0]
