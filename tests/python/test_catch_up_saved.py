"""Rows that make up for missed steps, in dumps, deltas, merged bases and checkpoints."""

import dataclasses
import datetime
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from catch_up_helpers import NUM_IDS, OPTIMIZERS, Pair

import tf_dynemb as de
from tf_dynemb import cli, serving, storage
from tf_dynemb.format.steps import Change, changes, is_record, without_steps

UTC = datetime.timezone.utc
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)


def exported(table):
    """All vectors of a table, as float32, in the order of the keys."""
    keys, vectors = de.export(table)
    return tf.cast(vectors, tf.float32).numpy()[np.argsort(keys.numpy())]


def copy_of(pair, name, learning_rate):
    """A table and a wrapper that have not been trained."""
    table = de.DynamicVariable(pair.table.dimension, name="items")
    optimizer = de.OptimizerWrapper(OPTIMIZERS[name](learning_rate), catch_up=True)
    return table, optimizer


def assert_trains_alike(pair, table, optimizer):
    """Continues the dense variable's training with a table that was loaded."""
    pair.assert_equal(table)
    pair.table, pair.optimizer = table, optimizer
    pair.train(15, ids=range(1, 6), first=100)
    pair.assert_equal()


# Each pair of a way and an optimizer, and each pair of one of these and a learning rate.
@pytest.mark.parametrize(
    ("how", "name", "learning_rate"),
    [
        (how, name, SCHEDULE if (h + n) % 2 else 0.01)
        for h, how in enumerate(["load", "merge", "checkpoint"])
        for n, name in enumerate(["adamw", "sgd nesterov", "amsgrad"])
    ],
    ids=lambda value: {SCHEDULE: "schedule", 0.01: "constant"}.get(value, value),
)
def test_training_continues(tmp_path, how, name, learning_rate):
    pair = Pair(name, learning_rate)
    pair.step(range(NUM_IDS))
    pair.train(10)
    path = tmp_path / "chain"
    if how in ("load", "merge"):
        de.dump(path, [pair.table], pair.optimizer, quiet=True)
    pair.train(10, ids=[3, 4], first=20)
    if how in ("load", "merge"):
        de.incremental_dump(path, [pair.table], optimizer=pair.optimizer, quiet=True)
        pair.train(10, ids=[5], first=30)
        de.incremental_dump(path, [pair.table], optimizer=pair.optimizer, quiet=True)
    table, optimizer = copy_of(pair, name, learning_rate)
    if how == "merge":
        assert cli.main(["merge", str(path), str(tmp_path / "merged")]) == 0
        path = tmp_path / "merged"
    if how == "checkpoint":
        tf.train.Checkpoint(table=pair.table, optimizer=pair.optimizer).write(str(path))
        read = tf.train.Checkpoint(table=table, optimizer=optimizer)
        optimizer.build([table])
        read.read(str(path)).assert_consumed()
    else:
        de.load(path, [table], optimizer, quiet=True)
    assert_trains_alike(pair, table, optimizer)


@pytest.mark.parametrize("learning_rate", [0.01, SCHEDULE], ids=["constant", "schedule"])
def test_followers_are_equal_at_each_watermark(tmp_path, learning_rate):
    pair = Pair("adamw", learning_rate)
    pair.step(range(NUM_IDS))
    de.dump(tmp_path, [pair.table], pair.optimizer, quiet=True)
    follower, optimizer = copy_of(pair, "adamw", learning_rate)
    de.load(tmp_path, [follower], optimizer, quiet=True)
    pair.assert_equal(follower)
    for part in range(4):
        pair.train(7, ids=[part, part + 1], first=10 * part)
        if part == 2:
            pair.table.upsert([9], [[1.0, 2.0, 3.0]])
            pair.dense.scatter_nd_update([[9]], [[1.0, 2.0, 3.0]])
        de.incremental_dump(tmp_path, [pair.table], optimizer=pair.optimizer, quiet=True)
        de.apply_delta(tmp_path, [follower], optimizer)
        pair.assert_equal(follower)
    assert_trains_alike(pair, follower, optimizer)


def test_files_have_rows_of_the_watermark(tmp_path):
    """A reader without optimizers gets the rows of a dense variable."""
    pair = Pair("adamw")
    pair.step(range(NUM_IDS))
    pair.train(30)
    de.dump(tmp_path, [pair.table], pair.optimizer, quiet=True)
    reader = serving.Reader(tmp_path)
    np.testing.assert_allclose(reader.lookup(range(NUM_IDS), "items"), pair.dense, 2e-6, 2e-6)
    plain = de.DynamicVariable(pair.table.dimension, name="items")
    de.load(tmp_path, [plain], quiet=True)
    pair.assert_equal(plain)
    # State of an optimizer without catch_up is other state.
    other = de.DynamicVariable(pair.table.dimension, name="items")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        de.load(tmp_path, [other], de.OptimizerWrapper(keras.optimizers.Adam()), quiet=True)
    assert any("dropped" in str(each.message) for each in caught)
    pair.assert_equal(other)


def test_weights_of_keras_models(tmp_path):
    file = str(tmp_path / "model.weights.h5")
    models = []
    for _ in range(2):
        layer = de.layers.Embedding(2, initializer="ones", name="items")
        model = keras.Sequential([keras.Input([1], dtype="int64"), layer])
        sgd = keras.optimizers.SGD(0.5, momentum=0.5, weight_decay=0.1)
        model.compile(de.OptimizerWrapper(sgd, catch_up=True), "mse", jit_compile=False)
        models.append(model)
    first, second = models
    ids = np.array([[1], [2]])
    zeros = np.zeros((2, 1, 2))
    for model in models:
        model.train_on_batch(ids, zeros)
    first.train_on_batch(ids[:1], zeros[:1])
    first.save_weights(file)
    second.load_weights(file)
    for model in models:
        model.train_on_batch(ids[:1], zeros[:1])
    expected, got = (model.layers[-1].table.lookup([1, 2]).numpy() for model in models)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_delta_since_forgotten_steps_has_all_rows(tmp_path):
    pair = Pair("adamw")
    pair.step(range(NUM_IDS))
    de.dump(tmp_path, [pair.table], quiet=True)
    reader = serving.Reader(tmp_path)
    for part in range(3):
        pair.train(3, first=3 * part)
        pair.optimizer.core.beta_1 = pair.reference.beta_1 = 0.5 - 0.1 * part
        pair.train(3, first=3 * part)
        # SOK's function returns the rows that were updated, whatever is known of the steps.
        keys, _ = de.incremental_model_dump([pair.table], datetime.datetime(2020, 1, 1, tzinfo=UTC))
        assert len(keys[0]) == NUM_IDS
        de.incremental_dump(tmp_path, [pair.table], quiet=True)
        reader.follow()
        np.testing.assert_allclose(reader.lookup(range(NUM_IDS)), pair.dense, 2e-6, 2e-6)
    assert storage.Chain.open(tmp_path).last.manifest.table("items")[1].shards[0].rows == NUM_IDS


def test_steps_are_added_to_the_steps_of_a_follower(tmp_path):
    """A follower that trains, and one whose table has another optimizer by now."""
    pair = Pair("sgd decay")
    pair.train(5)
    de.dump(tmp_path, [pair.table], pair.optimizer, quiet=True)
    followers = [copy_of(pair, "sgd decay", 0.01) for _ in range(3)]
    for table, optimizer in followers:
        de.load(tmp_path, [table], optimizer, quiet=True)
    (trains, optimizer), (plain, _), (anew, _) = followers
    de.load(tmp_path, [plain], quiet=True)
    decay = 1 - 0.01 * 0.02
    rows = pair.dense.numpy()[5:]
    for _ in range(7):
        with tf.GradientTape() as tape:
            loss = 0.0 * tf.reduce_sum(tf.nn.embedding_lookup(trains, [0]))
        optimizer.apply_gradients([(tape.gradient(loss, trains), trains)])
    pair.train(4, first=5)
    de.incremental_dump(tmp_path, [pair.table], optimizer=pair.optimizer, quiet=True)
    for table, used, steps in (
        (trains, optimizer, 11),
        (plain, de.OptimizerWrapper(OPTIMIZERS["sgd decay"](0.01), catch_up=True), 4),
        (anew, de.OptimizerWrapper(OPTIMIZERS["sgd decay"](0.01), catch_up=True), 4),
    ):
        de.apply_delta(tmp_path, [table], used)
        np.testing.assert_allclose(table.lookup(range(5, NUM_IDS)), rows * decay**steps, 3e-6)


def record(last, before, *runs, weight_decay=0.5):
    hyper = [0.0] * 10 + [weight_decay, 0.0]
    return (last, before, 0, *hyper, 0.5, 0.9, 1.0, *(number for run in runs for number in run))


def test_changes_are_of_the_steps_since():
    first = record(10, 4, (6, 0.1, 5))
    assert Change.between(first, ()) == Change()
    # 3 steps with 0.1 before the first snapshot, 1 of them after it, and 2 with 0.2.
    change = Change.between(first, record(13, 7, (4, 0.1, 9), (2, 0.2, 20)))
    np.testing.assert_allclose(change.decay, 0.95 * 0.9**2)
    state = np.ones((2, 7), np.float32)
    expected = [*[0.5**3] * 2, *[0.9**3] * 2, 1, 1, 13]
    np.testing.assert_allclose(
        change.state(state, [2, 2, 2, 1], record(13, 7)), [expected] * 2, rtol=1e-6
    )
    assert (state == 1).all()
    # Numbers of another state begin later: none of its steps is known.
    anew = record(103, 100, (3, 0.1, 1))
    np.testing.assert_allclose(Change.between(first, anew).decay, 0.95**3)
    np.testing.assert_allclose(Change.between((), anew).decay, 0.95**3)
    np.testing.assert_allclose(
        [each.decay for each in changes([first, anew, (), record(104, 100, (4, 0.1, 1))])],
        [0.95**4, 0.95, 0.95, 1.0],
    )
    assert without_steps(anew) == record(103, 103)
    for whole in (anew, record(3, 3), ()):
        assert is_record(whole)
    for damaged in (anew[:-1], anew[:-3], record(103, 100, (0, 0.1, 1), (3, 0.1, 1)), (1, 1)):
        assert not is_record(damaged)


# A dump with state and one without for each optimizer; both dtypes occur with each.
@pytest.mark.parametrize(
    ("name", "with_state", "dtype"),
    [
        (name, with_state, tf.bfloat16 if with_state == (n < 2) else tf.float32)
        for n, name in enumerate(["adamw", "sgd decay", "sgd nesterov", "adam"])
        for with_state in (False, True)
    ],
    ids=lambda value: (
        ("vectors", "state")[value] if isinstance(value, bool) else getattr(value, "name", value)
    ),
)
def test_readers_are_equal_at_each_watermark(tmp_path, name, with_state, dtype):
    """A reader of the chain, one of the merged chain, and a table that loads it."""
    rtol = 3e-6 if dtype == tf.float32 else 2e-2
    pair = Pair(name, 0.01, dtype=dtype)
    pair.compile()
    optimizer = pair.optimizer if with_state else None
    pair.step(range(NUM_IDS))
    path = tmp_path / "chain"
    de.dump(path, [pair.table], optimizer, quiet=True)
    reader = serving.Reader(path)
    everything = range(NUM_IDS)
    for part in range(7):
        first = 400 * part
        pair.train(5 if part % 2 else 230, ids=[part, part + 1], first=first)
        if part == 3:  # the learning rate is a variable
            pair.optimizer.core.learning_rate = pair.reference.learning_rate = 0.003
        if part == 4:
            pair.table.upsert([9], [[1.0, 2.0, 3.0]])
            pair.dense.scatter_nd_update([[9]], [[1.0, 2.0, 3.0]])
        delta = de.incremental_dump(path, [pair.table], optimizer=optimizer, quiet=True)
        assert delta is not None
        assert reader.follow() == 1
        expected = pair.dense.numpy() if dtype == tf.float32 else exported(pair.table)
        np.testing.assert_allclose(reader.lookup(everything), expected, rtol, rtol)
        keys, vectors = zip(*reader.items(chunk=5), strict=True)
        order = np.argsort(np.concatenate(keys))
        np.testing.assert_array_equal(np.concatenate(vectors)[order], reader.lookup(everything))
    deltas = storage.Chain.open(path).deltas
    assert deltas[-1].manifest.table("items")[1].shards[0].rows < NUM_IDS
    merged = tmp_path / "merged"
    assert cli.main(["merge", str(path), str(merged)]) == 0
    np.testing.assert_allclose(
        serving.Reader(merged).lookup(everything), reader.lookup(everything), 1e-6, 1e-7
    )
    for source in (path, merged):
        plain = de.DynamicVariable(pair.table.dimension, name="items", dtype=dtype)
        de.load(source, [plain], quiet=True)
        np.testing.assert_allclose(exported(plain), expected, rtol, rtol)


def test_deltas_of_other_optimizers_do_not_need_state(tmp_path):
    """Without weight decay, rows that a delta lacks have not changed."""
    pair = Pair("adam")
    pair.compile()
    pair.step(range(NUM_IDS))
    de.dump(tmp_path, [pair.table], quiet=True)
    follower = de.DynamicVariable(pair.table.dimension, name="items")
    de.load(tmp_path, [follower], quiet=True)
    for part in range(3):
        pair.train(180, ids=[part], first=part * 200)
        de.incremental_dump(tmp_path, [pair.table], quiet=True)
        de.apply_delta(tmp_path, [follower])
        np.testing.assert_allclose(
            follower.lookup(range(NUM_IDS), insert=False), pair.dense, 3e-6, 3e-6
        )


def test_deltas_that_shrink_other_rows_need_the_optimizer(tmp_path):
    pair = Pair("sgd decay")
    pair.step(range(NUM_IDS))
    de.dump(tmp_path, [pair.table], pair.optimizer, quiet=True)
    follower = de.DynamicVariable(pair.table.dimension, name="items")
    de.load(tmp_path, [follower], quiet=True)
    before = follower.lookup(range(NUM_IDS)).numpy()
    pair.train(3)
    de.incremental_dump(tmp_path, [pair.table], optimizer=pair.optimizer, quiet=True)
    for optimizer in (None, de.OptimizerWrapper(keras.optimizers.Adam())):
        with pytest.raises(ValueError, match=r"catch_up and weight_decay.*'items'"):
            de.apply_delta(tmp_path, [follower], optimizer)
    assert np.array_equal(follower.lookup(range(NUM_IDS)), before)


def test_a_follower_has_the_steps_of_a_trainer_that_starts_anew(tmp_path):
    """The trainer loads its dump without the state, so that its steps have other numbers."""
    pair = Pair("sgd decay")
    pair.train(20)
    de.dump(tmp_path, [pair.table], pair.optimizer, quiet=True)
    reader = serving.Reader(tmp_path)
    table, optimizer = copy_of(pair, "sgd decay", 0.01)
    de.load(tmp_path, [table], quiet=True)
    pair.table, pair.optimizer = table, optimizer
    for part in range(2):
        pair.train(10, ids=[part], first=20 + part)
        de.incremental_dump(tmp_path, [table], quiet=True)
        reader.follow()
        np.testing.assert_allclose(reader.lookup(range(NUM_IDS)), pair.dense, 3e-6, 3e-6)


def test_damaged_records_are_errors(tmp_path):
    pair = Pair("sgd decay")
    pair.train(3)
    de.dump(tmp_path, [pair.table], pair.optimizer, quiet=True)
    pair.train(3)
    de.incremental_dump(tmp_path, [pair.table], optimizer=pair.optimizer, quiet=True)
    manifest = storage.Chain.open(tmp_path).last.manifest
    _, entry = manifest.table("items")
    shard = entry.shards[0]
    assert len(shard.steps) == 21
    assert shard.steps[0] - shard.steps[1] == 3
    for steps in (shard.steps[:-1], (1, *shard.steps[1:]), (*shard.steps[:-1], "1"), (1, -1)):
        damaged = dataclasses.replace(
            manifest,
            tables=(dataclasses.replace(entry, shards=(dataclasses.replace(shard, steps=steps),)),),
        )
        with pytest.raises(storage.DataLossError, match="steps"):
            storage.Manifest.from_json(damaged.to_json(), "")
    older = dataclasses.replace(entry, shards=(dataclasses.replace(shard, steps=()),))
    assert (entry.steps, older.steps) == (shard.steps, ())
