"""Exports of models whose tables are in GPU memory: on the fake GPU, except for names."""

import gpu
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.saved_model import loader_impl
from test_export_saved_model import apply_delta, load
from test_saved_models import assert_same_bits

import tf_dynemb as de
from tf_dynemb import _ops, layers
from tf_dynemb.parallel.placement import Placement

GB = 2.0**-30
DIM = 4
IDS = tf.constant([[1, 2, 3], [-1, 150, 2**40]], tf.int64)
KINDS = {"hbm": {}, "hybrid": {"max_hbm_for_vectors": 1024 * GB}, "host": {}}


def make_model(kinds):
    inputs = keras.Input([3], dtype="int64", name="ids")
    bags = [
        layers.Embedding(DIM, combiner="mean", name=kind, var_type=kind, **KINDS[kind])(inputs)
        for kind in kinds
    ]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(bags)))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adagrad(0.5)), "mse")
    model.fit(IDS, np.ones([2, 1]), verbose=0)
    return model


def tables(model, kinds):
    return [model.get_layer(kind).table for kind in kinds]


def change(model, kinds, seed):
    rng = np.random.default_rng(seed)
    for table in tables(model, kinds):
        table.upsert(np.arange(200), rng.normal(size=[200, DIM]))
        table.erase(rng.integers(0, 200, 10))


@pytest.mark.skipif(not gpu.ON, reason="tables are not on a GPU")
@pytest.mark.parametrize("kinds", [["hbm"], ["hybrid"], ["hbm", "hybrid", "host"]], ids="+".join)
def test_a_model_with_rows_on_a_device(tmp_path, kinds):
    """Rows of both tiers are in the SavedModel, whose tables are in the host's memory."""
    model = make_model(kinds)
    change(model, kinds, 1)
    for table, kind in zip(tables(model, kinds), kinds, strict=True):
        in_device = table.stats()["device_rows"]
        held = len(table)
        assert {"hbm": in_device >= held, "hybrid": 0 < in_device < held, "host": not in_device}[
            kind
        ]
    dump, path = tmp_path / "dump", tmp_path / "model"
    de.dump(dump, model, model.optimizer)
    watermark = de.export_saved_model(model, path)
    expected = model.predict_on_batch(IDS)
    loaded, linked = load(path), tmp_path / "linked"
    assert_same_bits(loaded.serve(IDS), expected)
    de.export_saved_model(model, linked, "link", dump)
    model.export(tmp_path / "exported", verbose=False)
    for other in (linked, tmp_path / "exported"):
        found = load(other)
        assert_same_bits(found.serve(IDS), expected)
    change(model, kinds, 2)
    de.incremental_dump(tmp_path / "deltas", model, since=watermark)
    assert int(apply_delta(loaded, tmp_path / "deltas")["applied"]) == 1
    assert_same_bits(loaded.serve(IDS), model.predict_on_batch(IDS))


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.table = de.DynamicVariable(DIM, "normal", name="table")
        self.other = de.DynamicVariable(DIM, "normal", "host", name="other")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def serve(self, ids):
        bags = tf.reshape(ids, [-1, 1])
        pooled = de.lookup_sparse([self.table, self.other], [bags, bags], combiners="sum")
        return tf.concat([self.table.lookup(ids), *pooled], 1)


@pytest.mark.parametrize("how", ["export_saved_model", "save"])
def test_no_operator_of_the_graph_has_a_gpu(tmp_path, monkeypatch, how):
    """Otherwise a machine without that GPU could not run it. The name is all that a test needs."""
    made, ids = Module(), tf.constant([1, 2, 2**50], tf.int64)
    made.table.upsert([1, 2], np.ones([2, DIM]))
    expected = made.serve(ids)
    with monkeypatch.context() as patch:
        patch.setattr(_ops.context, "num_gpus", lambda: 1)
        made.table._placement = Placement("/device:GPU:0", "hbm")
        made = traced(made)
        assert "GPU:0" in str(made.serve.get_concrete_function().graph.as_graph_def())
        if how == "save":
            tf.saved_model.save(made, tmp_path / "model")
        else:
            de.export_saved_model(made, tmp_path / "model", signatures=made.serve)
    graph = loader_impl.parse_saved_model(str(tmp_path / "model")).meta_graphs[0].graph_def
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    assert any(node.op == "DynembLookupSparse" for node in nodes)
    assert [node.name for node in nodes if "GPU" in node.device] == []
    loaded = load(tmp_path / "model")
    assert_same_bits(loaded.serve(ids), expected)


def traced(made):
    """The same tables in a module whose function is traced now."""
    again = Module()
    again.table, again.other = made.table, made.other
    return again
