"""Dumps, deltas, checkpoints and exported models of tables with rows in files."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from file_pairs import DIM, Pair, check_same, in_files
from row_memory import host_memory

import tf_dynemb as de

K = keras.optimizers


def trained(folder, seed=0, **options):
    pair = Pair(folder, lambda: K.Adam(0.05), states=2, **options)
    pair.train(seed=seed)
    return pair


def empty(folder, to_files, rows=100):
    """A table to load into."""
    if to_files:
        return in_files(folder, DIM, rows, 2, name="t", seed=5, initializer="normal")
    return de.DynamicVariable(DIM, var_type="host", name="t", seed=5, initializer="normal")


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_a_dump_equals_the_dump_of_the_table_in_memory(tmp_path, dtype):
    """It can be read without TensorFlow, and has the same rows."""
    pair = trained(tmp_path / "files", dtype=dtype)
    for name, table in zip(("files", "memory"), pair.tables, strict=True):
        de.dump(tmp_path / f"dump_{name}", table)
    keys = np.sort(de.export(pair.memory)[0].numpy())
    ids = np.concatenate([keys, keys + 1])
    vectors = []
    for name, table in zip(("files", "memory"), pair.tables, strict=True):
        reader = de.serving.Reader(tmp_path / f"dump_{name}")
        vectors.append(np.asarray(reader.lookup(ids), np.float32))
        np.testing.assert_array_equal(reader.contains(ids), np.isin(ids, keys))
        expected = []
        for first in range(0, len(ids), 50):
            found = table.lookup(ids[first : first + 50], insert=False)
            expected.append(tf.cast(found, tf.float32))
        np.testing.assert_array_equal(vectors[-1], np.concatenate(expected))
    np.testing.assert_array_equal(*vectors)
    pair.check()


@pytest.mark.parametrize(("from_files", "to_files"), [(True, False), (False, True), (True, True)])
def test_loading_in_each_direction(tmp_path, from_files, to_files):
    """Also into a table whose memory holds another number of rows; then training goes on."""
    pair = trained(tmp_path / "a")
    source = pair.files if from_files else pair.memory
    optimizer = pair.optimizers[0 if from_files else 1]
    de.dump(tmp_path / "dump", source, optimizer=optimizer)
    table = empty(tmp_path / "b", to_files, rows=160)
    loaded = de.OptimizerWrapper(K.Adam(0.05))
    de.load(tmp_path / "dump", table, optimizer=loaded)
    check_same(table, pair.memory, most_in_files=to_files)
    pair.files, pair.tables = table, (table, pair.memory)
    pair.optimizers = [loaded, pair.optimizers[1]]
    pair.train(steps=10, seed=9)
    pair.check(most_in_files=to_files)


def test_deltas(tmp_path):
    """Deltas have the changed rows and the deletions, wherever the rows are."""
    pair = trained(tmp_path / "files")
    paths = (tmp_path / "a", tmp_path / "b")
    sources = list(zip(paths, pair.tables, pair.optimizers, strict=True))
    # The follower with files reads the chain of the table in memory, and the other way round.
    followers = [
        (path, table, de.OptimizerWrapper(K.Adam(0.05)))
        for path, table in zip(
            paths, (empty(None, False), empty(tmp_path / "c", True, 240)), strict=True
        )
    ]
    for path, table, optimizer in sources:
        de.dump(path, table, optimizer)
    for path, table, optimizer in followers:
        de.load(path, table, optimizer)
    keys = np.sort(de.export(pair.memory)[0].numpy())
    for n in range(4):
        pair.train(steps=3, seed=n + 20)
        pair.both(lambda t, n=n: t.erase(keys[n * 20 : n * 20 + 20]))
        if n == 2:
            pair.both(lambda t: t.forget(keys[-9:]))
            pair.both(lambda t: t.upsert(keys[:50], tf.ones([50, DIM])) and None)
        if n == 3:
            pair.both(lambda t: t.clear() and None)
            pair.train(steps=2, seed=40)
        for path, table, optimizer in sources:
            de.incremental_dump(path, table, optimizer=optimizer)
        for path, table, optimizer in followers:
            de.apply_delta(path, table, optimizer)
            check_same(table, pair.memory, most_in_files=False)
    assert followers[1][1].stats()["file_rows_written"] > 0


def test_incremental_dump_since_a_watermark(tmp_path):
    pair = trained(tmp_path / "files")
    marks = [de.dump(tmp_path / n, t) for n, t in zip("ab", pair.tables, strict=True)]
    keys = np.sort(de.export(pair.memory)[0].numpy())
    changed = keys[::7][:40]
    pair.both(
        lambda t: t.scatter_add(tf.IndexedSlices(tf.ones([len(changed), DIM]), changed)) and 0
    )
    pair.both(lambda t: t.lookup(keys[:90]))  # changes no row
    pair.both(lambda t: t.lookup(keys[90:180]))
    for name, table in zip("ab", pair.tables, strict=True):
        de.incremental_dump(tmp_path / name, table)
        reader = de.serving.Reader(tmp_path / name)
        got = reader.lookup(changed)
        np.testing.assert_array_equal(got, table.lookup(changed, insert=False))
    assert marks[0] is not None


def test_a_dump_while_training(tmp_path):
    """The dump has the rows of its moment, although rows move and change meanwhile."""
    from tf_dynemb.tables.cut import Cut

    pair = trained(tmp_path / "files")
    before = {k: v.tobytes() for k, v in zip(*map(np.asarray, de.export(pair.memory)), strict=True)}
    with Cut([pair.files], [-1], with_deleted=False) as cut:
        pair.train(steps=20, seed=3)
        pair.both(lambda t: t.erase(list(before)[:50]))
        rows = {}
        for _, block in cut.blocks():
            rows.update(
                (k, v.view(np.float32).tobytes())
                for k, v in zip(block.keys.tolist(), block.vectors, strict=True)
            )
    assert rows == before
    pair.check()


def model_of(folder, **options):
    keras.utils.set_random_seed(1)
    if folder is not None:
        limit = host_memory(200, DIM, states=2)
        options |= {"var_type": "file", "file_path": folder, "max_dram_for_vectors": limit}
    inputs = keras.Input((3,), dtype="int64")
    x = de.layers.Embedding(DIM, name="ids", seed=1, **options)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
    model.compile(de.OptimizerWrapper(K.Adam(0.05)), loss="mse")
    return model


RNG = np.random.default_rng(0)
X = RNG.integers(-900, 900, (640, 3))
Y = RNG.random((640, 1)).astype(np.float32)


def fit(model, epochs=1):
    return model.fit(X, Y, epochs=epochs, batch_size=32, shuffle=False, verbose=0).history["loss"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same model with rows in files and in memory, after an epoch."""
    both = [model_of(tmp_path_factory.mktemp("files")), model_of(None)]
    assert fit(both[0]) == fit(both[1])
    return both


def tables_of(*models):
    return [model.get_layer("ids").table for model in models]


def test_fit_evaluate_and_predict(models):
    files, memory = models
    check_same(*tables_of(files, memory))
    hits = tables_of(files)[0].stats()["file_hits"]
    assert files.evaluate(X, Y, 32, verbose=0) == memory.evaluate(X, Y, 32, verbose=0)
    np.testing.assert_array_equal(
        files.predict(X + 3, 32, verbose=0), memory.predict(X + 3, 32, verbose=0)
    )
    assert tables_of(files)[0].stats()["file_hits"] > hits
    check_same(*tables_of(files, memory))


@pytest.mark.parametrize(("source", "to_files"), [(0, False), (1, True), (0, True)])
def test_weights_file(tmp_path, models, source, to_files):
    path = tmp_path / "w.weights.h5"
    models[source].save_weights(path)
    other = model_of(tmp_path / "files" if to_files else None)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(path)
    check_same(*tables_of(other, models[1]), most_in_files=to_files)


@pytest.mark.parametrize(("source", "to_files"), [(0, False), (1, True), (0, True)])
def test_checkpoint(tmp_path, models, source, to_files):
    path = tf.train.Checkpoint(models[source]).save(str(tmp_path / "c"))
    other = model_of(tmp_path / "files" if to_files else None)
    tf.train.Checkpoint(other).restore(path).assert_existing_objects_matched()
    check_same(*tables_of(other, models[1]), most_in_files=to_files)
    np.testing.assert_array_equal(
        other.predict(X, 32, verbose=0), models[1].predict(X, 32, verbose=0)
    )


def test_keras_file(tmp_path, models):
    """The config has the options, so the loaded model has rows in files, too."""
    models[0].save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    table = tables_of(loaded)[0]
    assert table.options.var_type == "file"
    assert table.options.file_path == tables_of(models[0])[0].options.file_path
    check_same(table, tables_of(models[1])[0])


def test_served_model(tmp_path, models):
    de.export_saved_model(models[0], tmp_path / "served")
    served = tf.saved_model.load(str(tmp_path / "served"))
    signature = served.signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    (got,) = signature(**{name: tf.constant(X)}).values()
    np.testing.assert_allclose(got, models[1].predict(X, 32, verbose=0), rtol=1e-6)


def test_model_dump_and_delta(tmp_path, models):
    files = models[0]
    de.dump(tmp_path / "d", files, files.optimizer)
    assert fit(files) == fit(models[1])
    de.incremental_dump(tmp_path / "d", files, optimizer=files.optimizer)
    other = model_of(None)
    de.load(tmp_path / "d", other, other.optimizer)
    check_same(*tables_of(files, other))
    reader, (table,) = de.serving.Reader(tmp_path / "d"), tables_of(models[1])
    np.testing.assert_array_equal(reader.lookup(X), table.lookup(X, insert=False))


def test_a_restore_keeps_the_index_of_memory_small(tmp_path):
    """Not a slot for each row in files."""
    pair = Pair(tmp_path / "files", dim=4, initializer="uniform")
    for first in range(0, 20_000, 80):
        pair.both(lambda t, f=first: t.lookup(range(f, f + 80)) is None)
    de.dump(tmp_path / "d", pair.files)
    table = in_files(tmp_path / "other", name="t", seed=5)
    de.load(tmp_path / "d", table)
    check_same(table, pair.memory)
    assert table.stats()["slots"] < 2000
