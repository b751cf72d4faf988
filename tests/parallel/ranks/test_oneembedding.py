"""OneEmbedding on several ranks: capacity, paths, snapshots, and the same model as on one rank."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
import tf_dynemb.oneembedding as oe
from parallel.ranks.gathered import close, gather, one_rank, whole_table
from tf_dynemb.tables.options import VAR_TYPES

pytestmark = pytest.mark.ranks(2, 4)


def layer_of(path, name="e", dim=2, capacity=100_000, **options):
    tables = [
        oe.make_table_options(oe.make_normal_initializer(0, 0.1)),
        oe.make_table_options(oe.make_uniform_initializer(-1, 1)),
    ]
    store = oe.make_cached_host_mem_store_options(16, path, capacity)
    return oe.MultiTableEmbedding(name, dim, "float32", "int64", tables, store, **options)


def train(layer, optimizer, batches, rank, size):
    """Steps with this rank's part of each batch of ids [batch, 2]."""
    for ids in batches:
        share = len(ids) // size
        part = tf.constant(ids[rank * share : (rank + 1) * share])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.reduce_sum(layer(part), [1, 2]) - 1) ** 2)
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def batches(seed, count=4):
    return np.random.default_rng(seed).integers(0, 300, [count, 64, 2])


def whole(comm, layer):
    return [whole_table(comm, table) for table in layer.tables]


def test_the_model_equals_the_model_of_one_rank(comm, shared_path):
    layer = layer_of(str(shared_path))
    train(
        layer, de.OptimizerWrapper(keras.optimizers.Adagrad(0.1)), batches(0), comm.rank, comm.size
    )
    rows = whole(comm, layer)
    with one_rank():
        alone = layer_of(str(shared_path))
        train(alone, de.OptimizerWrapper(keras.optimizers.Adagrad(0.1)), batches(0), 0, 1)
        for table, all_rows in zip(alone.tables, rows, strict=True):
            expected = table.lookup(all_rows.keys, insert=False).numpy()
            assert len(table) == len(all_rows.keys)
            close(all_rows.vectors, expected, 1e-4)


def test_the_capacity_is_of_all_ranks_together(comm, shared_path):
    """That many ids fit, wherever they belong; a multiple of them does not."""
    tables = [oe.make_table_options(oe.make_constant_initializer(1))]
    store = oe.make_cached_host_mem_store_options(16, str(shared_path), 1001)
    layer = oe.MultiTableEmbedding("full", 2, "float32", "int64", tables, store)
    layer(tf.range(1001, dtype=tf.int64), training=True)
    table = layer.tables[0]
    assert gather(comm, np.array([len(table)])).sum() == 1001
    limit = table.attributes["max_capacity"]
    assert 1001 / comm.size <= limit < 1001 / comm.size * 1.5
    comm.barrier()
    ids = tf.range(1001 + 2000 * comm.rank, 3001 + 2000 * comm.rank, dtype=tf.int64)
    with pytest.raises((tf.errors.ResourceExhaustedError, tf.errors.UnknownError)):
        layer(ids, training=True)
    assert len(table) <= limit


def test_a_snapshot_is_one_for_all_ranks(comm, shared_path):
    path = str(shared_path)
    layer, optimizer = layer_of(path), de.OptimizerWrapper(keras.optimizers.Adam(0.05))
    train(layer, optimizer, batches(0), comm.rank, comm.size)
    layer.save_snapshot("s")
    saved = [rows.bits() for rows in whole(comm, layer)]
    train(layer, optimizer, batches(1), comm.rank, comm.size)
    assert [rows.bits() for rows in whole(comm, layer)] != saved
    layer.load_snapshot("s")
    assert [rows.bits() for rows in whole(comm, layer)] == saved
    assert os.listdir(shared_path / "snapshots" / "s") == ["e"]

    rows = whole(comm, layer)
    with one_rank():  # another number of ranks
        alone = layer_of(path)
        alone_optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.05))
        alone.load_snapshot("s", alone_optimizer)
        for table, expected in zip(alone.tables, rows, strict=True):
            np.testing.assert_array_equal(
                table.lookup(expected.keys, insert=False), expected.vectors
            )
            assert len(table) == len(expected.keys)


def test_errors_are_the_same_on_all_ranks(comm, shared_path):
    layer = layer_of(str(shared_path))
    with pytest.raises(FileNotFoundError, match="'e' has no snapshot 'missing'"):
        layer.load_snapshot("missing")
    layer(tf.constant([[1, 2]], tf.int64), training=True)
    layer.save_snapshot("s")
    with pytest.raises(ValueError, match="has dimension 2 on disk, but 'e/table_0:0' has 3"):
        layer_of(str(shared_path), dim=3).load_snapshot("s")


def test_a_list_has_a_path_for_each_rank(comm, shared_path):
    paths = [str(shared_path / f"of_{rank}") for rank in range(comm.size)]
    layer = layer_of(paths)
    layer(tf.constant([[comm.rank, comm.rank + 10]], tf.int64), training=True)
    layer.save_snapshot("s")
    comm.barrier()
    assert (shared_path / "of_0" / "snapshots" / "s" / "e").is_dir()
    layer.load_snapshot("s")
    assert [len(rows.keys) for rows in whole(comm, layer)] == [comm.size, comm.size]
    with pytest.raises(ValueError, match=f"a path for each of the {comm.size} rank"):
        layer_of(paths[1:])


@pytest.mark.skipif("file" not in VAR_TYPES, reason="this build has no tables in files")
@pytest.mark.parametrize("as_list", [False, True])
def test_each_rank_has_its_files(comm, shared_path, as_list):
    folders = [f"of_{rank}" if as_list else f"{rank}-{comm.size}" for rank in range(comm.size)]
    path = [str(shared_path / folder) for folder in folders] if as_list else str(shared_path)
    store = oe.make_cached_ssd_store_options(1, path)
    layer = oe.MultiTableEmbedding("e", 16, "float32", "int64", None, store)
    for first in range(0, 40_000, 10_000):  # each batch fits in memory
        layer(tf.range(first, first + 10_000, dtype=tf.int64), training=True)
    comm.barrier()
    for folder in folders:
        assert [file for file in (shared_path / folder).rglob("*") if file.is_file()]
    assert sorted(os.listdir(shared_path)) == folders
