"""Dumps of ranks that are processes; tests/python has dumps of ranks that are threads."""

from __future__ import annotations

import contextlib
import datetime
import os
import time

import keras
import numpy as np
import pytest
import rank_threads
import table_reader
import tensorflow as tf
from chain_reader import Rows, fold, in_order, read_snapshot
from rank_model import GRID, HOME, Rank, whole, whole_matrices

import tf_dynemb as de
from tf_dynemb import cli, serving, storage
from tf_dynemb.parallel.agreement import OtherRankError
from tf_dynemb.persistence import columns

KEYS = np.arange(400)
OTHER_SIZES = (1, 3, 8)


def gathered(comm, rank):
    """Returns the tables of all ranks, the same on each of them."""
    contents = {
        name: [(column.dtype.str, column.tolist()) for column in rows]
        for name, rows in rank.contents().items()
    }
    parts = comm.gather_objects(contents, "contents")
    shapes = {table.name.removesuffix(":0"): table for table in rank.tables}

    def rows_of(name, columns):
        arrays = [np.array(values, dtype) for dtype, values in columns]
        table = shapes[name]
        arrays[1] = arrays[1].reshape(-1, table.dimension)
        arrays[2] = arrays[2].reshape(len(arrays[0]), -1 if len(arrays[0]) else 0)
        return Rows(*arrays)

    found = {}
    for name in contents:
        shards = [rows_of(name, part[name]) for part in parts]
        shards = [rows for rows in shards if len(rows.keys)]
        found[name] = in_order(*(np.concatenate(c) for c in zip(*shards, strict=True)))
    return found


@contextlib.contextmanager
def rank_0_alone(comm):
    """Yields True on rank 0 only, for which the others then wait; its failure fails all ranks."""
    error = None
    try:
        if comm.rank == 0:
            yield True
        else:
            yield False
    except Exception as raised:
        error = raised
    failures = comm.gather_objects(repr(error) if error else None, "alone")
    if error:
        raise error
    assert failures[0] is None


def trained(comm, path):
    rank = Rank(comm, path)
    rank.write(KEYS, 1)
    rank.write(KEYS[::3], 2)
    rank.erase(KEYS[:7])
    rank.optimizer.core.iterations.assign(5)
    return rank


def check_chain(path, tables):
    folded = fold(storage.Chain.open(path))
    assert table_reader.same({name: folded[name] for name in tables}, tables, table_reader.ALL)
    assert cli.main(["verify", str(path)]) == 0
    assert [name for name in os.listdir(path) if name.startswith(".tmp")] == []


def test_a_dump_loads_on_the_same_and_other_numbers_of_ranks(comm, shared_path, monkeypatch):
    rank = trained(comm, shared_path)
    mark = rank.dump()
    tables = gathered(comm, rank)
    check_chain(shared_path, tables)
    manifest = storage.Chain.open(shared_path).last.manifest
    assert manifest.world_size == comm.size
    assert de.Watermark.of(manifest) == mark
    # The clocks are equal, so the cuts of all ranks have the same tick.
    assert comm.gather_objects(mark.tick, "ticks") == [mark.tick] * comm.size
    assert {dict(table.snapshots.items())[mark.id] for table in rank.tables} == {(mark.tick, True)}

    heir = Rank(comm, shared_path)
    heir.write([3, 2**30], 9)
    for matrix in heir.matrices:
        matrix.assign(tf.zeros_like(matrix))
    assert heir.load() == mark
    assert table_reader.same(gathered(comm, heir), tables, table_reader.ALL)
    assert int(heir.optimizer.core.iterations) == 5
    whole_matrix = GRID[comm.rank :: comm.size]
    np.testing.assert_array_equal(heir.matrices[0].numpy(), whole_matrix)
    np.testing.assert_array_equal(
        heir.matrices[1].numpy(), HOME if comm.rank == comm.size - 1 else HOME[:0]
    )

    with rank_0_alone(comm) as alone:
        for size in OTHER_SIZES if alone else ():
            with rank_threads.ranks_are_threads(monkeypatch):

                def load(size):
                    heir = Rank(size, shared_path)
                    return heir, heir.load()

                heirs, marks = zip(*rank_threads.run(size, load), strict=True)
                found = rank_threads.run(size, lambda c, heirs=heirs: heirs[c.rank].contents())
                matrices = whole_matrices(heirs)
            assert set(marks) == {mark}
            assert table_reader.same(whole(found), tables, table_reader.ALL)
            np.testing.assert_array_equal(matrices[0], GRID)
            np.testing.assert_array_equal(matrices[1], HOME)


@pytest.mark.parametrize("size", OTHER_SIZES)
def test_dumps_of_other_numbers_of_ranks(comm, shared_path, monkeypatch, size):
    with rank_0_alone(comm) as alone:
        if alone:
            with rank_threads.ranks_are_threads(monkeypatch):
                rank_threads.run(size, lambda c: trained(c, shared_path).dump())
    rank = Rank(comm, shared_path)
    rank.load()
    folded = fold(storage.Chain.open(shared_path))
    tables = gathered(comm, rank)
    expected = {name: folded[name] for name in tables}
    assert table_reader.same(tables, expected, table_reader.ALL)
    # The chain continues.
    rank.write(KEYS[100:150], 7)
    rank.erase(KEYS[200:210])
    rank.dump_delta()
    check_chain(shared_path, gathered(comm, rank))
    assert len(storage.Chain.open(shared_path).deltas) == 1


def test_followers_apply_deltas(comm, shared_path):
    rank = trained(comm, shared_path)
    mark = rank.dump()
    follower = Rank(comm, shared_path)
    follower.load()
    comm.barrier()
    reader = serving.Reader(shared_path)
    for version in range(3, 6):
        rank.write(KEYS[10 * version : 10 * version + 15], version)
        rank.erase(KEYS[100 + version : 102 + version])
        # The ranks run different numbers of batches.
        for _ in range(5 * comm.rank):
            rank.write([1], version)
        mark = rank.dump_delta(mark if version == 4 else None)
        changed = {*range(10 * version, 10 * version + 15)}
        rows, deleted = read_snapshot(storage.Chain.open(shared_path).last, "user")
        assert set(rows.keys.tolist()) - {1} == changed - {1}
        assert set(deleted.tolist()) == {100 + version, 101 + version} - (
            {100 + version} if version > 3 else set()
        )
        assert follower.apply() == mark
        assert table_reader.same(gathered(comm, follower), gathered(comm, rank))
        assert reader.follow() == 1
        assert reader.watermark == mark.tick
        comm.barrier()
    check_chain(shared_path, gathered(comm, rank))
    everything = gathered(comm, rank)["user"]
    keys = np.concatenate([keys for keys, _ in reader.items("user")])
    np.testing.assert_array_equal(np.sort(keys), everything.keys)
    np.testing.assert_array_equal(reader.lookup(everything.keys, "user"), everything.vectors)


def model(dimension=4):
    table = de.DynamicVariable(dimension, "normal", name="table", seed=3)
    matrix = de.Variable(np.linspace(-1, 1, 40, dtype=np.float32).reshape(10, 4), name="matrix")
    return [table, matrix], de.OptimizerWrapper(keras.optimizers.Adagrad(0.5))


def step(comm, variables, optimizer, number):
    ids = np.random.default_rng([number, comm.rank]).integers(0, 10, [6, 3])
    with tf.GradientTape() as tape:
        vectors = de.lookup_sparse(variables, [ids, ids], combiners=["sum", "mean"])
        loss = sum(tf.reduce_sum(v**2) for v in vectors)
    grads = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(grads, variables, strict=True))


def test_training_continues_from_a_dump_with_the_same_bits(comm, shared_path):
    def values(variables):
        rows = table_reader.rows_of(variables[0])
        return [rows.keys.tolist(), rows.vectors.tolist(), rows.state.tolist()], (
            variables[1].numpy().tolist()
        )

    variables, optimizer = model()
    for number in range(4):
        step(comm, variables, optimizer, number)
    de.dump(shared_path, variables, optimizer)
    others, other_optimizer = model()
    step(comm, others, other_optimizer, 99)
    de.load(shared_path, others, other_optimizer)
    assert values(others) == values(variables)
    for number in range(4, 7):
        step(comm, variables, optimizer, number)
        step(comm, others, other_optimizer, number)
    # Not the matrix: Keras keeps its state, so dumps do not contain it.
    assert values(others)[0] == values(variables)[0]


def test_incremental_model_dump(comm):
    rank = Rank(comm)
    rank.write(KEYS[:100], 1)
    time.sleep(0.01)
    now = datetime.datetime.now(datetime.timezone.utc)
    # Clocks of processes on one machine agree.
    now = datetime.datetime.fromisoformat(max(comm.gather_objects(now.isoformat(), "now")))
    time.sleep(0.01)
    rank.write(KEYS[95:130], 2)
    comm.barrier()
    keys, vectors = de.incremental_model_dump(rank.tables, now)
    expected = gathered(comm, rank)
    for name, k, v in zip(expected, keys, vectors, strict=True):
        order = np.argsort(k)
        kept = expected[name].keys >= 95
        np.testing.assert_array_equal(k[order], expected[name].keys[kept], strict=True)
        assert v[order].tobytes() == expected[name].vectors[kept].tobytes()


@pytest.mark.ranks(2, 4)
def test_a_failure_on_one_rank_fails_all(comm, shared_path, monkeypatch):
    rank = trained(comm, shared_path)
    rank.dump()
    before = gathered(comm, rank)
    rank.write(KEYS[:50], 6)
    append = storage.ColumnWriter.append
    for failing in range(comm.size):
        for call in (rank.dump, rank.dump_delta):

            def fails(self, rows, failing=failing):
                if self.path.endswith(f"/001.r{failing}.vectors.npy"):
                    raise OSError(28, "No space left on device", str(self.path))
                append(self, rows)

            with monkeypatch.context() as patch:
                patch.setattr(storage.ColumnWriter, "append", fails)
                with pytest.raises(OSError if comm.rank == failing else OtherRankError) as caught:
                    call()
            assert f"001.r{failing}.vectors.npy" in str(caught.value)
            if comm.rank != failing:
                assert f"on rank {failing}: OSError" in str(caught.value)
            comm.barrier()
            check_chain(shared_path, before)
            comm.barrier()
    rank.dump_delta()
    check_chain(shared_path, gathered(comm, rank))


@pytest.mark.ranks(2, 4)
def test_damage_that_one_rank_detects(comm, shared_path, monkeypatch):
    rank = trained(comm, shared_path)
    rank.dump()
    heir = Rank(comm, shared_path)
    heir.write([5], 3)
    before = heir.state()
    for name in ("000.r1.vectors.npy", "003.r0.keys.npy"):
        file = storage.Chain.open(shared_path).last.directory / name
        content = file.read_bytes()
        comm.barrier()
        if comm.rank == 0:
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 8]))
        comm.barrier()
        with pytest.raises((storage.DataLossError, OtherRankError), match=name):
            heir.load()
        assert heir.state() == before
        comm.barrier()
        if comm.rank == 0:
            file.write_bytes(content)
        comm.barrier()
    load_rows = columns.load_rows

    def fails(*args):
        raise MemoryError("no room")

    for failing in range(comm.size):
        with monkeypatch.context() as patch:
            patch.setattr(columns, "load_rows", fails if comm.rank == failing else load_rows)
            with pytest.raises(MemoryError if comm.rank == failing else OtherRankError):
                heir.load()
        assert heir.state() == before
    heir.load()
    assert table_reader.same(gathered(comm, heir), gathered(comm, rank), table_reader.ALL)


@pytest.mark.ranks(2, 4)
def test_missing_paths_and_ranks_that_differ(comm, shared_path):
    rank = Rank(comm, shared_path)
    with pytest.raises(FileNotFoundError, match="holds no snapshot"):
        rank.load()
    with pytest.raises(ValueError, match="the variables must be the same on all ranks"):
        de.dump(shared_path, rank.tables[: 1 + comm.rank % 2])
    with pytest.raises(RuntimeError, match="the ranks must all call the same"):
        (rank.load if comm.rank else rank.dump)()
    rank.dump()
    rank.load()
    assert len(rank.tables[0]) == 0
