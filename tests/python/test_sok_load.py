"""Loads dumps of SOK into variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_sok_dump import KEY, KEYS, VECTORS, WEIGHT, write, write_table

import tf_dynemb as de
from tf_dynemb.variables.transfer import export_rows


def rows_of(table):
    keys, values, state = (part.numpy() for part in export_rows(table))
    return {
        k: (v.tolist(), s.tolist()) for k, v, s in zip(keys.tolist(), values, state, strict=True)
    }


@pytest.mark.parametrize("file_name", ["users", "users_0"])
def test_keys_and_vectors(tmp_path, file_name):
    write_table(tmp_path, file_name)
    table = de.DynamicVariable(3, name="users")
    table.lookup([1, 2])
    de.load_sok_dump(tmp_path, [table])
    expected = {
        key: (vector, []) for key, vector in zip(KEYS.tolist(), VECTORS.tolist(), strict=True)
    }
    assert rows_of(table) == expected


def test_rows_from_elsewhere_do_not_replace_a_chain(tmp_path):
    (tmp_path / "sok").mkdir()
    write_table(tmp_path / "sok", "users")
    table = de.DynamicVariable(3, name="users")
    de.dump(tmp_path / "chain", table)
    de.load_sok_dump(tmp_path / "sok", table)
    with pytest.raises(ValueError, match="another table 'users'"):
        de.dump(tmp_path / "chain", table)


def test_state_of_the_same_optimizer_and_then_training(tmp_path):
    write_table(tmp_path, m=VECTORS * 2, v=VECTORS + 1)
    table = de.DynamicVariable(3, name="users")
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.1))
    de.load_sok_dump(tmp_path, table, optimizer)
    states = np.concatenate([VECTORS * 2, VECTORS + 1], axis=1)
    rows = rows_of(table)
    assert {k: row[1] for k, row in rows.items()} == dict(
        zip(KEYS.tolist(), states.tolist(), strict=True)
    )

    # A step continues from that state, as it would in Keras.
    dense = tf.Variable(VECTORS)
    reference = keras.optimizers.Adam(0.1)
    reference.build([dense])
    moments = [v for v in reference.variables if v.shape == dense.shape]
    for moment, value in zip(moments, (VECTORS * 2, VECTORS + 1), strict=True):
        moment.assign(value)
    for optimizer_, variable, ids in ((optimizer, table, KEYS), (reference, dense, np.arange(4))):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, ids) ** 2)
        gradient = (
            tf.convert_to_tensor(tape.gradient(loss, variable))
            if variable is dense
            else tape.gradient(loss, variable)
        )
        optimizer_.apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(table.lookup(KEYS).numpy(), dense.numpy(), rtol=1e-6)


def test_state_of_another_optimizer_is_dropped_with_a_warning(tmp_path):
    write_table(tmp_path, m=VECTORS, v=VECTORS)
    table = de.DynamicVariable(3, name="users")
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25))
    with pytest.warns(UserWarning, match=r"state of Adam .*'users' .* dropped: .* with 'adagrad'"):
        de.load_sok_dump(tmp_path, [table], optimizer)
    assert {tuple(row[1]) for row in rows_of(table).values()} == {(0.25, 0.25, 0.25)}


def test_without_an_optimizer_no_state_is_loaded(tmp_path):
    write_table(tmp_path, m=VECTORS, v=VECTORS)
    table = de.DynamicVariable(3, name="users")
    de.load_sok_dump(tmp_path, [table])
    assert {tuple(row[1]) for row in rows_of(table).values()} == {()}


def test_dense_table_in_the_order_of_its_keys(tmp_path):
    write(tmp_path / "d-key", KEY, np.array([2, 0, 3, 1]))
    write(tmp_path / "d-weight", WEIGHT, VECTORS)
    variable = de.Variable(tf.zeros([4, 3]), name="d")
    de.load_sok_dump(tmp_path, [variable])
    np.testing.assert_array_equal(variable.numpy(), VECTORS[[1, 3, 0, 2]])


def test_other_types_are_converted(tmp_path):
    write(tmp_path / "t-key", KEY, np.array([1, 2, 3], np.int64))
    write(tmp_path / "t-weight", WEIGHT, np.full([3, 2], 1 / 3, np.float64))
    table = de.DynamicVariable(2, name="t", key_type=tf.int32, dtype=tf.bfloat16)
    de.load_sok_dump(tmp_path, {"t": table})
    assert (table.lookup([1, 2, 3]).numpy() == tf.constant(1 / 3, tf.bfloat16).numpy()).all()


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        (lambda: de.DynamicVariable(4), "dimension 3, but .* has 4"),
        (lambda: de.DynamicVariable(3, key_type=tf.int32), "int64 keys that do not fit int32"),
        (lambda: de.DynamicVariable(3, key_type=tf.uint64), "int64 keys that do not fit uint64"),
        (lambda: de.Variable(tf.zeros([4, 3])), "4 rows that are not the 4 of"),
    ],
)
def test_mismatch_changes_nothing(tmp_path, variable, says):
    write_table(tmp_path)
    bad = variable()
    good = de.DynamicVariable(3)
    write_table(tmp_path, "good")
    good.lookup([9])
    before = rows_of(good)
    with pytest.raises(ValueError, match=says):
        de.load_sok_dump(tmp_path, {"good": good, "users": bad})
    assert rows_of(good) == before
    with pytest.raises(ValueError, match="missing"):
        de.load_sok_dump(tmp_path, {"good": good, "absent": de.DynamicVariable(3)})
    assert rows_of(good) == before
