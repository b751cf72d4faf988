"""OneEmbedding's save_snapshot and load_snapshot: rows, optimizer state, errors."""

import gc
import warnings

import keras
import numpy as np
import pytest

import tf_dynemb as de
import tf_dynemb.oneembedding as oe
from tf_dynemb.variables.transfer import export_rows

IDS = np.random.default_rng(0).integers(0, 30, [200, 2])
LABELS = (IDS.sum(1) % 2).astype(np.float32)


def layer_of(path, name="ads", dim=3, tables=2, dtype="float32", key_type="int64"):
    table = oe.make_table_options(oe.make_uniform_initializer(-0.1, 0.1))
    return oe.MultiTableEmbedding(
        name,
        dim,
        dtype,
        key_type,
        [table] * tables,
        oe.make_cached_host_mem_store_options(16, path, 1000),
    )


def model_of(path, kind="Adam", **options):
    layer = layer_of(path, **options)
    inputs = keras.Input([2], dtype="int64")
    x = keras.layers.Flatten()(layer(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(x))
    model.compile(de.OptimizerWrapper(getattr(keras.optimizers, kind)(0.05)), "mse")
    return model, layer


def fit(model, epochs=1):
    model.fit(IDS, LABELS, epochs=epochs, verbose=0, shuffle=False, batch_size=50)


def content(layer):
    """The rows of each table, in the order of their keys: keys, vectors, optimizer state."""
    rows = []
    for table in layer.tables:
        keys, *others = (part.numpy() for part in export_rows(table))
        order = np.argsort(keys)
        rows += [keys[order], *(part[order] for part in others)]
    return rows


def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def test_a_snapshot_has_rows_and_optimizer_state(tmp_path):
    model, layer = model_of(tmp_path)
    fit(model)
    layer.save_snapshot("first")
    saved, steps = content(layer), int(model.optimizer.iterations)
    assert saved[2].shape[1] >= 6  # the two moments of Adam
    assert np.abs(saved[2]).min(1).max() > 0
    fit(model)
    after = content(layer)
    assert not same(after, saved)
    layer.load_snapshot("first")
    assert same(content(layer), saved)
    assert int(model.optimizer.iterations) == steps

    other, loaded = model_of(tmp_path)
    assert loaded.load_snapshot("first", optimizer=other.optimizer) is None
    assert same(content(loaded), saved)
    assert int(other.optimizer.iterations) == steps
    assert (tmp_path / "snapshots" / "first" / "ads").is_dir()


def test_training_continues_from_a_snapshot_with_the_same_bits(tmp_path):
    results = []
    for stop in (False, True):
        model, layer = model_of(tmp_path / str(stop), kind="Adagrad")
        model.layers[-1].trainable = False  # only the tables are in the snapshot
        model.compile(model.optimizer, "mse")
        fit(model)
        if stop:
            layer.save_snapshot("s")
            model, layer = model_of(tmp_path / str(stop), kind="Adagrad")
            model.layers[-1].trainable = False
            model.compile(model.optimizer, "mse")
            layer.load_snapshot("s", model.optimizer)
        fit(model)
        results.append(content(layer))
    assert same(*results)


def test_a_multi_optimizer_is_found(tmp_path):
    kinds = keras.optimizers
    if not hasattr(kinds, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    model, layer = model_of(tmp_path)
    by_path = kinds.OptimizerMap(
        kinds.SGD(0.05), {"ads/table_0": kinds.Adam(0.05), "ads/table_1": kinds.Adagrad(0.05)}
    )
    model.compile(de.OptimizerWrapper(kinds.MultiOptimizer(by_path)), "mse")
    fit(model)
    saved = content(layer)
    assert saved[2].shape[1] >= 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.save_snapshot("s")
        fit(model)
        layer.load_snapshot("s")
    assert same(content(layer), saved)


def test_a_snapshot_is_replaced(tmp_path):
    model, layer = model_of(tmp_path)
    for _ in range(2):
        fit(model)
        layer.save_snapshot("s")
    saved = content(layer)
    fit(model)
    layer.load_snapshot("s")
    assert same(content(layer), saved)


def test_embeddings_that_share_a_path(tmp_path):
    wide, deep = layer_of(tmp_path, "wide", dim=1), layer_of(tmp_path, "deep")
    ids = np.arange(20).reshape(10, 2)
    for layer in (wide, deep):
        layer(ids, training=True)
        layer.save_snapshot("s")
    saved = content(wide), content(deep)
    for layer, rows in zip((wide, deep), saved, strict=True):
        layer(ids + 100, training=True)
        layer.load_snapshot("s")
        assert same(content(layer), rows)


def test_serving_reads_a_snapshot(tmp_path):
    layer = layer_of(tmp_path)
    layer(IDS, training=True)
    layer.save_snapshot("s")
    reader = de.serving.Reader(tmp_path / "snapshots" / "s" / "ads")
    assert sorted(reader.tables) == ["table_0", "table_1"]
    expected = layer(IDS).numpy()
    for t in range(2):
        np.testing.assert_array_equal(reader.lookup(IDS[:, t], table=f"table_{t}"), expected[:, t])


def test_a_list_of_paths_has_snapshots_in_the_first(tmp_path):
    layer = layer_of([str(tmp_path / "rank")])
    layer(IDS, training=True)
    layer.save_snapshot("s")
    assert (tmp_path / "rank" / "snapshots" / "s" / "ads").is_dir()


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"name": "other"}, FileNotFoundError, "'other' has no snapshot 's'.*snapshots in.*: s"),
        ({"tables": 3}, ValueError, "'s' has the tables table_0, table_1, but 'ads' has.*table_2"),
        ({"tables": 1}, ValueError, "'s' has the tables table_0, table_1, but 'ads' has table_0"),
        ({"dim": 4}, ValueError, "'table_0' has dimension 3 on disk, but 'ads/table_0:0' has 4"),
        ({"dtype": "float16"}, ValueError, "'table_0' has dtype float32 on disk"),
        ({"key_type": "int32"}, ValueError, "'table_0' has key_type int64 on disk"),
    ],
    ids=str,
)
def test_a_snapshot_that_does_not_fit(tmp_path, changes, error, names):
    layer = layer_of(tmp_path)
    layer(IDS, training=True)
    layer.save_snapshot("s")
    other = layer_of(tmp_path, **changes)
    before = content(other)
    with pytest.raises(error, match=names):
        other.load_snapshot("s")
    assert same(content(other), before)


def test_a_snapshot_that_is_not_there(tmp_path):
    layer = layer_of(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"'ads' has no snapshot 's'.*snapshots in.*: none"):
        layer.load_snapshot("s")
    for name in ("a", "b"):
        layer.save_snapshot(name)
    with pytest.raises(FileNotFoundError, match=r"snapshots in.*: a, b"):
        layer.load_snapshot("s")


def test_a_damaged_snapshot(tmp_path):
    layer = layer_of(tmp_path)
    layer(IDS, training=True)
    layer.save_snapshot("s")
    (vectors, *_) = (tmp_path / "snapshots").rglob("*vectors*.npy")
    vectors.write_bytes(vectors.read_bytes()[:-8] + b"\1" * 8)
    before = content(layer)
    with pytest.raises(de.storage.DataLossError, match="vectors"):
        layer.load_snapshot("s")
    assert same(content(layer), before)


@pytest.mark.parametrize("call", ["save_snapshot", "load_snapshot"])
@pytest.mark.parametrize(
    ("name", "error"),
    [(3, TypeError), (None, TypeError), ("", ValueError), ("..", ValueError), ("a/b", ValueError)],
)
def test_bad_names(tmp_path, call, name, error):
    layer = layer_of(tmp_path)
    with pytest.raises(error, match=f"snapshot_name.*{name!r}"):
        getattr(layer, call)(name)
    assert list(tmp_path.iterdir()) == []


def test_bad_optimizers(tmp_path):
    layer = layer_of(tmp_path)
    with pytest.raises(TypeError, match=r"optimizer must be an OptimizerWrapper.*sgd"):
        layer.save_snapshot("s", optimizer="sgd")


def test_state_is_not_lost_in_silence(tmp_path):
    model, layer = model_of(tmp_path)
    fit(model)
    layer.save_snapshot("s")
    other = layer_of(tmp_path)
    with pytest.warns(UserWarning, match="'s' has the state of Adam.*pass optimizer="):
        other.load_snapshot("s")
    assert same(content(other)[:2], content(layer)[:2])
    del model
    gc.collect()
    keras.backend.clear_session()
    gc.collect()
    with pytest.warns(UserWarning, match="the optimizer of 'ads' does not exist any more"):
        layer.save_snapshot("t")


def test_tables_of_several_optimizers(tmp_path):
    layer = layer_of(tmp_path)
    layer(IDS, training=True)
    wrappers = [de.OptimizerWrapper(keras.optimizers.Adam()) for _ in range(2)]
    for wrapper, table in zip(wrappers, layer.tables, strict=True):
        wrapper.attach([table])
    with pytest.raises(ValueError, match="2 optimizers train the tables: save_snapshot needs"):
        layer.save_snapshot("s")
