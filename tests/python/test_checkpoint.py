"""Checkpoints of TensorFlow and of Keras contain tables, bit by bit."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb.tables.content import read_content

RNG = np.random.default_rng(0)
IDS = RNG.integers(-(2**40), 2**40, 500)
X = RNG.choice(IDS, (256, 3))
Y = RNG.random((256, 1))


def make_model(optimizer=None, dtype="float32", **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            de.layers.Embedding(4, dtype=dtype, name="ids", **options),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = optimizer or keras.optimizers.Adam(0.05)
    model.compile(optimizer=de.OptimizerWrapper(optimizer), loss="mse")
    return model


def train(model, epochs=1, **kwargs):
    model.fit(X, Y, epochs=epochs, verbose=0, batch_size=32, shuffle=False, **kwargs)


def table_of(model):
    return model.layers[0].table


def rows_of(table):
    """Returns {key: (bits of the vector, bits of the state, update, access)}, times in ticks."""
    saved = read_content(table)
    base = json.loads(saved.info)["base"]
    rows = saved.rows
    return {
        key: (vector.tobytes(), state.tobytes(), base + int(update), base + int(access))
        for key, vector, state, update, access in zip(
            rows.keys.tolist(), rows.vectors, rows.state, rows.updates, rows.accesses, strict=True
        )
    }


def weights_of(model):
    return [w.tobytes() for layer in model.layers[1:] for w in layer.get_weights()]


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "nadam": lambda: keras.optimizers.Nadam(0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restore_continues_with_the_same_bits(tmp_path, name):
    model = make_model(OPTIMIZERS[name]())
    train(model, 2)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "ck")
    at_save = rows_of(table_of(model))
    train(model)
    expected = rows_of(table_of(model)), weights_of(model), int(model.optimizer.iterations)

    # Into the same model, and into another whose optimizer has no variables yet.
    checkpoint.restore(path).assert_consumed()
    assert rows_of(table_of(model)) == at_save
    fresh = make_model(OPTIMIZERS[name]())
    status = tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).restore(path)
    assert rows_of(table_of(fresh)) == at_save
    for restored in (model, fresh):
        train(restored)
        without_times = [
            {key: row[:2] for key, row in rows.items()}
            for rows in (rows_of(table_of(restored)), expected[0])
        ]
        assert without_times[0] == without_times[1]
        assert weights_of(restored) == expected[1]
        assert int(restored.optimizer.iterations) == expected[2]
    status.assert_existing_objects_matched()


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint64])
def test_a_table_alone(tmp_path, dtype, key_type):
    keys = tf.constant(RNG.integers(0, 2**31 - 1, 300), key_type)
    table = de.DynamicVariable(4, key_type=key_type, dtype=dtype, initializer="normal")
    table.lookup(keys)
    table.erase(keys[:50])
    path = tf.train.Checkpoint(table=table).save(tmp_path / "ck")
    saved = rows_of(table)
    table.clear()
    other = de.DynamicVariable(4, key_type=key_type, dtype=dtype)
    other.lookup(keys[:10])
    for restored in (table, other):
        tf.train.Checkpoint(table=restored).restore(path).assert_consumed()
        assert rows_of(restored) == saved


def test_an_empty_table(tmp_path):
    table = de.DynamicVariable(4)
    path = tf.train.Checkpoint(table=table).save(tmp_path / "ck")
    table.lookup([1, 2])
    tf.train.Checkpoint(table=table).restore(path).assert_consumed()
    assert len(table) == 0


def test_checkpoint_manager(tmp_path):
    table = de.DynamicVariable(2)
    step = tf.Variable(0)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(table=table, step=step), tmp_path, max_to_keep=2
    )
    states = []
    for i in range(3):
        table.upsert([i], [[1.0, i]])
        step.assign(i)
        manager.save()
        states.append(rows_of(table))
    assert len(manager.checkpoints) == 2
    manager.checkpoint.restore(manager.checkpoints[0])
    assert rows_of(table) == states[1]
    assert int(step) == 1
    manager.restore_or_initialize()
    assert rows_of(table) == states[2]


def test_state_of_another_optimizer_is_dropped_with_a_warning(tmp_path):
    model = make_model(keras.optimizers.Adagrad(0.1))
    train(model)
    path = tf.train.Checkpoint(table=table_of(model)).save(tmp_path / "ck")
    other = make_model(keras.optimizers.Adam(0.1))
    train(other)
    with pytest.warns(UserWarning, match=r"state of 'adagrad' .* is dropped: .* with 'adam'"):
        tf.train.Checkpoint(table=table_of(other)).restore(path)
    vectors = [{k: row[0] for k, row in rows_of(table_of(m)).items()} for m in (model, other)]
    assert vectors[0] == vectors[1]
    assert not np.frombuffer(b"".join(row[1] for row in rows_of(table_of(other)).values())).any()
    train(other)


@pytest.mark.parametrize("other", [{"dimension": 3}, {"dimension": 2, "dtype": tf.float16}])
def test_a_different_table_is_refused_and_unchanged(tmp_path, other):
    table = de.DynamicVariable(2)
    table.lookup([1, 2, 3])
    path = tf.train.Checkpoint(table=table).save(tmp_path / "ck")
    different = de.DynamicVariable(**other)
    different.lookup([7])
    before = rows_of(different)
    # For another dtype, TensorFlow raises the error.
    says = r"vectors of dimension 3, but the checkpoint|expected dtype half"
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=says):
        tf.train.Checkpoint(table=different).restore(path)
    assert rows_of(different) == before


def test_model_checkpoint(tmp_path):
    model = make_model()
    saver = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    train(model, 2, callbacks=[saver])
    rows, predictions = rows_of(table_of(model)), model.predict(X, verbose=0)
    train(model)
    model.load_weights(tmp_path / "2.weights.h5")
    assert rows_of(table_of(model)) == rows
    np.testing.assert_array_equal(model.predict(X, verbose=0), predictions)
    assert int(model.optimizer.iterations) == 16


class InterruptionError(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptionError


def test_backup_and_restore(tmp_path):
    uninterrupted = make_model()
    train(uninterrupted, 4)
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(InterruptionError):
        train(make_model(), 4, callbacks=[backup, Interrupt()])
    resumed = make_model()
    train(resumed, 4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    rows = [
        {key: row[:2] for key, row in rows_of(table_of(m)).items()}
        for m in (uninterrupted, resumed)
    ]
    assert rows[0] == rows[1]
    assert weights_of(uninterrupted) == weights_of(resumed)


def test_weights_of_another_dtype_are_converted(tmp_path):
    model = make_model()
    train(model)
    model.save_weights(tmp_path / "x.weights.h5")
    half = make_model(dtype="bfloat16")
    half.load_weights(tmp_path / "x.weights.h5")
    keys = sorted(rows_of(table_of(model)))
    exact, rounded = (table_of(m).lookup(tf.constant(keys)) for m in (model, half))
    np.testing.assert_array_equal(tf.cast(exact, rounded.dtype).numpy(), rounded.numpy())


def test_a_small_table_keeps_some_rows(tmp_path):
    table = de.DynamicVariable(2)
    for i in range(100):
        table.lookup([i])
    path = tf.train.Checkpoint(table=table).save(tmp_path / "ck")
    small = de.DynamicVariable(2, init_capacity=8, max_capacity=20)
    tf.train.Checkpoint(table=small).restore(path)
    assert len(small) == 20
    assert set(rows_of(small).items()) <= set(rows_of(table).items())


def test_calls_in_a_graph_are_refused():
    table = de.DynamicVariable(2)

    @tf.function
    def save():
        return table._serialize_to_tensors()

    with pytest.raises(NotImplementedError, match="eagerly"):
        save()
