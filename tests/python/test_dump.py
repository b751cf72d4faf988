"""dump, load, incremental_dump and apply_delta: arguments, results and errors."""

import datetime
import time

import keras
import numpy as np
import pytest
import pytz
import tensorflow as tf
import warm_python
from dump_helpers import UTC, make, step, vectors_of
from test_checkpoint import rows_of

import tf_dynemb as de
from tf_dynemb import storage


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


def test_the_table_of_a_keras_layer(tmp_path):
    model = keras.Sequential([keras.Input((1,), dtype="int64"), de.layers.Embedding(2)])
    model.layers[0](tf.constant([[1], [2]]), training=True)
    embedding_variables, others = de.filter_variables(model.trainable_variables)
    assert not others
    de.dump(tmp_path, {"ids": embedding_variables[0]})
    other = de.DynamicVariable(2)
    de.load(tmp_path, {"ids": other})
    assert vectors_of(other) == vectors_of(model.layers[0].table)


def test_subsets_renamed_tables_and_static_variables(tmp_path):
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
def test_an_incomplete_matrix_is_refused(tmp_path, keys, says):
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
            publication.part.column(0, column, values.dtype, values.shape[1:]).append(values)
        publication.part.write_index(0)
        publication.publish([table], watermark=1, watermark_utc_ns=1)
    with pytest.raises(ValueError, match=says):
        de.load(tmp_path, static)
    assert not static.numpy().any()


def test_training_continues_with_the_loaded_optimizer(tmp_path):
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
    # The warnings point to this file, not into the package.
    assert {warning.filename for warning in caught} == {__file__}
    said = " ".join(str(w.message) for w in caught)
    assert "state of 'adam' that table 't'" in said
    assert "the optimizer Adam" in said
    assert vectors_of(other) == vectors_of(table)
    assert int(adagrad.iterations) == 0
    step(adagrad, [other], [1])


def test_a_load_without_the_optimizer_gives_fresh_state(tmp_path):
    table, other = make(), make()
    optimizers = [de.OptimizerWrapper(keras.optimizers.Adagrad(0.1, 0.5)) for _ in range(2)]
    step(optimizers[0], [table], [1, 2])
    step(optimizers[1], [other], [3])
    de.dump(tmp_path, table)
    de.load(tmp_path, other)
    assert vectors_of(other) == vectors_of(table)
    state = {row[1] for row in rows_of(other).values()}
    assert state == {np.full(2, 0.5, np.float32).tobytes()}


def test_other_dtypes_require_cast(tmp_path):
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


def test_a_smaller_table_keeps_recently_used_rows_and_warns(tmp_path):
    table = make()
    for i in range(60):
        table.lookup([i])
    de.dump(tmp_path, table)
    small = make(init_capacity=4, max_capacity=20)
    with pytest.warns(UserWarning, match="40 of the rows of table 't' did not fit"):
        de.load(tmp_path, small)
    assert len(small) == 20
    # 60 rows are in a few buckets, so nearly all evicted rows are the least recently used.
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
def test_a_failed_load_changes_nothing(tmp_path, other, says):
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


def test_times_without_a_time_zone_or_later_than_now_are_refused():
    table = make()
    for call in (
        lambda t: de.incremental_model_dump([table], t),
        lambda t: de.incremental_dump("/nonexistent", [table], since=t),
    ):
        with pytest.raises(ValueError, match=r"no time zone"):
            call(datetime.datetime(2026, 1, 1))
        with pytest.raises(ValueError, match=r"later than now.*a clock that is wrong"):
            call(datetime.datetime.now(UTC) + datetime.timedelta(minutes=2))
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


def test_variables_without_names(tmp_path):
    matrices = [de.Variable(np.full((3, 2), i, np.float32)) for i in range(3)]
    names = [matrix.name.split(":")[0] for matrix in matrices]
    assert len(set(names)) == 3
    de.dump(tmp_path / "chain", matrices)
    for matrix in matrices:
        matrix.assign(-tf.ones([3, 2]))
    de.load(tmp_path / "chain", matrices)
    for i, matrix in enumerate(matrices):
        np.testing.assert_array_equal(matrix, np.full((3, 2), i))
    # The names depend only on the order of creation in the process.
    code = "import tf_dynemb as de; print([de.Variable([[1.0]]).name for _ in range(3)])"
    done = warm_python.run(["-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['Variable:0', 'Variable_1:0', 'Variable_2:0']"
