"""Tables with rows in files on several ranks: the same bits as in memory, own folders, dumps."""

from __future__ import annotations

import gc
import os

import gpu
import keras
import numpy as np
import pytest
import tensorflow as tf
from row_memory import host_memory

import tf_dynemb as de
from parallel.ranks.gathered import one_rank, whole_table
from tf_dynemb.parallel import agreement
from tf_dynemb.tables import flushes

K = keras.optimizers
DIM, HELD = 256, 150  # wide, so that rows are written to files
MEMORY = host_memory(HELD, DIM, states=2)

pytestmark = pytest.mark.ranks(2, 4)


def tables_of(path, **options):
    """A table with files, and one in host memory."""
    options = {"name": "t", "seed": 5, **options}
    files = {"var_type": "file", "file_path": path, "max_dram_for_vectors": MEMORY}
    if gpu.ON:
        tiers = {"max_hbm_for_vectors": MEMORY / 3, "max_dram_for_vectors": MEMORY * 2 / 3}
        files |= {"var_type": "hybrid", **tiers}
    return [
        de.DynamicVariable(DIM, "normal", **files, **options),
        de.DynamicVariable(DIM, "normal", var_type="host", **options),
    ]


def persistent(path):
    """The options of a table that survives its process."""
    files = {"var_type": "file", "file_path": path, "max_dram_for_vectors": MEMORY}
    return {**files, "persistent": True, "name": "t"}


def batches(comm, steps, seed=0, batch=40, ids=1500):
    rng = np.random.default_rng([seed, comm.rank])
    for _ in range(steps):
        few = rng.integers(0, 20, batch)
        numbers = np.where(rng.random(batch) < 0.3, few, rng.integers(0, ids, batch))
        yield tf.constant(numbers * 1_000_003)


def train(comm, tables, optimizers, steps=25, seed=0):
    for ids in batches(comm, steps, seed):
        bags, pooled = tf.reshape(ids, [-1, 4]), []
        for table, optimizer in zip(tables, optimizers, strict=True):
            with tf.GradientTape() as tape:
                vectors = de.lookup_sparse(table, bags, combiners="mean")
                loss = tf.reduce_sum((vectors - 0.1) ** 2) + tf.reduce_sum(table.lookup(ids) ** 2)
            pooled.append(vectors.numpy())
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        for other in pooled[1:]:
            np.testing.assert_array_equal(pooled[0], other)


def check(comm, tables, most_in_files=True):
    files, memory = (whole_table(comm, table) for table in tables)
    np.testing.assert_array_equal(files.keys, memory.keys)
    np.testing.assert_array_equal(files.vectors, memory.vectors)
    assert files.bits() == memory.bits()
    if most_in_files:
        assert tables[0].stats()["file_rows"] > len(tables[0]) // 2
        assert tables[0].stats()["file_writes"] > 0
    return files


def optimizers_of(make=lambda: K.Adam(0.05)):
    return [de.OptimizerWrapper(make()) for _ in range(2)]


@pytest.mark.parametrize("name", ["adam", "nadam"])
def test_training_equals_training_in_memory(comm, shared_path, name):
    tables = tables_of(shared_path / "rows")
    make = {"adam": lambda: K.Adam(0.05), "nadam": lambda: K.Nadam(0.05)}[name]
    train(comm, tables, optimizers_of(make))
    check(comm, tables)
    assert sorted(os.listdir(shared_path / "rows")) == [
        f"{rank}-{comm.size}" for rank in range(comm.size)
    ]


def test_rows_make_up_for_missed_steps(comm, shared_path):
    tables = tables_of(shared_path / "rows")
    schedule = K.schedules.ExponentialDecay(0.05, 5, 0.9)
    optimizers = [
        de.OptimizerWrapper(K.AdamW(schedule, weight_decay=0.02), catch_up=True) for _ in tables
    ]
    train(comm, tables, optimizers)
    files, memory = (whole_table(comm, table) for table in tables)
    np.testing.assert_array_equal(files.keys, memory.keys)
    np.testing.assert_array_equal(files.vectors, memory.vectors)
    assert tables[0].stats()["file_rows"] > len(tables[0]) // 2


def test_single_calls(comm, shared_path):
    tables = tables_of(shared_path / "rows")
    train(comm, tables, optimizers_of())
    for n, ids in enumerate(batches(comm, 6, seed=3)):
        values = tf.random.stateless_normal([40, DIM], [n, comm.rank])
        # Each key is written by one rank.
        rank_ids = ids * comm.size + comm.rank
        read = []
        for table in tables:
            table.upsert(rank_ids, values)
            table.scatter_add(tf.IndexedSlices(values, ids))
            table.erase(ids[:5])
            read.append((table.lookup(ids, insert=False).numpy(), table.contains(ids).numpy()))
        for one, other in zip(*read, strict=True):
            np.testing.assert_array_equal(one, other)
    check(comm, tables)


def test_prefetched_batches(comm, shared_path):
    """Rows of a batch that was looked up ahead may leave memory before its step."""
    tables, optimizers = tables_of(shared_path / "rows"), optimizers_of()
    dataset = [tf.reshape(ids, [-1, 4]) for ids in batches(comm, 60, seed=4)]
    for table, optimizer in zip(tables, optimizers, strict=True):
        steps = de.prefetch_lookup(dataset, [table], lambda batch: [batch])
        for _, ahead in steps:
            with tf.GradientTape() as tape:
                (pooled,) = de.lookup_sparse([table], ahead, combiners="sum")
                loss = tf.reduce_sum(pooled**2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    check(comm, tables)
    # Rows were read from the disk without the lock. (Many others wait in memory to be written.)
    assert tables[0].stats()["file_hits_ahead"] > 0


@pytest.mark.parametrize(("from_files", "to_files"), [(True, False), (False, True)])
def test_dumps(comm, shared_path, from_files, to_files):
    """All ranks dump together; the rows are loaded by them, and by one rank alone."""
    tables, optimizers = tables_of(shared_path / "rows"), optimizers_of()
    train(comm, tables, optimizers)
    source = 0 if from_files else 1
    de.dump(shared_path / "dump", tables[source], optimizers[source])
    train(comm, tables, optimizers, steps=4, seed=1)
    de.incremental_dump(shared_path / "dump", tables[source], optimizer=optimizers[source])
    expected = check(comm, tables)
    loaded = tables_of(shared_path / "other")[0 if to_files else 1]
    de.load(shared_path / "dump", loaded, optimizers_of()[0])
    assert whole_table(comm, loaded).bits() == expected.bits()
    reader = de.serving.Reader(shared_path / "dump")
    np.testing.assert_array_equal(reader.lookup(expected.keys), expected.vectors)
    with one_rank():
        alone = tables_of(shared_path / f"alone_{comm.rank}")[0]
        de.load(shared_path / "dump", alone, optimizers_of()[0])
        assert len(alone) == len(expected.keys)
        sample = expected.keys[:: len(expected.keys) // 100][:100]
        np.testing.assert_array_equal(alone.lookup(sample, insert=False), expected.at(sample))


def test_flushes(comm, shared_path):
    """A table that is created again has the rows of the last flush on every rank."""
    options = persistent(shared_path / "rows")
    tables = [
        de.DynamicVariable(DIM, "normal", seed=5, **options),
        de.DynamicVariable(DIM, "normal", seed=5, var_type="host"),
    ]
    optimizers = optimizers_of()
    train(comm, tables, optimizers)
    tables[0].flush()
    expected = check(comm, tables)
    train(comm, tables, optimizers, steps=3, seed=1)  # lost
    again = de.DynamicVariable(DIM, **options)
    assert whole_table(comm, again).bits() == expected.bits()
    # A flush that only some ranks have does not count.
    train(comm, [again], optimizers_of()[:1], steps=3, seed=1)
    again.flush()
    (last,) = (shared_path / "rows" / f"{comm.rank}-{comm.size}" / "t.persistent").glob("flush-*")
    comm.barrier()
    if comm.rank == 0:
        (last / "manifest").unlink()
    comm.barrier()
    with pytest.raises(ValueError, match="the ranks have different flushes"):
        de.DynamicVariable(DIM, **options)
    with one_rank(), pytest.raises(ValueError, match="another number of ranks"):
        de.DynamicVariable(DIM, **options)


@pytest.mark.parametrize("how", ["fails", "is interrupted", "is interrupted before it knows"])
def test_a_flush_that_one_rank_does_not_make(comm, shared_path, monkeypatch, how):
    """A restart has one flush on all ranks, and no row that was forgotten since."""
    options = persistent(shared_path / "rows")

    def fill(table, keys):
        for first in range(0, len(keys), 100):
            chunk = keys[first : first + 100]
            table.upsert(chunk, np.full((len(chunk), DIM), 3, np.float32))

    table = de.DynamicVariable(DIM, **options)
    fill(table, np.arange(1000))
    table.flush()
    fill(table, np.arange(1000, 1200))
    with monkeypatch.context() as patch:
        if how == "fails":
            if comm.rank == comm.size - 1:
                error = OSError(28, "injected")
                patch.setattr(flushes.Flushes, "begin", lambda *_: raise_(error))
            with pytest.raises((OSError, RuntimeError), match="injected"):
                table.flush()
        elif comm.rank == 0:
            if how == "is interrupted":
                patch.setattr(flushes, "_keep_flush", lambda *_: raise_(KeyboardInterrupt()))
            else:
                patch.setattr(agreement.Ranks, "conclude", interrupted_at(2))
            with pytest.raises(KeyboardInterrupt):
                table.flush()
        else:
            table.flush()
    comm.barrier()
    table.forget(np.arange(100, 200))
    size = 900 if how == "fails" else 1100
    for _ in range(2):
        del table
        gc.collect()
        comm.barrier()
        table = de.DynamicVariable(DIM, **options)
        rows = whole_table(comm, table)
        np.testing.assert_array_equal(
            rows.keys, np.setdiff1d(np.arange(size + 100), np.arange(100, 200))
        )
        assert (rows.vectors == 3).all()
        table.flush()


def raise_(error):
    raise error


def interrupted_at(call):
    """Ranks.conclude, interrupted when the others know that this rank has succeeded."""
    conclude = agreement.Ranks.conclude
    calls = []

    def interrupted(*args):
        said = conclude(*args)
        calls.append(said)
        return raise_(KeyboardInterrupt()) if len(calls) == call else said

    return interrupted


def test_a_batch_that_memory_cannot_hold(comm, shared_path):
    """It fails on all ranks if all have too many rows; the tables can be used afterwards."""
    tables = tables_of(shared_path / "rows")
    # Without state, each rank can hold 448 rows, and owns about 700 of these.
    ids = tf.range(700 * comm.rank, 700 * comm.rank + 700, dtype=tf.int64)
    with pytest.raises((tf.errors.ResourceExhaustedError, tf.errors.UnknownError)):
        tables[0].lookup(ids)
    comm.barrier()
    for table in tables:
        for first in range(0, 700, 100):
            table.lookup(ids[first : first + 100])
    check(comm, tables, most_in_files=False)
    assert tables[0].stats()["file_rows"] > 0
