"""Tables with persistent=True: what is there after a process has ended, in whatever way."""

import gc
import os
import pathlib

import keras
import numpy as np
import pytest
import table_reader
import tensorflow as tf
import warm_python
from dump_helpers import run_script
from file_pairs import DIM, Pair, in_files
from row_memory import host_memory

import tf_dynemb as de

K = keras.optimizers


def make(path, rows=100, states=1, name="t", **options):
    return in_files(path, DIM, rows, states, name=name, persistent=True, **options)


def fill(table, keys, value):
    """Sets the vectors of keys, in chunks that fit memory."""
    values = np.broadcast_to(np.asarray(value, np.float32), (len(keys), DIM))
    for at in range(0, len(keys), 90):
        table.upsert(keys[at : at + 90], values[at : at + 90])


def reopened(path, table, **options):
    """The contents of a table, and of the next table of that name."""
    had = table_reader.rows_of(table)
    del table
    gc.collect()
    return had, make(path, **options)


def test_a_new_table_has_the_rows_of_the_last_flush(tmp_path):
    table = make(tmp_path)
    keys = np.arange(400)
    values = np.random.default_rng(0).normal(size=(400, DIM)).astype(np.float32)
    fill(table, keys, values)
    table.flush()
    table.upsert(keys[:10], np.zeros((10, DIM), np.float32))  # after the flush
    table.erase(keys[20:30])
    assert table.stats()["file_rows"] > 150
    del table
    gc.collect()
    table = make(tmp_path)
    assert len(table) == 400
    for at in range(0, 400, 80):
        found = table.lookup(keys[at : at + 80], insert=False)
        np.testing.assert_array_equal(found, values[at : at + 80])
    # And it is a table like any other.
    fill(table, np.arange(1000, 1200), 1)
    table.flush()
    del table
    gc.collect()
    assert len(make(tmp_path)) == 600


@pytest.mark.parametrize(
    ("optimizer", "strategy"), [(K.Adam, "lru"), (K.Adagrad, "lfu"), (K.SGD, "epoch_lfu")]
)
def test_training_continues_bit_for_bit(tmp_path, optimizer, strategy):
    """Against a table in memory, which is not interrupted."""
    states = {K.Adagrad: 1, K.Adam: 2, K.SGD: 0}[optimizer]
    pair = Pair(
        tmp_path, lambda: optimizer(0.1), states=states, evict_strategy=strategy, persistent=True
    )
    for _ in range(2):
        pair.train(steps=8)
        pair.files.flush()
        iterations = int(pair.optimizers[0].iterations)
        pair.files = None
        pair.tables = pair.optimizers = (None, pair.optimizers[1])
        gc.collect()
        pair.files = make(
            tmp_path, states=states, seed=5, initializer="normal", evict_strategy=strategy
        )
        pair.tables = (pair.files, pair.memory)
        optimizers = de.OptimizerWrapper(optimizer(0.1))
        optimizers.iterations.assign(iterations)
        pair.optimizers = (optimizers, pair.optimizers[1])
        found, expected = (table_reader.rows_of(table) for table in pair.tables)
        assert found.same(expected, ("keys", "vectors", "state"))
        np.testing.assert_array_equal(
            pair.files.scores(found.keys) if strategy != "lru" else 0,
            pair.memory.scores(found.keys) if strategy != "lru" else 0,
        )
    pair.train(steps=8)
    found, expected = (table_reader.rows_of(table) for table in pair.tables)
    assert found.same(expected, ("keys", "vectors", "state"))


@pytest.mark.slow
def test_a_process_killed_at_any_moment(tmp_path):
    trials = int(os.environ.get("FLUSH_TRIALS", "20"))
    counts = run_script("flush_zygote.py", tmp_path / "files", trials)
    assert counts["trials"] == trials
    assert counts["opened"] > trials // 3
    assert counts["last"] >= trials // 5
    # Processes were killed during a flush, and some of these flushes were complete.
    assert counts["during a flush"] >= trials // 20


def test_expiry_and_admission_continue(tmp_path):
    """Against a table in memory, which is not interrupted."""
    options = {"ttl": 5, "admission": de.Frequency(2), "name": "t"}
    tables = [make(tmp_path, **options), de.DynamicVariable(DIM, var_type="host", **options)]
    for table in tables:
        table.lookup([1, 2, 3])  # counted once
        table.upsert([7], np.ones((1, DIM), np.float32))
    tables[0].flush()
    tables[0] = make(tmp_path, **options)
    seen = []
    for _ in range(8):
        for table in tables:
            table.lookup([1])
        found = [table.contains([1, 2, 7]).numpy().tolist() for table in tables]
        assert found[0] == found[1]
        seen.append(found[0])
    assert seen[0] == [True, False, True]
    assert seen[-1] == [True, False, False]


def test_deltas_continue(tmp_path):
    """The first delta after a restart needs a base of this process; then all is as usual."""
    table = make(tmp_path / "files")
    fill(table, np.arange(300), 1)
    table.flush()
    del table
    gc.collect()
    table = make(tmp_path / "files")
    de.dump(str(tmp_path / "dump"), [table], quiet=True)
    table.upsert([5], np.zeros((1, DIM), np.float32))
    table.erase([6])
    de.incremental_dump(str(tmp_path / "dump"), [table], quiet=True)
    # A new table, from the dump alone.
    loaded = de.DynamicVariable(DIM, name="t", var_type="host")
    de.load(str(tmp_path / "dump"), [loaded], quiet=True)
    assert loaded.lookup([5, 7], insert=False).numpy().sum(1).tolist() == [0, DIM]
    assert loaded.contains([6]).numpy().tolist() == [False]


def test_forgotten_rows_do_not_come_back(tmp_path):
    table = make(tmp_path)
    fill(table, np.arange(500), 3)
    table.flush()
    assert int(table.forget(np.arange(100, 200))) == 100
    table.flush()
    del table
    gc.collect()
    table = make(tmp_path)
    assert len(table) == 400
    assert not table.contains(np.arange(100, 200)).numpy().any()


def test_a_table_without_rows(tmp_path):
    table = make(tmp_path)
    table.flush()
    table.flush()
    del table
    gc.collect()
    assert len(make(tmp_path)) == 0


def test_load_replaces_the_rows(tmp_path):
    table = make(tmp_path / "files")
    fill(table, np.arange(300), 1)
    de.dump(str(tmp_path / "dump"), [table], quiet=True)
    fill(table, np.arange(900), 0)
    table.flush()
    de.load(str(tmp_path / "dump"), [table], quiet=True)
    assert len(table) == 300
    table.flush()
    had, table = reopened(tmp_path / "files", table)
    assert table_reader.rows_of(table).same(had, ("keys", "vectors"))
    assert len(table) == 300


def test_as_a_layer(tmp_path):
    """The option is one of the layer, too."""

    def layer():
        return de.layers.Embedding(
            DIM,
            name="items",
            var_type="file",
            file_path=str(tmp_path),
            max_dram_for_vectors=host_memory(200, DIM),
            persistent=True,
        )

    first = layer()
    vectors = first(tf.range(50)[None], training=True).numpy()
    first.table.flush()
    del first
    gc.collect()
    np.testing.assert_array_equal(layer()(tf.range(50)[None], training=False), vectors)


# --- What is refused

OPEN = """
import sys, tf_dynemb as de
de.DynamicVariable(int(sys.argv[2]), name="t", var_type="file", file_path=sys.argv[1],
                   persistent=True)
"""


def test_one_table_at_a_time(tmp_path):
    table = make(tmp_path)
    fill(table, np.arange(300), 1)
    table.flush()
    done = warm_python.run(["-c", OPEN, str(tmp_path), str(DIM)])
    assert done.returncode == 1
    assert "Another process has the persistent table 't'" in done.stderr
    other = make(tmp_path, name="a/b")  # another name
    other.flush()
    # In this process, the later one has the files.
    later = make(tmp_path)
    assert len(later) == 300
    with pytest.raises(ValueError, match="belong to a later table"):
        table.flush()
    assert len(table) == 300
    later.upsert([1000], np.ones((1, DIM), np.float32))
    later.flush()
    assert len(make(tmp_path)) == 301


def test_other_options(tmp_path):
    table = make(tmp_path, states=2)
    fill(table, np.arange(300), 1)
    table.flush()
    del table
    gc.collect()
    with pytest.raises(tf.errors.FailedPreconditionError, match="another dimension than"):
        in_files(tmp_path, 5, name="t", persistent=True)
    gc.collect()
    with pytest.raises(tf.errors.FailedPreconditionError, match="another dtype"):
        make(tmp_path, dtype=tf.bfloat16)
    gc.collect()
    with pytest.raises(tf.errors.FailedPreconditionError, match="another evict_strategy"):
        make(tmp_path, evict_strategy="lfu")
    gc.collect()
    with pytest.raises(tf.errors.FailedPreconditionError, match="another key_type"):
        make(tmp_path, key_type=tf.int32)
    gc.collect()
    assert len(make(tmp_path, states=2)) == 300  # nothing was lost


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="persistent=True needs file_path"):
        de.DynamicVariable(4, name="t", var_type="host", persistent=True)
    with pytest.raises(ValueError, match="needs a name"):
        in_files(tmp_path, persistent=True)
    with pytest.raises(TypeError, match="persistent must be True or False"):
        make(tmp_path).__class__(4, name="u", file_path=str(tmp_path), persistent="yes")
    table = in_files(tmp_path)
    with pytest.raises(ValueError, match="without persistent=True"):
        table.flush()
    with pytest.raises(RuntimeError, match="eagerly"):
        tf.function(make(tmp_path, name="v").flush)()


def test_another_number_of_ranks(tmp_path):
    folder = tmp_path / "0-2" / "t.persistent" / "flush-3"
    folder.mkdir(parents=True)
    (folder / "manifest").touch()
    with pytest.raises(ValueError, match="another number of ranks"):
        make(tmp_path)


@pytest.mark.parametrize("name", ["manifest", "index"])
def test_a_damaged_flush(tmp_path, name):
    table = make(tmp_path)
    fill(table, np.arange(300), 1)
    table.flush()
    del table
    gc.collect()
    (path,) = pathlib.Path(tmp_path).glob(f"t.persistent/flush-*/{name}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    with pytest.raises(tf.errors.DataLossError, match=name):
        make(tmp_path)


def test_a_flush_that_fails(tmp_path):
    """The last one stays, and the next one succeeds."""
    table = make(tmp_path)
    fill(table, np.arange(300), 1)
    table.flush()
    folder = tmp_path / "t.persistent"
    (folder / "flush-2").write_text("in the way")
    fill(table, np.arange(300), 0)
    with pytest.raises(OSError, match="flush-2"):
        table.flush()
    assert (folder / "flush-1" / "manifest").exists()
    (folder / "flush-2").unlink()
    table.flush()
    assert sorted(os.listdir(folder)) == ["LOCK", "flush-2"]
    del table
    gc.collect()
    assert make(tmp_path).lookup([3], insert=False).numpy().sum() == 0
