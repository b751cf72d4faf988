"""Models and training with the rows of thin copies: exports, followers, loads."""

from __future__ import annotations

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb.format.vector_format import decode, encode
from tf_dynemb.storage import Chain
from tf_dynemb.storage.local_place import list_snapshots


def keys_of(path, table):
    return sorted(k for keys, _ in de.serving.Reader(path).items(table) for k in keys.tolist())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model, its chain, and its inputs."""
    folder = tmp_path_factory.mktemp("model")
    keras.utils.set_random_seed(5)
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(16, name="table")(ids))
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(vectors))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    rng = np.random.default_rng(1)
    inputs = rng.integers(0, 500, (512, 1))
    model.fit(inputs, rng.normal(size=[512, 1]), verbose=0)
    de.dump(folder / "chain", model, model.optimizer)
    return model, folder / "chain", inputs


def manifest_in(model_folder):
    return Chain.open(model_folder / "assets.extra" / "tf_dynemb").last.manifest


def stored_in(model_folder):
    (table,) = manifest_in(model_folder).tables
    return table.stored_as


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("from_dump", [False, True])
def test_exported_rows(tmp_path, trained, stored, from_dump):
    model, chain, inputs = trained
    dump = chain if from_dump else None
    de.export_saved_model(model, tmp_path / "whole", dump=dump)
    de.export_saved_model(model, tmp_path / "small", dump=dump, rows=stored)
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / each).rglob("*.vectors.npy"))
        for each in ("whole", "small")
    ]
    assert sizes[1] < 0.6 * sizes[0]
    assert stored_in(tmp_path / "small") == stored
    # Training does not continue from the rows of the second one.
    assert [manifest_in(tmp_path / each).copy for each in ("whole", "small")] == [None, {}]
    assert not list((tmp_path / "small").rglob("rows"))
    loaded = tf.saved_model.load(tmp_path / "small")
    exact = {key: v for keys, vs in de.serving.Reader(chain).items("table/embeddings")
             for key, v in zip(keys.tolist(), vs, strict=True)}  # fmt: skip
    vectors = np.stack([exact[int(key)] for key in inputs[:, 0]])
    kernel, bias = model.get_layer("out").get_weights()
    expected = decode(encode(vectors, stored), 16) @ kernel + bias
    np.testing.assert_allclose(loaded.serve(tf.constant(inputs)), expected, atol=1e-5)


def test_dense_variables_stay_whole(tmp_path):
    ones = np.ones((20, 4), np.float32)
    tables = {"t": de.DynamicVariable(4, name="t"), "mat": de.Variable(ones)}
    tables["t"].lookup(np.arange(30))
    de.dump(tmp_path / "chain", tables)
    de.publish(tmp_path / "copy", from_=tmp_path / "chain", where={"sample": 0.5}, max_rows=9,
               rows="int8")  # fmt: skip
    assert len(keys_of(tmp_path / "copy", "t")) == 9
    assert keys_of(tmp_path / "copy", "mat") == list(range(20))
    loaded = {"t": de.DynamicVariable(4, name="t"), "mat": de.Variable(0 * ones)}
    de.load(tmp_path / "copy", loaded)
    np.testing.assert_allclose(loaded["mat"].numpy(), ones, atol=0.01)
    with pytest.raises(ValueError, match="max_rows has 'mat', a dense variable"):
        de.publish(tmp_path / "other", from_=tmp_path / "chain", max_rows={"mat": 9})


def test_training_does_not_go_on_from_a_copy(tmp_path):
    """A table with the rows of a copy lacks what the chain has; it can follow the copy."""
    chain, copy = tmp_path / "chain", tmp_path / "copy"
    table = de.DynamicVariable(4, name="t")
    table.lookup(np.arange(30))
    de.dump(chain, table)
    de.publish(copy, from_=chain, max_rows=5)
    other = de.DynamicVariable(4, name="t")
    de.load(copy, other)
    assert len(other) == 5
    other.upsert([7], [[1.0] * 4])
    with pytest.raises(ValueError, match="never dumped to or loaded from the last snapshot"):
        de.incremental_dump(chain, other)
    with pytest.raises(ValueError, match="has snapshots of another table 't'"):
        de.dump(chain, other)
    for call in (de.dump, de.incremental_dump):
        with pytest.raises(ValueError, match="is a copy for serving, which `publish` writes"):
            call(copy, other)
    assert len(list_snapshots(chain)) == len(list_snapshots(copy)) == 1
    table.upsert([3], [[2.0] * 4])
    de.incremental_dump(chain, table)
    de.publish(copy, from_=chain)
    with pytest.raises(ValueError, match="do not continue the content of these tables"):
        de.apply_delta(chain, other)
    de.apply_delta(copy, other)
    assert other.lookup([3]).numpy().tolist() == [[2.0] * 4]
    assert de.apply_delta(copy, other).id == Chain.open(copy).last.manifest.id
    de.dump(tmp_path / "new", other)
    de.incremental_dump(tmp_path / "new", other)


def test_exports_of_rows_that_are_wrong(tmp_path, trained):
    model, chain, _ = trained
    with pytest.raises(ValueError, match="rows='int8' needs tables='copy'"):
        de.export_saved_model(model, tmp_path / "m", "link", chain, rows="int8")
    with pytest.raises(ValueError, match="rows must be one of float32"):
        de.export_saved_model(model, tmp_path / "m", rows="int16")
    with pytest.raises(ValueError, match="rows names table 'x', but the model has"):
        de.export_saved_model(model, tmp_path / "m", rows={"x": "int8"})
    assert not (tmp_path / "m").exists()


def test_a_small_model_follows(tmp_path, trained):
    """A model of int8 rows takes deltas of int8 from a copy, and of float32 from the chain."""
    model, chain, inputs = trained
    shutil.copytree(chain, tmp_path / "chain")
    chain, copy = tmp_path / "chain", tmp_path / "copy"
    de.publish(copy, from_=chain, rows="int8")
    loaded = []
    for name in ("of_copy", "of_chain"):
        de.export_saved_model(model, tmp_path / name, dump=copy)
        loaded.append(tf.saved_model.load(tmp_path / name))
    model.fit(inputs[:64], np.ones((64, 1)), verbose=0)
    last = de.incremental_dump(chain, model, optimizer=model.optimizer)
    de.publish(copy, from_=chain)
    loaded[0].apply_delta(tf.constant(str(copy)))
    loaded[1].apply_delta(tf.constant(str(chain)))
    exact = model.predict(inputs, verbose=0)
    for each in loaded:
        assert each.watermark()["id"].numpy().decode() == last.id
        np.testing.assert_allclose(each.serve(tf.constant(inputs)), exact, atol=0.05)
    changed = np.isin(inputs[:, 0], inputs[:64, 0])
    from_chain = np.abs(loaded[1].serve(tf.constant(inputs)) - exact)[changed]
    assert from_chain.max() < 1e-5  # rows of float32


def test_a_load_of_small_rows(tmp_path, trained):
    _, chain, inputs = trained
    de.publish(tmp_path / "copy", from_=chain, rows="int8")
    table = de.DynamicVariable(16, name="table/embeddings")
    de.load(tmp_path / "copy", {"table/embeddings": table}, dense=None)
    keys = np.unique(inputs)
    expected = de.serving.Reader(tmp_path / "copy").lookup(keys, "table/embeddings")
    np.testing.assert_array_equal(table.lookup(keys), expected)
