"""SavedModels that several ranks export together."""

from __future__ import annotations

import os
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.saved_model import loader_impl

import tf_dynemb as de
from tf_dynemb import layers, storage
from tf_dynemb.parallel.agreement import OtherRankError
from tf_dynemb.saved_models import writing

pytestmark = pytest.mark.ranks(2, 4)

EXTRA = pathlib.Path("assets.extra", "tf_dynemb")
IDS = tf.constant([[1, 2, 3], [-1, 50, 2**40]], tf.int64)
GRID = np.arange(22, dtype=np.float32).reshape(11, 2)


class Model(keras.Model):
    """Two tables, of which one rank has the second, and two matrices, spread in the same way."""

    def __init__(self):
        super().__init__()
        self.spread = layers.Embedding(4, combiner="sum", name="spread")
        self.localized = layers.Embedding(
            2, combiner="max", name="localized", mode="localized:1", trainable=False
        )
        self.grid = de.Variable(GRID, name="grid", trainable=False)
        self.home = de.Variable(GRID * 3, name="home", mode="localized:1", trainable=False)
        self.top = keras.layers.Dense(1)

    def call(self, ids):
        rows = tf.math.floormod(ids[:, 0], 11)
        matrices = [tf.gather(matrix, rows) for matrix in (self.grid, self.home)]
        return self.top(tf.concat([self.spread(ids), self.localized(ids), *matrices], 1))


def make_model():
    """A model that the ranks have trained for two steps."""
    model = Model()
    model.compile(de.OptimizerWrapper(keras.optimizers.Adagrad(0.5)), "mse")
    data = tf.data.Dataset.from_tensor_slices((IDS, np.ones([2, 1]))).repeat(2).batch(2)
    model.fit(data, verbose=0, callbacks=[de.callbacks.SynchronizeRanks()])
    change(model, 0)
    return model


def tables(model):
    return {"spread/embeddings": model.spread.table, "localized/embeddings": model.localized.table}


def change(model, seed):
    """Changes and removes rows of both tables: nothing that a delta would not have."""
    rng = np.random.default_rng(seed)
    keys = np.unique(rng.integers(0, 100, 80))
    for table in tables(model).values():
        table.upsert(keys, rng.normal(size=[len(keys), table.dimension]))
        table.erase(rng.integers(0, 100, 5))


def assert_same_bits(found, expected):
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def load(path):
    loaded = tf.saved_model.load(str(path))
    (graph,) = loader_impl.parse_saved_model(str(path)).meta_graphs
    operators = [op.name for op in graph.meta_info_def.stripped_op_list.op]
    assert [name for name in operators if "Horovod" in name or name == "DynembRoute"] == []
    return loaded


def serve(path):
    loaded = load(path)  # TensorFlow's functions need the object that they belong to
    return loaded.serve(IDS)


def apply_delta(loaded, path):
    return loaded.signatures["apply_delta"](path=tf.constant(str(path)))


SIGNATURE = [keras.InputSpec("int64", [None, 3])]


@pytest.mark.any_number_of_ranks
def test_all_ranks_export_one_model(comm, shared_path):
    export_together(comm, shared_path, "now")


@pytest.mark.parametrize("how", ["copy", "link", "external"])
def test_all_ranks_export_a_dump(comm, shared_path, how):
    export_together(comm, shared_path, how)


def export_together(comm, shared_path, how):
    """It has the rows of all ranks, wherever they come from, and takes the deltas of all ranks."""
    if comm.rank == 0:  # ranks may have counted their variables differently before
        de.Variable(GRID, name="of_one_rank", trainable=False)
    model = make_model()
    path, dump = shared_path / "model", shared_path / "dump"
    if how == "now":
        mark = de.export_saved_model(model, path, input_signature=SIGNATURE)
    else:
        de.dump(dump, tables(model), model.optimizer)
        change(model, 1)
        written = de.incremental_dump(dump, tables(model), optimizer=model.optimizer)
        mark = de.export_saved_model(model, path, how, dump, input_signature=SIGNATURE)
        assert mark == written
    assert (
        comm.gather_objects([mark.id, mark.tick, str(mark.utc)], "mark")
        == [[mark.id, mark.tick, str(mark.utc)]] * comm.size
    )
    expected = model.predict_on_batch(IDS)
    if how not in ("now", "external"):
        comm.barrier("exported")
        if comm.rank == 0:
            shutil.rmtree(dump)
        comm.barrier("without the dump")
    where = dump if how == "external" else path / EXTRA
    shards = storage.Chain.open(where).base.manifest.table("spread/embeddings")[1].shards
    assert [shard.rank for shard in shards if shard.rows] == list(range(comm.size))
    loaded = load(path)
    assert_same_bits(loaded.serve(IDS), expected)
    change(model, 2)
    deltas, changed = shared_path / "deltas", tables(model)
    if how == "now":  # the dump has no dense weights
        for weight in model.top.weights:
            weight.assign(weight * 3.0)
            changed[f"top/{weight.name}"] = weight
    last = de.incremental_dump(deltas, changed, since=mark)
    answer = apply_delta(loaded, deltas)
    assert int(answer["applied"]) == 1
    assert answer["id"].numpy().decode() == last.id
    assert_same_bits(loaded.serve(IDS), model.predict_on_batch(IDS))
    assert sorted(os.listdir(shared_path)) == sorted(
        {"model", "deltas", *(["dump"] if how == "external" else [])}
    )


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.user = de.DynamicVariable(3, "normal", name="user")
        self.item = de.DynamicVariable(2, "normal", name="user", key_type=tf.int32)
        self.grid = de.Variable(GRID, name="grid", trainable=False)
        self.weight = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def serve(self, ids):
        rows = tf.reshape(ids, [-1, 1]) % 11
        pooled = de.lookup_sparse([self.user, self.grid], [rows, rows], combiners="sum")
        items = self.item.lookup(tf.cast(ids % 11, tf.int32), insert=False)
        return tf.concat([self.user.lookup(ids), items, *pooled], 1) * self.weight


@pytest.mark.any_number_of_ranks
def test_functions_that_were_traced_on_several_ranks(comm, shared_path):
    made = Module()
    made.user.upsert(np.arange(40), np.arange(120.0).reshape(40, 3))
    made.item.upsert(np.arange(5, dtype=np.int32), np.ones([5, 2]))
    ids = tf.constant([1, 7, 30, 39, -5], tf.int64)
    expected = made.serve(ids)  # traced here, with exchanges; it also inserts a row
    de.export_saved_model(made, shared_path / "model", signatures=made.serve)
    assert made.grid.shape == GRID[comm.rank :: comm.size].shape
    assert_same_bits(made.serve(ids), expected)
    loaded = load(shared_path / "model")
    assert_same_bits(loaded.serve(ids), expected)
    (found,) = loaded.signatures["serving_default"](ids=ids).values()
    assert_same_bits(found, expected)
    other = tf.Module()
    other.user = made.user
    other.lookup = tf.function(other.user.lookup, [tf.TensorSpec([None], tf.int64)])
    concrete = other.lookup.get_concrete_function()
    error = ValueError if comm.rank == 0 else OtherRankError
    with pytest.raises(error, match="a ConcreteFunction that was traced for several ranks"):
        de.export_saved_model(other, shared_path / "other", signatures=concrete)
    comm.barrier("failed")
    assert os.listdir(shared_path) == ["model"]


def test_the_failure_of_one_rank_fails_all(comm, shared_path, monkeypatch):
    """A failed export leaves the model that was there, and nothing else."""
    model, path = make_model(), shared_path / "model"

    def export(target=path, **arguments):
        return de.export_saved_model(model, target, input_signature=SIGNATURE, **arguments)

    export()
    expected = model.predict_on_batch(IDS)
    change(model, 3)

    def full(*_):
        raise OSError(28, "no space left, planted")

    def assert_fails(failing, what=export):
        error, message = (
            (OSError, "planted")
            if comm.rank == failing
            else (
                OtherRankError,
                f"failed on rank {failing}: OSError: .*planted",
            )
        )
        with pytest.raises(error, match=message):
            what()
        comm.barrier("failed")  # rank 0 has removed what was written
        assert os.listdir(shared_path) == ["model"]
        assert_same_bits(serve(path), expected)
        comm.barrier("compared")

    for rank in range(comm.size):
        with monkeypatch.context() as patch:
            if comm.rank == rank:
                patch.setattr(storage.ColumnWriter, "append", full)
            assert_fails(rank)
    with monkeypatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(writing, "sync", full)
        assert_fails(0)
    with pytest.raises(ValueError, match="arguments and the tables must be the same on all ranks"):
        export(follow_seconds=1.0 + comm.rank)
    occupied = shared_path / "occupied"
    if comm.rank == 0:
        occupied.write_text("")
    error = FileExistsError if comm.rank == 0 else OtherRankError
    with pytest.raises(error, match="is not a SavedModel"):
        export(occupied)
    comm.barrier("occupied")
    export()
    assert_same_bits(serve(path), model.predict_on_batch(IDS))


def test_other_functions_refuse_tables_on_several_ranks(comm, shared_path):
    """`tf.saved_model.save` and `model.export` cannot write one model together."""
    model = make_model()
    path = shared_path / f"model_{comm.rank}"
    with pytest.raises(RuntimeError, match="export_saved_model on all ranks"):
        model.export(path, input_signature=SIGNATURE, verbose=False)
    with pytest.raises(RuntimeError, match="export_saved_model on all ranks"):
        tf.saved_model.save(Module(), path)
    assert not (path / "saved_model.pb").exists()
