"""export_saved_model: copies, links and paths of dumps; deltas; failures."""

import contextlib
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import delta_publisher
import keras
import numpy as np
import pytest
import tensorflow as tf
from test_saved_models import assert_same_bits, no_files_above

import tf_dynemb as de
from tf_dynemb import layers, serving
from tf_dynemb.saved_models import export, writing

EXTRA = pathlib.Path("assets.extra", "tf_dynemb")
IDS = tf.constant([[1, 2, 3], [-1, 50, 2**40]], tf.int64)


def make_model():
    """A model of two tables, trained for a step."""
    inputs = keras.Input([3], dtype="int64", name="ids")
    parts = [
        layers.Embedding(dim, combiner=combiner, name=f"e{dim}")(inputs)
        for dim, combiner in ((4, "sum"), (2, "max"))
    ]
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(parts))
    model = keras.Model(inputs, outputs)
    model.compile(de.OptimizerWrapper(keras.optimizers.Adagrad(0.5)), "mse")
    model.fit(IDS, np.ones([2, 1]), verbose=0)
    train(model, 0)
    return model


def train(model, seed, rows=200):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 100, [rows, 3])
    tables = model.layers[1].table, model.layers[2].table
    # Only the rows change, so that a delta has all that has changed.
    for table in tables:
        keys = np.unique(ids)
        table.upsert(keys, rng.normal(size=[len(keys), table.dimension]))
        table.erase(rng.integers(0, 100, 5))


@pytest.fixture
def model():
    return make_model()


@pytest.mark.parametrize("path", ["model", "another"])
@pytest.mark.parametrize("tables", ["external", "link", "copy"])
def test_a_second_version_has_its_own_rows(tmp_path, tables, path):
    """The first version is loaded meanwhile. The weights of the second go with its rows."""
    module = tf.Module()
    module.table = de.DynamicVariable(2, 0.0, "host", name="t")
    module.weight = tf.Variable(1.0)
    module.serve = tf.function(
        lambda ids: module.weight * module.table.lookup(ids, insert=False),
        input_signature=[tf.TensorSpec([None], tf.int64)],
    )
    ids = tf.constant([1], tf.int64)
    dump = tmp_path / "dump"
    module.table.upsert([1], [[1.0, 1.0]])
    de.dump(dump, module.table, quiet=True)
    de.export_saved_model(module, tmp_path / "model", tables, dump)
    first = tf.saved_model.load(str(tmp_path / "model"))
    assert first.serve(ids).numpy().tolist() == [[1.0, 1.0]]
    module.table.upsert([1], [[2.0, 2.0]])
    module.weight.assign(10.0)
    exported = de.incremental_dump(dump, module.table, quiet=True)
    de.export_saved_model(module, tmp_path / path, tables, dump)
    second = tf.saved_model.load(str(tmp_path / path))
    assert second.serve(ids).numpy().tolist() == [[20.0, 20.0]]
    assert int(second.signatures["watermark"]()["watermark"]) == exported.tick
    assert first.serve(ids).numpy().tolist() == [[1.0, 1.0]]


def test_tables_in_a_list_of_a_layer(tmp_path):
    inputs = keras.Input([2], dtype="int64")
    made = keras.Model(inputs, layers.MultiTableEmbedding(3, tables=2)(inputs))
    ids = np.array([[5, 5], [6, 2**40]])
    made(ids[:1], training=True)
    de.export_saved_model(made, tmp_path / "served")
    served = load(tmp_path / "served")
    np.testing.assert_array_equal(served.serve(ids), made.predict(ids, verbose=0))


def load(path):
    return tf.saved_model.load(str(path))


def serve(path, ids=IDS):
    loaded = load(path)  # TensorFlow's functions need the object that they belong to
    return loaded.serve(ids)


def apply_delta(loaded, path):
    return loaded.signatures["apply_delta"](path=tf.constant(str(path)))


@pytest.mark.parametrize("tables", ["copy", "copy of a dump", "link", "external"])
def test_each_place_of_the_tables(tmp_path, model, tables):
    path, dump = tmp_path / "model", tmp_path / "dump"
    how, *from_dump = tables.split(" of a ")
    if from_dump or how != "copy":
        de.dump(dump, model, model.optimizer)
        train(model, 1)
        written = de.incremental_dump(dump, model, optimizer=model.optimizer)
        watermark = de.export_saved_model(model, path, how, dump)
        assert watermark == written
    else:
        watermark = de.export_saved_model(model, path)
    expected = model.predict_on_batch(IDS)
    loaded = load(path)
    assert_same_bits(loaded.serve(IDS), expected)
    if how == "external":
        assert not (path / EXTRA).exists()
    else:
        shutil.rmtree(dump, ignore_errors=True)
        moved = tmp_path / "moved"
        path.rename(moved)
        path = moved
        assert_same_bits(serve(path), expected)
        assert_same_bits(loaded.serve(IDS), expected)
    # A delta from the watermark continues it.
    train(model, 2)
    deltas = tmp_path / "deltas"
    de.incremental_dump(deltas, model, since=watermark)
    again = load(path)
    answer = apply_delta(again, deltas)
    assert int(answer["applied"]) == 1
    assert apply_delta(loaded, deltas)["id"].numpy() == answer["id"].numpy()
    assert_same_bits(loaded.serve(IDS), model.predict_on_batch(IDS))
    assert int(apply_delta(loaded, deltas)["applied"]) == 0


def test_a_link_shares_the_files_and_a_copy_lacks_the_state(tmp_path, model):
    dump = tmp_path / "dump"
    de.dump(dump, model, model.optimizer)
    de.export_saved_model(model, tmp_path / "link", "link", dump)
    de.export_saved_model(model, tmp_path / "copy", "copy", dump)
    assert list(dump.glob("*/*.state.npy"))
    for file in dump.glob("*/*"):
        assert (tmp_path / "link" / EXTRA / file.relative_to(dump)).samefile(file)
    names = {file.name for file in (tmp_path / "copy" / EXTRA).rglob("*.npy")}
    assert {name.split(".")[2] for name in names} == {
        "keys", "vectors", "index", "updates", "accesses",
    }  # fmt: skip
    # Both are dumps, which numpy alone reads.
    for name in ("link", "copy"):
        reader = serving.Reader(tmp_path / name / EXTRA, verify=True)
        vectors = model.layers[1].table.lookup(IDS, insert=False)
        assert_same_bits(reader.lookup(IDS.numpy(), reader.tables[0]), vectors)


def test_a_module_with_signatures(tmp_path):
    made = tf.Module()
    made.table = de.DynamicVariable(2, "ones", "host", name="user")
    made.table.upsert([1], [[3.0, 4.0]])
    spec = tf.TensorSpec([None], tf.int64, name="ids")
    made.serve = tf.function(made.table.lookup, input_signature=[spec])
    de.export_saved_model(made, tmp_path / "model", signatures=made.serve)
    loaded = load(tmp_path / "model")
    assert set(loaded.signatures) == {"serving_default", "apply_delta", "watermark"}
    assert loaded.serve(tf.constant([1, 2], tf.int64)).numpy().tolist() == [[3, 4], [1, 1]]
    assert len(made.table) == 1


@pytest.mark.parametrize("has_dump", [False, True])
def test_it_creates_the_folders_of_its_path(tmp_path, model, has_dump):
    if has_dump:
        de.dump(tmp_path / "dump", model)
    tables = ["link", tmp_path / "dump"] if has_dump else []
    path = tmp_path / "models" / "ctr" / "1"
    de.export_saved_model(model, path, *tables)
    assert [each.name for each in path.parent.iterdir()] == ["1"]
    tf.saved_model.load(str(path))


def test_the_log_names_the_path(tmp_path, model, caplog):
    logger = logging.getLogger("tensorflow")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "tensorflow"):
            de.export_saved_model(model, tmp_path / "model")
            logger.info("100%s", "%")
    finally:
        logger.removeHandler(caplog.handler)
    texts = [record.getMessage() for record in caplog.records]
    assert f"Assets written to: {tmp_path / 'model' / 'assets'}" in texts
    assert texts[-1] == "100%"
    assert not any("/.model." in text for text in texts)


def test_it_replaces_a_model_but_nothing_else(tmp_path, model):
    path = tmp_path / "model"
    de.export_saved_model(model, path)
    loaded, before = load(path), model.predict_on_batch(IDS)
    train(model, 5)
    de.export_saved_model(model, path)
    assert_same_bits(loaded.serve(IDS), before)
    assert_same_bits(serve(path), model.predict_on_batch(IDS))
    (tmp_path / "other").mkdir()
    de.export_saved_model(model, tmp_path / "other")  # an empty directory
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="full exists, and is not a SavedModel"):
        de.export_saved_model(model, tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "model", "other"]


WATCHER = """
import os, sys
path, stop = sys.argv[1:]
missing = 0
print("watching", flush=True)
while not os.path.exists(stop):
    for _ in range(10000):
        missing += not os.access(path, os.F_OK)
print(missing)
"""


def replace(path, number):
    """Puts a folder with a number in the place of a model."""
    new = path.with_name("new")
    new.mkdir()
    (new / "saved_model.pb").write_text(str(number))
    export._move(new, path)
    shutil.rmtree(new, ignore_errors=True)  # the model before


def test_a_model_is_there_while_it_is_replaced(tmp_path, monkeypatch):
    """In the eyes of another process, which has time to look after each `os.rename`."""
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    if not writing.exchange_at_once(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange two paths")
    (tmp_path / "a").unlink()
    (tmp_path / "b").unlink()
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths: (rename(*paths), time.sleep(0.01)))
    path, stop = tmp_path / "model", tmp_path / "stop"
    replace(path, -1)
    command = [sys.executable, "-c", WATCHER, str(path / "saved_model.pb"), str(stop)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout.readline() == "watching\n"
        for number in range(50):
            replace(path, number)
            assert (path / "saved_model.pb").read_text() == str(number)
        stop.touch()
        assert watcher.stdout.read() == "0\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "stop"]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_link_to_a_model(tmp_path, is_broken):
    """The link is replaced, not the model."""
    path, other = tmp_path / "model", tmp_path / "other"
    if not is_broken:
        replace(other, 1)
    path.symlink_to(other)
    replace(path, 2)
    assert (path / "saved_model.pb").read_text() == "2"
    assert is_broken or (other / "saved_model.pb").read_text() == "1"
    assert {p.name for p in tmp_path.iterdir()} == {"model", *([] if is_broken else ["other"])}


def test_a_system_that_cannot_exchange_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "exchange_at_once", lambda *_: False)
    path, new = tmp_path / "model", tmp_path / "new"
    replace(path, 1)
    replace(path, 2)
    assert (path / "saved_model.pb").read_text() == "2"
    with pytest.raises(FileNotFoundError):
        writing.exchange(new, path)
    assert (path / "saved_model.pb").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failed_export_leaves_what_was_there(tmp_path, model):
    path = tmp_path / "model"
    model.layers[1].table.upsert(np.arange(9000), np.ones([9000, 4]))
    with no_files_above(120_000), pytest.raises(OSError, match=r"\.npy"):
        de.export_saved_model(model, path)
    assert list(tmp_path.iterdir()) == []
    de.export_saved_model(model, path)
    expected = model.predict_on_batch(IDS)
    model.layers[1].table.upsert(np.arange(9), np.zeros([9, 4]))
    with no_files_above(120_000), pytest.raises(OSError, match=r"\.npy"):
        de.export_saved_model(model, path)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert_same_bits(serve(path), expected)


def test_dumps_of_other_tables(tmp_path, model):
    other = de.DynamicVariable(3, "ones", "host", name="e4/embeddings")
    de.dump(tmp_path / "dump", other)
    with pytest.raises(ValueError, match=r"'e4/embeddings' has dimension.*\(3, .*but \(4, "):
        de.export_saved_model(model, tmp_path / "model", "link", tmp_path / "dump")
    de.dump(tmp_path / "dump", {"x": other}, overwrite=True)
    with pytest.raises(ValueError, match="has no table 'e4/embeddings': it has 'x'"):
        de.export_saved_model(model, tmp_path / "model", "external", tmp_path / "dump")
    with pytest.raises(FileNotFoundError, match="nowhere holds no snapshot"):
        de.export_saved_model(model, tmp_path / "model", "copy", tmp_path / "nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tables": "move"}, "tables must be one of copy, link, external, got 'move'"),
        ({"tables": "link"}, "tables='link' needs dump"),
        ({"tables": "external"}, "tables='external' needs dump"),
        ({"follow": "x", "follow_seconds": 0}, "follow_seconds must be positive, got 0"),
        ({"signatures": {}}, "signatures is for a tf.Module"),
    ],
)
def test_invalid_arguments(tmp_path, model, arguments, message):
    with pytest.raises(ValueError, match=message):
        de.export_saved_model(model, tmp_path / "model", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_tables(tmp_path):
    inputs = keras.Input([3])
    with pytest.raises(ValueError, match="has no dynamic tables"):
        de.export_saved_model(keras.Model(inputs, inputs * 2), tmp_path / "model")


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_follow(tmp_path, model):
    """Deltas and bases that are published at a path appear, in all tables at once."""
    dump, path = tmp_path / "dump", tmp_path / "model"
    de.dump(dump, model)
    de.export_saved_model(model, path, dump=dump, follow=dump, follow_seconds=0.02)
    described = json.loads((path / "assets" / "tf_dynemb.json").read_text())
    assert described["follow"] == str(dump)
    loaded = load(path)
    for step in range(4):
        train(model, step + 10)
        (de.dump if step == 2 else de.incremental_dump)(dump, model)
        expected = model.predict_on_batch(IDS).tobytes()
        wait_for(lambda expected=expected: loaded.serve(IDS).numpy().tobytes() == expected)


def test_requests_while_deltas_are_applied(tmp_path):
    """Each answer belongs to one watermark, in both tables, and is never older than the last."""
    made = delta_publisher.Model()
    made.set(0)
    watermark = de.export_saved_model(made, tmp_path / "model")
    loaded = load(tmp_path / "model")
    problems, counts, stop = [], [0, 0], threading.Event()

    def ask(number):
        rng, last = np.random.default_rng(number), 0
        while not stop.is_set():
            answers = [part.numpy() for part in loaded.serve(rng.integers(0, 500, 50))]
            values = np.unique(np.concatenate(answers))
            if len(values) != 1 or values[0] < last:
                problems.append((last, values))
                return
            last = values[0]
            counts[number] += 1

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    deltas = tmp_path / "deltas"
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(stop.set)
        since = watermark
        for step in range(1, 201):
            made.set(step)
            since = de.incremental_dump(deltas, made.tables, since)
            assert int(apply_delta(loaded, deltas)["applied"]) == 1
            since = None
    assert problems == []
    assert min(counts) > 50
    assert loaded.serve([1])[0].numpy().tolist() == [[200, 200]]


def test_the_environment_is_untouched(tmp_path, model):
    before = dict(os.environ), sorted(os.listdir(tmp_path))
    de.export_saved_model(model, tmp_path / "model")
    assert dict(os.environ) == before[0]
    assert sorted(os.listdir(tmp_path)) == ["model"]
