"""OneEmbedding's store in files: training on it equals training in memory, bit for bit."""

import keras
import numpy as np
import pytest

import tf_dynemb as de
import tf_dynemb.oneembedding as oe
from tf_dynemb.tables.options import VAR_TYPES
from tf_dynemb.variables.transfer import export_rows

pytestmark = pytest.mark.skipif("file" not in VAR_TYPES, reason="this build has no tables in files")


def layer_of(store):
    table = oe.make_table_options(oe.make_normal_initializer(0, 0.1))
    return oe.MultiTableEmbedding("e", 16, "float32", "int64", [table] * 2, store)


def rows_of(layer):
    rows = []
    for table in layer.tables:
        keys, vectors, state = (part.numpy() for part in export_rows(table))
        order = np.argsort(keys)
        rows += [keys[order], vectors[order], state[order]]
    return rows


def trained(store, steps=6):
    """A layer after steps with more rows than 1 MB holds, and the model around it."""
    layer = layer_of(store)
    inputs = keras.Input([2], dtype="int64")
    x = keras.layers.Flatten()(layer(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(x))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.05)), "mse")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20_000, [steps * 2000, 2])
    labels = rng.normal(size=len(ids)).astype(np.float32)
    model.fit(ids, labels, batch_size=2000, verbose=0, shuffle=False)
    return layer, model


@pytest.mark.parametrize("budgets", [{"cache_budget_mb": 1}, {"host_cache_budget_mb": 1}])
def test_training_in_files_equals_training_in_memory(tmp_path, budgets):
    store = oe.make_cached_ssd_store_options(
        **{"cache_budget_mb": 0, "persistent_path": str(tmp_path), **budgets}
    )
    in_files, _ = trained(store)
    files = [path for path in (tmp_path / "0-1").rglob("*") if path.is_file()]
    assert files
    in_memory, _ = trained(oe.make_cached_host_mem_store_options(1, "unused", 10**6))
    for one, other in zip(rows_of(in_files), rows_of(in_memory), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_snapshot_of_files_is_for_any_store(tmp_path):
    store = oe.make_cached_ssd_store_options(1, str(tmp_path))
    layer, model = trained(store, steps=3)
    layer.save_snapshot("s")
    expected = rows_of(layer)
    trained_optimizer = model.optimizer
    layer.load_snapshot("s", trained_optimizer)
    memory_store = oe.make_cached_host_mem_store_options(1, str(tmp_path), 10**6)
    other = layer_of(memory_store)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.05))
    other.load_snapshot("s", optimizer)
    for loaded in (layer, other):
        for one, saved in zip(rows_of(loaded), expected, strict=True):
            np.testing.assert_array_equal(one, saved)


def test_a_path_for_each_rank_has_the_files_itself(tmp_path):
    layer = layer_of(oe.make_cached_ssd_store_options(1, [str(tmp_path / "of_rank_0")]))
    for ids in np.arange(20_000).reshape(4, -1, 2):  # each batch fits in memory
        layer(ids, training=True)
    assert [path for path in (tmp_path / "of_rank_0" / "e").rglob("*") if path.is_file()]
    assert not (tmp_path / "of_rank_0" / "0-1").exists()
