"""TableStats: its numbers in the logs and in TensorBoard's files."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_memory import host_memory

import tf_dynemb as de
from tf_dynemb.callbacks import TableStats


def EachTable(*args, **options):  # noqa: N802
    return TableStats(*args, **options, stats="all", per_table=True)


def fit(ids, callbacks, epochs=2, dim=4, **options):
    items = de.layers.Embedding(dim, name="items", **options)
    model = keras.Sequential(
        [keras.Input([1], dtype="int64"), items, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(de.OptimizerWrapper("sgd"), loss="mse")
    history = model.fit(
        np.asarray(ids)[:, None],
        np.zeros([len(ids), 1]),
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        callbacks=callbacks,
        verbose=0,
    )
    return history.history, items.table


def item_logs(history):
    prefix = "items/embeddings/"
    return {
        name.removeprefix(prefix): values
        for name, values in history.items()
        if name.startswith(prefix)
    }


def test_logs_have_the_numbers_of_each_epoch():
    seen = []
    spy = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    history, table = fit(range(12), [EachTable(), spy], max_capacity=8)
    numbers = item_logs(history)
    assert numbers["size"] == [8, 8]
    # 12 keys one after the other, in a table of 8: none is there when it is asked for again.
    assert numbers["inserts"] == [12, 12]
    assert numbers["evictions"] == [4, 12]
    assert numbers["hit_rate"] == [0.0, 0.0]
    assert numbers["load"] == [8 / table.stats()["slots"]] * 2
    assert numbers["refused"] == numbers["dropped_gradients"] == numbers["erased"] == [0, 0]
    assert [logs["items/embeddings/size"] for logs in seen] == [8, 8]

    numbers = item_logs(fit([1, 2, 1, 2, 1, 2, 1, 2], [EachTable()])[0])
    assert numbers["hit_rate"] == [0.5, 1.0]
    assert numbers["inserts"] == [2, 0]


def test_tables_in_files(tmp_path):
    memory = host_memory(100, 1024)
    options = {"var_type": "file", "file_path": tmp_path, "max_dram_for_vectors": memory}
    ids = np.concatenate([np.arange(2000), np.arange(2000)])
    history, table = fit(ids, [EachTable()], dim=1024, **options)
    numbers, total = item_logs(history), table.stats()
    assert numbers["file_rows"][-1] == total["file_rows"] > 1800
    assert numbers["file_bytes"][-1] == total["file_bytes"] > 0
    assert 0 < numbers["load"][-1] <= 1  # rows in files have no slots
    for name in ("file_hits", "file_rows_written", "file_bytes_read", "file_reads"):
        assert min(numbers[name]) > 0
        assert sum(numbers[name]) == total[name]
    # Each key was asked for again long after its row had left memory.
    assert numbers["hit_rate"] == [0.5, 1.0]
    assert numbers["memory_hit_rate"][0] == 1 - numbers["file_hits"][0] / 2000
    assert numbers["memory_hit_rate"][1] < 0.1
    assert "file_rows" not in item_logs(fit([1, 2], [EachTable()])[0])


def test_counts_begin_with_the_training():
    table = de.DynamicVariable(2, name="apart")
    table.lookup([1, 2, 3])
    history, _ = fit(range(4), [EachTable([table])], epochs=1)
    assert history["apart/inserts"] == [0]
    assert history["apart/size"] == [3]
    assert "apart/hit_rate" not in history
    assert not item_logs(history)


def test_tensorboard_gets_the_numbers(tmp_path):
    fit(range(12), [EachTable(log_dir=tmp_path, update_freq=2)], max_capacity=8)
    points = {}
    for path in tmp_path.glob("events.out.tfevents.*"):
        for record in tf.compat.v1.train.summary_iterator(str(path)):
            for value in record.summary.value:
                point = record.step, value.simple_value
                points.setdefault(value.tag.removeprefix("items/embeddings/"), []).append(point)
    assert points["size"] == [(2, 8.0), (4, 8.0), (6, 8.0)]
    assert points["inserts"] == [(2, 8.0), (4, 8.0), (6, 8.0)]
    assert points["evictions"] == [(2, 0.0), (4, 8.0), (6, 8.0)]


def test_batches_that_keras_runs_in_one_call_count(tmp_path):
    items = de.layers.Embedding(4, name="items")
    model = keras.Sequential([keras.Input([1], dtype="int64"), items, keras.layers.Flatten()])
    model.compile(de.OptimizerWrapper("sgd"), loss="mse", steps_per_execution=4)
    ids, labels = np.arange(16)[:, None], np.zeros([16, 4])
    stats = TableStats(log_dir=tmp_path, update_freq=4)
    model.fit(ids, labels, batch_size=2, epochs=2, callbacks=[stats], verbose=0)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    records = tf.compat.v1.train.summary_iterator(str(path))
    assert [record.step for record in records if record.summary.value] == [4, 8, 12, 16]


DEFAULT = {"size", "load", "hit_rate", "inserts", "evictions", "expired", "nonfinite_gradients"}


def fit_two(callback, tmp_path=None):
    """Trains a model of two tables, the second one in files if there is a path."""
    ids = keras.Input([2], dtype="int64")
    files = {"var_type": "file", "file_path": tmp_path} if tmp_path else {}
    first = de.layers.Embedding(2, name="a", max_capacity=4)
    second = de.layers.Embedding(2, name="b", **files)
    added = keras.layers.Add()([first(ids[:, 0]), second(ids[:, 1])])
    model = keras.Model(ids, added)
    model.compile(de.OptimizerWrapper("sgd"), loss="mse")
    data = np.stack([np.arange(8), np.arange(8) % 2], axis=1)
    fitted = model.fit(data, np.zeros([8, 2]), 4, 1, callbacks=[callback], verbose=0, shuffle=False)
    return fitted.history, [first.table, second.table]


def test_all_tables_together(tmp_path):
    history, tables = fit_two(TableStats())
    assert set(history) == {"loss", *(f"tables/{name}" for name in DEFAULT)}
    assert history["tables/size"] == [4 + 2]
    assert history["tables/inserts"] == [8 + 2]
    assert history["tables/evictions"] == [4]
    assert history["tables/hit_rate"] == [(8 - 4) / 16]
    slots = sum(table.stats()["slots"] for table in tables)
    assert history["tables/load"] == [6 / slots]
    history, _ = fit_two(TableStats(), tmp_path)
    file_names = {"file_rows", "file_bytes", "memory_hit_rate"}
    assert set(history) == {"loss", *(f"tables/{name}" for name in DEFAULT | file_names)}
    # The table that has no files does not count.
    assert history["tables/memory_hit_rate"] == [1.0]


def test_chosen_numbers():
    history, _ = fit_two(TableStats(stats=["size", "refused"], per_table=True))
    numbers = {"a/embeddings/size": [4], "b/embeddings/size": [2]}
    refused = {"a/embeddings/refused": [0], "b/embeddings/refused": [0]}
    assert {k: v for k, v in history.items() if k != "loss"} == numbers | refused
    history, _ = fit_two(TableStats(stats="size"))
    assert set(history) == {"loss", "tables/size"}
    with pytest.raises(ValueError, match="stats has the unknown name 'sizes'; known: size, load"):
        TableStats(stats=["sizes"])


def test_bad_arguments(tmp_path):
    with pytest.raises(TypeError, match="tables must be DynamicVariables"):
        TableStats([tf.Variable(1.0)])
    for bad in ["batch", 0, 1.5, True]:
        with pytest.raises(ValueError, match="update_freq"):
            TableStats(log_dir=tmp_path, update_freq=bad)
    with pytest.raises(ValueError, match="needs log_dir"):
        TableStats(update_freq=5)
