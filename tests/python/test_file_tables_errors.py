"""Invalid options of tables with rows in files, full memory, full disks, processes that die."""

import errno
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from file_pairs import DIM, Pair, check_same, in_files
from row_memory import host_memory

import tf_dynemb as de
import tf_dynemb.tfra as tfra

K = keras.optimizers


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"var_type": "file"}, ValueError, "var_type='file' needs file_path"),
        ({"var_type": "file", "file_path": ""}, ValueError, "file_path .*''"),
        ({"file_path": ""}, ValueError, "file_path .*''"),
        ({"file_path": "a\0b"}, ValueError, "file_path .*a"),
        ({"file_path": 3}, TypeError, "file_path .*3"),
        ({"file_path": b"x"}, TypeError, "file_path .*b'x'"),
        ({"var_type": "host", "file_path": "x"}, ValueError, "file_path='x' .*'host'"),
        ({"var_type": "hbm", "file_path": "x"}, ValueError, "file_path='x' .*'hbm'"),
        ({"max_dram_for_vectors": 4}, ValueError, "max_dram_for_vectors=4 needs file_path"),
        *(
            ({"file_path": "x", "max_dram_for_vectors": value, **kind}, ValueError, names)
            for kind in ({}, {"var_type": "file"})
            for value, names in [
                (0, "max_dram_for_vectors.*0"),
                (-1, "max_dram_for_vectors .*-1"),
                (float("nan"), "max_dram_for_vectors .*nan"),
                (float("inf"), "max_dram_for_vectors .*inf"),
                (True, "max_dram_for_vectors .*True"),
                ("1", "max_dram_for_vectors .*'1'"),
                (2**32, "max_dram_for_vectors .*4294967296"),
            ]
        ),
    ],
)
def test_invalid_options(options, error, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make in (de.DynamicVariable, de.layers.Embedding, de.layers.EmbeddingBag):
        with pytest.raises(error, match=names):
            make(4, **options)
    assert not list(tmp_path.iterdir())


def test_memory_of_too_few_rows(tmp_path):
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"hold 63 rows .* at least 64"):
        in_files(tmp_path, rows=63)
    table = in_files(tmp_path, rows=70)
    # The state of an optimizer makes rows larger.
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least 64 rows are needed"):
        de.OptimizerWrapper(K.Adam()).attach([table])
    table.lookup(range(70))
    table.lookup(range(70, 140))
    assert len(table) == 140


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda folder: (folder / "x").touch(), errno.EEXIST),
        (lambda folder: (folder / "y").touch(), errno.ENOTDIR),
        (lambda folder: (folder / "x").symlink_to(folder / "missing"), errno.EEXIST),
    ],
)
def test_a_path_that_is_no_folder(tmp_path, make, number):
    make(tmp_path)
    path = tmp_path / "x" if number == errno.EEXIST else tmp_path / "y" / "x"
    with pytest.raises(OSError, match=f"file_path='{path}'") as caught:
        in_files(path)
    assert caught.value.errno == number


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=r"file_path='.*/x'.*Permission"):
        in_files(tmp_path / "x")


def test_missing_folders_are_created(tmp_path):
    table = in_files(tmp_path / "a b" / "ä" / "c")
    table.lookup(range(90))
    table.lookup(range(90, 180))
    assert table.stats()["file_rows"] == 80


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = in_files("here")
    monkeypatch.chdir("/")
    for first in range(0, 2000, 100):
        table.lookup(range(first, first + 100))
    np.testing.assert_array_equal(table.lookup([5]), table.lookup([5], insert=False))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.lookup(range(5000, 5101)),
        lambda t: t.lookup(range(101), insert=False),
        lambda t: de.lookup_sparse(t, tf.range(1000, 1101, dtype=tf.int64)),
        lambda t: de.lookup_sparse(t, tf.range(101, dtype=tf.int64), insert=False),
        lambda t: t.upsert(range(5000, 5101), np.ones([101, DIM], np.float32)),
        lambda t: de.assign(t, range(101), np.ones([101, DIM], np.float32)),
        lambda t: t.scatter_add(tf.IndexedSlices(np.ones([101, DIM], np.float32), range(101))),
    ],
)
def test_a_batch_that_memory_cannot_hold(tmp_path, call):
    """It fails and changes nothing; a smaller one works."""
    pair = Pair(tmp_path)
    for first in range(0, 2000, 80):
        pair.both(lambda t, f=first: t.lookup(range(f, f + 80)))
    full = r"max_dram_for_vectors ha(s|ve) no room"
    with pytest.raises(tf.errors.ResourceExhaustedError, match=full):
        call(pair.files)
    check_same(*pair.tables)
    pair.both(lambda t: t.lookup(range(300, 400)))
    pair.check()


def test_the_error_says_what_to_do(tmp_path):
    table = in_files(tmp_path)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="max_dram_for_vectors"):
        table.lookup(range(101))


def test_the_error_of_too_few_rows_names_the_option(tmp_path):
    with pytest.raises(tf.errors.InvalidArgumentError, match="max_dram_for_vectors"):
        in_files(tmp_path, rows=63)


def test_rows_without_scores_are_loaded_in_parts(tmp_path):
    """apply_delta of more rows than memory holds."""
    source, table = de.DynamicVariable(4, name="t"), in_files(tmp_path / "f", name="t")
    source.lookup([0])
    de.dump(tmp_path / "d", source)
    de.load(tmp_path / "d", table)
    source.lookup(range(1000))
    de.incremental_dump(tmp_path / "d", source)
    de.apply_delta(tmp_path / "d", table)
    check_same(table, source)


@pytest.mark.parametrize("strategy", ["lru", "lfu", "epoch_lru", "epoch_lfu", "score"])
def test_capacity_is_of_memory_and_files_together(tmp_path, strategy):
    table = in_files(tmp_path, max_capacity=500, evict_strategy=strategy)
    for first in range(0, 2000, 50):
        ids = tf.range(first, first + 50, dtype=tf.int64)
        table.lookup(ids)
        table.upsert(ids, tf.repeat(tf.cast(ids, tf.float32)[:, None], 4, axis=1))
        assert len(table) == min(500, first + 50)
        assert table.contains(ids).numpy().all()
    stats = table.stats()
    assert (stats["evictions"], stats["file_rows"]) == (1500, 400)
    keys, vectors = de.export(table)
    np.testing.assert_array_equal(vectors, np.repeat(keys.numpy()[:, None], 4, 1))


def test_evicted_rows_are_returned(tmp_path):
    """insert_and_evict, evict: each key is in the table or was returned, with its vector."""
    table = in_files(tmp_path, max_capacity=300)
    left = {}
    for first in range(0, 900, 60):
        ids = np.arange(first, first + 60)
        values = np.repeat(ids[:, None], 4, 1).astype(np.float32)
        rows = table.insert_and_evict(ids, values)
        left.update(
            zip(rows.keys.numpy().tolist(), rows.vectors.numpy()[:, 0].tolist(), strict=True)
        )
    assert len(left) == 600
    assert all(key == vector for key, vector in left.items())
    assert sorted([*left, *de.export(table)[0].numpy().tolist()]) == list(range(900))
    assert int(table.evict(100)) == 200
    assert len(table) == 100


def test_no_eviction(tmp_path):
    table = in_files(tmp_path, max_capacity=300, evict_strategy="none")
    for first in range(0, 300, 60):
        table.lookup(range(first, first + 60))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="evict_strategy is none"):
        table.lookup([300])
    assert len(table) == 300
    table.erase(range(20))
    table.lookup([300])


def test_rows_in_files_expire(tmp_path):
    pair = Pair(tmp_path, ttl=5)
    for first in range(0, 1200, 80):
        pair.both(lambda t, f=first: t.lookup(range(f, f + 80)))
        pair.both(lambda t: t.contains(range(1200)))
    for table in pair.tables:
        table.expire()
    pair.both(len)
    assert len(pair.files) == 400
    pair.check()


def test_admission(tmp_path):
    pair = Pair(tmp_path, lambda: K.Adagrad(0.1), states=1, admission=de.Frequency(2))
    pair.train(steps=40, ids=400)
    pair.both(len)
    pair.check()


def test_files_vanish_with_the_table(tmp_path):
    table = in_files(tmp_path)
    table.lookup(range(90))
    table.lookup(range(90, 180))
    (folder,) = tmp_path.iterdir()  # of the process
    (table_folder,) = folder.glob("[0-9]*")
    assert list(table_folder.iterdir())
    other = in_files(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    assert len(list(folder.glob("[0-9]*"))) == 2
    del table
    gc.collect()
    assert len(list(folder.glob("[0-9]*"))) == 1
    del other
    gc.collect()
    assert not list(tmp_path.iterdir())


def child(folder, *what):
    script = pathlib.Path(__file__).with_name("file_table_process.py")
    root = script.parents[2]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if (root / "tf_dynemb").is_dir():
        environment["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), str(folder), *what]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def test_processes_share_a_folder_and_clean_up(tmp_path):
    """Files of a living process stay; files of a killed process go with the next table."""
    process = child(tmp_path)
    try:
        said = json.loads(process.stdout.readline())
        assert said["file_rows"] > 0
        (process_folder,) = tmp_path.iterdir()
        pair = Pair(tmp_path)
        for first in [*range(0, 2000, 80), 0]:
            pair.both(lambda t, f=first: t.lookup(range(f, f + 80)))
        assert process_folder in tmp_path.iterdir()
        print("again", file=process.stdin, flush=True)
        assert json.loads(process.stdout.readline())["same"]
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert process_folder in tmp_path.iterdir()
        table = in_files(tmp_path)
        assert process_folder not in tmp_path.iterdir()
        pair.check()
        assert len(list(tmp_path.iterdir())) == 1
        assert len(list(tmp_path.glob("*/[0-9]*"))) == 2
        assert len(table) == 0
    finally:
        process.kill()


def test_files_vanish_at_exit(tmp_path):
    process = child(tmp_path)
    process.communicate("again\n", 120)
    assert process.returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("mounting is not permitted")
    yield folder
    gc.collect()
    subprocess.run(["umount", "-l", str(folder)], check=True)


def upsert_numbers(table, ids):
    """Each vector consists of its key."""
    ids = tf.constant(ids, tf.int64)
    table.upsert(ids, tf.repeat(tf.cast(ids, tf.float32)[:, None], table.dimension, axis=1))


def fill_the_disk(table):
    """Returns the number of keys, from 0 on, that the batches before the error had."""
    text = f"{table.options.file_path}/.*No space left on device"
    with pytest.raises(tf.errors.ResourceExhaustedError, match=text):  # noqa: PT012
        for first in range(0, 20_000, 100):
            upsert_numbers(table, range(first, first + 100))
    return first


def test_a_full_disk_fails_the_batch(small_disk):
    """No row of an earlier batch is lost, and the table can be cleared and used again."""
    table = in_files(small_disk, dim=256, rows=200)
    rows = fill_the_disk(table)
    assert rows > 1000
    keys, vectors = de.export(table)
    assert set(range(rows)) <= set(keys.numpy().tolist())
    np.testing.assert_array_equal(vectors[:, 0], keys.numpy())
    table.clear()
    for first in range(0, rows // 2, 100):
        upsert_numbers(table, range(first, first + 100))
    assert table.lookup([5])[0, 0] == 5


def test_erasing_makes_room_on_a_full_disk(small_disk):
    table = in_files(small_disk, dim=256, rows=200)
    rows = fill_the_disk(table)
    table.erase(range(rows - 200))
    time.sleep(0.2)  # the thread that gives space back
    for first in range(50_000, 50_600, 100):
        upsert_numbers(table, range(first, first + 100))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.write_bytes(b"U" * path.stat().st_size), "is damaged"),
        (lambda path: os.truncate(path, 0), "ends before"),
    ],
)
def test_damaged_files(tmp_path, damage, text):
    """Calls that need damaged rows fail and name the file; rows in memory can be used."""
    table = in_files(tmp_path / "rows", dim=1024, name="t")
    for first in range(0, 1500, 100):
        upsert_numbers(table, range(first, first + 100))
    for path in (tmp_path / "rows").rglob("*.rows"):
        damage(path)
    ids = tf.constant([5], tf.int64)
    for call in (
        lambda: table.lookup(ids),
        lambda: table.lookup(ids, insert=False),
        lambda: de.lookup_sparse(table, ids, insert=False),
        lambda: table.contains(ids),
        lambda: upsert_numbers(table, [5]),
        lambda: table.erase(ids),
        lambda: de.export(table),
        lambda: de.dump(tmp_path / "dump", table),
    ):
        with pytest.raises(tf.errors.DataLossError, match=rf"{tmp_path}/rows/.*\.rows .*{text}"):
            call()
    assert [entry.name for entry in (tmp_path / "dump").iterdir()] == ["LOCK"]
    assert table.lookup([1450])[0, 0] == 1450
    table.clear()
    upsert_numbers(table, [5])
    assert table.lookup(ids)[0, 0] == 5


def test_lookups_of_several_tables_say_what_was_left_undone(tmp_path):
    """Rows leave the files of a full table after new keys have come, which nothing else reports."""
    table = in_files(tmp_path / "rows", dim=1024, name="t", max_capacity=1500)
    for first in range(0, 1500, 100):
        upsert_numbers(table, range(first, first + 100))
    for path in (tmp_path / "rows").rglob("*.rows"):
        os.truncate(path, 0)
    with pytest.raises(tf.errors.DataLossError, match=rf"{tmp_path}/rows/.*\.rows .*ends before"):
        de.lookup_sparse(table, tf.range(2000, 2100, dtype=tf.int64)[:, None])
    # The error was said once, and the keys are there.
    de.lookup_sparse(table, tf.constant([[2000]], tf.int64), insert=False)
    assert np.all(table.contains(range(2000, 2100)))


def test_configs_have_the_options(tmp_path):
    options = {
        "var_type": "file",
        "file_path": tmp_path,
        "max_dram_for_vectors": host_memory(100, 4),
    }
    layers = [
        de.layers.Embedding(4, **options),
        de.layers.EmbeddingBag(4, **options),
        de.layers.MultiTableEmbedding(4, [options, {"var_type": "host"}]),
    ]
    for layer in layers:
        config = json.loads(json.dumps(layer.get_config()))
        other = type(layer).from_config(config)
        assert json.loads(json.dumps(other.get_config())) == config
        assert str(tmp_path) in json.dumps(config)


def test_every_constructor_passes_the_options(tmp_path):
    options = {
        "var_type": "file",
        "file_path": str(tmp_path),
        "max_dram_for_vectors": host_memory(100, 4),
    }
    embedding = de.layers.Embedding(4, **options)
    embedding(tf.constant([[1]]))
    bag = de.layers.EmbeddingBag(4, **options)
    bag(tf.constant([[1]]))
    tables = [
        embedding.table,
        bag.table,
        *de.layers.MultiTableEmbedding(4, 2, **options).tables,
        tfra.get_variable("v", dim=4, **options),
    ]
    for table in tables:
        assert (table.options.file_path, table.options.var_type) == (str(tmp_path), "file")
        assert table.options.max_dram_for_vectors == options["max_dram_for_vectors"]
    assert len(list(tmp_path.glob("*/[0-9]*"))) == len(tables)


def churn(table, new):
    """Three times all of 10,000 rows, most of which are in files; then the thread has time.

    In another order each time: otherwise whole files would have no rows in use.
    """
    for n in range(3):
        order = np.random.default_rng(n).permutation(10_000)
        for first in range(0, 10_000, 500):
            table.lookup(order[first : first + 500])
            if new:
                table.lookup([-1 - 10_000 * n - first])
    time.sleep(1)
    return table.stats()


@pytest.mark.parametrize("new", [True, False])
def test_space_of_old_copies_is_given_back(tmp_path, new):
    table = in_files(tmp_path, dim=1100, rows=600)
    table.upsert(range(500), np.ones([500, 1100], np.float32))
    stats = churn(table, new)
    files = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.rows"))
    assert stats["file_rows_compacted"] > 0
    assert max(files, stats["file_bytes"]) < 2 * stats["file_row_bytes"] + 2**27
    np.testing.assert_array_equal(table.lookup(range(500)), np.ones([500, 1100]))


def test_damage_is_said_and_costs_little_space(tmp_path):
    """A unit that cannot be read, and whose rows no call asks for."""
    table = in_files(tmp_path, DIM, rows=1000)
    rows = 6000
    for first in [*range(0, rows, 500), 0]:
        table.lookup(range(first, first + 500))
    path = max(tmp_path.rglob("*.rows"), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    assert size >= 2**20
    with open(path, "r+b") as file:
        file.seek(3 * size // 4 // 4096 * 4096 + 100)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    keys = np.arange(rows)
    errors = {}
    for chunk in keys.reshape(-1, 10):
        try:
            table.explain(chunk)
        except tf.errors.DataLossError as error:
            errors[tuple(chunk)] = str(error)
    assert 0 < len(errors) < 20
    assert all(path.name in error for error in errors.values())
    lost = [key for chunk in errors for key in chunk]
    assert table.stats()["file_errors"] == 0
    left = np.setdiff1d(keys, lost)
    rng = np.random.default_rng(0)
    deadline = time.monotonic() + 200
    while not table.stats()["file_errors"]:
        table.lookup(rng.choice(left, 800, replace=False))
        assert time.monotonic() < deadline
    for _ in range(100):
        table.lookup(rng.choice(left, 800, replace=False))
    while (s := table.stats())["file_bytes"] > 2 * s["file_row_bytes"] + 4 * 2**20:
        time.sleep(0.01)
        assert time.monotonic() < deadline
    assert table.stats()["file_errors"] < 5
    with pytest.raises(tf.errors.DataLossError):
        table.lookup(lost)
