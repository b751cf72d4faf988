"""Rows with a time to live: options, clocks, what reads as unknown, and ages on disk."""

import collections
import datetime
import json
import threading
import time

import keras
import numpy as np
import pytest
import table_reader
import tensorflow as tf
from expiry_helpers import DAY, held, make, step

import tf_dynemb as de

UTC = datetime.timezone.utc


@pytest.mark.parametrize("since", ["update", "access"])
def test_rows_expire_after_ttl_steps(since):
    table = make(3, ttl_since=since)
    step(table, [1, 2])
    table.upsert([1], [[5.0, 5.0]])  # is a step, too
    step(table, [2])
    assert held(table, [1, 2]) == [1, 2]
    step(table)
    # 2 was last updated three steps ago, and last used one step ago.
    assert held(table, [1, 2]) == ([1] if since == "update" else [1, 2])
    step(table)
    assert held(table, [1, 2]) == ([] if since == "update" else [2])
    step(table)
    assert held(table, [1, 2]) == []


def test_an_expired_row_starts_anew():
    table = make(2)
    first = step(table, [7])
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.5))
    optimizer.attach([table])

    def train(key):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.lookup([key]))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    train(7)
    trained = table_reader.rows_of(table)
    assert (trained.vectors != first).all()
    fresh = trained.state.copy()
    step(table)
    step(table)
    assert table.lookup([7], insert=False).numpy().tolist() == first.tolist()
    assert step(table, [7]).tolist() == first.tolist()
    rows = table_reader.rows_of(table)
    assert rows.keys.tolist() == [7]
    assert (rows.state < fresh).all()  # the accumulator's initial value
    train(7)
    assert (table_reader.rows_of(table).vectors == trained.vectors).all()
    assert table.stats()["expired"] == 1


def test_a_table_in_several_features():
    table = make(2)
    ids = [tf.constant([[1], [2], [3]]), tf.constant([[3], [4], [1]]), tf.constant([[9], [1], [2]])]
    look_up = tf.function(lambda: de.lookup_sparse([table] * 3, ids, combiners=["sum"] * 3))
    first = [vectors.numpy() for vectors in look_up()]
    for number in range(3):
        table.upsert([1, 3, 9], tf.fill([3, 2], float(number)))
        step(table)
        step(table)
        again = [vectors.numpy() for vectors in look_up()]
        assert np.array_equal(again, first)
        rows = table_reader.rows_of(table)
        assert rows.keys.tolist() == [1, 2, 3, 4, 9]
        assert len(table) == 5
        assert table.stats()["inserts"] - table.stats()["expired"] == 5


def test_training_keeps_rows_alive():
    table = make(2)
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(0.1))
    for number in range(6):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.lookup_sparse(table, tf.constant([[1], [100 + number]])))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    assert table.stats()["dropped_gradients"] == 0
    assert held(table, [1, *range(100, 106)]) == [1, 104, 105]


def test_expired_rows_are_nowhere():
    table = make(2)
    step(table, [1, 2])
    step(table, [3])
    step(table)
    assert len(table) == 3  # with the memory that nothing has reclaimed yet
    assert table.export_if().keys.numpy().tolist() == [3]
    assert table_reader.rows_of(table).keys.tolist() == [3]
    assert table.size_if() == 1
    assert table.erase_if(key_below=3) == 0
    assert table.scores([1, 3]).numpy()[0] == -1
    assert int(table.expire()) == 2
    assert int(table.expire()) == 0
    assert (len(table), table.stats()["expired"]) == (1, 2)


def test_random_steps_match_a_model():
    rng = np.random.default_rng(3)
    for since in ("update", "access"):
        table = make(4, ttl_since=since, init_capacity=1)
        used: dict[int, int] = {}
        for now in range(1, 301):
            keys = rng.integers(0, 40, 5)
            used = {key: at for key, at in used.items() if now - at < 4}
            for key in keys.tolist():
                if since == "access" or key not in used:
                    used[key] = now
            step(table, keys)
            other = rng.integers(0, 40, 3)
            table.lookup(other, insert=False)
            if since == "access":
                used.update({key: now for key in other.tolist() if key in used})
            assert held(table, range(40)) == sorted(used)


def test_the_system_clock():
    table = make(datetime.timedelta(milliseconds=400))
    assert table.options.lifetime.clock == "wall"
    begun = time.monotonic()
    step(table, [1])
    seen = table.contains([1]).numpy().tolist()
    assert seen == [True] or time.monotonic() - begun > 0.39
    time.sleep(0.5)
    assert table.contains([1]).numpy().tolist() == [False]
    step(table, [2])
    assert table.explain([1])[0].lost_because == "expired"


def test_the_time_of_the_data():
    table = make(30 * DAY, ttl_clock="data")
    step(table, [1])
    start = datetime.datetime(2026, 1, 1, tzinfo=UTC)
    table.set_data_time(start)
    step(table, [2])
    table.set_data_time(start + 29 * DAY)
    step(table, [3])
    table.set_data_time(start + 5 * DAY)  # batches need not be in exact order
    assert held(table, [1, 2, 3]) == [1, 2, 3]
    table.set_data_time((start + 30 * DAY).timestamp())
    assert held(table, [1, 2, 3]) == [3]

    @tf.function
    def train(times):
        table.set_data_time(tf.reduce_max(times))
        return table.contains([3])

    late = int((start + 59 * DAY).timestamp())
    assert train(tf.constant([5, late - 1])).numpy().tolist() == [True]
    assert train(tf.constant([5, late])).numpy().tolist() == [False]


def test_one_event_with_a_wrong_date(capfd):
    table = de.DynamicVariable(2, name="log", ttl=30 * DAY, ttl_clock="data")
    start = datetime.datetime(2026, 11, 27, tzinfo=UTC)
    table.set_data_time(start)
    table.lookup([1])
    table.set_data_time(start + 3650 * DAY)
    table.lookup([2])
    assert held(table, [1, 2]) == [1, 2]
    table.set_data_time(start + DAY)
    assert "log': the data's time 2111097600000000000 is ignored" in capfd.readouterr().err
    table.set_data_time(start + 29 * DAY)
    assert held(table, [1, 2]) == [1, 2]
    table.set_data_time(start + 31 * DAY)
    assert held(table, [1, 2]) == []
    # After a long pause, the second time counts.
    table.lookup([3])
    for _ in range(2):
        assert held(table, [3]) == [3]
        table.set_data_time(start + 1000 * DAY)
    assert held(table, [3]) == []


def test_floats_are_exact_enough():
    table = make(datetime.timedelta(seconds=30), ttl_clock="data")
    table.set_data_time(1769817663.0)
    step(table, [1])
    table.set_data_time(1769817692.5)
    assert held(table, [1]) == [1]
    table.set_data_time(1769817693.5)
    assert held(table, [1]) == []


def test_integer_times_of_the_data():
    table = make(24, ttl_clock="data")  # hours
    table.set_data_time(100)
    step(table, [1])
    table.set_data_time(tf.constant(123))
    assert held(table, [1]) == [1]
    table.set_data_time(124)
    assert held(table, [1]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": 0}, "ttl must be positive"),
        ({"ttl": -5}, "ttl must be positive"),
        ({"ttl": DAY * 0}, "ttl must be positive"),
        ({"ttl": DAY * -1}, "ttl must be positive"),
        ({"ttl": DAY * 400000}, "ttl must be positive, and at most"),
        ({"ttl": 1.5}, "ttl must be a datetime.timedelta"),
        ({"ttl": True}, "ttl must be a datetime.timedelta"),
        ({"ttl": "1d"}, "ttl must be a datetime.timedelta"),
        ({"ttl": 5, "ttl_clock": "wall"}, "ttl=5 is a number of steps, but ttl_clock='wall'"),
        ({"ttl": DAY, "ttl_clock": "steps"}, "is a time, but ttl_clock='steps'"),
        ({"ttl": 5, "ttl_clock": "moon"}, "ttl_clock must be one of steps, wall, data"),
        ({"ttl": 5, "ttl_since": "birth"}, "ttl_since must be 'update' or 'access'"),
        ({"ttl": 5, "ttl_since": "access", "evict_strategy": "lfu"}, "ttl_since='access' needs"),
        ({"ttl": 5, "ttl_min_rows": -1}, "ttl_min_rows must be 0 or more"),
        ({"ttl": 5, "ttl_min_rows": 1.5}, "ttl_min_rows must be an integer"),
        ({"ttl": None, "ttl_min_rows": 5}, "ttl_min_rows=5 needs a ttl"),
        ({"ttl": None, "ttl_clock": "data"}, "ttl_clock='data' needs a ttl"),
        ({"ttl": None, "ttl_since": "access"}, "ttl_since='access' needs a ttl"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_times_that_are_none():
    table = make(DAY, ttl_clock="data")
    with pytest.raises(ValueError, match="has no time zone"):
        table.set_data_time(datetime.datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="before 1970"):
        table.set_data_time(datetime.datetime(1969, 1, 1, tzinfo=UTC))
    for wrong in (-1, -0.5, 1_700_000_000_000, 1e19, float("nan"), float("inf"), 2**62):
        with pytest.raises(ValueError, match="negative, or too large"):
            table.set_data_time(wrong)
    for wrong in (None, datetime.date(2026, 1, 1), np.datetime64("2026-01-01"), True, "x", b"x"):
        with pytest.raises(TypeError, match="time must be"):
            table.set_data_time(wrong)
    with pytest.raises(TypeError, match="float32, which cannot represent"):
        table.set_data_time(tf.constant(1.7e9))
    with pytest.raises(ValueError, match="scalar"):
        table.set_data_time([1, 2])
    with pytest.raises(TypeError, match="time must be"):
        table.set_data_time("yesterday")

    @tf.function
    def set_time(time):
        table.set_data_time(time)

    for wrong in (-5, 1_700_000_000_000):
        with pytest.raises(tf.errors.InvalidArgumentError, match="negative"):
            set_time(tf.constant(wrong, tf.int64))
    table.set_data_time(1_700_000_000)  # the table's time was not set before
    step(table, [1])
    assert held(table, [1]) == [1]
    hours = make(24, ttl_clock="data")
    for wrong in (1.5, datetime.datetime(2026, 1, 1, tzinfo=UTC)):
        with pytest.raises(TypeError, match="times must be integers"):
            hours.set_data_time(wrong)
    for other in (make(3), make(DAY), de.DynamicVariable(2)):
        with pytest.raises(ValueError, match="set_data_time needs"):
            other.set_data_time(5)


def test_few_rows_do_not_expire():
    table = make(1, ttl_min_rows=4)
    step(table, [1, 2, 3, 4])
    for _ in range(3):
        step(table)
    assert held(table, [1, 2, 3, 4]) == [1, 2, 3, 4]
    step(table, [5])
    step(table)
    assert held(table, [1, 2, 3, 4, 5]) == []
    assert int(table.expire()) == 1
    assert len(held(table, [1, 2, 3, 4, 5])) == 4


def test_layers_have_rows_that_expire():
    layer = de.layers.Embedding(2, ttl=2, name="items")
    model = keras.Sequential([keras.Input([1], dtype="int64"), layer, keras.layers.Flatten()])
    model.compile(de.OptimizerWrapper("sgd"), loss="mse")
    for number in range(4):
        model.fit(tf.constant([[number]]), tf.zeros([1, 2]), verbose=0)
    model.predict(tf.constant([[9]]), verbose=0)  # neither inserts nor ages
    assert held(layer.table, [0, 1, 2, 3, 9]) == [2, 3]
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.table_options["ttl"] == 2


def test_models_with_times_are_saved(tmp_path):
    ttl = datetime.timedelta(days=30, microseconds=7)
    one = de.layers.Embedding(2, ttl=ttl, ttl_clock="data", name="one")
    many = de.layers.MultiTableEmbedding(tables=[{"dim": 2, "ttl": ttl}, {"dim": 2}], dim=2)
    for layer in (one, many):
        again = keras.saving.deserialize_keras_object(
            json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))
        )
        assert again.get_config() == layer.get_config()
    model = keras.Sequential([keras.Input([1], dtype="int64"), one, keras.layers.Flatten()])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].table.options.ttl == ttl


@pytest.mark.parametrize("strategy", ["lru", "lfu", "score", "none"])
def test_a_full_table_removes_what_has_expired_first(strategy):
    table = make(1, max_capacity=100, evict_strategy=strategy)
    step(table, range(60))
    step(table, range(60, 120))
    assert held(table, range(120)) == list(range(60, 120))
    assert table.stats()["evictions"] == 0


def test_readers_record_times_in_any_order(tmp_path):
    table = make(datetime.timedelta(milliseconds=300))
    step(table, range(20))
    stop = threading.Event()

    def read():
        while not stop.is_set():
            table.lookup([0, 1, 2], insert=False)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(10):
            time.sleep(0.02)
            de.dump(tmp_path / str(number), [table], quiet=True)
            de.load(tmp_path / str(number), [make(DAY)], quiet=True)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_memory_is_reclaimed_while_training():
    table = make(20, init_capacity=1)
    most = 0
    for number in range(200):
        step(table, range(300 * number, 300 * number + 300))
        most = max(most, len(table))
    assert most < 6000 * 1.5 + 8192
    counts = collections.Counter(table.stats())
    assert counts["size"] == counts["inserts"] - counts["expired"]
