"""dump, load, incremental_dump and apply_delta: arguments, results and errors."""

import datetime
import os
import signal
import threading
import time
import warnings

import keras
import numpy as np
import pytest
import pytz
import tensorflow as tf
from test_checkpoint import rows_of

import tf_dynemb as de
from tf_dynemb import storage
from tf_dynemb.snapshots import columns
from tf_dynemb.tables.cut import Cut

UTC = datetime.timezone.utc


def vectors_of(table):
    keys, values = de.export(table)
    values = tf.cast(values, tf.float32)
    return dict(zip(keys.numpy().tolist(), map(tuple, values.numpy().tolist()), strict=True))


def make(name="t", dim=2, **kwargs):
    return de.DynamicVariable(dim, name=name, initializer="normal", **kwargs)


def step(optimizer, tables, ids):
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(tf.nn.embedding_lookup(t, ids) ** 2) for t in tables)
    optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))


@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint64])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_round_trip_of_every_type(tmp_path, key_type, dtype):
    table, other = (make(key_type=key_type, dtype=dtype) for _ in range(2))
    limits = np.iinfo(key_type.as_numpy_dtype)
    table.lookup(tf.constant([limits.min, limits.max, 0, 1, 5], key_type))
    de.dump(tmp_path, table)
    de.load(tmp_path, other)
    assert rows_of(other) == rows_of(table)


def test_an_empty_table(tmp_path):
    table, other = make(), make()
    other.lookup([1])
    de.dump(tmp_path, [table])
    de.incremental_dump(tmp_path, [table])
    de.load(tmp_path, [other])
    assert len(other) == 0


def test_a_keras_model_its_variables_and_its_layers_table(tmp_path):
    model = keras.Sequential([keras.Input((1,), dtype="int64"), de.layers.Embedding(2)])
    model.layers[0](tf.constant([[1], [2]]), training=True)
    ours, others = de.filter_variables(model.trainable_variables)
    assert not others
    de.dump(tmp_path, {"ids": ours[0]})
    other = de.DynamicVariable(2)
    de.load(tmp_path, {"ids": other})
    assert vectors_of(other) == vectors_of(model.layers[0].table)


def test_subset_renamed_and_static(tmp_path):
    a, b = make("a"), make("b", 3)
    s = de.Variable(np.arange(12.0, dtype=np.float32).reshape(4, 3), name="s")
    a.lookup([1, 2])
    b.lookup([3])
    de.dump(tmp_path, [a, s, b])
    renamed, static = make("c", 3), de.Variable(tf.zeros([4, 3]), name="s")
    de.load(tmp_path, {"b": renamed})
    assert vectors_of(renamed) == vectors_of(b)
    de.load(tmp_path, [static])
    np.testing.assert_array_equal(static.numpy(), s.numpy())
    assert [t.name for t in storage.Chain.open(tmp_path).last.manifest.tables] == ["a", "b", "s"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([0, 1, 3], "keys on disk that are not row numbers below 3"),
        ([0, 1, -1], "keys on disk that are not row numbers below 3"),
        ([0, 1, 1], "lacks rows of 's"),
    ],
)
def test_a_matrix_whose_rows_are_not_all_there(tmp_path, keys, says):
    static = de.Variable(tf.zeros([3, 2]), name="s")
    columns = {
        "keys": np.array(keys),
        "vectors": np.ones((3, 2), np.float32),
        "updates": np.zeros(3, np.uint32),
        "accesses": np.zeros(3, np.uint32),
    }
    table = storage.TableEntry(
        "s",
        2,
        "int64",
        "float32",
        0,
        storage.InitializerEntry(("constant",), (0.0, 0.0)),
        None,
        (storage.Shard(0, 3, 0, 0),),
    )
    with storage.Publication(tmp_path, "base") as publication:
        for column, values in columns.items():
            publication.column(0, column, values.dtype, values.shape[1:]).append(values)
        publication.write_index(0)
        publication.publish([table], watermark=1, watermark_utc_ns=1)
    with pytest.raises(ValueError, match=says):
        de.load(tmp_path, static)
    assert not static.numpy().any()


def test_optimizer_comes_along_and_training_goes_on(tmp_path):
    def new():
        return [make("a"), make("b", 3)], de.OptimizerWrapper(keras.optimizers.Adam(0.1))

    tables, optimizer = new()
    for i in range(3):
        step(optimizer, tables, [i, 7, i])
    optimizer.learning_rate = 0.25
    de.dump(tmp_path, tables, optimizer)
    step(optimizer, tables, [1, 9])
    de.incremental_dump(tmp_path, tables, optimizer=optimizer)
    others, other_optimizer = new()
    de.load(tmp_path, others, other_optimizer)
    assert int(other_optimizer.iterations) == 4
    assert float(other_optimizer.learning_rate) == 0.25
    for table, other in zip(tables, others, strict=True):
        assert rows_of(other) == rows_of(table)
    for i in range(3):
        step(optimizer, tables, [i, 8])
        step(other_optimizer, others, [i, 8])
    for table, other in zip(tables, others, strict=True):
        assert {k: r[:2] for k, r in rows_of(other).items()} == {
            k: r[:2] for k, r in rows_of(table).items()
        }


def test_state_of_another_optimizer_is_dropped_and_named(tmp_path):
    table, other = make(), make()
    adam, adagrad = (
        de.OptimizerWrapper(o(0.1)) for o in (keras.optimizers.Adam, keras.optimizers.Adagrad)
    )
    step(adam, [table], [1, 2])
    de.dump(tmp_path, table, adam)
    with pytest.warns(UserWarning, match="Adam|adam") as caught:
        de.load(tmp_path, other, adagrad)
    # They point to this file, not into the package.
    assert {warning.filename for warning in caught} == {__file__}
    said = " ".join(str(w.message) for w in caught)
    assert "state of 'adam' that table 't'" in said
    assert "the optimizer Adam" in said
    assert vectors_of(other) == vectors_of(table)
    assert int(adagrad.iterations) == 0
    step(adagrad, [other], [1])


def test_without_the_optimizer_rows_begin_with_fresh_state(tmp_path):
    table, other = make(), make()
    optimizers = [de.OptimizerWrapper(keras.optimizers.Adagrad(0.1, 0.5)) for _ in range(2)]
    step(optimizers[0], [table], [1, 2])
    step(optimizers[1], [other], [3])
    de.dump(tmp_path, table)
    de.load(tmp_path, other)
    assert vectors_of(other) == vectors_of(table)
    state = {row[1] for row in rows_of(other).values()}
    assert state == {np.full(2, 0.5, np.float32).tobytes()}


def test_other_dtypes_only_when_asked(tmp_path):
    table = make()
    table.lookup(tf.range(100))
    de.dump(tmp_path, table)
    other = make(dtype=tf.bfloat16)
    with pytest.raises(ValueError, match=r"dtype float32 on disk.*bfloat16.*cast=True"):
        de.load(tmp_path, other)
    de.load(tmp_path, other, cast=True)
    for key, vector in vectors_of(table).items():
        exact = tf.cast(tf.cast(tf.constant(vector), tf.bfloat16), tf.float32)
        assert vectors_of(other)[key] == tuple(exact.numpy().tolist())
    de.dump(tmp_path, other)
    back = make()
    de.load(tmp_path, back, cast=True)
    assert vectors_of(back) == vectors_of(other)


def test_a_smaller_table_keeps_what_was_used_last_and_says_so(tmp_path):
    table = make()
    for i in range(60):
        table.lookup([i])
    de.dump(tmp_path, table)
    small = make(init_capacity=4, max_capacity=20)
    with pytest.warns(UserWarning, match="40 of the rows of table 't' did not fit"):
        de.load(tmp_path, small)
    assert len(small) == 20
    # 60 rows are in a few buckets, so "least recently used" is nearly exact.
    assert min(vectors_of(small)) >= 30
    fixed = make(init_capacity=4, max_capacity=20, evict_strategy="none")
    fixed.lookup([5])
    before = rows_of(fixed)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="cannot hold the rows of 't'"):
        de.load(tmp_path, fixed)
    assert rows_of(fixed) == before


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: make(dim=3), "dimension 2 on disk, but .* has 3"),
        (lambda: make(key_type=tf.int32), "key_type int64 on disk, but .* has int32"),
        (lambda: make("nobody"), "has no table 'nobody'; its tables are a, t"),
        (lambda: de.Variable(tf.zeros([5, 2]), name="t"), "3 rows on disk, but .* has 5"),
    ],
)
def test_a_load_that_fails_changes_nothing(tmp_path, other, says):
    good, table = make("a"), make()
    good.lookup([1])
    table.lookup([1, 2, 3])
    de.dump(tmp_path, [good, table])
    good.lookup([2])
    before = rows_of(good)
    with pytest.raises(ValueError, match=says):
        de.load(tmp_path, [good, other()])
    assert rows_of(good) == before


def test_bad_arguments(tmp_path):
    table = make()
    table.lookup([1])
    with pytest.raises(TypeError, match="DynamicVariables or"):
        de.dump(tmp_path, [tf.Variable([1.0])])
    with pytest.raises(ValueError, match="Two of the variables are named 't'"):
        de.dump(tmp_path, [table, make()])
    with pytest.raises(ValueError, match="named twice"):
        de.dump(tmp_path, {"a": table, "b": table})
    with pytest.raises(ValueError, match="empty"):
        de.dump(tmp_path, [])
    with pytest.raises(TypeError, match="OptimizerWrapper"):
        de.dump(tmp_path, table, keras.optimizers.Adam())
    with pytest.raises(FileNotFoundError, match="no snapshot"):
        de.load(tmp_path, table)
    assert len(table) == 1
    de.dump(tmp_path, table)
    with pytest.raises(TypeError, match="dense"):
        de.incremental_dump(tmp_path, [de.Variable(tf.zeros([1, 1]), name="d")])
    with pytest.raises(TypeError, match="Watermark, a datetime or None"):
        de.incremental_dump(tmp_path, table, since=5)

    @tf.function
    def in_graph():
        de.dump(tmp_path, table)

    with pytest.raises(RuntimeError, match=r"outside tf.function"):
        in_graph()
    assert len(storage.Chain.open(tmp_path).snapshots) == 1


def test_times_without_a_zone_are_refused():
    table = make()
    for call in (
        lambda t: de.incremental_model_dump([table], t),
        lambda t: de.incremental_dump("/nonexistent", [table], since=t),
    ):
        with pytest.raises(ValueError, match=r"no time zone"):
            call(datetime.datetime(2026, 1, 1))
    with pytest.raises(TypeError, match="must be a datetime"):
        de.incremental_model_dump([table], 5)


def test_incremental_model_dump_as_in_sok():
    a, b = make("a"), make("b", 3, dtype=tf.bfloat16)
    a.lookup([1, 2, 3])
    b.lookup([1])
    time.sleep(0.01)
    begin = pytz.utc.localize(datetime.datetime.now(UTC).replace(tzinfo=None))
    time.sleep(0.01)
    a.lookup([1], insert=False)  # reading is not an update
    a.upsert([2, 9], [[1.0, 2.0], [3.0, 4.0]])
    b.upsert([], tf.zeros([0, 3]))
    keys, values = de.incremental_model_dump([a, b], begin)
    _, (half,) = de.incremental_model_dump([b], datetime.datetime(2000, 1, 1, tzinfo=UTC))
    np.testing.assert_array_equal(half, b.lookup([1]).numpy())
    order = np.argsort(keys[0])
    assert keys[0][order].tolist() == [2, 9]
    assert values[0][order].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert keys[1].shape == (0,)
    assert values[1].shape == (0, 3)
    zone = datetime.timezone(datetime.timedelta(hours=5))
    again, _ = de.incremental_model_dump([a], begin.astimezone(zone))
    assert sorted(again[0]) == [2, 9]
    everything, _ = de.incremental_model_dump([a], datetime.datetime(2000, 1, 1, tzinfo=UTC))
    assert sorted(everything[0]) == [1, 2, 3, 9]


def delta_of(path):
    snapshot = storage.Chain.open(path).last
    keys = snapshot.column(0, "keys").tolist()
    return sorted(keys), sorted(snapshot.column(0, "deleted").tolist())


def test_a_delta_holds_what_changed_and_nothing_else(tmp_path):
    table = make()
    table.lookup([1, 2, 3, 4, 5, 6])
    de.dump(tmp_path, table)
    table.lookup([1], insert=True)  # found, so not changed
    table.upsert([2, 10], tf.ones([2, 2]))
    table.erase([3, 4])
    table.forget([5])
    table.lookup([4, 11])  # inserted again, and a new key that is erased at once
    table.erase([11])
    de.incremental_dump(tmp_path, table)
    assert delta_of(tmp_path) == ([2, 4, 10], [3, 5, 11])
    de.incremental_dump(tmp_path, table)
    assert delta_of(tmp_path) == ([], [])
    table.clear()
    de.incremental_dump(tmp_path, table)
    assert delta_of(tmp_path) == ([], [1, 2, 4, 6, 10])


def test_since_a_watermark_and_since_a_time(tmp_path):
    table = make()
    table.lookup([1])
    first = de.dump(tmp_path / "chain", table)
    table.lookup([2])
    second = de.incremental_dump(tmp_path / "chain", table)
    time.sleep(0.01)
    now = datetime.datetime.now(UTC)
    time.sleep(0.01)
    table.lookup([3])
    de.incremental_dump(tmp_path / "a", table, since=second)
    assert delta_of(tmp_path / "a") == ([3], [])
    de.incremental_dump(tmp_path / "b", table, since=first)
    assert delta_of(tmp_path / "b") == ([2, 3], [])
    de.incremental_dump(tmp_path / "c", table, since=now)
    assert delta_of(tmp_path / "c") == ([3], [])
    # A time before the chain's end: more rows than needed, and no gap.
    de.incremental_dump(tmp_path / "chain", table, since=now - datetime.timedelta(days=1))
    assert delta_of(tmp_path / "chain") == ([1, 2, 3], [])
    other = make()
    de.load(tmp_path / "chain", other)
    assert rows_of(other) == rows_of(table)
    table.lookup([4])
    time.sleep(0.01)
    with pytest.raises(ValueError, match="after the last snapshot"):
        de.incremental_dump(tmp_path / "chain", table, since=datetime.datetime.now(UTC))


def test_gaps_are_refused(tmp_path):
    table, stranger = make(), make()
    table.lookup([1])
    with pytest.raises(ValueError, match=r"no snapshot at .* to continue"):
        de.incremental_dump(tmp_path, table)
    mark = de.dump(tmp_path, table)
    with pytest.raises(ValueError, match="were never dumped to or loaded from the last"):
        de.incremental_dump(tmp_path, stranger)
    with pytest.raises(ValueError, match="no snapshot that these tables were: t"):
        de.incremental_dump(tmp_path / "other", stranger, since=mark)
    de.load(tmp_path, stranger)
    stranger.lookup([2])
    de.incremental_dump(tmp_path, stranger)
    with pytest.raises(ValueError, match="were never dumped to or loaded from the last"):
        de.incremental_dump(tmp_path, table)
    de.apply_delta(tmp_path, table)
    assert vectors_of(table) == vectors_of(stranger)
    table.lookup([3])
    de.incremental_dump(tmp_path, table)
    with pytest.raises(ValueError, match="do not continue the content of these tables"):
        de.apply_delta(tmp_path, make())
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


def test_deltas_shipped_apart(tmp_path):
    table, replica = make(), make()
    table.lookup([1, 2])
    mark = de.dump(tmp_path / "base", table)
    for i in range(3):
        table.upsert([i], [[1.0, i]])
        table.erase([i + 1])
        mark = de.incremental_dump(tmp_path / "deltas", table, since=mark)
    with pytest.raises(ValueError, match="no dump that they continue"):
        de.load(tmp_path / "deltas", replica)
    de.load(tmp_path / "base", replica)
    assert de.apply_delta(tmp_path / "deltas", replica).id == mark.id
    assert vectors_of(replica) == vectors_of(table)
    assert de.apply_delta(tmp_path / "deltas", replica).id == mark.id  # nothing new


def test_deletions_that_are_forgotten_are_said_to_be(tmp_path):
    table = make(init_capacity=8, max_capacity=8)
    for i in range(20):
        table.lookup([1000 + i])  # evicts before the table tracks deletions
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"'.*t'.* are not known"):
        de.incremental_dump(tmp_path, table, since=datetime.datetime(2000, 1, 1, tzinfo=UTC))
    assert not os.listdir(tmp_path) or os.listdir(tmp_path) == ["LOCK"]
    de.dump(tmp_path, table)
    table.lookup([5000])
    de.incremental_dump(tmp_path, table)
    keys, deleted = delta_of(tmp_path)
    assert keys == [5000]
    assert len(deleted) == 1


def test_two_dumps_of_one_table_do_not_mix(tmp_path):
    table = make()
    table.lookup([1])
    says = pytest.raises(RuntimeError, match="another process writes")
    with storage.Publication(tmp_path, "base"), says:
        de.dump(tmp_path, table)
    says = pytest.raises(tf.errors.FailedPreconditionError, match="being dumped already")
    with Cut([table], [-1], with_deleted=False), says:
        de.dump(tmp_path, table)
    de.dump(tmp_path, table)


def test_a_dump_waits_until_another_of_the_same_table_has_ended(tmp_path):
    tables = [make("a"), make("b")]
    for table in tables:
        table.lookup([1])
    began, ended = threading.Event(), []

    def other():
        with Cut(tables, [-1, -1], with_deleted=False):
            began.set()
            time.sleep(0.2)
            ended.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    began.wait()
    path = tf.train.Checkpoint(table=tables[1]).save(tmp_path / "ck")
    assert ended
    thread.join()
    tf.train.Checkpoint(table=tables[1]).restore(path)
    de.dump(tmp_path / "chain", tables[::-1])


def test_training_goes_on_during_dumps(tmp_path):
    # Every step writes its number into all rows of two tables, so that a mixture would be detected.
    tables = [make("a", 4), make("b", 8)]
    keys = tf.range(20_000, dtype=tf.int64)
    stop = threading.Event()
    steps = [0]

    def write():
        steps[0] += 1
        for table in tables:
            table.upsert(keys, tf.fill([len(keys), table.dimension], float(steps[0])))

    def train():
        while not stop.is_set():
            write()

    write()
    thread = threading.Thread(target=train)
    thread.start()
    try:
        de.dump(tmp_path, tables)
        for _ in range(10):
            de.incremental_dump(tmp_path, tables)
    finally:
        stop.set()
        thread.join()
    seen = []
    for snapshot in storage.Chain.open(tmp_path).snapshots:
        versions = []
        for number in range(2):
            vectors = snapshot.column(number, "vectors")
            assert len(np.unique(vectors)) <= 1
            if len(vectors):
                assert len(vectors) == len(keys)
                versions.append(float(vectors[0, 0]))
        # The first table is written first.
        if len(versions) == 2:
            assert versions[0] - versions[1] in (0.0, 1.0)
        seen += versions[:1]
    assert len(seen) > 2
    assert seen == sorted(set(seen))


def test_forget_wipes(tmp_path):
    table = make()
    secret = [1234.5, 6789.25]
    table.upsert([7], [secret])
    assert int(table.forget([7, 8])) == 1
    assert len(table) == 0
    de.dump(tmp_path, table)
    for path in tmp_path.rglob("*.npy"):
        assert np.float32(secret[0]).tobytes() not in path.read_bytes()


def test_progress_is_quiet_where_there_is_no_terminal(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(columns, "_PATIENCE", 0)
    table = make()
    table.lookup(tf.range(1000))
    de.dump(tmp_path, table)
    assert capfd.readouterr().err == ""
    de.dump(tmp_path, table, quiet=False)
    assert "dump: 100%" in capfd.readouterr().err
    de.load(tmp_path, table, quiet=False)
    assert "load t" in capfd.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        de.dump(tmp_path, table, quiet=True)
    assert capfd.readouterr().err == ""


def fold(path):
    """Returns the tables of a process that loads the chain."""
    table = make()
    de.load(path, table)
    return vectors_of(table)


def test_what_was_trained_here_before_apply_delta_is_in_the_next_delta(tmp_path):
    table, replica = make(), make()
    table.lookup([1, 2, 3])
    de.dump(tmp_path, table)
    de.load(tmp_path, replica)
    replica.upsert([9], [[1.0, 2.0]])
    replica.erase([3])
    table.lookup([4])
    de.incremental_dump(tmp_path, table)
    de.apply_delta(tmp_path, replica)
    de.incremental_dump(tmp_path, replica)
    assert set(fold(tmp_path)) == {1, 2, 4, 9}
    assert fold(tmp_path) == vectors_of(replica)


def test_rows_that_applying_a_delta_evicts_are_in_the_next_one(tmp_path):
    table, small = make(), make(init_capacity=4, max_capacity=4)
    table.lookup([1, 2, 3, 4])
    de.dump(tmp_path, table)
    de.load(tmp_path, small)
    table.lookup([5, 6])
    de.incremental_dump(tmp_path, table)
    de.apply_delta(tmp_path, small)
    de.incremental_dump(tmp_path, small)
    assert len(small) == 4
    assert fold(tmp_path) == vectors_of(small)


def test_a_table_that_lacks_rows_of_the_chain_cannot_continue_it(tmp_path):
    table, small = make(), make(init_capacity=4, max_capacity=4)
    table.lookup(tf.range(8))
    de.dump(tmp_path, table)
    with pytest.warns(UserWarning, match="4 of the rows of table 't' did not fit"):
        de.load(tmp_path, small)
    with pytest.raises(ValueError, match="were never dumped to or loaded from the last"):
        de.incremental_dump(tmp_path, small)


def test_a_delta_of_another_dtype_is_refused(tmp_path):
    table, half = make(), make(dtype=tf.bfloat16)
    table.lookup([1])
    de.dump(tmp_path, table)
    de.load(tmp_path, half, cast=True)
    half.lookup([2])
    with pytest.raises(ValueError, match=r"'float32'\) at .* but .* has .*'bfloat16'"):
        de.incremental_dump(tmp_path, half)


def test_state_that_was_not_taken_over_is_not_continued(tmp_path):
    table, other = make(), make()
    optimizers = [de.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2)]
    step(optimizers[0], [table], [1, 2])
    de.dump(tmp_path, table, optimizers[0])
    de.load(tmp_path, other)
    step(optimizers[1], [other], [1])
    with pytest.raises(ValueError, match="state that these tables did not take over"):
        de.incremental_dump(tmp_path, other, optimizer=optimizers[1])
    de.incremental_dump(tmp_path, other)
    assert fold(tmp_path) == vectors_of(other)


def test_state_that_began_anew_during_a_dump_is_not_continued(tmp_path, monkeypatch):
    table = make()
    first, second = (de.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2))
    step(first, [table], [1, 2])
    write = columns.write_rows

    def slow(*args):
        written = write(*args)
        step(second, [table], [1])
        return written

    monkeypatch.setattr(columns, "write_rows", slow)
    de.dump(tmp_path, table, first)
    with pytest.raises(ValueError, match="never were"):
        de.incremental_dump(tmp_path, table, optimizer=second)


def test_an_optimizer_that_cannot_step_tables_changes_nothing(tmp_path):
    table = make()
    table.lookup([1])
    de.dump(tmp_path, table)
    table.lookup([2])
    with pytest.raises(ValueError, match="use_ema"):
        de.load(tmp_path, table, de.OptimizerWrapper(keras.optimizers.Adam(0.1, use_ema=True)))
    assert set(vectors_of(table)) == {1, 2}


def test_states_of_different_meaning_are_told_apart(tmp_path):
    table, other = make(), make()
    momentum, centered = (
        de.OptimizerWrapper(keras.optimizers.RMSprop(0.1, **kwargs))
        for kwargs in ({"momentum": 0.9}, {"centered": True})
    )
    step(momentum, [table], [1])
    de.dump(tmp_path, table, momentum)
    with pytest.warns(UserWarning, match="state of 'rmsprop momentum' .* 'rmsprop centered'"):
        de.load(tmp_path, other, centered)


def test_shared_state_goes_to_the_table_of_its_name(tmp_path):
    tables = [make("a"), make("b")]
    nadam, other = (de.OptimizerWrapper(keras.optimizers.Nadam(0.1)) for _ in range(2))
    step(nadam, tables, [1])
    step(nadam, tables[1:], [1])
    de.dump(tmp_path, tables, nadam)
    loaded = make("b")
    de.load(tmp_path, loaded, other)
    products = [
        [float(v) for v in o.shared_variables(t)] for o, t in ((nadam, tables[1]), (other, loaded))
    ]
    assert products[0] == products[1] != [float(v) for v in nadam.shared_variables(tables[0])]


def test_the_latest_that_is_known_of_the_optimizer_counts(tmp_path):
    table, other = make(), make()
    optimizer, fresh = (de.OptimizerWrapper(keras.optimizers.SGD(0.1)) for _ in range(2))
    step(optimizer, [table], [1])
    de.dump(tmp_path, table, optimizer)
    step(optimizer, [table], [1])
    de.incremental_dump(tmp_path, table, optimizer=optimizer)
    de.incremental_dump(tmp_path, table)
    de.load(tmp_path, other, fresh)
    assert int(fresh.iterations) == 2


def test_dense_variables_are_of_the_moment_of_the_dump(tmp_path, monkeypatch):
    table, static = make(), de.Variable(tf.zeros([2, 2]), name="s")
    table.lookup([1])
    write = columns.write_rows

    def slow(*args):
        static.assign(tf.ones([2, 2]))
        return write(*args)

    monkeypatch.setattr(columns, "write_rows", slow)
    de.dump(tmp_path, [table, static])
    assert not storage.Chain.open(tmp_path).last.column("s", "vectors").any()


def test_priority_that_cannot_be_lowered_is_no_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    table = make()
    table.lookup([1])
    de.dump(tmp_path, table)


def test_forked_processes_do_not_keep_the_lock(tmp_path):
    table = make()
    table.lookup([1])
    with storage.Publication(tmp_path, "base"):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        de.dump(tmp_path, table)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_state_that_a_base_had_is_missing_after_its_deltas_too(tmp_path):
    table, other = make(), make()
    optimizers = [de.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2)]
    step(optimizers[0], [table], [1, 2])
    de.dump(tmp_path, table, optimizers[0])
    de.load(tmp_path, other)
    step(optimizers[0], [table], [2])
    de.incremental_dump(tmp_path, table, optimizer=optimizers[0])
    de.apply_delta(tmp_path, other, optimizers[1])
    with pytest.raises(ValueError, match="state that these tables did not take over"):
        de.incremental_dump(tmp_path, other, optimizer=optimizers[1])
