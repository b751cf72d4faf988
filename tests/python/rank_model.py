"""Variables that are spread over ranks; the content of a row depends on its key and a version."""

from __future__ import annotations

import os
import re

import keras
import numpy as np
import table_reader
import tensorflow as tf
from chain_reader import Rows, in_order
from rank_threads import outcomes, run

import tf_dynemb as de
from tf_dynemb import _ops
from tf_dynemb.parallel import ownership
from tf_dynemb.parallel.agreement import OtherRankError

GRID = np.arange(22, dtype=np.float32).reshape(11, 2)
HOME = np.arange(15, dtype=np.float32).reshape(5, 3) - 7


class Rank:
    """One rank's shards of three tables and two matrices."""

    def __init__(self, comm, path=None):
        self.comm = comm
        self.path = path
        last = f"localized:{comm.size - 1}"
        self.tables = [
            de.DynamicVariable(3, "uniform", name="user", seed=1),
            de.DynamicVariable(
                2, "uniform", name="item", seed=2, key_type=tf.int32, dtype=tf.bfloat16
            ),
            de.DynamicVariable(1, name="page", seed=3, key_type=tf.uint64, mode=last),
        ]
        self.matrices = [
            de.Variable(GRID, name="grid"),
            de.Variable(HOME, name="home", mode=last),
        ]
        self.optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.1))
        self.optimizer.attach(self.tables)

    @property
    def variables(self):
        return [*self.tables, *self.matrices]

    def owned_keys(self, table, keys):
        """Returns the keys that this rank holds, in the table's type."""
        keys = np.asarray(keys).astype(table.key_type.as_numpy_dtype)
        is_owned = ownership.owned(table, keys)
        return keys if is_owned is None else keys[is_owned]

    def write(self, keys, version):
        """Sets the rows of keys in all tables to values that depend on key and version."""
        for table in self.tables:
            self.write_one(table, keys, version)

    def write_one(self, table, keys, version):
        rank_keys = self.owned_keys(table, keys)
        _, widths, _ = table.state_spec
        width = table.dimension + sum(widths)
        values = (np.arange(width) + rank_keys.astype(np.float32)[:, None] % 64 + 100 * version) / 4
        _ops.library().dynemb_write_rows(
            table.handle,
            rank_keys,
            values[:, : table.dimension].astype(np.float32),
            values[:, table.dimension :].astype(np.float32),
            int(version),
            insert=True,
        )

    def erase(self, keys):
        for table in self.tables:
            _ops.library().dynemb_erase(table.handle, self.owned_keys(table, keys))

    def dump(self, path=None):
        return de.dump(path or self.path, self.variables, self.optimizer, quiet=True)

    def dump_delta(self, since=None, path=None):
        return de.incremental_dump(
            path or self.path, self.tables, since, self.optimizer, quiet=True
        )

    def load(self):
        return de.load(self.path, self.variables, self.optimizer, quiet=True)

    def apply(self):
        return de.apply_delta(self.path, self.tables, self.optimizer)

    def contents(self):
        """Returns the rows on this rank; checks that this rank owns them."""
        found = table_reader.contents(self.tables)
        for table in self.tables:
            keys = found[table.name.removesuffix(":0")].keys
            assert len(self.owned_keys(table, keys)) == len(keys)
        return found

    def state(self):
        """Returns everything that a load changes."""
        notes = [dict(table.snapshots.items()) for table in self.tables]
        matrices = [matrix.numpy().tolist() for matrix in self.matrices]
        rows = {
            name: [column.tolist() for column in rows] for name, rows in self.contents().items()
        }
        return rows, notes, matrices, int(self.optimizer.core.iterations)


def whole(parts) -> dict[str, Rows]:
    """Joins the tables of ranks, given the `contents` of each."""
    return {
        name: in_order(*(np.concatenate(column) for column in zip(*rows, strict=True)))
        for name in parts[0]
        if (rows := [part[name] for part in parts])
    }


def whole_matrices(ranks) -> list[np.ndarray]:
    """Joins the matrices of ranks."""
    found = []
    for matrices in zip(*(rank.matrices for rank in ranks), strict=True):
        value = np.full(matrices[0].global_shape, np.nan, np.float32)
        for rank, matrix in zip(ranks, matrices, strict=True):
            rows = np.arange(rank.comm.rank, len(value), len(ranks))
            if matrix.mode is not None:
                rows = np.arange(matrix.shape[0])
            value[rows] = matrix.numpy()
        found.append(value)
    return found


def contents(ranks) -> dict[str, Rows]:
    """Returns the tables of all ranks."""
    return whole([rank.contents() for rank in ranks])


def _on_its_rank(ranks, work):
    def call(comm):
        ranks[comm.rank].comm = comm
        return work(ranks[comm.rank])

    return call


def run_on(ranks, work):
    """Runs `work(rank)` on each of the ranks, in new threads; returns the results."""
    return run(len(ranks), _on_its_rank(ranks, work))


def outcomes_on(ranks, work):
    """Runs `work(rank)` on each of the ranks, in new threads; returns the outcomes."""
    return outcomes(len(ranks), _on_its_rank(ranks, work))


def check_failed(found, failing, kind, says):
    """Checks that the failing ranks raised `kind`, and the others an error that names the first."""
    for rank, outcome in enumerate(found):
        if rank in failing:
            assert type(outcome.error) is kind, repr(outcome.error)
        else:
            assert type(outcome.error) is OtherRankError, repr(outcome.error)
            assert f"on rank {failing[0]}: {kind.__name__}: " in str(outcome.error)
        assert re.search(says, str(outcome.error))


def unpublished(path):
    return [name for name in os.listdir(path) if name.startswith(".tmp-")]
